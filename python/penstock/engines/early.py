"""Reading ahead from the moment an engine knows its model until its loader begins.

Between the two an engine imports, starts processes, makes groups of ranks and builds the model: many seconds in which
the disk could work and nobody asks it to. So whoever first knows the model ``begin``s, and the loader, in whichever
process it runs, ``end``s it and finds in the page cache what has come in until then.

The processes share no memory but a file system, so a file in the directory for temporary files says that reading ahead
goes on, and removing it ends it. Its name is made of the user's and of the checkpoint's directory. Two engines that
start with the same model end each other's reading ahead, which costs them no more than that.

Once for each checkpoint and process: engines make their configuration anew while they build, and when they have
loaded. A hint: nothing is raised from here. It knows no engine.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engines.files import locate

if TYPE_CHECKING:
    from penstock._native import Ahead
    from penstock.checkpoint import Checkpoint

logger = logging.getLogger(__name__)

_begun: dict[Path, Ahead] = {}


def at_start(engine: str, opened: Callable[[], Checkpoint | None], log: logging.Logger) -> None:
    """Begins with what ``opened`` gives, in the process that starts the engine: those that it starts need not.

    Args:
        engine: what people call it.
        opened: opens the files of the engine's model; None where they are not to be read ahead.
        log: is told.
    """
    if multiprocessing.parent_process() is not None:
        return
    try:
        checkpoint = opened()
        if checkpoint is not None and begin(checkpoint):
            gb, where = checkpoint.nbytes / 1e9, checkpoint.storage
            log.info("Penstock: reading ahead while %s starts: %.2f GB on %s", engine, gb, where)
    except Exception as error:  # noqa: BLE001 - the load itself will say what is wrong
        log.debug("nothing is read ahead: %s", error)


def here(model: str, revision: str | None, cache_dir: str | None) -> str:
    """The directory of a model that is on this machine. What is not is fetched later, by whoever needs it.

    Raises:
        ObjectNotFoundError: it is not.
    """
    return locate(model, revision=revision, cache_dir=cache_dir, local_files_only=True).local


def begin(checkpoint: Checkpoint) -> bool:
    """Begins, if this process has not done so for these files before; says whether it did."""
    sign = _sign(checkpoint)
    if sign in _begun:
        return False
    try:
        # Others may write there too: where a link of that name leads is not to be touched.
        os.close(os.open(sign, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError as error:
        logger.debug("nothing is read ahead: %s", error)
        return False
    if not _begun:
        atexit.register(_end_all)
    _begun[sign] = checkpoint.read_ahead(until_gone=sign)
    return True


def end(checkpoint: Checkpoint) -> None:
    """Ends what this or another process has begun for these files."""
    sign = _sign(checkpoint)
    with suppress(OSError):
        sign.unlink(missing_ok=True)
    if sign in _begun:
        _begun[sign].stop()


def _sign(checkpoint: Checkpoint) -> Path:
    """The file that is there while it goes on."""
    # By directory: loaders may come to know that they need only some of its files.
    directory = min((Path(os.path.realpath(location)).parent for location, _ in checkpoint.objects), default="")
    name = hashlib.sha256(f"{os.getuid()}:{directory}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"penstock-ahead-{name}")


def _end_all() -> None:
    for sign, ahead in _begun.items():
        with suppress(OSError):
            sign.unlink(missing_ok=True)
        ahead.stop()
