"""``cxlbench size``: the DRAM, SSDs and link that a workload needs for a goal, and their cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cxlbench.harness.cli.options import (
    COUNT,
    FILE,
    FiniteRange,
    examples,
    json_option,
    refuse_idle,
    set_option,
)
from cxlbench.harness.cli.output import Output

if TYPE_CHECKING:
    from cxlbench.devices.profile import PricesProfile
    from cxlbench.harness.requests import Workload
    from cxlbench.harness.reuse_distance import HitRateCurve
    from cxlbench.harness.sizing import Sized
    from cxlbench.harness.sizing_simulation import SimulatedSize
    from cxlbench.harness.ttft_model import Load

    _SecondsBase = click.ParamType[float]
    _ShareBase = click.ParamType[float]
else:
    _SecondsBase = _ShareBase = click.ParamType


class SecondsType(_SecondsBase):
    """A time: ``2s``, ``500 ms``, or seconds."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return seconds."""
        from cxlbench.devices.units import Dimension, UnitError, parse_quantity, to_base

        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            if text.replace(".", "", 1).isdecimal():
                text = f"{text} s"
            return float(to_base(*parse_quantity(text, Dimension.TIME), Dimension.TIME))
        except UnitError as error:
            self.fail(f"{value!r} {error}", param, ctx)


class ShareType(_ShareBase):
    """A share: ``0.8`` or ``80%``."""

    name = "share"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return a share."""
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            return float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            self.fail(f"{value!r} is no share such as 0.8 or 80%", param, ctx)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    trace: Path | None
    knobs: str | None
    goal_hit_rate: float | None
    goal_ttft_s: float | None
    model: str
    gpu: str
    servers: int
    open_loop: bool | None
    at_once: int | None
    speed: float
    block_tokens: int | None
    limit: int | None
    sessions: int | None
    prices: str
    overrides: dict[str, str]
    simulate: bool


@click.command(
    short_help="Size a tier for a workload and a goal.",
    epilog=examples(
        "cxlbench size chat.jsonl.gz --goal-hit-rate 0.8",
        "cxlbench size chat.jsonl.gz --goal-ttft-p95 2s --servers 4",
        "cxlbench size --generate sessions=64,turns=6,turn_input_tokens=2048 --goal-ttft-p95 1s",
        'cxlbench size chat.jsonl.gz --goal-hit-rate 80% --set "ssd_per_gib_high=0.4 USD"',
    ),
)
@click.argument("trace", type=FILE, required=False)
@click.option(
    "--generate",
    "knobs",
    metavar="KNOB=VALUE,...",
    help="Make the workload instead: the options of `cxlbench generate`, as sessions=64,turns=6.",
)
@click.option(
    "--goal-hit-rate",
    type=ShareType(),
    help="Share of the blocks of all prompts that the tier is to serve: 0.8 or 80%.",
)
@click.option(
    "--goal-ttft-p95",
    "goal_ttft_s",
    type=SecondsType(),
    help="Or: 95th percentile of the time to first token: 2s or 500ms.",
)
@click.option("--model", default="Llama-3.1-8B", show_default=True, help="Decides the KV's size.")
@click.option("--gpu", default="a100-80g", show_default=True, help="Profile of the GPUs.")
@click.option("--servers", type=COUNT, default=4, show_default=True, help="GPU servers.")
@click.option(
    "--open-loop/--closed-loop",
    "open_loop",
    default=None,
    help="Requests come at the trace's times, or a think time after their predecessor in the "
    "session has been answered. [default: open, closed for --generate]",
)
@click.option(
    "--at-once", type=COUNT, help="Sessions at a time in a closed loop. [default: all of them]"
)
@click.option(
    "--speed",
    type=FiniteRange(min=1e-3, max=1e6),
    default=1,
    show_default=True,
    help="Divides arrival and think times.",
)
@click.option("--block-tokens", type=COUNT, help="Tokens in a block. [default: the trace's own]")
@click.option("--limit", type=COUNT, help="Take the first so many requests only.")
@click.option("--sessions", type=COUNT, help="Take the first so many sessions only.")
@click.option(
    "--prices",
    default="prices-hymcache",
    show_default=True,
    help="Profile of prices, by name or file; `cxlbench profiles show` has the sources.",
)
@set_option
@click.option(
    "--simulate",
    is_flag=True,
    help="Then bisect the CXL-HM tier's capacity with the real code in virtual time (slow).",
)
@json_option
def size(as_json: bool, **given: Any) -> None:
    """Find the smallest tier that meets a goal for TRACE, of DRAM and of CXL-HM, and its cost.

    The hit rate is exact for LRU, by one pass over the trace; it counts leading blocks of prompts
    only, as an engine can use them. Blocks that are seen for the first time bound it. The time to
    first token is that of a queue model (docs/sweeps.md says which), unless --simulate checks it.
    --set replaces a price.
    """
    from cxlbench.devices.profile import AcceleratorProfile, PricesProfile, load_as
    from cxlbench.devices.profile_kinds import ServingEngineProfile
    from cxlbench.harness.serve.roofline import Roofline
    from cxlbench.harness.sizing import (
        SizingError,
        burst_bytes,
        reuse_of,
        size_for_hit_rate,
        size_for_ttft,
    )
    from cxlbench.harness.sizing_parts import Catalogue
    from cxlbench.harness.ttft_model import Load
    from cxlbench.kv.geometry import model_shape

    asked = _Asked(**given)
    output = Output(as_json=as_json)
    _refuse_contradictions(asked)
    roofline = Roofline(
        model_shape(asked.model),
        load_as(AcceleratorProfile, asked.gpu),
        load_as(ServingEngineProfile, "vllm-default"),
    )
    roofline.kv_space_bytes()  # refuses a model that does not fit
    prices = load_as(PricesProfile, asked.prices, overrides=asked.overrides)
    with output.progress() as progress:
        workload = _workload(asked, progress)
        closed = asked.trace is None if asked.open_loop is None else not asked.open_loop
        at_once = None
        if closed:
            workload.require_sessions("a closed loop")
            at_once = asked.at_once or len(workload.sessions())
        else:
            refuse_idle(("at_once",), "it is for --closed-loop")
        load = Load(
            workload=workload,
            roofline=roofline,
            servers=asked.servers,
            sessions_at_once=at_once,
            speed=asked.speed,
        )
        reuse = reuse_of(load)
        catalogue = Catalogue(
            servers=asked.servers,
            block_bytes=load.block_bytes,
            burst_bytes=burst_bytes(load, reuse),
            prices=prices,
        )
        if asked.goal_hit_rate is not None:
            found = size_for_hit_rate(load, reuse, catalogue, asked.goal_hit_rate)
        else:
            assert asked.goal_ttft_s is not None
            found = size_for_ttft(load, reuse, catalogue, asked.goal_ttft_s, progress=progress)
        simulated, missed = None, ""
        if asked.simulate:
            try:
                simulated = _simulated(asked, load, found, progress)
            except SizingError as error:  # what the model says is shown all the same
                missed = str(error)
    _report(asked, load, reuse.curve, prices, found, simulated, output)
    if missed:
        output.say(f"NOT MET: {missed}")
    output.document(
        {
            "workload": workload.name,
            "goal": {"hit_rate": asked.goal_hit_rate, "ttft_p95_s": asked.goal_ttft_s},
            "best_hit_rate": reuse.curve.best_hit_rate,
            "blocks": {
                "servable": reuse.curve.servable,
                "distinct": reuse.curve.distinct,
                "bytes": load.block_bytes,
            },
            "tiers": found,
            "simulated": simulated,
            "simulation_missed": missed or None,
            "prices": _prices(prices),
        }
    )


def _refuse_contradictions(asked: _Asked) -> None:
    if (asked.trace is None) == (asked.knobs is None):
        raise click.UsageError("give a TRACE, or --generate with the knobs of a workload")
    if (asked.goal_hit_rate is None) == (asked.goal_ttft_s is None):
        raise click.UsageError("give one goal: --goal-hit-rate, or --goal-ttft-p95")
    if asked.trace is None:
        refuse_idle(("block_tokens", "limit", "sessions"), "they are for a TRACE")


def _workload(asked: _Asked, progress: Callable[[str, int, int], None]) -> Workload:
    from cxlbench.harness.generator import generate
    from cxlbench.harness.requests import Mode
    from cxlbench.harness.traces import read_trace, require_format_with_ids

    if asked.trace is None:
        return generate(_knobs(asked.knobs or ""), progress=progress)
    require_format_with_ids(asked.trace)
    return read_trace(
        asked.trace,
        mode=Mode.WHOLE_BLOCKS,
        block_tokens=asked.block_tokens,
        limit=asked.limit,
        sessions=asked.sessions,
        progress=lambda done, total: progress("reading the trace, bytes", done, total),
    )


def _knobs(text: str) -> Any:
    """Return the generator's knobs of ``sessions=64,turns=6``."""
    from cxlbench.harness.experiment_catalog import nearest
    from cxlbench.harness.generator import WHOLE_KNOBS, GeneratorKnobs

    names = [field.name for field in dataclasses.fields(GeneratorKnobs)]
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if name not in names:
            hint = nearest(name, names, otherwise=f"there are {', '.join(names)}")
            raise click.BadParameter(f"there is no knob {name!r}; {hint}", param_hint="--generate")
        try:
            found[name] = int(value) if name in WHOLE_KNOBS else float(value)
        except ValueError:
            kind = "a whole number" if name in WHOLE_KNOBS else "a number"
            said = f"{part!r}: {name} must be {kind}" if equals else f"{part!r} is not KNOB=VALUE"
            raise click.BadParameter(said, param_hint="--generate") from None
    return GeneratorKnobs(**found)


def _simulated(
    asked: _Asked,
    load: Load,
    found: tuple[Sized, ...],
    progress: Callable[[str, int, int], None],
) -> SimulatedSize | None:
    from cxlbench.harness.sizing_parts import Kind
    from cxlbench.harness.sizing_simulation import simulated_size

    def meets(hit_rate: float, ttft_p95_s: float) -> bool:
        if asked.goal_hit_rate is not None:
            return hit_rate >= asked.goal_hit_rate
        return ttft_p95_s <= (asked.goal_ttft_s or 0.0)

    for sized in found:
        if sized.kind is Kind.CXL_HM:
            of_tier = asked.goal_hit_rate is not None
            return simulated_size(load, sized, meets, gpu_caches=not of_tier, progress=progress)
    return None


def _prices(prices: PricesProfile) -> list[dict[str, Any]]:
    from cxlbench.devices.profile import describe_profile

    return [row._asdict() for row in describe_profile(prices)]


def _report(
    asked: _Asked,
    load: Load,
    curve: HitRateCurve,
    prices: PricesProfile,
    found: tuple[Sized, ...],
    simulated: SimulatedSize | None,
    output: Output,
) -> None:
    from cxlbench.harness.tables import left_table, percent, size

    goal = (
        f"a hit rate of {percent(asked.goal_hit_rate)}"
        if asked.goal_hit_rate is not None
        else f"a p95 of TTFT of {asked.goal_ttft_s:g} s"
    )
    output.say(
        f"{load.workload.name}: {curve.requests:,} requests, {curve.servable:,} servable blocks of "
        f"{size(load.block_bytes)}, best possible hit rate {percent(curve.best_hit_rate)}; "
        f"{load.servers} x {asked.gpu}, {asked.model}"
    )
    output.say(f"goal: {goal}")
    output.say()
    headers = (
        "tier",
        "capacity",
        "DRAM",
        "SSDs",
        "nodes",
        "link",
        "cost, $K",
        "hit rate",
        "p95 TTFT, s",
        "limited by",
    )
    rows = [
        (
            one.kind.value,
            size(one.capacity_bytes),
            size(one.parts.dram_bytes),
            f"{one.parts.ssds} x {size(one.parts.ssd_bytes / one.parts.ssds)}"
            if one.parts.ssds
            else "-",
            str(one.parts.nodes),
            one.link,
            f"{one.cost.low / 1e3:.3g}-{one.cost.high / 1e3:.3g}",
            percent(one.hit_rate),
            f"{one.ttft_p95_s:.3g}",
            one.limit,
        )
        for one in found
    ]
    output.say(left_table(headers, rows))
    assumed = [row["name"] for row in _prices(prices) if row["mark"] == "assumption"]
    output.say()
    output.say(
        "TTFT by the queue model. Cost of tier and ports, without servers and switches; assumed, "
        f"without a source: {', '.join(assumed) or 'nothing'}"
    )
    if simulated is not None:
        output.say(
            f"simulated (HyMCache, {simulated.runs} runs): {size(simulated.capacity_bytes)} give a "
            f"hit rate of {percent(simulated.hit_rate)} and a p95 of {simulated.ttft_p95_s:.3g} s, "
            f"the GPUs' own prefix caches {'off' if asked.goal_hit_rate is not None else 'on'}"
        )
