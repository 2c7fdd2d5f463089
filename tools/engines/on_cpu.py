"""A platform plugin for vLLM: wheels that are built for GPUs run on the CPU, as far as they need none of its kernels.

Building a model and loading its weights needs none but for some activation functions; computing does.
"""

from __future__ import annotations


def platform() -> str:
    """The platform's class, for the entry point ``vllm.platform_plugins``."""
    return "vllm.platforms.cpu.CpuPlatform"
