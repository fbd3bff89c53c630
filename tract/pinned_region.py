"""A region that a GPU's copy engine may read and write: pinned by ``cudaHostRegister``.

TraCT, § GPU DMA: the mapping of the shared memory is registered with CUDA once, and from then on
blocks go between a GPU's memory and the region by the GPU's own copy engine, past the CPU's caches.
``PinnedRegion`` registers the mapping of a live pod (``Attachment.region``) where torch finds a
GPU, and unregisters it when it is closed. Copies are asynchronous: on a stream of their own, each
with an event. When it is complete the block may be published, or be used.

Where there is no torch, no GPU, or CUDA refuses, ``pinned`` is False and ``reason`` says why; then
blocks go through the pod's own DMA (``transfer``), with words in host memory on the other side.

torch is imported when a region is made, if it is installed, and never before. Units: bytes.
Left out: peers of several GPUs, and GPUs that are not CUDA's.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from typing import Any, Protocol, Self

REGISTER_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all contexts of the process."""


class NotPinnedError(RuntimeError):
    """A copy was asked for that no GPU can make: the region is not pinned, or was closed."""


class OutsideRegionError(ValueError):
    """A copy would leave the region, or its tensor is not one that a copy engine can take."""


class Copy(Protocol):
    """A copy under way: an event of the GPU's."""

    def query(self) -> bool:
        """Return whether it is complete."""

    def synchronize(self) -> None:
        """Wait until it is."""


def find_torch(torch: Any = None) -> tuple[Any, str]:
    """Return torch if it finds a GPU, else None; and why not.

    ``torch`` is the module to ask; the installed one is imported if none is given.
    """
    if torch is None:
        if importlib.util.find_spec("torch") is None:
            return None, "torch is not installed"
        try:
            torch = importlib.import_module("torch")
        except Exception as error:  # a broken installation is a reason, not a failure
            return None, f"torch does not work: {error}"
    try:
        there = bool(torch.cuda.is_available())
    except Exception as error:  # so is a broken driver
        return None, f"torch does not work: {error}"
    return (torch, "") if there else (None, "torch finds no GPU")


class PinnedRegion:
    """A mapping of ``nbytes`` bytes at ``address``, registered with CUDA while this is open."""

    def __init__(self, address: int, nbytes: int, *, torch: Any = None) -> None:
        self.nbytes = nbytes
        self._address = address
        self._torch, self.reason = find_torch(torch)
        """Why it is not pinned; empty if it is."""
        self._bytes: Any = None
        self._stream: Any = None
        if self._torch is not None:
            self.reason = self._register()

    @property
    def pinned(self) -> bool:
        """Whether copies of a GPU can go to and from the region."""
        return self._bytes is not None

    def start_write(self, off: int, tensor: Any) -> Copy:
        """Start copying a GPU's tensor to the region at byte ``off``."""
        return self._copy(self._span(off, tensor), self._flat(tensor))

    def start_read(self, off: int, tensor: Any) -> Copy:
        """Start copying the region from byte ``off`` to a GPU's tensor.

        What reads the tensor on another stream must wait for the copy first.
        """
        return self._copy(self._flat(tensor), self._span(off, tensor))

    def close(self) -> None:
        """Wait for the copies under way and unregister; the mapping must still be there."""
        if self._bytes is None:
            return
        self._stream.synchronize()
        self._bytes = None
        self.reason = "it was closed"
        self._torch.cuda.cudart().cudaHostUnregister(self._address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _register(self) -> str:
        """Register; return why that failed, or nothing."""
        torch = self._torch
        try:
            runtime = torch.cuda.cudart()
            code = int(runtime.cudaHostRegister(self._address, self.nbytes, REGISTER_PORTABLE))
        except Exception as error:  # torch raises where CUDA cannot be initialized
            return f"cudaHostRegister failed: {error}"
        if code:
            return f"cudaHostRegister of {self.nbytes} B failed with CUDA error {code}"
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self._address)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._stream = torch.cuda.Stream()
        return ""

    def _span(self, off: int, tensor: Any) -> Any:
        if self._bytes is None:
            raise NotPinnedError(
                f"no GPU copies to this region: {self.reason}; use the pod's DMA (tract.transfer)"
            )
        size = int(tensor.numel()) * int(tensor.element_size())
        if not 0 <= off <= self.nbytes - size:
            raise OutsideRegionError(f"{size} B at offset {off}: the region has {self.nbytes} B")
        return self._bytes[off : off + size]

    def _flat(self, tensor: Any) -> Any:
        if not tensor.is_contiguous():
            raise OutsideRegionError("the tensor is not contiguous: copy it into one that is")
        return tensor.reshape(-1).view(self._torch.uint8)

    def _copy(self, target: Any, source: Any) -> Copy:
        torch = self._torch
        self._stream.wait_stream(torch.cuda.current_stream())  # what made the tensor comes first
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event: Copy = torch.cuda.Event()
            event.record(self._stream)  # type: ignore[attr-defined]
        return event
