"""What a replacement policy is: it orders resident blocks and names the next victim.

A policy does no I/O, knows no sizes and no clock; its owner (CMM-H's cache, a statistic) moves the
bytes. Who calls what, and when:

- ``touch(block)`` on each hit;
- ``insert(block)`` when a block has been filled; if the policy is full, after ``evict()``;
- ``evict()`` when room is needed: chooses a resident block, forgets it, returns it;
- ``remove(block)`` when a block goes for another reason than replacement (freed, invalidated).

A block that its owner cannot give up now (pinned, in flight) is put back by ``insert``. Blocks
are integers. One thread owns a policy.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable


class PolicyError(ValueError):
    """A policy was asked for something it cannot do; the message says what was expected."""


@runtime_checkable
class ReplacementPolicy(Protocol):
    """The contract of a replacement policy over ``capacity_blocks`` resident blocks.

    Errors are ``PolicyError``: a capacity below 1, ``touch`` or ``remove`` of a block that is not
    resident, ``insert`` of one that is or into a full policy, ``evict`` from an empty one.
    """

    @property
    def capacity_blocks(self) -> int:
        """How many blocks may be resident."""
        ...

    def touch(self, block: int) -> None:
        """Note a hit on a resident block."""
        ...

    def insert(self, block: int) -> None:
        """Make a block resident that was not."""
        ...

    def evict(self) -> int:
        """Choose a resident block, forget it, and return it."""
        ...

    def remove(self, block: int) -> None:
        """Forget a resident block without counting it as evicted."""
        ...

    def __len__(self) -> int:
        """Return the number of resident blocks."""
        ...

    def __contains__(self, block: object) -> bool:
        """Return whether a block is resident."""
        ...


class PolicyFactory(Protocol):
    """What makes a policy, such as its class."""

    def __call__(self, capacity_blocks: int) -> ReplacementPolicy:
        """Return an empty policy of this capacity."""
        ...


def checked_capacity(capacity_blocks: int) -> int:
    """Return a capacity, or raise PolicyError unless it is a whole number of 1 or more."""
    if isinstance(capacity_blocks, bool) or not isinstance(capacity_blocks, int):
        raise PolicyError(f"capacity_blocks={capacity_blocks!r}: must be a whole number")
    if capacity_blocks < 1:
        raise PolicyError(f"capacity_blocks={capacity_blocks}: a cache holds 1 block or more")
    return capacity_blocks


def absent(block: int) -> PolicyError:
    """Return the error for a block that should be resident and is not."""
    return PolicyError(f"block {block} is not resident: touch and remove need a resident block")


def present(block: int) -> PolicyError:
    """Return the error for a block that is inserted twice."""
    return PolicyError(f"block {block} is resident already: insert needs a block that is not")


def full(capacity_blocks: int) -> PolicyError:
    """Return the error for an insert into a full policy."""
    return PolicyError(f"all {capacity_blocks} blocks are in use: evict or remove one first")


def empty() -> PolicyError:
    """Return the error for an eviction from an empty policy."""
    return PolicyError("nothing is resident: there is no block to evict")
