"""What an experiment is: a set-up in knobs and profiles, claims to judge, and a function that runs.

Every number of a set-up is a ``Knob`` with a unit and a source, or a field of a named device
profile. What no source gives is marked as an assumption, in either place, so that the list of
assumptions in a report, and the grid that a sweep draws from, are collected and never typed in.

A ``Context`` is one point of that grid: the knobs and profile numbers with the user's overrides,
the seed, and whether it is the quick form. It refuses keys that do not exist, with the nearest
names. Experiments return ``Findings``: rows, plots as data, judged claims and checks.

Units: as each knob says; sizes in bytes and bandwidth in bytes/s once read from profiles.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from cxlbench.devices.profile import Profile, load_profile
from cxlbench.devices.profile_loader import load_as
from cxlbench.devices.profile_schema import Number, ProfileError, Quantity, schema_of
from cxlbench.devices.units import format_number
from cxlbench.harness.claims import JudgedClaim, PaperClaim

P = TypeVar("P", bound=Profile)

Scalar = bool | int | float | str
Row = Mapping[str, Scalar | None]
"""One line of results: names with units (``ttft_mean_s``), one value each."""

ASSUMPTION_SPREAD = 0.3
"""How far a sweep moves a number that no source gives, up and down."""


RANGE_ENDS = ("_low", "_high")
"""Fields that are the ends of another field's range: nothing reads them, nothing is swept."""

BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
"""Sizes in these are powers of two, or multiples of one; what lies between is no size to sweep."""

MOST_SHOWN = 12
"""Names that an error lists when none is near what was asked."""


class ExperimentError(ValueError):
    """An experiment, a key of one, or a value for it that cannot be."""


class InputMissingError(ExperimentError):
    """A file that an experiment reads, such as a public trace, is not on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One number or choice of a set-up.

    Attributes:
        name: such as ``workload.sessions``.
        value: at full size.
        quick: in the quick form, where that differs.
        unit: empty for counts and choices.
        source: where the value stands, or why it is this one.
        assumption: whether no source gives it; then sweeps vary it.
        low: least value that a sweep tries; None is 30 % below ``value``.
        high: greatest one; None is 30 % above.
        choices: all possible values of a choice.
    """

    name: str
    value: Scalar
    source: str
    quick: Scalar | None = None
    unit: str = ""
    assumption: bool = False
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()

    def at(self, *, quick: bool) -> Scalar:
        """Return the value of the full or of the quick form."""
        return self.quick if quick and self.quick is not None else self.value

    def parse(self, text: str) -> Scalar:
        """Return ``text`` as a value of this knob; raise ``ExperimentError`` if it is none."""
        if self.choices and text not in self.choices:
            raise ExperimentError(f"{self.name}={text!r}: possible are {', '.join(self.choices)}")
        if isinstance(self.value, str):
            return text
        if isinstance(self.value, bool):
            if text.lower() not in ("true", "false"):
                raise ExperimentError(f"{self.name}={text!r}: must be true or false")
            return text.lower() == "true"
        whole = isinstance(self.value, int)
        try:
            number = int(text) if whole else float(text)
        except ValueError:
            kind = "a whole number" if whole else "a number"
            raise ExperimentError(f"{self.name}={text!r}: must be {kind}") from None
        if not 0 <= number < float("inf"):
            raise ExperimentError(f"{self.name}={text}: must be finite and not negative")
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A number or choice that no source gives, as reports list it and sweeps vary it."""

    key: str
    value: str
    why: str
    low: str
    high: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that must be true of every run: a law, not a claim of a paper."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure as data. ``kind`` is ``line``, ``bar`` (x are names) or ``cdf`` (x are samples)."""

    name: str
    title: str
    x_label: str
    y_label: str
    kind: str
    series: Mapping[str, tuple[Sequence[float | str], Sequence[float]]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a run of an experiment came to."""

    rows: Sequence[Row]
    claims: Sequence[JudgedClaim] = ()
    plots: Sequence[Plot] = ()
    checks: Sequence[Check] = ()
    notes: Sequence[str] = ()
    partial: bool = False


def about_of(doc: str | None) -> str:
    """Return what a module's docstring says of the set-up: without its title and what it omits."""
    return (doc or "").partition("\n\n")[2].partition("\n\nLeft out")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One figure or table: what it sets up, what it must answer, how it runs."""

    name: str
    title: str
    source: str
    """Of the figure, such as ``HyMCache fig. 10``."""
    about: str
    """The set-up in a few sentences, and what is left out."""
    knobs: tuple[Knob, ...]
    profiles: tuple[str, ...]
    """Names of all built-in profiles that the run reads."""
    claims: tuple[PaperClaim, ...]
    run: Callable[[Context], Findings]
    compares_tiers: bool = False
    """Whether the run takes a user's tiers (``Context.tiers``) beside its own."""

    def __post_init__(self) -> None:
        for what, names in (
            ("knobs", [knob.name for knob in self.knobs]),
            ("claims", [claim.name for claim in self.claims]),
        ):
            for name in dict.fromkeys(names):
                if names.count(name) > 1:
                    raise ExperimentError(f"{self.name}: {names.count(name)} {what} are {name!r}")

    def knob(self, name: str) -> Knob:
        """Return a knob by name; raise ``ExperimentError`` with the nearest ones."""
        for knob in self.knobs:
            if knob.name == name:
                return knob
        raise _unknown(self.name, "knob", name, [knob.name for knob in self.knobs])

    def keys(self) -> list[str]:
        """Return every key that an override or a sweep may name."""
        keys = [knob.name for knob in self.knobs]
        for name in self.profiles:
            keys += [f"{name}.{key}" for key, _ in _numbers(load_profile(name))]
        return keys

    def assumptions(self, *, quick: bool = False) -> list[Assumption]:
        """Return all that no source gives, knobs first, in a fixed order."""
        found = [_of_knob(knob, quick=quick) for knob in self.knobs if knob.assumption]
        for name in self.profiles:
            for key, quantity in _numbers(load_profile(name)):
                if quantity.assumption and not key.endswith(RANGE_ENDS):
                    found.append(_of_number(name, key, quantity))
        return found


@dataclass(slots=True)
class Context:
    """One point at which an experiment runs.

    ``overrides`` are texts by key: a knob's name, or ``PROFILE.FIELD`` with a unit
    (``nic-100g.bandwidth=200 Gb/s``). Raises ``ExperimentError`` for unknown keys and impossible
    values, and ``ProfileError`` for impossible profile numbers, on construction.
    """

    experiment: Experiment
    quick: bool = False
    seed: int = 0
    overrides: Mapping[str, str] = field(default_factory=dict)
    tiers: tuple[str, ...] = ()
    """More tiers to compare: names of the catalog, or a user's ``module:object``."""
    progress: Callable[[str, int, int], None] = lambda *_: None
    """Called with what is being done, how much of it is done, and how much there is."""
    memo: MutableMapping[Hashable, object] = field(default_factory=dict)
    """Runs that several experiments of one session share, by all that they depend on."""
    stopping: Callable[[], bool] = lambda: False
    """Whether the user asked to stop: what is there by then is returned, marked partial."""

    def __post_init__(self) -> None:
        if self.tiers and not self.experiment.compares_tiers:
            raise ExperimentError(
                f"{self.experiment.name} compares no tiers; those that do say so in "
                "`cxlbench list NAME`"
            )
        if self.tiers:
            from cxlbench.harness.tiers.catalog import tier  # the whole rig comes with it

            for spec in self.tiers:
                tier(spec)
        knobs = {knob.name for knob in self.experiment.knobs}
        keys = set(self.experiment.keys())
        for key, text in self.overrides.items():
            if key not in keys:
                raise _unknown(self.experiment.name, "key", key, self.experiment.keys())
            if key in knobs:
                self.experiment.knob(key).parse(text)
        for name in self.experiment.profiles:
            load_profile(name, overrides=self._of_profile(name))

    def _of_profile(self, name: str) -> dict[str, str]:
        prefix = f"{name}."
        return {
            key.removeprefix(prefix): text
            for key, text in self.overrides.items()
            if key.startswith(prefix)
        }

    def profile(self, kind: type[P], name: str) -> P:
        """Return a declared profile with the overrides of this point.

        Overrides of ``pm1743-class.*`` also reach profiles that refer to that one. A user's tiers
        may read others, as they are.
        """
        if name not in self.experiment.profiles and not self.tiers:
            raise ExperimentError(
                f"{self.experiment.name} reads profile {name!r}, which it does not declare"
            )
        overrides = self._of_profile(name)
        for key in schema_of(kind):
            if key.refers_to is None:
                continue
            inner = getattr(load_as(kind, name, overrides=overrides), key.name).name
            for field_name, text in self._of_profile(inner).items():
                overrides.setdefault(f"{key.name}.{field_name}", text)
        return load_as(kind, name, overrides=overrides)

    def knob(self, name: str) -> Scalar:
        """Return a knob's value at this point."""
        knob = self.experiment.knob(name)
        text = self.overrides.get(name)
        return knob.at(quick=self.quick) if text is None else knob.parse(text)

    def number(self, name: str) -> float:
        """Return a knob that is a number."""
        return float(self.knob(name))

    def count(self, name: str) -> int:
        """Return a knob that is a whole number."""
        return int(self.knob(name))

    def choice(self, name: str) -> str:
        """Return a knob that is a choice."""
        return str(self.knob(name))

    def point(self) -> tuple[object, ...]:
        """Return all that a run at this point depends on, beside its set-up, as a memo's key."""
        return (self.quick, self.seed, self.tiers, tuple(sorted(self.overrides.items())))

    def setup(self) -> dict[str, Scalar]:
        """Return every knob's value, and a user's tiers, for the record."""
        setup = {knob.name: self.knob(knob.name) for knob in self.experiment.knobs}
        return setup | ({"tiers": " ".join(self.tiers)} if self.tiers else {})


def _numbers(profile: Profile) -> Iterator[tuple[str, Quantity]]:
    for key in schema_of(type(profile)):
        if isinstance(key.rule, Number) and key.name in profile.provenance:
            yield key.name, profile.provenance[key.name]


def _of_knob(knob: Knob, *, quick: bool) -> Assumption:
    value = knob.at(quick=quick)
    if knob.choices or isinstance(value, (str, bool)):
        choices = knob.choices or (("false", "true") if isinstance(value, bool) else (str(value),))
        return Assumption(
            key=knob.name, value=str(value), why=knob.source, low="", high="", choices=choices
        )
    low = knob.low if knob.low is not None else value * (1 - ASSUMPTION_SPREAD)
    high = knob.high if knob.high is not None else value * (1 + ASSUMPTION_SPREAD)
    if isinstance(value, int):
        low, high = max(1, round(low)), max(1, round(high))
    unit = f" {knob.unit}" if knob.unit else ""
    return Assumption(
        key=knob.name,
        value=f"{format_number(value)}{unit}",
        why=knob.source,
        low=f"{low:.6g}",
        high=f"{high:.6g}",
    )


def _of_number(name: str, key: str, quantity: Quantity) -> Assumption:
    """Return a profile's number with its range: 30 % down and up.

    Sizes that must be whole grains or powers of two do not exist there; they are halved and doubled
    instead, as far as the profile's rules allow. A flag is tried both ways.
    """
    unit = "" if quantity.unit in ("count", "ratio", "flag") else f" {quantity.unit}"

    def moved(factor: float) -> str:
        value = quantity.value * factor
        if quantity.unit == "ratio":
            value = min(value, 1.0)
        whole = isinstance(quantity.value, int) and quantity.unit == "count"
        return f"{max(1, round(value)) if whole else value:.6g}{unit}"

    def possible(text: str) -> bool:
        try:
            load_profile(name, overrides={key: text})
        except ProfileError:
            return False
        return True

    given = moved(1.0)
    low, high = moved(1 - ASSUMPTION_SPREAD), moved(1 + ASSUMPTION_SPREAD)
    choices: tuple[str, ...] = ()
    if quantity.unit == "flag":
        given, low, high = str(bool(quantity.value)).lower(), "", ""
        choices = tuple(text for text in ("true", "false") if possible(text))
    elif not quantity.value:
        low = high = given = f"0{unit}"  # no part of nothing can be taken
    elif not (possible(low) and possible(high)) or quantity.unit in BINARY_UNITS:
        choices = tuple(text for text in (moved(0.5), given, moved(2.0)) if possible(text))
        low = high = ""
    return Assumption(
        key=f"{name}.{key}", value=given, why=quantity.source, low=low, high=high, choices=choices
    )


def _unknown(owner: str, what: str, name: str, possible: Sequence[str]) -> ExperimentError:
    close = difflib.get_close_matches(name, possible, n=3, cutoff=0.5)
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    else:
        shown = ", ".join(possible[:MOST_SHOWN])
        hint = f"there are {shown}" + (" and others" if len(possible) > MOST_SHOWN else "")
    return ExperimentError(f"{owner} has no {what} {name!r}; {hint}")


__all__ = [
    "Assumption",
    "Check",
    "Context",
    "Experiment",
    "ExperimentError",
    "Findings",
    "Knob",
    "Plot",
    "ProfileError",
    "Row",
    "Scalar",
    "about_of",
]
