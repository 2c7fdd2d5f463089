"""What a thread of PyTorch's has besides its program: the current device and streams, and the modes of autograd.

Helper threads start with the defaults. Work that is given to one is done as the caller would have done it: memory comes
from the pools of the caller's streams, and what is queued there is ordered with what the caller queues.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

T = TypeVar("T")


def as_here(work: Callable[[], T]) -> Callable[[], T]:
    """``work``, to be called in another thread under the CUDA device, streams and modes of this one."""
    import torch

    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    streams, device = [], None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        device = torch.cuda.current_device()
        # Entering a device makes a context on it, of some 100 MB: none where nothing was done yet.
        current = map(torch.cuda.current_stream, range(torch.cuda.device_count()))
        streams = [stream for stream in current if stream != torch.cuda.default_stream(stream.device)]

    def there() -> T:
        with ExitStack() as entered:
            entered.enter_context(torch.inference_mode(inference))
            entered.enter_context(torch.set_grad_enabled(grad))
            for stream in streams:
                entered.enter_context(torch.cuda.stream(stream))
            if device is not None:
                # The last, as entering a stream enters its device.
                entered.enter_context(torch.cuda.device(device))
            return work()

    return there
