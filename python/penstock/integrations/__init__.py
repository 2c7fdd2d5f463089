"""Penstock in the programs and libraries that run models.

* ``vllm``, ``sglang``: ``--load-format penstock``.
* ``transformers``, ``diffusers``: ``from_pretrained``.
* ``safetensors``: ``patch_safetensors``, for libraries that call safetensors themselves.
* ``shared``: what they have in common.

Nothing is imported here: each needs its library, and says so.
"""
