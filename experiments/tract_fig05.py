"""TraCT fig. 5: the shared memory as a transport, without a cache.

Set-up (§5, experiment 1): prompts of 1500, 3000, 4500 and 6000 tokens that share nothing, 3 output
tokens, at a load so low that requests hardly ever meet. NIXL hands the KV over through the network,
TraCT through the shared memory, where nothing is ever hit.

The paper shows TraCT's distribution of TTFT to the left of NIXL's, the more the longer the input,
with a shorter tail. Arithmetic says what must come out without queues: a 100 Gb/s port carries
12.5 GB/s, and the Niagara 10.1 GB/s in both directions together, which a hand-over uses twice,
first to write and then to read: 5 GB/s. The network is faster even where the copies through the
hosts count one after the other (25, 12.5 and 25 GB/s make 6.3). The ablation runs NIXL with each
kind of copies at 6000 tokens (quick form).

Left out: the variance of a real network, which is the paper's reason for the tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cxlbench.experiments import testbed
from cxlbench.experiments import tract_testbed as bed
from cxlbench.experiments.serving import Runs, all_checks, total_row
from cxlbench.harness.claims import JudgedClaim, PaperClaim, Sense
from cxlbench.harness.experiment import (
    Check,
    Context,
    Experiment,
    Findings,
    Knob,
    Plot,
    Row,
    about_of,
)
from cxlbench.harness.serve.handover import Path
from cxlbench.harness.serve.run import Simulated
from cxlbench.harness.shared_prefixes import SharedPrefixKnobs, generate_shared_prefixes

LENGTHS = (1500, 3000, 4500, 6000)
KNOBS = (
    bed.MODEL,
    bed.BLOCK_TOKENS,
    bed.PATH,
    bed.LAYERWISE,
    bed.CACHE,
    testbed.COMPUTE,
    Knob(name="workload.requests", value=100, quick=20, assumption=True, source="not stated"),
    Knob(
        name="workload.qps",
        value=0.05,
        unit="requests/s",
        assumption=True,
        source="not stated; low, so that a request rarely waits for another",
    ),
    Knob(name="workload.output_tokens", value=3, unit="tokens", source="TraCT §5"),
)
CLAIMS = (
    PaperClaim(
        name="lower-at-every-length",
        statement="TraCT's mean TTFT is lower than NIXL's at every input length",
        source="TraCT fig. 5",
        sense=Sense.TRUE,
    ),
    PaperClaim(
        name="gap-grows",
        statement="The longer the input, the further TraCT's TTFT is below NIXL's",
        source="TraCT fig. 5",
        sense=Sense.TRUE,
    ),
    PaperClaim(
        name="shorter-tail",
        statement="TraCT's P99 TTFT is lower than NIXL's at 6000 tokens",
        source="TraCT fig. 5",
        sense=Sense.TRUE,
    ),
)


def run(context: Context) -> Findings:
    """Run both systems at every length."""
    found: dict[int, Runs] = {}
    for length in LENGTHS:
        if context.stopping():
            break
        found[length] = run_length(context, length, context.number("workload.qps"))
    rows: list[Row] = []
    checks: list[Check] = []
    for length, runs in found.items():
        for label, one in runs.by_label.items():
            row = total_row(one, input_tokens=length, system=label)
            del row["turn"]
            rows.append(row)
        checks += all_checks(runs, f", {length} tokens")
    partial = len(found) < len(LENGTHS) or any(runs.partial for runs in found.values())
    paths: dict[str, Simulated] = {}
    if not partial and not context.stopping():
        paths = _paths(context)
        partial = len(paths) < len(Path)
        for path, one in paths.items():
            row = total_row(one, input_tokens=LENGTHS[-1], system=f"{bed.NIXL}, {path}")
            del row["turn"]
            rows.append(row)
    return Findings(
        rows=rows,
        claims=() if partial else _claims(context, found, paths),
        plots=_plots(found),
        checks=checks,
        partial=partial,
    )


def _paths(context: Context) -> dict[str, Simulated]:
    """Run NIXL with each kind of copies through the hosts at the longest prompts, quick form."""
    found = {}
    for path in Path:
        what = testbed.ablation(context, **{bed.PATH.name.replace(".", "__"): path})
        runs = run_length(what, LENGTHS[-1], what.number("workload.qps"), (bed.NIXL,))
        if not runs.partial:
            found[str(path)] = runs.by_label[bed.NIXL]
    return found


def run_length(
    context: Context, length: int, qps: float, labels: Sequence[str] = (bed.NIXL, bed.TRACT)
) -> Runs:
    """Run NIXL and TraCT on prompts of one length that share nothing."""
    workload = generate_shared_prefixes(
        SharedPrefixKnobs(
            requests=context.count("workload.requests"),
            rate_per_s=qps,
            input_tokens=length,
            unique_tokens=length,
            output_tokens=context.number("workload.output_tokens"),
            groups=1,
            block_tokens=context.count(bed.BLOCK_TOKENS.name),
            seed=context.seed,
        ),
        name=f"unique-{length}",
    )
    compared = [s for s in bed.systems(context) if s.label in labels]
    return bed.run_each(context, compared, workload, labels=f", {length} tokens")


def _claims(
    context: Context, found: Mapping[int, Runs], paths: Mapping[str, Simulated]
) -> list[JudgedClaim]:
    gaps = []
    for length in LENGTHS:
        runs = found[length].by_label
        gaps.append(runs[bed.NIXL].ttft.mean_s - runs[bed.TRACT].ttft.mean_s)
    longest = found[LENGTHS[-1]].by_label
    moved = {label: _decode_read_ms(runs) for label, runs in longest.items()}
    written = _mean_write_ms(longest[bed.TRACT])
    by_path = ", ".join(f"{path} {_decode_read_ms(one):.0f} ms" for path, one in paths.items())
    reason = (
        f"at {LENGTHS[-1]} tokens NIXL moves the KV in {moved[bed.NIXL]:.0f} ms (quick form: "
        f"{by_path}); TraCT writes it in {written:.0f} ms and reads it in {moved[bed.TRACT]:.0f} "
        f"ms; mean TTFT {longest[bed.NIXL].ttft.mean_s * 1e3:.0f} and "
        f"{longest[bed.TRACT].ttft.mean_s * 1e3:.0f} ms"
    )
    tail = (
        f"P99 {longest[bed.NIXL].ttft.p99_s * 1e3:.0f} ms against "
        f"{longest[bed.TRACT].ttft.p99_s * 1e3:.0f} ms; no variance of the network is modelled"
    )
    apart = "; NIXL's TTFT less TraCT's: " + ", ".join(f"{gap * 1e3:.0f} ms" for gap in gaps)
    reasons = {
        "lower-at-every-length": reason,
        "gap-grows": reason + apart,
        "shorter-tail": tail,
    }
    measured = {
        "lower-at-every-length": float(all(gap > 0 for gap in gaps)),
        "gap-grows": float(gaps[0] > 0 and gaps == sorted(gaps)),
        "shorter-tail": float(longest[bed.TRACT].ttft.p99_s < longest[bed.NIXL].ttft.p99_s),
    }
    at = f"{context.number('workload.qps'):g} requests/s"
    return [
        claim.judge(measured[claim.name], reason=reasons[claim.name], at=at) for claim in CLAIMS
    ]


def _mean_write_ms(run: Simulated) -> float:
    served = run.served
    return sum(record.write_s for record in served) / max(len(served), 1) * 1e3


def _decode_read_ms(run: Simulated) -> float:
    served = run.served
    return sum(record.decode_read_s for record in served) / max(len(served), 1) * 1e3


def _plots(found: Mapping[int, Runs]) -> Sequence[Plot]:
    plots = []
    for length, runs in found.items():
        series: dict[str, tuple[list[float | str], list[float]]] = {
            label: (sorted(record.ttft_s for record in run.served), [])
            for label, run in runs.by_label.items()
        }
        plots.append(
            Plot(
                name=f"ttft-{length}",
                title=f"TTFT, inputs of {length} tokens, no cache",
                x_label="TTFT, s",
                y_label="share of requests",
                kind="cdf",
                series=series,
            )
        )
    return plots


EXPERIMENT = Experiment(
    name="tract_fig05",
    title="Shared memory as a transport",
    source="TraCT fig. 5",
    about=about_of(__doc__),
    knobs=KNOBS,
    profiles=tuple(name for name in bed.PROFILES if name != "lmcache-local"),
    claims=CLAIMS,
    run=run,
)
