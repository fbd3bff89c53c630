"""Which prefill server gets a request: in turn, or by what a server has seen of its prefix.

*Prefix-aware* takes the server that served the longest leading part of the chain before, and of
equals the one with the fewest requests under way, then the next in turn; where nobody has seen
anything, the same rule decides. A server that is far busier than the idlest one (by ``slack``
requests) is passed over. What routers of serving frameworks do by indexes of KV events is
approximated by what was sent where: the router does not learn of evictions.

Units: blocks, requests.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Routing(enum.StrEnum):
    """How requests are spread over servers."""

    ROUND_ROBIN = "round-robin"
    PREFIX = "prefix-aware"


class Router:
    """Chooses servers and keeps count of what is under way."""

    def __init__(self, servers: int, routing: Routing, *, slack: int = 8) -> None:
        if servers < 1:
            raise ValueError(f"a cluster needs at least one prefill server, got {servers}")
        self.routing = routing
        self.under_way = [0] * servers
        self._slack = slack
        self._turn = 0
        self._seen: dict[bytes, int] = {}
        """Servers that have had a block, as bits."""

    def choose(self, keys: Sequence[bytes]) -> int:
        """Return the server of a request; ``done`` must follow."""
        servers = len(self.under_way)
        turn = self._turn
        self._turn = (turn + 1) % servers
        chosen = turn
        if self.routing is Routing.PREFIX:
            idlest = min(self.under_way)
            lengths = self._lengths(keys)
            able = [s for s in range(servers) if self.under_way[s] <= idlest + self._slack]
            chosen = min(able, key=lambda s: (-lengths[s], self.under_way[s], (s - turn) % servers))
            bit = 1 << chosen
            for key in keys:
                self._seen[key] = self._seen.get(key, 0) | bit
        self.under_way[chosen] += 1
        return chosen

    def done(self, server: int) -> None:
        """Note that a request of ``server`` has ended."""
        self.under_way[server] -= 1

    def _lengths(self, keys: Sequence[bytes]) -> list[int]:
        """Return the leading blocks that each server has seen."""
        lengths = [0] * len(self.under_way)
        having = (1 << len(lengths)) - 1
        for key in keys:
            having &= self._seen.get(key, 0)
            if not having:
                break
            for server in range(len(lengths)):
                lengths[server] += having >> server & 1
        return lengths
