"""What a device profile is made of: fields, their dimensions, their provenance, their scaling.

A kind of device is a frozen dataclass below ``Profile`` (``profile_kinds.py``). Its fields carry
all that the loader, the scaler and the printer must know, as ``Annotated`` metadata: a ``Number``
with its dimension and bounds, a ``Text``, or a ``Reference`` to a profile of another kind. Values
are in base units (bytes, bytes/s, s, 1/s, count, ratio); how they were written, by which statistic
and from which source is kept beside them in ``provenance``.

Left out: distributions. A profile holds one number per quantity, and says which statistic it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, ClassVar, get_type_hints

from cxlbench.devices.units import Dimension


class Scaling(Enum):
    """What ``scale = S`` does to a field (the rule of scale: bytes and bytes/s are divided)."""

    NONE = "not scaled"
    """Latencies, counts, rates of operations, lines, pages, ratios, costs."""
    BANDWIDTH = "divided"
    """Bytes per second."""
    CAPACITY = "divided, whole grains, refused below one"
    """Bytes that hold data; rounded down, so a scaled device never holds more than its share."""
    WINDOW = "divided, whole pages, never below one"
    """Frames, chunks, batches and buffers."""
    RESERVE = "divided, rounded up to whole grains"
    """Bytes that something must fit into."""


@dataclass(frozen=True, slots=True)
class Number:
    """A numeric field: dimension, scaling, and which values are possible.

    ``zero`` allows zero; negative values never are. ``grain`` names the field of the same profile
    that this one must be a multiple of.
    """

    dimension: Dimension
    scaling: Scaling = Scaling.NONE
    zero: bool = False
    at_most: float | None = None
    grain: str | None = None


@dataclass(frozen=True, slots=True)
class Text:
    """A field that is a name, such as a replacement policy."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A field that names another profile; the type of the field says of which kind."""


_RULES = (Number, Text, Reference)

Capacity = Annotated[int, Number(Dimension.SIZE, Scaling.CAPACITY)]
OptionalCapacity = Annotated[int | None, Number(Dimension.SIZE, Scaling.CAPACITY)]
Window = Annotated[int, Number(Dimension.SIZE, Scaling.WINDOW)]
FixedSize = Annotated[int, Number(Dimension.SIZE)]
Bandwidth = Annotated[float, Number(Dimension.BANDWIDTH, Scaling.BANDWIDTH)]
Seconds = Annotated[float, Number(Dimension.TIME)]
SecondsOrZero = Annotated[float, Number(Dimension.TIME, zero=True)]
OptionalSeconds = Annotated[float | None, Number(Dimension.TIME)]
PerSecond = Annotated[float, Number(Dimension.RATE)]
Count = Annotated[int, Number(Dimension.COUNT)]
CountOrZero = Annotated[int, Number(Dimension.COUNT, zero=True)]
Share = Annotated[float, Number(Dimension.RATIO, at_most=1.0)]
ShareOrZero = Annotated[float, Number(Dimension.RATIO, zero=True, at_most=1.0)]
OptionalShare = Annotated[float | None, Number(Dimension.RATIO, at_most=1.0)]
FlopPerSecond = Annotated[float, Number(Dimension.COMPUTE)]
OptionalDollars = Annotated[float | None, Number(Dimension.COST)]
Flag = Annotated[bool, Number(Dimension.FLAG, zero=True)]
Name = Annotated[str, Text()]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number as its profile writes it, with where it comes from."""

    value: int | float | bool
    unit: str
    statistic: str
    source: str
    assumption: bool


@dataclass(frozen=True, slots=True, eq=True)
class Provenance(Mapping[str, Quantity]):
    """The quantities of one profile by field name, in the order of the fields; immutable."""

    entries: tuple[tuple[str, Quantity], ...] = ()

    def __getitem__(self, key: str) -> Quantity:
        for name, quantity in self.entries:
            if name == key:
                return quantity
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason to refuse a profile: the file, the key in it, and what is wrong."""

    file: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key}: {self.message}" if self.key else self.message


class ProfileError(ValueError):
    """A profile is refused; ``problems`` lists everything that is wrong with it."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))

    def __reduce__(self) -> tuple[type[ProfileError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


@dataclass(frozen=True, slots=True)
class Check:
    """A rule between fields: ``test`` gets their values and returns what is wrong, or None.

    The first of ``fields`` is the one that the message names. A check is skipped when one of its
    fields is missing, so that the other problems of a file are still found. ``full_size_only`` is
    for rules about what a scaled profile no longer shows, such as a window held up at a page.
    """

    fields: tuple[str, ...]
    test: Callable[..., str | None]
    full_size_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What all kinds have. ``scale`` is the S that the bytes and bytes/s are divided by."""

    kind: ClassVar[str]
    checks: ClassVar[tuple[Check, ...]] = ()

    name: str
    description: str
    provenance: Provenance = field(default=Provenance(), repr=False)
    scale: float = 1


@dataclass(frozen=True, slots=True)
class SchemaField:
    """One key of a kind: its rule, whether it must be given, and the kind that it refers to."""

    name: str
    rule: Number | Text | Reference
    required: bool
    refers_to: type[Profile] | None = None


def schema_of(kind: type[Profile]) -> tuple[SchemaField, ...]:
    """Return the keys that a profile of this kind has, in the order of the dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    keys: list[SchemaField] = []
    for member in dataclasses.fields(kind):
        hint = hints[member.name]
        rules = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, _RULES)]
        if not rules:
            continue
        target = hint.__origin__ if isinstance(rules[0], Reference) else None
        required = member.default is dataclasses.MISSING
        keys.append(SchemaField(member.name, rules[0], required, target))
    return tuple(keys)


def rule_problems(
    kind: type[Profile], values: Mapping[str, Any], *, full_size: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each rule between fields that ``values`` breaks.

    ``values`` are in base units and may be incomplete: rules that need what is missing are skipped.
    """
    for key in schema_of(kind):
        grain = key.rule.grain if isinstance(key.rule, Number) else None
        if grain is None or not (values.get(key.name) and values.get(grain)):
            continue
        size, unit = values[key.name], values[grain]
        if size % unit:
            yield (
                key.name,
                f"is {size} B, not a multiple of {grain} ({unit} B): {size % unit} B are left "
                f"over; use {size - size % unit or unit} B",
            )
    for check in kind.checks:
        given = [values.get(name) for name in check.fields]
        if check.full_size_only and not full_size:
            continue
        if all(value is not None for value in given):
            message = check.test(*given)
            if message is not None:
                yield check.fields[0], message
