"""Units of device profiles: what a written quantity means in base units.

A profile says ``13.0`` and ``"GB/s"``; inside, everything is in base units: bytes, bytes per
second, seconds, 1 per second, counts, ratios, FLOP per second, US dollars. Decimal and binary
prefixes are kept apart (``GB`` is 10^9 bytes, ``GiB`` is 2^30), and ``Gb/s`` is what network cards
are sold by: 10^9 / 8 bytes per second. Conversion is exact (fractions), and rounded once at the
end.

Left out: compound units and unit arithmetic; a profile field has one dimension, and that is all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import Enum
from fractions import Fraction
from types import MappingProxyType

PAGE_BYTES = 4096
"""The unit of device memory management: nothing that is moved or kept is smaller."""


class UnitError(ValueError):
    """A quantity cannot be read, or is of another dimension than the one asked for."""


class Dimension(Enum):
    """What a number measures; the value is how messages call it."""

    SIZE = "a size"
    BANDWIDTH = "a bandwidth"
    TIME = "a time"
    RATE = "a rate"
    COUNT = "a count"
    RATIO = "a ratio"
    COMPUTE = "a compute rate"
    COST = "a cost"
    FLAG = "a flag"

    @property
    def is_whole(self) -> bool:
        """Whether base values are integers (bytes and counts)."""
        return self in (Dimension.SIZE, Dimension.COUNT)


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit: its dimension, and how many base units one of it is."""

    dimension: Dimension
    factor: Fraction


def _units() -> dict[str, Unit]:
    table: dict[str, Unit] = {}

    def add(dimension: Dimension, **factors: int | Fraction) -> None:
        table.update({name: Unit(dimension, Fraction(by)) for name, by in factors.items()})

    sizes = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "TiB": 2**40}
    sizes |= {"GB": 10**9, "MB": 10**6, "KB": 10**3, "TB": 10**12, "B": 1}
    speeds = {"GB/s": 10**9, "MB/s": 10**6, "GiB/s": 2**30, "MiB/s": 2**20, "KB/s": 10**3}
    add(Dimension.SIZE, **sizes)
    add(Dimension.BANDWIDTH, **speeds, **{"B/s": Fraction(1), "Gb/s": Fraction(10**9, 8)})
    times = {"ns": Fraction(1, 10**9), "us": Fraction(1, 10**6), "ms": Fraction(1, 10**3)}
    add(Dimension.TIME, **times, s=1)
    add(Dimension.RATE, **{"IOPS": 1, "K IOPS": 10**3, "M IOPS": 10**6, "1/s": 1})
    add(Dimension.COUNT, count=1)
    add(Dimension.RATIO, ratio=1)
    add(Dimension.COMPUTE, **{"TFLOP/s": 10**12, "FLOP/s": 1})
    add(Dimension.COST, USD=1)
    add(Dimension.FLAG, flag=1)
    return table


UNITS: Mapping[str, Unit] = MappingProxyType(_units())
"""Every unit that a profile may use, by its spelling."""

Number = int | float | Decimal
_WRITTEN = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*")
_FLAG_WORDS = {"true": True, "yes": True, "on": True, "1": True}
_FLAG_WORDS |= {"false": False, "no": False, "off": False, "0": False}


def unit_examples(dimension: Dimension) -> str:
    """Return up to three units of ``dimension`` for a message: ``"GB/s, MB/s, GiB/s"``."""
    return ", ".join([name for name, unit in UNITS.items() if unit.dimension is dimension][:3])


def to_base(value: Number | bool, unit: str, dimension: Dimension) -> int | float | bool:
    """Convert ``value`` of ``unit`` to base units of ``dimension``.

    Sizes and counts come back as ``int``, flags as ``bool``, everything else as ``float``. Raises
    ``UnitError`` for an unknown unit, another dimension, a value that is no finite number, and a
    size or count that is not whole.
    """
    known = UNITS.get(unit)
    expected = f"expected {dimension.value} such as {unit_examples(dimension)}"
    if known is None:
        raise UnitError(f"is in the unknown unit {unit!r}, {expected}")
    if known.dimension is not dimension:
        raise UnitError(f"is in {unit} ({known.dimension.value}), {expected}")
    if dimension is Dimension.FLAG:
        if not isinstance(value, bool):
            raise UnitError(f"is {value}, expected true or false")
        return value
    if isinstance(value, bool) or not (isinstance(value, int) or math.isfinite(value)):
        raise UnitError(f"is {str(value).lower()}, expected a finite number")
    written = value if isinstance(value, int) else Decimal(str(value))
    exact = Fraction(written) * known.factor
    if not dimension.is_whole:
        try:
            return float(exact)
        except OverflowError:
            raise UnitError(f"is {value} {unit}, too large for a number") from None
    if exact.denominator != 1:
        raise UnitError(f"is {value} {unit}, expected a whole number of {_whole_name(dimension)}")
    return exact.numerator


def parse_quantity(text: str, dimension: Dimension) -> tuple[int | float | bool, str]:
    """Read ``"32 GiB"`` as value and unit; raises ``UnitError`` when there is no such thing.

    A count, a ratio and a flag may stand without a unit: ``"4"``, ``"0.25"``, ``"off"``. The unit
    is not checked against ``dimension``: ``to_base`` does that.
    """
    if dimension is Dimension.FLAG:
        word = text.strip().lower().removesuffix(" flag")
        if word not in _FLAG_WORDS:
            raise UnitError(f"is {text!r}, expected on or off")
        return _FLAG_WORDS[word], "flag"
    match = _WRITTEN.fullmatch(text)
    example = unit_examples(dimension).split(", ")[0]
    if match is None:
        raise UnitError(f"is {text!r}, expected a number and a unit such as '4 {example}'")
    digits, unit = match.groups()
    if not unit:
        if dimension not in (Dimension.COUNT, Dimension.RATIO):
            raise UnitError(f"is {text!r}, without a unit: expected such as '{digits} {example}'")
        unit = example
    return plain_number(_decimal(digits)), unit


def plain_number(value: Number) -> int | float:
    """Return ``value`` as the ``int`` or ``float`` that reads the same."""
    if isinstance(value, Decimal):
        whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if whole and abs(value) < 2**53 else float(value)
    return value


def format_number(value: float | bool) -> str:
    """Return ``value`` as a person would write it: ``13`` for 13.0, ``on`` for true."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return str(int(value))
    return str(value)


def format_base(value: float | bool, dimension: Dimension) -> str:
    """Return a base value in the unit that suits its magnitude, at four digits.

    Sizes print as KiB, MiB, GiB or TiB, bandwidth as MB/s or GB/s.
    """
    ladders: dict[Dimension, tuple[str, ...]] = {
        Dimension.SIZE: ("B", "KiB", "MiB", "GiB", "TiB"),
        Dimension.BANDWIDTH: ("B/s", "KB/s", "MB/s", "GB/s"),
        Dimension.TIME: ("ns", "us", "ms", "s"),
        Dimension.RATE: ("IOPS", "K IOPS", "M IOPS"),
        Dimension.COMPUTE: ("FLOP/s", "TFLOP/s"),
        Dimension.COST: ("USD",),
    }
    if dimension not in ladders:
        return format_number(value)
    ladder = ladders[dimension]
    fitting = [name for name in ladder if value >= UNITS[name].factor] or [ladder[0]]
    return f"{float(Fraction(value) / UNITS[fitting[-1]].factor):.4g} {fitting[-1]}"


def _decimal(digits: str) -> Decimal:
    try:
        return Decimal(digits)
    except InvalidOperation:
        raise UnitError(f"is {digits!r}, expected a number") from None


def _whole_name(dimension: Dimension) -> str:
    return "bytes" if dimension is Dimension.SIZE else "things"
