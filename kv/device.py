"""What a tier's software needs of a memory device that keeps KV objects.

The protocol is HyMCache's view (§3.4, §4.2): object-level prefetch in three calls, write admission
that reserves or refuses at once, and reads that always succeed, staged or not. A device without
staging (a transparent cache, plain DRAM) satisfies it with ``prefetch_depth == 0``.

Addresses are logical, from 0, backed by the device's capacity; staging frames and write buffers
never leave the device. ``size_bytes`` is the payload's size everywhere: the object's trailer (its
footer) lies in the page after the payload and is ``trailer_bytes`` long. All calls but the
``async`` ones return at once and cost no emulated time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from cxlbench.emu.fabric import PrefetchRequest, ReadView, Target
from cxlbench.emu.memory import Buffer, Bytes


@runtime_checkable
class MemoryDevice(Target, Protocol):
    """A device that stores objects at logical addresses."""

    name: str
    capacity_bytes: int
    page_bytes: int
    """Grain of object addresses; every extent is a whole number of these."""
    prefetch_depth: int
    """How many prefetch requests may be held at once; 0 means that the device has no staging."""

    # Read side: issue, wait, release (HyMCache §3.4).

    def chm_prefetch_object(self, address: int, size_bytes: int) -> PrefetchRequest | None:
        """Start staging an object; None if depth or frames are exhausted (retry on a release)."""

    async def chm_prefetch_wait(self, request: PrefetchRequest) -> None:
        """Wait until the object is staged; raise ``DeviceError`` if that failed."""

    def chm_prefetch_release(self, request: PrefetchRequest) -> None:
        """Give the staging region back, once its reads and its staging I/O have ended."""

    async def open_read(self, address: int, size_bytes: int) -> ReadView:
        """Make the object readable (a hit, or a demand miss that stages it) and pin it."""

    # Write side: check-and-reserve, receive, commit, flush in the background.

    def admit(self, address: int, size_bytes: int) -> bool:
        """Reserve write-buffer space for an object at ``address``, or refuse at once."""

    async def ready_to_receive(self, address: int) -> None:
        """Wait until the bytes of an admitted object can be taken."""

    def receive(self, address: int, payload: Buffer, trailer: Bytes | None) -> None:
        """Take the object's bytes into the reserved space (the target end of an RDMA WRITE)."""

    def commit(self, address: int) -> None:
        """Declare the object complete: it may be read, and is eligible for flush."""

    def cancel(self, address: int) -> None:
        """Give up a reservation that was not committed."""

    def discard(self, address: int, size_bytes: int) -> None:
        """Forget a committed object: its extent is free. Nobody may read it any more."""

    # Housekeeping.

    on_frames_free: Callable[[], None]
    """Called when staging frames went free: a refused prefetch may fit now."""
    on_lost: Callable[[int], None]
    """Called with the address of a committed object that the device could not keep."""

    def at_rest(self) -> dict[str, int]:
        """Count what is held for somebody, by name; all zero when nothing is going on."""

    async def quiesce(self) -> None:
        """Wait until everything committed has reached the backing store."""

    async def close(self) -> None:
        """Stop background work and release memory and files."""
