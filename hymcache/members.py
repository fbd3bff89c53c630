"""Which names each connected process uses: what is under them comes back when the process ends."""

from __future__ import annotations

from cxlbench.emu.wire_server import Peer
from cxlbench.hymcache.node_service import Name

NAMES_AT_MOST = 256
"""Of one process. A client has one number; a peer that sends others must not fill the memory."""


class Members:
    """The numbers with which the names begin that a peer has used."""

    def __init__(self) -> None:
        self._of: dict[bytes, set[int]] = {}

    def note(self, peer: Peer, name: Name) -> Name:
        """Note who chose ``name``, and return it; raises ``ValueError`` if it has too many."""
        mine = self._of.setdefault(peer.address, set())
        if name[0] not in mine and len(mine) >= NAMES_AT_MOST:
            raise ValueError(f"{peer.name} uses more than {NAMES_AT_MOST} numbers of members")
        mine.add(name[0])
        return name

    def end(self, peer: Peer) -> set[int]:
        """Return a peer's numbers, and forget them."""
        return self._of.pop(peer.address, set())
