"""Adapters (LoRA) of a pool's models: read on first use, merged into weights or beside them as branches.

* ``catalogue``: what ``ModelPool`` has of them by name, and ``choice``: which of them a model has, and in which form.
* ``adapter``: one of them, and what of it is where. ``tier``: host memory of their own budget; copies on the device.
* ``reading``: its file and its configuration; ``formats``, ``converting``: names of peft, diffusers and kohya;
  ``fitting``: the layers that they are for.
* ``merging``: low-rank products added to weights; ``branches``: the same beside a layer, by a forward hook.
"""
