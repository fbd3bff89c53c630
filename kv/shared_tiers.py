"""One tier for all connector objects of a process: a table with reference counts.

An engine makes one connector object for its scheduler and one for its worker, with nothing in
common but the configuration, and the two must reach the same embedded tier. So the table below is
the project's one piece of process-wide state. It is empty again when everybody has detached, and
what is left at the end of the process is closed then.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cxlbench.emu.clock import Clock
from cxlbench.kv.connector import Connector
from cxlbench.kv.embedded import EmbeddedTier, EmbeddedTierError

_log = logging.getLogger("cxlbench.kv.embedded")


@dataclass(slots=True)
class _Shared:
    tier: EmbeddedTier
    settings: Mapping[str, object]
    users: int


_shared: dict[str, _Shared] = {}
_shared_lock = threading.Lock()


def attach(
    tier_id: str, settings: Mapping[str, object], build: Callable[[Clock], Connector]
) -> EmbeddedTier:
    """Return this process's tier of that id, built now if it is not there; pair with ``detach``.

    ``settings`` is what ``build`` goes by: who attaches to a tier must want the one that is there.

    Raises:
        EmbeddedTierError: the tier could not be built, or exists with other settings.
    """
    with _shared_lock:
        shared = _shared.get(tier_id)
        if shared is None:
            tier = EmbeddedTier(build, name=tier_id)
            shared = _shared[tier_id] = _Shared(tier, dict(settings), 0)
        elif shared.settings != settings:
            raise EmbeddedTierError(
                f"tier {tier_id!r} is there with the settings {shared.settings}, not {settings}: "
                "use another tier_id, or the same settings"
            )
        shared.users += 1
        return shared.tier


def detach(tier_id: str) -> None:
    """Give back one ``attach``; the last one closes the tier (and may raise as ``close`` does)."""
    with _shared_lock:
        shared = _shared.get(tier_id)
        if shared is None:
            raise EmbeddedTierError(f"nobody is attached to a tier {tier_id!r}")
        shared.users -= 1
        if shared.users:
            return
        del _shared[tier_id]
    shared.tier.close()


def attached() -> dict[str, int]:
    """Return the tiers of this process and how many are attached to each."""
    with _shared_lock:
        return {tier_id: shared.users for tier_id, shared in _shared.items()}


@atexit.register
def _close_what_is_left() -> None:
    """Close what engines that were not shut down left, so that no files stay behind."""
    with _shared_lock:
        left = [shared.tier for shared in _shared.values()]
        _shared.clear()
    for tier in left:
        try:
            tier.close()
        except EmbeddedTierError as error:
            _log.warning("%s", error)
