"""System calls that this process may make no more: what an old kernel or a container's seccomp profile does.

Stronger than a library in between: it also meets system calls that are made without the C library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Of linux/audit.h."""
NUMBERS = {
    "x86_64": {"cachestat": 451, "statx": 332, "madvise": 28, "mincore": 27, "fadvise64": 221},
    "aarch64": {"cachestat": 451, "statx": 291, "madvise": 233, "mincore": 232, "fadvise64": 223},
}

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


def forbid(calls: dict[str, str]) -> None:
    """From now on, and in every thread started from now on, each of ``calls`` fails with the named error."""
    machine = platform.machine()
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, AUDIT_ARCH[machine]), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
    for call, name in calls.items():
        code += [(_EQUAL, 0, 1, NUMBERS[machine][call]), (_RETURN, 0, 0, _REFUSE | getattr(errno, name))]
    code.append((_RETURN, 0, 0, _ALLOW))
    instructions = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    held = ctypes.create_string_buffer(instructions, len(instructions))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(held)))
    libc = ctypes.CDLL(None, use_errno=True)
    for option in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*option) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
