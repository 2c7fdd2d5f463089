"""Engines: Penstock in the programs and libraries that run models.

* ``transformers``, ``diffusers``, ``peft``: ``from_pretrained`` and its like, from anywhere straight to a device.
* ``vllm``, ``sglang``: ``--load-format penstock``.
* ``plugin``, ``options``, ``filling``: what those two share.
* ``libraries``: which versions were tried, and one clear sentence where a library is absent or unknown.
* ``files``, ``objects``: the small files beside weights, on the local disk.
* ``supply``, ``lazy``: tensors when they are asked for.

Nothing is imported here: each module needs its library, and says so.
"""
