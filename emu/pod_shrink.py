"""Shrinking: drop choices from a failing schedule as long as it fails in the same way.

After Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", TSE 2002: halves,
quarters and so on down to single choices are left out in turn. The replay is lenient, so whatever
is left is a schedule; what it does not say, the plain continuation of ``schedule_replay`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cxlbench.emu.pod_schedule import Choice


def shrink(
    choices: Sequence[Choice],
    still_fails: Callable[[list[Choice]], bool],
    *,
    attempts: int,
) -> list[Choice]:
    """Return a shorter list of choices for which ``still_fails`` is true, if one is found.

    ``attempts`` bounds the calls of ``still_fails``.
    """
    best = merged(choices)
    size = max(1, len(best) // 2)
    while attempts > 0:
        at = 0
        shorter = False
        while at < len(best) and attempts > 0:
            candidate = merged(best[:at] + best[at + size :])
            attempts -= 1
            if still_fails(candidate):
                best = candidate
                shorter = True
            else:
                at += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return best


def merged(choices: Sequence[Choice]) -> list[Choice]:
    """Return ``choices`` with neighbouring steps of one task put together."""
    result: list[Choice] = []
    for what, a, b in choices:
        if what == "run" and result and result[-1][:2] == ("run", a):
            result[-1] = ("run", a, result[-1][2] + b)
        else:
            result.append((what, a, b))
    return result
