"""What ``--model-loader-extra-config`` may hold for ``--load-format penstock`` in vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engines import options


@dataclass(frozen=True)
class Options(options.Options):
    """Settings of a load. None has to be set: each is found, or has a default that suits."""

    share: bool | None = None
    """Whether tensor-parallel ranks read together what several of them want of a tensor; by default on
    CPUs, where it comes over a network. Not measured between GPUs yet, so there it has to be asked for."""
    enable_weights_track: bool | None = None
    """Fail where a parameter got no weight; by default for models that are not quantised, as vLLM does."""
