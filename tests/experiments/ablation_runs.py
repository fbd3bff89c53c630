"""What the tests of the ablations share: quick runs, each done once, and their rows."""

from __future__ import annotations

from functools import cache
from typing import Any

from cxlbench.experiments import (
    dram_for_latency,
    flush_cost,
    lock_contention,
    policy_ablation,
    prefetch_depth,
    write_buffer,
)
from cxlbench.harness.experiment import Context, Findings
from cxlbench.harness.results import Verdict

ON_DEVICES = {
    one.EXPERIMENT.name: one.EXPERIMENT
    for one in (dram_for_latency, policy_ablation, prefetch_depth, write_buffer)
}
ON_THE_POD = {one.EXPERIMENT.name: one.EXPERIMENT for one in (flush_cost, lock_contention)}
ALL = ON_DEVICES | ON_THE_POD


@cache
def quick(name: str, *overrides: tuple[str, str]) -> Findings:
    return ALL[name].run(Context(ALL[name], quick=True, seed=1, overrides=dict(overrides)))


def rows(name: str, **having: Any) -> list[Any]:
    return [
        row
        for row in quick(name).rows
        if all(row.get(key) == value for key, value in having.items())
    ]


def one_row(name: str, **having: Any) -> Any:
    (found,) = rows(name, **having)
    return found


def is_whole(name: str) -> None:
    """Check that a run comes out even, judges each claim once, and draws what it says."""
    found = quick(name)
    assert not found.partial
    assert len(found.checks) >= 2
    assert [check for check in found.checks if not check.ok] == []
    assert [claim.name for claim in found.claims] == [claim.name for claim in ALL[name].claims]
    assert all(claim.verdict is not Verdict.OPEN for claim in found.claims)
    for plot in found.plots:
        for xs, ys in plot.series.values():
            assert len(xs) == len(ys) > 0


def stops(name: str) -> None:
    """Check that a run that is stopped at once is partial and decides nothing."""
    found = ALL[name].run(Context(ALL[name], quick=True, stopping=lambda: True))
    assert found.partial
    assert all(claim.verdict is Verdict.OPEN for claim in found.claims)
