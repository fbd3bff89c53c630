"""Least recently used: the victim is the block whose last fill or hit is longest ago.

The policy of the transparent DRAM cache that HyMCache §3.3 argues against: a scan longer than the
cache pushes out every block just before it is needed again.
"""

from __future__ import annotations

from collections import OrderedDict

from cxlbench.devices.policies.protocol import absent, checked_capacity, empty, full, present


class LruPolicy:
    """Exact LRU; every call takes constant time."""

    __slots__ = ("_order", "capacity_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = checked_capacity(capacity_blocks)
        self._order: OrderedDict[int, None] = OrderedDict()

    def touch(self, block: int) -> None:
        """Make a resident block the most recent one."""
        try:
            self._order.move_to_end(block)
        except KeyError:
            raise absent(block) from None

    def insert(self, block: int) -> None:
        """Add a block as the most recent one."""
        order = self._order
        if block in order:
            raise present(block)
        if len(order) >= self.capacity_blocks:
            raise full(self.capacity_blocks)
        order[block] = None

    def evict(self) -> int:
        """Remove and return the least recently used block."""
        if not self._order:
            raise empty()
        return self._order.popitem(last=False)[0]

    def remove(self, block: int) -> None:
        """Forget a resident block."""
        try:
            del self._order[block]
        except KeyError:
            raise absent(block) from None

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: object) -> bool:
        return block in self._order
