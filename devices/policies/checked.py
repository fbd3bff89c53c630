"""A policy of the user's own, watched: what it gets wrong is said at once, and where.

A victim that is not resident, or a method that raises, is a ``PolicyError`` that names the policy,
the method, the block and the line. It costs a set of the resident blocks.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from cxlbench.devices.policies.protocol import PolicyError, ReplacementPolicy


class CheckedPolicy:
    """The policy ``own``, which was loaded as ``spec``."""

    def __init__(self, own: ReplacementPolicy, spec: str) -> None:
        self.own = own
        self._spec = spec
        self._resident: set[int] = set()

    @property
    def capacity_blocks(self) -> int:
        """How many blocks may be resident."""
        return self.own.capacity_blocks

    def touch(self, block: int) -> None:
        """Note a hit on a resident block."""
        self._call(self.own.touch, block)

    def insert(self, block: int) -> None:
        """Make a block resident that was not."""
        self._call(self.own.insert, block)
        self._resident.add(block)

    def evict(self) -> int:
        """Return a resident block, which is none any more."""
        block: int = self._call(self.own.evict)
        if block not in self._resident:
            raise PolicyError(
                f"policy {self._spec!r}: evict() returned {block!r}, which is not resident: it "
                "must return a block that was inserted, and neither evicted nor removed since"
            )
        self._resident.remove(block)
        return block

    def remove(self, block: int) -> None:
        """Forget a resident block without counting it as evicted."""
        self._call(self.own.remove, block)
        self._resident.discard(block)

    def __len__(self) -> int:
        return int(self._call(self.own.__len__))

    def __contains__(self, block: object) -> bool:
        return bool(self._call(self.own.__contains__, block))

    def _call(self, method: Callable[..., Any], *arguments: object) -> Any:
        try:
            return method(*arguments)
        except PolicyError:
            raise
        except Exception as error:  # whatever a user's method raises
            frames = traceback.extract_tb(error.__traceback__)
            given = ", ".join(map(repr, arguments))
            raise PolicyError(
                f"policy {self._spec!r}: {method.__name__}({given}) raised "
                f"{type(error).__name__}: {error} ({frames[-1].filename}:{frames[-1].lineno})"
            ) from error
