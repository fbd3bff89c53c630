"""First in, first out: the victim is the block that was filled longest ago; hits change nothing."""

from __future__ import annotations

from collections import OrderedDict

from cxlbench.devices.policies.protocol import absent, checked_capacity, empty, full, present


class FifoPolicy:
    """Exact FIFO; every call takes constant time."""

    __slots__ = ("_order", "capacity_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = checked_capacity(capacity_blocks)
        self._order: OrderedDict[int, None] = OrderedDict()

    def touch(self, block: int) -> None:
        """Check that the block is resident."""
        if block not in self._order:
            raise absent(block)

    def insert(self, block: int) -> None:
        """Add a block as the newest one."""
        order = self._order
        if block in order:
            raise present(block)
        if len(order) >= self.capacity_blocks:
            raise full(self.capacity_blocks)
        order[block] = None

    def evict(self) -> int:
        """Remove and return the oldest block."""
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
