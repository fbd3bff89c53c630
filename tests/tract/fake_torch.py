"""As much of torch and CUDA as a pinned region needs; copies complete when they are waited for."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np


class Tensor:
    """Bytes, on the GPU or not."""

    def __init__(self, array: Any, *, contiguous: bool = True) -> None:
        self.array = array
        self._contiguous = contiguous

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def is_contiguous(self) -> bool:
        return self._contiguous

    def reshape(self, shape: int) -> Tensor:
        return Tensor(self.array.reshape(shape))

    def view(self, kind: Any) -> Tensor:
        return Tensor(self.array.view(kind))

    def __getitem__(self, span: slice) -> Tensor:
        return Tensor(self.array[span])

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        Cuda.current.queue.append((self.array, source.array))


class Stream:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def wait_stream(self, other: str) -> None:
        assert other == "the program's"

    def synchronize(self) -> None:
        for target, source in self.cuda.queue:
            assert self.cuda.registered, "a copy after the region was unregistered"
            target[:] = source
        self.cuda.queue.clear()


class Event:
    def __init__(self) -> None:
        self.stream: Any = None

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return not self.stream.cuda.queue

    def synchronize(self) -> None:
        self.stream.synchronize()


class Cuda:
    """``torch.cuda``, and the runtime that ``cudart()`` gives."""

    current: Cuda

    def __init__(self, *, there: bool = True, code: int = 0, error: str = "") -> None:
        Cuda.current = self
        self.there, self.code, self.error = there, code, error
        self.queue: list[Any] = []
        self.registered: dict[int, tuple[int, int]] = {}
        self.Event = Event

    def is_available(self) -> bool:
        return self.there

    def cudart(self) -> Cuda:
        if self.error:
            raise RuntimeError(self.error)
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if not self.code:
            self.registered[address] = nbytes, flags
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def Stream(self) -> Stream:
        return Stream(self)

    def stream(self, stream: Stream) -> Any:
        return contextlib.nullcontext(stream)

    def current_stream(self) -> str:
        return "the program's"


class Torch:
    """The module."""

    uint8 = np.uint8

    def __init__(self, **cuda: Any) -> None:
        self.cuda = Cuda(**cuda)

    def frombuffer(self, memory: Any, *, dtype: Any) -> Tensor:
        assert isinstance(memory, ctypes.Array)
        return Tensor(np.frombuffer(memory, dtype=dtype))
