"""What a sweep varies: the keys, their values, and the points that follow.

Keys are those of ``Experiment.keys()``: knobs, and numbers of device profiles. The user gives a
grid (``KEY=V1,V2`` or ``KEY=LOW..HIGH:N``; several keys make the product), or lets the
assumptions be varied: Latin-hypercube points over what no source gives
(``Experiment.assumptions``). With both, every sample runs at every point of the grid, and keys
of the grid are not sampled.

Not every number can be moved by 30 %: sizes must stay whole pages or whole frames, and some must
divide others. Sizes are rounded to two of their grains; what no range fits (a power of two, a
frame) is halved, kept, and doubled; what cannot be moved at all, or is itself the end of a
stated range, is kept and listed with the reason. Where several moved numbers do not go together
at a point, the one that the profile's rules refuse keeps its value there, and the point does not
list it.

Units: as the keys' own; texts as ``--set`` takes them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cxlbench.devices.profile import Profile, load_profile
from cxlbench.devices.profile_schema import Number, ProfileError, SchemaField, schema_of
from cxlbench.devices.units import PAGE_BYTES, UNITS, Dimension, UnitError, parse_quantity, to_base
from cxlbench.harness.experiment import Assumption, Context, Experiment, ExperimentError
from cxlbench.harness.latin_hypercube import cycled, strata

MOST_POINTS = 100_000
_RANGE = re.compile(r"(.+?)\.\.(.+):\s*(\d+)\s*")
_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*")


class SweepError(ExperimentError):
    """A sweep that cannot be, or a file that is not this sweep's."""


Point = Mapping[str, str]
"""The overrides of one point: a text by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A number between two ends. ``step`` is what values are multiples of; 0 is none."""

    key: str
    low: float
    high: float
    unit: str = ""
    step: float = 0

    def draw(self, count: int, *, seed: int) -> list[str]:
        """Return ``count`` values as texts."""
        return [self.text(place) for place in strata(self.key, count, seed=seed)]

    def text(self, place: float) -> str:
        """Return the value at a place in [0, 1]."""
        value = self.low + place * (self.high - self.low)
        if self.step:
            value = min(max(round(value / self.step) * self.step, self.low), self.high)
            return f"{int(value)}{self.unit and f' {self.unit}'}"
        return f"{value:.6g}{self.unit and f' {self.unit}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of several texts."""

    key: str
    choices: tuple[str, ...]

    def draw(self, count: int, *, seed: int) -> list[str]:
        """Return ``count`` values, each choice equally often."""
        return cycled(self.key, self.choices, count, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An assumption that a sweep does not move, and why."""

    key: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What a sweep runs, in order."""

    points: tuple[Point, ...]
    keys: tuple[str, ...]
    kept: tuple[Kept, ...] = ()


@dataclass(slots=True)
class _Tried:
    """An experiment against which values are tried, one at a time."""

    experiment: Experiment
    quick: bool
    profiles: dict[str, Profile] = field(default_factory=dict)

    def refusal(self, overrides: Point) -> ProfileError | ExperimentError | None:
        """Return why a ``Context`` would refuse overrides, reading only the profiles they name."""
        left = dict(overrides)
        try:
            for name in self.experiment.profiles:
                prefix = f"{name}."
                own = {key: left.pop(key) for key in overrides if key.startswith(prefix)}
                if own:
                    texts = {key.removeprefix(prefix): text for key, text in own.items()}
                    load_profile(name, overrides=texts)
            for key, text in left.items():
                self.experiment.knob(key).parse(text)
        except (ProfileError, ExperimentError) as error:
            return error
        return None

    def number(self, key: str) -> tuple[Profile, SchemaField, Number] | None:
        """Return the profile, field and rule that a key names; None for knobs."""
        for name in self.experiment.profiles:
            if key.startswith(f"{name}."):
                profile = self.profiles.setdefault(name, load_profile(name))
                for member in schema_of(type(profile)):
                    if f"{name}.{member.name}" == key and isinstance(member.rule, Number):
                        return profile, member, member.rule
        return None

    def whole(self, key: str) -> bool:
        """Return whether a key takes whole numbers only."""
        found = self.number(key)
        if found is not None:
            return found[2].dimension is Dimension.COUNT
        value = self.experiment.knob(key).value
        return isinstance(value, int) and not isinstance(value, bool)


def make_design(
    experiment: Experiment,
    *,
    sets: Sequence[str] = (),
    samples: int = 0,
    quick: bool = False,
    seed: int = 0,
) -> Design:
    """Return the points of a sweep.

    ``sets`` are texts such as ``workload.sessions=64,128`` or
    ``nic-100g.bandwidth=50..200 Gb/s:4``; ``samples`` is the number of Latin-hypercube points over
    the assumptions.

    Raises:
        SweepError: nothing to sweep, an unknown key, an impossible value, or too many points.
    """
    tried = _Tried(experiment, quick)
    grid = [_grid_axis(tried, text) for text in sets]
    names = [key for key, _ in grid]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SweepError(f"{twice!r} is given twice: put all its values into one --set")
    if not grid and not samples:
        raise SweepError(
            "there is nothing to sweep: give keys with --set KEY=V1,V2 (or KEY=LOW..HIGH:N), "
            "or vary what no source gives with --assumptions N"
        )
    sampled: list[dict[str, str]] = [{}]
    kept: list[Kept] = []
    if samples:
        axes, kept = _assumption_axes(tried, set(names))
        if not axes:
            raise SweepError(
                f"{experiment.name} has no assumption that can be varied"
                + "".join(f"\n  {one.key}: {one.why}" for one in kept)
            )
        drawn = {axis.key: axis.draw(samples, seed=seed) for axis in axes}
        sampled = [{key: values[n] for key, values in drawn.items()} for n in range(samples)]
    count = len(sampled) * math.prod(len(values) for _, values in grid)
    if count > MOST_POINTS:
        raise SweepError(f"these are {count:,} points; a sweep has {MOST_POINTS:,} at most")
    points = []
    for chosen in itertools.product(*(values for _, values in grid)):
        fixed = dict(zip(names, chosen, strict=True))
        points += [_possible(tried, fixed, sample) for sample in sampled]
    keys = dict.fromkeys([*names, *(key for sample in sampled for key in sample)])
    return Design(points=tuple(points), keys=tuple(keys), kept=tuple(kept))


def _possible(tried: _Tried, fixed: Point, sample: Point) -> Point:
    """Return the point without the sampled values that the profiles' rules refuse together."""
    left = dict(sample)
    while left:
        error = tried.refusal({**left, **fixed})
        if not isinstance(error, ProfileError):
            break
        refused = {f"{p.file.removesuffix('.toml')}.{p.key}" for p in error.problems}
        if not refused & left.keys():
            break
        left = {key: text for key, text in left.items() if key not in refused}
    return {**left, **fixed}


# -- what the user gives ---------------------------------------------------------------------------


def _grid_axis(tried: _Tried, text: str) -> tuple[str, tuple[str, ...]]:
    key, equals, given = (part.strip() for part in text.partition("="))
    if not equals or not key or not given:
        raise SweepError(f"--set {text!r} is not KEY=V1,V2,... or KEY=LOW..HIGH:N")
    if tried.number(key) is None and key not in {k.name for k in tried.experiment.knobs}:
        Context(tried.experiment, quick=tried.quick, overrides={key: given})  # has the nearest keys
        raise SweepError(f"--set {key}: it is no number or knob that can be swept")
    values = _spaced(tried, key, given) if ".." in given else _listed(key, given)
    for value in values:
        error = tried.refusal({key: value})
        if error is not None:
            raise SweepError(f"--set {key}: {value!r} is not possible: {error}")
    return key, values


def _listed(key: str, given: str) -> tuple[str, ...]:
    values = [value.strip() for value in given.split(",")]
    if not all(values):
        raise SweepError(f"--set {key}={given}: there is an empty value between the commas")
    if len(set(values)) < len(values):
        raise SweepError(f"--set {key}={given}: a value is given twice")
    return tuple(values)


def _spaced(tried: _Tried, key: str, given: str) -> tuple[str, ...]:
    match = _RANGE.fullmatch(given)
    ends = [_NUMBER.fullmatch(part) for part in match.groups()[:2]] if match else [None]
    if match is None or not all(ends):
        raise SweepError(
            f"--set {key}={given}: a range is LOW..HIGH:N, such as 50..200 Gb/s:4 for four values"
        )
    count = int(match[3])
    (low, low_unit), (high, high_unit) = ((float(e[1]), e[2]) for e in ends if e is not None)
    unit = high_unit or low_unit
    if low_unit not in ("", unit):
        raise SweepError(f"--set {key}={given}: both ends need the same unit")
    if count < 2 or not low < high:
        raise SweepError(f"--set {key}={given}: a range goes up and has 2 values or more")
    if count > MOST_POINTS:
        raise SweepError(
            f"--set {key}={given}: these are {count:,} points; a sweep has {MOST_POINTS:,} at most"
        )
    axis = _in_steps(tried, key, low, high, unit)
    return tuple(dict.fromkeys(axis.text(step / (count - 1)) for step in range(count)))


def _in_steps(tried: _Tried, key: str, low: float, high: float, unit: str) -> Range:
    found = tried.number(key)
    if found is not None and found[2].dimension is Dimension.SIZE and unit in UNITS:
        factor = float(UNITS[unit].factor)
        return _of_pages(key, low * factor, high * factor, PAGE_BYTES)
    return Range(key=key, low=low, high=high, unit=unit, step=1 if tried.whole(key) else 0)


# -- what no source gives --------------------------------------------------------------------------


def _assumption_axes(
    tried: _Tried, without: Iterable[str]
) -> tuple[list[Range | Choice], list[Kept]]:
    axes: list[Range | Choice] = []
    kept: list[Kept] = []
    for assumption in tried.experiment.assumptions(quick=tried.quick):
        if assumption.key not in without:
            axis = _axis_of(tried, assumption)
            if isinstance(axis, Kept):
                kept.append(axis)
            else:
                axes.append(axis)
    return axes, kept


def _axis_of(tried: _Tried, assumption: Assumption) -> Range | Choice | Kept:
    key = assumption.key
    if assumption.choices:
        if len(assumption.choices) < 2:
            return Kept(key=key, why="there is one possible value")
        return Choice(key=key, choices=assumption.choices)
    found = tried.number(key)
    if found is None:
        low, high = float(assumption.low), float(assumption.high)
        if not low < high:
            return Kept(key=key, why=f"30 % up or down is still {assumption.value}")
        return Range(key=key, low=low, high=high, step=1 if tried.whole(key) else 0)
    return _axis_of_number(tried, assumption, *found)


def _axis_of_number(
    tried: _Tried, assumption: Assumption, profile: Profile, member: SchemaField, rule: Number
) -> Range | Choice | Kept:
    key = assumption.key
    names = {one.name for one in schema_of(type(profile))}
    for end in ("_low", "_high"):
        if member.name.endswith(end) and member.name.removesuffix(end) in names:
            return Kept(key=key, why="it is the end of a stated range, not a number of the run")
    if rule.dimension is Dimension.FLAG:
        return Choice(key=key, choices=("on", "off"))
    if not getattr(profile, member.name):
        return Kept(key=key, why="30 % of zero is zero")
    grains = {one.rule.grain for one in schema_of(type(profile)) if isinstance(one.rule, Number)}
    if member.name not in grains:
        axis = _range_of_number(assumption, profile, rule)
        if not axis.low < axis.high and rule.dimension is not Dimension.SIZE:
            return Kept(key=key, why=f"30 % up or down is still {assumption.value}")
        tries = [axis.text(place) for place in (0.0, 0.5, 1.0)] if axis.low < axis.high else []
        if tries and not any(tried.refusal({key: text}) for text in tries):
            return axis
    value, unit = parse_quantity(assumption.value, rule.dimension)
    texts = [f"{value * by:.6g} {unit}" for by in (0.5, 1, 2)]
    possible = tuple(text for text in texts if tried.refusal({key: text}) is None)
    if len(possible) < 2:
        return Kept(key=key, why="the profile's rules leave no other value possible")
    return Choice(key=key, choices=possible)


def _range_of_number(assumption: Assumption, profile: Profile, rule: Number) -> Range:
    key, dimension = assumption.key, rule.dimension
    low, unit = parse_quantity(assumption.low, dimension)
    high, _ = parse_quantity(assumption.high, dimension)
    if dimension is Dimension.SIZE:
        factor = float(UNITS[unit].factor)
        grain = getattr(profile, rule.grain) if rule.grain else PAGE_BYTES
        return _of_pages(key, low * factor, high * factor, 2 * grain)
    if dimension is Dimension.COUNT:
        return Range(key=key, low=float(low), high=float(high), step=1)
    if rule.at_most is not None:
        high = min(high, rule.at_most / float(UNITS[unit].factor))
    shown = "" if dimension is Dimension.RATIO else unit
    return Range(key=key, low=float(low), high=float(high), unit=shown)


def _of_pages(key: str, low_bytes: float, high_bytes: float, grain_bytes: int) -> Range:
    """Return sizes in whole grains; in bytes where a grain is no whole KiB."""
    unit, size = ("KiB", 1024) if grain_bytes % 1024 == 0 else ("B", 1)
    step = grain_bytes // size
    low = math.ceil(low_bytes / size / step) * step
    high = math.floor(high_bytes / size / step) * step
    return Range(key=key, low=low, high=high, unit=unit, step=step)


def as_number(text: str) -> float | None:
    """Return a value's number in base units, for ranking; None for what is a choice."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    if not match[2]:
        return float(match[1])
    if match[2] not in UNITS:
        return None
    try:
        return float(to_base(float(match[1]), match[2], UNITS[match[2]].dimension))
    except UnitError:
        return float(match[1]) * float(UNITS[match[2]].factor)
