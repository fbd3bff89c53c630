"""``cxlbench chaos``: kill and stop the parts of a deployment at random, under a verified load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cxlbench.harness.cli.group import WRONG_DATA
from cxlbench.harness.cli.options import COUNT, FOLDER, examples, json_option, seed_option_for
from cxlbench.harness.cli.output import Output

if TYPE_CHECKING:
    from cxlbench.harness.chaos import ChaosReport


class _Seconds(click.ParamType):  # type: ignore[type-arg]
    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return seconds."""
        from cxlbench.devices.units import Dimension, UnitError, parse_quantity, to_base

        if isinstance(value, float):
            return value
        text = str(value).strip()
        if text.replace(".", "", 1).isdecimal():
            text += "s"
        try:
            seconds = float(to_base(*parse_quantity(text, Dimension.TIME), Dimension.TIME))
        except UnitError as error:
            self.fail(f"{value!r} {error}", param, ctx)
        if not 0.1 <= seconds <= 60:
            self.fail(f"{value!r} is not from 0.1 s to 60 s", param, ctx)
        return seconds


SECONDS = _Seconds()


@click.command(
    epilog=examples(
        "cxlbench chaos --rounds 10",
        "cxlbench chaos --rounds 200 --seed 7 --deadline 1s",
        "cxlbench chaos --seed 7 --from-round 31 --rounds 1",
    )
)
@click.option(
    "--rounds", type=COUNT, default=200, show_default=True, help="How many rounds to run."
)
@click.option(
    "--from-round",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of the first round; to replay one that failed.",
)
@click.option(
    "--deadline",
    type=SECONDS,
    default="1s",
    show_default=True,
    help="After which a read is a miss: 1s, 500ms; a number is seconds.",
)
@click.option(
    "--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Worker processes."
)
@click.option(
    "--nodes", type=click.IntRange(1, 64), default=2, show_default=True, help="Memory nodes."
)
@click.option(
    "--folder", type=FOLDER, help="Run directory and backing files go here. [default: temporary]"
)
@seed_option_for("The faults of a round depend on it and on the round's number only.")
@json_option
def chaos(
    rounds: int,
    from_round: int,
    deadline: float,
    workers: int,
    nodes: int,
    folder: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """Kill and stop workers, nodes and Master at random, under a verified multi-turn load.

    In every round: no wrong byte, no wait beyond the deadline, and when all parts are back, nothing
    is held for anybody and no file or segment is left. About 3 s a round: 200 take 10 minutes on
    two cores.

    Exit codes: 0 so it is; 1 a promise was broken (the seed and the round are told); 2 this host
    cannot.
    """
    from cxlbench.harness.chaos import Chaos
    from cxlbench.harness.chaos_spec import chaos_spec
    from cxlbench.harness.run_folders import run_folder

    output = Output(as_json=as_json)
    with run_folder(folder) as made:
        spec = chaos_spec(made, nodes=nodes, deadline_s=deadline)
        with output.progress() as progress:
            found = Chaos(spec, workers=workers, seed=seed, progress=progress).run(
                rounds, first=from_round
            )
        logs = "".join(
            f"\n--- {path.name}\n{path.read_text(errors='replace')[-4000:]}"
            for path in sorted(made.glob("**/*.log"))
        )
    _tell(output, found)
    output.document(found)
    for broken in found.violations:
        output.note(f"BROKEN in round {broken.round}: {broken.what} ({broken.faults})")
    if not found.passed:
        output.note(
            f"replay: cxlbench chaos --seed {seed} --from-round {found.violations[0].round} "
            f"--rounds 1 --deadline {deadline:g}s --workers {workers} --nodes {nodes}"
        )
        if logs:
            output.note(logs)
        raise click.exceptions.Exit(WRONG_DATA)


def _tell(output: Output, found: ChaosReport) -> None:
    from cxlbench.harness.tables import listing, size, table

    faults = ", ".join(f"{count} x {name}" for name, count in found.faults.items())
    output.say(
        listing(
            [
                ("rounds", f"{found.rounds:,} in {found.elapsed_s:.0f} s, seed {found.seed}"),
                ("faults", faults),
                ("turns", f"{found.turns:,}"),
                ("blocks read, every byte checked", f"{found.hits:,}, {size(found.checked_bytes)}"),
                ("blocks found, but not delivered", f"{found.missed:,}"),
                ("blocks stored", f"{found.stored:,}"),
                ("longest until all worked again", f"{found.slowest_back_s:.2f} s"),
                ("longest until nothing was held", f"{found.slowest_rest_s:.2f} s"),
            ]
        )
    )
    output.say()
    output.say(
        table(
            (
                "private memory\nand descriptors",
                "first quarter\nMiB",
                "last quarter\nMiB",
                "first\nfds",
                "last\nfds",
            ),
            [
                (
                    row.part,
                    f"{row.first_bytes / (1 << 20):.1f}",
                    f"{row.last_bytes / (1 << 20):.1f}",
                    row.first_descriptors,
                    row.last_descriptors,
                )
                for row in found.residents
            ],
        )
    )
