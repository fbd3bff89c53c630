"""Small experiments for tests of the front end; as a user's project would have them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from cxlbench.harness.claims import PaperClaim, Sense
from cxlbench.harness.experiment import Check, Context, Experiment, Findings, Knob, Plot

KNOBS = (
    Knob(name="turns", value=4, quick=2, source="enough to see it"),
    Knob(name="rate", value=1.5, unit="1/s", source="not stated", assumption=True),
    Knob(
        name="routing",
        value="round-robin",
        choices=("round-robin", "prefix-aware"),
        source="not stated",
        assumption=True,
    ),
    Knob(name="lossless", value=True, source="what the check looks at"),
)
CLAIMS = (
    PaperClaim(
        name="faster",
        statement="HyMCache <reads> faster than Recompute & co",
        source="§1",
        expected=2,
        neutral=1,
        unit="x",
    ),
    PaperClaim(name="more", statement="At least 9 GB/s", source="§2", expected=9, neutral=1),
    PaperClaim(name="never", statement="It never waits", source="§3", sense=Sense.TRUE),
    PaperClaim(name="unknown", statement="It uses less power", source="§4", expected=3),
)
SYSTEMS = ("Recompute", "HyMCache")


def run(context: Context) -> Findings:
    rng = random.Random(context.seed)
    rows, lines, samples = [], {}, {}
    turns = context.count("turns")
    for speed, system in enumerate(SYSTEMS, 1):
        times = []
        for turn in range(1, turns + 1):
            if context.stopping():
                break
            context.progress("turns", turn, turns)
            times.append((turn + rng.random() / 10) / speed / context.number("rate"))
            rows.append(
                {
                    "system": system,
                    "routing": context.choice("routing"),
                    "turn": turn,
                    "ttft_mean_s": times[-1],
                    "read_bytes_per_s": 1e9 * speed * turn,
                    "held_bytes": speed * 2**30,
                    "wait_s": None if turn == 1 else 0.5,
                }
            )
        lines[system] = (list(range(1, len(times) + 1)), times)
        samples[system] = ([rng.random() / speed for _ in range(2000)], [])
    claims = {claim.name: claim for claim in context.experiment.claims}
    bars = {"cost": (["64 GB", "1 TB"], [10500.0, 30000.0])}
    return Findings(
        rows=rows,
        claims=[
            claims["faster"].judge(2.1, at="QPS 3"),
            claims["more"].judge(3.0, reason="the link is the limit"),
            claims["never"].judge(0),
        ],
        plots=[
            Plot(
                name="ttft",
                title="TTFT by turn",
                x_label="turn",
                y_label="TTFT, s",
                kind="line",
                series=lines,
                note="means",
            ),
            Plot(
                name="all ttft",
                title="All TTFT",
                x_label="TTFT, s",
                y_label="share of requests",
                kind="cdf",
                series=samples,
            ),
            Plot(name="cost", title="Cost", x_label="", y_label="USD", kind="bar", series=bars),
        ],
        checks=[Check(name="nothing lost", ok=bool(context.knob("lossless")), detail="0 lost")],
        notes=["a toy"],
    )


def run_until_stopped(context: Context) -> Findings:
    """Go on until somebody asks to stop; a file tells that it has begun."""
    rows = []
    while not context.stopping():
        rows.append({"step": len(rows)} if not rows else rows[0])
        Path("begun").touch()
    return Findings(rows=rows[:1])


def run_deaf(context: Context) -> Findings:
    """Never ask whether to stop."""
    Path("begun").touch()
    while True:
        pass


def run_badly(context: Context) -> Findings:
    raise RuntimeError("a slip of the pen")


def toy(
    name: str = "toy", *, knobs: tuple[Knob, ...] = KNOBS, run: Callable[..., Findings] = run
) -> Experiment:
    return Experiment(
        name=name,
        title=f"The toy called {name}",
        source="no paper",
        about="""Two systems that do nothing,
            for a few turns.""",
        knobs=knobs,
        profiles=("pm1743-class", "cxl-hm-prototype"),
        claims=CLAIMS,
        run=run,
    )


EXPERIMENT = toy()
OTHER = toy("toy2", knobs=(*KNOBS, Knob(name="only_here", value=1, source="a toy")))
SLOW = toy("slow", run=run_until_stopped)
DEAF = toy("deaf", run=run_deaf)
BAD = toy("bad", run=run_badly)
