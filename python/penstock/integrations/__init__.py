"""Penstock in the programs and libraries that run models.

* ``vllm``, ``sglang``: ``--load-format penstock``.
* ``transformers``, ``diffusers``, ``peft``: ``from_pretrained`` and its like.
* ``safetensors``: ``patch_safetensors``, for libraries that call safetensors themselves.
* ``shared``: what they have in common.

Nothing is imported here: each needs its library, and says so.
"""
