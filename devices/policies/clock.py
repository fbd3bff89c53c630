"""CLOCK (Corbató 1969): FIFO in which a block that was hit gets another round.

The ring is kept as a queue that begins at the hand: passing a referenced block clears its bit and
moves it to the end, which is where the hand meets it last. A filled block takes the place just
behind the hand, with its bit clear: only a hit sets it.
"""

from __future__ import annotations

from collections import OrderedDict

from cxlbench.devices.policies.protocol import absent, checked_capacity, empty, full, present


class ClockPolicy:
    """CLOCK with one reference bit; ``evict`` takes amortized constant time."""

    __slots__ = ("_ring", "capacity_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = checked_capacity(capacity_blocks)
        self._ring: OrderedDict[int, bool] = OrderedDict()

    def touch(self, block: int) -> None:
        """Set the reference bit of a resident block."""
        if block not in self._ring:
            raise absent(block)
        self._ring[block] = True

    def insert(self, block: int) -> None:
        """Add a block just behind the hand, unreferenced."""
        ring = self._ring
        if block in ring:
            raise present(block)
        if len(ring) >= self.capacity_blocks:
            raise full(self.capacity_blocks)
        ring[block] = False

    def evict(self) -> int:
        """Move the hand to the first unreferenced block, clearing bits; remove and return it."""
        ring = self._ring
        if not ring:
            raise empty()
        while True:
            block, referenced = ring.popitem(last=False)
            if not referenced:
                return block
            ring[block] = False

    def remove(self, block: int) -> None:
        """Forget a resident block."""
        try:
            del self._ring[block]
        except KeyError:
            raise absent(block) from None

    def __len__(self) -> int:
        return len(self._ring)

    def __contains__(self, block: object) -> bool:
        return block in self._ring
