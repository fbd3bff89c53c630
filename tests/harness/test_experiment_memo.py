"""Experiments of one session share the runs that several of them need."""

from __future__ import annotations

from cxlbench.harness.experiment import Context, Experiment, Findings
from cxlbench.harness.experiment_run import make_contexts


def _counting(name: str, calls: list[str]) -> Experiment:
    def run(context: Context) -> Findings:
        key = ("shared", *context.point())
        if key not in context.memo:
            calls.append(name)
            context.memo[key] = True
        return Findings(rows=())

    return Experiment(
        name=name, title="", source="", about="", knobs=(), profiles=(), claims=(), run=run
    )


def test_the_second_experiment_takes_what_the_first_has_run():
    calls: list[str] = []
    for context in make_contexts([_counting("a", calls), _counting("b", calls)]):
        context.experiment.run(context)
    assert calls == ["a"]


def test_another_seed_shares_nothing():
    calls: list[str] = []
    experiment = _counting("a", calls)
    for seed in (0, 1):
        (context,) = make_contexts([experiment], seed=seed)
        experiment.run(context)
    assert calls == ["a", "a"]
