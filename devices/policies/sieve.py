"""SIEVE: FIFO order with a hand that passes over blocks that were hit, and leaves them in place.

Zhang, Yang, Yue, Vigfusson and Rashmi, "SIEVE is simpler than LRU", NSDI'24, §3: new blocks enter
at the head; the hand moves from the tail to the head, clears the bit of a visited block and goes
on, and takes the first block that was not visited. Unlike in CLOCK a block that is passed keeps its
place, so new blocks are looked at sooner than old ones that once had a hit.
"""

from __future__ import annotations

from cxlbench.devices.policies.protocol import absent, checked_capacity, empty, full, present


class _Node:
    __slots__ = ("block", "newer", "older", "visited")

    def __init__(self, block: int) -> None:
        self.block = block
        self.visited = False
        self.newer: _Node | None = None
        self.older: _Node | None = None


class SievePolicy:
    """SIEVE; ``evict`` takes amortized constant time."""

    __slots__ = ("_hand", "_newest", "_nodes", "_oldest", "capacity_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = checked_capacity(capacity_blocks)
        self._nodes: dict[int, _Node] = {}
        self._newest: _Node | None = None
        self._oldest: _Node | None = None
        self._hand: _Node | None = None

    def touch(self, block: int) -> None:
        """Note that a resident block was visited."""
        node = self._nodes.get(block)
        if node is None:
            raise absent(block)
        node.visited = True

    def insert(self, block: int) -> None:
        """Add a block as the newest one, not visited."""
        if block in self._nodes:
            raise present(block)
        if len(self._nodes) >= self.capacity_blocks:
            raise full(self.capacity_blocks)
        node = self._nodes[block] = _Node(block)
        node.older = self._newest
        if self._newest is None:
            self._oldest = node
        else:
            self._newest.newer = node
        self._newest = node

    def evict(self) -> int:
        """Move the hand to the first block that was not visited; remove and return it."""
        node = self._hand or self._oldest
        if node is None:
            raise empty()
        while node.visited:
            node.visited = False
            node = node.newer or self._oldest
            assert node is not None
        self._hand = node
        self._unlink(node)
        return node.block

    def remove(self, block: int) -> None:
        """Forget a resident block."""
        node = self._nodes.get(block)
        if node is None:
            raise absent(block)
        self._unlink(node)

    def _unlink(self, node: _Node) -> None:
        del self._nodes[node.block]
        if self._hand is node:
            self._hand = node.newer
        if node.older is None:
            self._oldest = node.newer
        else:
            node.older.newer = node.newer
        if node.newer is None:
            self._newest = node.older
        else:
            node.newer.older = node.older

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: object) -> bool:
        return block in self._nodes
