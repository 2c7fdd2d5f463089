"""``penstock run``: a command that takes this process's place, and a helper that brings in ahead of it what it reads.

The command has this process's id, its signals and its exit status: nothing stands between. The helper is no child of
it, belongs to a session of its own, and ends with it. Whatever goes wrong here, the command starts, and one line on
stderr says why nothing was brought in.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock.errors import PenstockError
from penstock.patches import START_CACHE_IN_USE as IN_USE
from penstock.patches import is_disabled
from penstock.start import environment as environments
from penstock.start import profile as profiles
from penstock.start.environment import Environment, files_below, model_of
from penstock.start.prefetch import Brought, be_idle, bring
from penstock.start.profile import Wanted
from penstock.units import size

_ORDER = (
    r"/torch/lib/(libtorch_python|libc10|libshm|libtorch_global|libtorch\.)",
    r"/torch/lib/libtorch_cpu",
    r"/torch/lib/",
    r"/nvidia/.*/lib(cudart|nvrtc|cupti|cublas|cublasLt|nccl|nvJitLink|cusparse|cufft|curand|cufile)\b[^/]*$",
    r"/(numpy|numpy\.libs|torch|triton|safetensors|tokenizers)/",
    r"/(vllm|sgl_kernel|sglang|flashinfer|xgrammar|llguidance|pydantic_core|pyarrow|cv2|PIL)/",
)
"""Libraries in the order in which the engines touch them: what a start without a profile brings in."""
_WEIGHTS = re.compile(r"\.(safetensors|gguf|bin|pt|pth)$")
_ENOUGH_STALE = 0.5
_SAMPLE = 200
START_CACHE_BYTES = 10 << 30


def libraries(environment: Environment) -> list[Wanted]:
    """The shared libraries of what is installed, of the engines and of what they build on, in order."""
    patterns = [re.compile(pattern) for pattern in _ORDER]
    found: list[list[str]] = [[] for _ in patterns]
    seen = set()
    for root in environment.packages:
        if not root.endswith(("site-packages", "dist-packages")):
            continue
        for path in files_below(root):
            if ".so" in path and path not in seen:
                seen.add(path)
                number = next((n for n, pattern in enumerate(patterns) if pattern.search(path)), None)
                if number is not None:
                    found[number].append(path)
    return profiles.whole(path for paths in found for path in sorted(paths))


def weights(command: Sequence[str]) -> list[Wanted]:
    """The files of weights that the command names, in order of their names."""
    paths = (path for root in model_of(command) for path in sorted(files_below(root)))
    return profiles.whole(path for path in paths if _WEIGHTS.search(path))


def wanted_by(
    command: Sequence[str], profile: str | None, *, with_weights: bool, with_libraries: bool
) -> tuple[list[Wanted], str | None]:
    """What a start is going to read, and why the profile was not used, where it was not.

    Args:
        command: what is started, or nothing.
        profile: a start profile.
        with_weights: the model's weights too.
        with_libraries: without a profile, all libraries of what is installed.
    """
    why = None
    wanted: list[Wanted] | None = None
    if profile is not None:
        try:
            found = list(profiles.load(profile).wanted)
            # Some of them: the engine is under way, and to look at all takes as long as to bring in the first.
            some = found[:: max(len(found) // _SAMPLE, 1)]
            stale = sum(map(profiles.is_stale, some))
            if some and stale > len(some) * _ENOUGH_STALE:
                why = f"the profile is stale: {stale:,} of {len(some):,} of its files have changed"
            else:
                wanted = found
        except PenstockError as error:
            why = error.cause
        except OSError as error:
            why = f"the profile cannot be read: {error.strerror}"
    if wanted is None:
        wanted = libraries(environments.of(command)) if command and with_libraries else []
    return wanted + (weights(command) if with_weights and command else []), why


def run(
    command: Sequence[str],
    profile: str | None,
    *,
    with_weights: bool = True,
    start_cache: str | None = None,
    start_cache_bytes: int = START_CACHE_BYTES,
) -> None:
    """Becomes the command; returns only by an exception.

    Args:
        profile: a start profile.
        with_weights: bring in the model's weights too.
        start_cache: where compile caches are restored from and saved to.
        start_cache_bytes: most bytes that are kept there.

    Raises:
        OSError: where the command cannot be started.
    """
    if shutil.which(command[0]) is not None and not is_disabled():
        try:
            _detached(lambda ended: _helper(command, profile, ended, with_weights=with_weights))
        except OSError as error:
            say(f"nothing is brought in ahead of the start: {error.strerror}")
        if start_cache is not None:
            _with_cache(command, start_cache, start_cache_bytes)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(command[0], list(command))  # noqa: S606 - what was asked for


def _with_cache(command: Sequence[str], location: str, limit: int) -> None:
    """Has a helper restore compile caches, waits for it, and has it save what is new."""
    from penstock.start.cache.beside import PATIENCE, StartCache
    from penstock.start.cache.location import opened

    try:
        opened(location)
    except PenstockError as error:
        say(error.cause)
        return
    reads, writes = os.pipe()

    def work(ended: Callable[[], str | None]) -> None:
        try:
            try:
                cache = StartCache(location, limit, command, say)
                cache.restore(ended)
            finally:
                os.close(writes)
            cache.save_until(ended)
        except Exception as error:  # noqa: BLE001 - nobody else would say it
            say(f"the start cache is not used: {type(error).__name__}: {error}")

    try:
        _detached(work, keep=writes)
    except OSError as error:
        say(f"the start cache is not used: {error.strerror}")
        return
    finally:
        os.close(writes)
    poller = select.poll()
    poller.register(reads, select.POLLIN)
    if not poller.poll(PATIENCE * 1000):
        say(f"the start cache takes longer than {PATIENCE:.0f} s: the command starts meanwhile")
    os.close(reads)
    os.environ[IN_USE] = "1"


def say(line: str) -> None:
    """One line on stderr."""
    sys.stderr.write(f"penstock: {line}\n")
    sys.stderr.flush()


def _helper(
    command: Sequence[str], profile: str | None, ended: Callable[[], str | None], *, with_weights: bool
) -> None:
    be_idle()
    # Libraries beside a start that loads them already only compete with it: most of their bytes are not read.
    wanted, why = wanted_by(command, profile, with_weights=with_weights, with_libraries=False)
    if why is not None:
        say(f"{why}; only weights are brought in" if wanted else f"{why}; nothing is brought in")
    done = bring(wanted, ended)
    if ended() is None and wanted:
        say(summary(done))


def summary(done: Brought) -> str:
    """What was brought in, in a line."""
    files = f"{done.files:,} file" + ("" if done.files == 1 else "s")
    parts = [f"{size(done.nbytes)} of {files} are in the page cache"]
    parts += [f"{done.stale:,} have changed and were left out"] if done.stale else []
    parts += [f"{done.failed:,} could not be read"] if done.failed else []
    parts += [f"stopped: {done.why}"] if done.why else []
    return ", ".join(parts)


def _detached(work: Callable[[Callable[[], str | None]], None], keep: int | None = None) -> None:
    """Runs ``work`` in a process that is no child of this one. It gets what says that this process has ended.

    Args:
        keep: a file descriptor that it has besides stderr.
    """
    me = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)  # whoever reads the command's output waits for the command alone
        for handle in set(range(3, 256)) - {keep}:
            with suppress(OSError):
                os.close(handle)
        work(_ended(me))
    except BaseException:  # noqa: BLE001, S110 - the command is under way, and is not to hear of it
        pass
    finally:
        os._exit(0)


def _ended(pid: int) -> Callable[[], str | None]:
    said = "the command has ended"
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):

        def alive() -> str | None:
            try:
                os.kill(pid, 0)
            except OSError:
                return said
            return None

        return alive

    def over() -> str | None:
        poller = select.poll()  # one of its own for each thread
        poller.register(handle, select.POLLIN)
        return said if poller.poll(0) else None

    return over
