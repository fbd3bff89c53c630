"""S3-FIFO: three FIFO queues that keep one-hit wonders out of the main one.

Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP'23, §4:
a small queue of 10 % of the capacity takes new blocks; those hit more than once before they reach
its end move to the main queue of 90 %, the others leave, and a ghost queue remembers the numbers
of as many of them as the main queue holds. A block that comes back while it is remembered goes to
the main queue at once. A counter per block goes up with each hit, to 3 at most; the main queue
passes over a block with a positive counter and takes 1 off.

Where the paper leaves room: shares are rounded down, the small queue holds at least one block, and
a moved block starts in the main queue at 0. ``remove`` leaves no ghost, since nothing was evicted.
"""

from __future__ import annotations

from collections import OrderedDict

from cxlbench.devices.policies.protocol import absent, checked_capacity, empty, full, present

SMALL_DIVISOR = 10
MOST_HITS = 3
HITS_TO_MOVE = 2


class S3FifoPolicy:
    """S3-FIFO; ``evict`` takes amortized constant time."""

    __slots__ = ("_ghost", "_main", "_small", "capacity_blocks", "main_blocks", "small_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = checked_capacity(capacity_blocks)
        self.small_blocks = max(1, capacity_blocks // SMALL_DIVISOR)
        self.main_blocks = capacity_blocks - self.small_blocks
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def touch(self, block: int) -> None:
        """Count a hit on a resident block."""
        queue = self._small if block in self._small else self._main
        hits = queue.get(block)
        if hits is None:
            raise absent(block)
        if hits < MOST_HITS:
            queue[block] = hits + 1

    def insert(self, block: int) -> None:
        """Add a block to the small queue, or to the main one if it left only lately."""
        if block in self._small or block in self._main:
            raise present(block)
        if len(self) >= self.capacity_blocks:
            raise full(self.capacity_blocks)
        if block in self._ghost:
            del self._ghost[block]
            self._main[block] = 0
        else:
            self._small[block] = 0

    def evict(self) -> int:
        """Remove and return a block: from the small queue while it has its share, else main."""
        if not self._small and not self._main:
            raise empty()
        if len(self._small) < self.small_blocks and self._main:
            return self._evict_main()
        while self._small:
            block, hits = self._small.popitem(last=False)
            if hits < HITS_TO_MOVE:
                self._remember(block)
                return block
            self._main[block] = 0
            if len(self._main) > self.main_blocks:
                return self._evict_main()
        return self._evict_main()

    def _evict_main(self) -> int:
        while True:
            block, hits = self._main.popitem(last=False)
            if not hits:
                return block
            self._main[block] = hits - 1

    def _remember(self, block: int) -> None:
        if self.main_blocks:
            if len(self._ghost) >= self.main_blocks:
                self._ghost.popitem(last=False)
            self._ghost[block] = None

    def remove(self, block: int) -> None:
        """Forget a resident block."""
        queue = self._small if block in self._small else self._main
        if block not in queue:
            raise absent(block)
        del queue[block]

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, block: object) -> bool:
        return block in self._small or block in self._main
