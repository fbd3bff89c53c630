"""A small experiment for tests of sweeps: arithmetic with knobs and a link's numbers, in no time.

Knobs make it raise, end its process, or wait, at chosen values.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from cxlbench.devices.profile import LinkProfile
from cxlbench.harness.claims import PaperClaim, Sense
from cxlbench.harness.experiment import Check, Context, Experiment, Findings, Knob

FASTER = PaperClaim(
    name="faster",
    statement="more sessions over a faster link go up",
    source="none",
    expected=2.0,
    sense=Sense.AT_LEAST,
    neutral=1.0,
    unit="x",
)
NEVER = PaperClaim(name="never", statement="is never measured", source="none")


def run(context: Context) -> Findings:
    sessions, share = context.count("sessions"), context.number("share")
    trouble = context.choice("trouble")
    marks = context.choice("marks")
    if marks:
        with Path(marks).open("a") as file:
            file.write(f"{os.getpid()} {sessions}\n")
    if trouble == "raise" and sessions >= 64:
        raise ValueError(f"{sessions} sessions are too many")
    if trouble == "die" and sessions >= 64:
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "hang" and sessions >= 64:
        time.sleep(600)
    link = context.profile(LinkProfile, "nic-100g")
    value = sessions / 16 * share * link.bandwidth / 12.5e9
    value *= 1.0 if context.choice("routing") == "round-robin" else 0.5
    return Findings(
        rows=[
            {"system": system, "turn": turn, "ttft_s": value * turn, "note_s": None}
            for system in ("slow", "fast")
            for turn in (1, 2)
        ],
        claims=[FASTER.judge(value), NEVER.judge(None)],
        checks=[Check(name="positive", ok=trouble != "break", detail="of all values")],
    )


EXPERIMENT = Experiment(
    name="toy",
    title="A toy",
    source="none",
    about="Arithmetic.",
    knobs=(
        Knob(name="sessions", value=32, quick=16, source="chosen"),
        Knob(name="share", value=0.5, source="nobody knows", assumption=True),
        Knob(
            name="routing",
            value="round-robin",
            choices=("round-robin", "prefix-aware"),
            source="not said",
            assumption=True,
        ),
        Knob(
            name="trouble",
            value="none",
            choices=("none", "raise", "die", "hang", "break"),
            source="chosen",
        ),
        Knob(name="marks", value="", source="a file that every run leaves a line in"),
    ),
    profiles=("nic-100g", "cxl-hm-prototype", "a100-80g", "cmm-h-256g"),
    claims=(FASTER, NEVER),
    run=run,
)
