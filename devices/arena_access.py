"""What devices share whose objects lie in an arena: where a WRITE lands, what a READ gathers.

A WRITE asks where the bytes of an admitted object go (``landing``), puts them there, and says so
(``landed``); a READ has an object pinned and gathers its extents. Both are apart, so that the bytes
can also be moved by another process that has the arena mapped. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cxlbench.emu.fabric import ObjectExtents
from cxlbench.emu.memory import AnyArena, Buffer, Bytes, Digest
from cxlbench.emu.pipe import Pipe, Reservation
from cxlbench.emu.status import DeviceError, Status


def trailer_cost(trailer_bytes: int, scale: float) -> int:
    """Return the bytes that a trailer counts for on pipes and SSDs at ``scale``, in words of 8 B.

    It takes its page at every scale, since pages do not scale; the time of the full-size system is
    that of one page beside a payload that is ``scale`` times as large.
    """
    return -(-trailer_bytes // int(8 * scale)) * 8 if trailer_bytes else 0


class ArenaTarget:
    """The receiving end of a device. Subclasses say where bytes land, and note that they did."""

    name: str
    arena: AnyArena
    trailer_bytes: int

    def landing(self, address: int) -> ObjectExtents:
        """Return where the object that was admitted at ``address`` goes.

        Raises ``DeviceError`` (NO_OBJECT) if nothing was admitted there, or it was committed.
        """
        raise NotImplementedError

    def landed(self, address: int) -> None:
        """Note that all bytes of the object are there."""
        raise NotImplementedError

    def receive(self, address: int, payload: Buffer, trailer: Bytes | None) -> None:
        """Take the bytes of a WRITE; without a trailer, one of zeros.

        Raises ``DeviceError``: NO_OBJECT as ``landing``; BOUNDS if sizes are not those admitted.
        """
        extents = self.landing(address)
        check_landing(self.name, extents, payload.nbytes, 0 if trailer is None else len(trailer))
        self.arena.store(extents.payload, payload)
        if extents.trailer:
            # Its last user may have left a footer there: nobody may take it for this object's.
            empty = np.zeros(extents.trailer_bytes, dtype=np.uint8)
            self.arena.store(extents.trailer, empty if trailer is None else trailer)
        self.landed(address)


def check_landing(name: str, extents: ObjectExtents, payload: int, trailer: int) -> None:
    """Refuse (BOUNDS) a WRITE whose sizes are not those of the object that was admitted."""
    if payload != extents.payload_bytes:
        raise DeviceError(
            Status.BOUNDS, f"{name}: {payload} B for {extents.payload_bytes} reserved"
        )
    if trailer > extents.trailer_bytes:
        raise DeviceError(
            Status.BOUNDS,
            f"{name}: a trailer of {trailer} B, room for {extents.trailer_bytes}",
        )


class ArenaView:
    """A pinned object in an arena. Subclasses unpin it."""

    def __init__(
        self,
        port: Pipe,
        arena: AnyArena,
        extents: ObjectExtents,
        bookings: Sequence[Reservation] = (),
    ) -> None:
        self.port = port
        self.arena = arena
        self.extents = extents
        self.bookings = tuple(bookings)
        self._open = True

    async def arrived(self) -> None:
        """Wait for bytes on their way; here they are in place before a view exists."""

    def copy_into(self, payload: Buffer, trailer: Bytes | None, digest: Digest | None) -> None:
        """Copy the object out."""
        if trailer is not None and len(trailer) and self.extents.trailer:
            self.arena.load(self.extents.trailer, trailer)
        self.arena.load(self.extents.payload, payload, digest)

    def close(self) -> None:
        """Unpin; a second call does nothing."""
        if self._open:
            self._open = False
            self.unpin()

    def unpin(self) -> None:
        """Give back what the view holds."""
        raise NotImplementedError
