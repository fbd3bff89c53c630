"""The claims as Markdown: one row a claim, whatever stands in it."""

from __future__ import annotations

from cxlbench.harness.claims import PaperClaim
from cxlbench.harness.experiment import Context, Experiment, Findings
from cxlbench.harness.experiment_record import make_record
from cxlbench.harness.report_markdown import claims_markdown

CLAIM = PaperClaim(
    name="gain",
    statement="It gains | a <lot>",
    source="fig. 1",
    expected=2.0,
    neutral=1.0,
    unit="x",
)


def toy(measured: float, reason: str = "") -> str:
    experiment = Experiment(
        name="toy",
        title="A toy",
        source="fig. 1",
        about="",
        knobs=(),
        profiles=(),
        claims=(CLAIM,),
        run=lambda _: Findings(rows=()),
    )
    findings = Findings(rows=(), claims=[CLAIM.judge(measured, reason=reason, at="load 3")])
    record = make_record(Context(experiment), findings)
    return claims_markdown([record], {"toy": {"gain": (5, 32)}})


def test_a_claim_is_one_row_with_its_share_of_the_grid():
    (row,) = [line for line in toy(1.9).splitlines() if "**holds**" in line]
    assert row.count(" | ") == 4
    assert "1.9 x, load 3" in row
    assert "5 of 32" in row


def test_what_would_end_a_cell_or_begin_a_tag_is_escaped():
    page = toy(1.9)
    assert "It gains \\| a &lt;lot>" in page


def test_reasons_and_counts_are_told():
    page = toy(0.5, reason="it was\ntoo slow")
    assert "1 does not hold" in page
    assert "- *gain*: it was too slow" in page


def test_the_same_runs_give_the_same_page():
    assert toy(1.9) == toy(1.9)
