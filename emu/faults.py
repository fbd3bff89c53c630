"""Fault plans: what goes wrong, where and when, drawn from a seed.

A plan is a list of rules. Each names an *injection point* and what happens there:

=================  ==============================================================================
point              faults that the system above must survive, and why they are real
=================  ==============================================================================
``ssd.read``       ``error`` (media error), ``delay`` (garbage collection), ``corrupt`` (bit rot
                   that the drive did not notice; the reader's checksum must)
``ssd.write``      ``error`` (drive full or failing), ``delay``, ``short`` (fewer bytes written
                   than asked, reported as done: must be noticed by comparing)
``fabric.read``    ``down`` (port or cable), ``delay`` (congestion), ``corrupt``
``fabric.write``   ``down``, ``delay``
``control``        ``down`` (a call to Master or a node fails), ``delay``
=================  ==============================================================================

The same plan, asked in the same order, gives the same faults: each rule has its own generator,
seeded by the plan's seed and the rule's place. ``where`` restricts a rule to names that contain it.
"""

from __future__ import annotations

import math
import random
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from cxlbench.emu.memory import TORN, Buffer

FaultKind = Literal["error", "delay", "corrupt", "short", "down"]
POINTS: dict[str, tuple[str, ...]] = {
    "ssd.read": ("error", "delay", "corrupt"),
    "ssd.write": ("error", "delay", "short"),
    "fabric.read": ("down", "delay", "corrupt"),
    "fabric.write": ("down", "delay"),
    "control": ("down", "delay"),
}


_TYPES: dict[str, tuple[type, ...]] = {
    "point": (str,),
    "kind": (str,),
    "probability": (int, float),
    "skip": (int,),
    "limit": (int, type(None)),
    "delay_s": (int, float),
    "where": (str,),
}
_WORDS = {str: "a text", int: "a whole number", float: "a number", type(None): "nothing"}


class FaultPlanError(ValueError):
    """A fault plan that says something impossible; the message names the rule and the key."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault that happens now."""

    kind: FaultKind
    delay_s: float = 0.0
    salt: int = 0

    def corrupt(self, buffer: Buffer) -> None:
        """Flip one bit of ``buffer``, chosen by the salt."""
        if isinstance(buffer, np.ndarray):
            if len(buffer):
                buffer[self.salt % len(buffer)] ^= 1 << (self.salt % 8)
        else:
            buffer.tag = TORN


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRule:
    """``kind`` at ``point``, with ``probability``, after ``skip`` visits, ``limit`` times."""

    point: str
    kind: FaultKind
    probability: float = 1.0
    skip: int = 0
    limit: int | None = None
    delay_s: float = 0.0
    where: str = ""

    def __post_init__(self) -> None:
        for name, kinds in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                wanted = " or ".join(_WORDS[kind] for kind in kinds)
                raise FaultPlanError(f"{name} must be {wanted}, got {value!r}")
        if self.point not in POINTS:
            raise FaultPlanError(f"unknown point {self.point!r}; points are {', '.join(POINTS)}")
        if self.kind not in POINTS[self.point]:
            raise FaultPlanError(
                f"{self.point} cannot have {self.kind!r}; it can have "
                f"{', '.join(POINTS[self.point])}"
            )
        if not 0 <= self.probability <= 1:
            raise FaultPlanError(f"probability must be within 0..1, got {self.probability}")
        if self.skip < 0 or (self.limit is not None and self.limit < 0):
            raise FaultPlanError(
                f"skip and limit must not be negative, got {self.skip}, {self.limit}"
            )
        if self.kind == "delay" and self.delay_s == 0:
            raise FaultPlanError("delay needs a delay_s above zero")
        if not 0 <= self.delay_s < math.inf:
            raise FaultPlanError(f"delay_s must be zero or more and finite, got {self.delay_s}")


@dataclass(slots=True)
class _Live:
    rule: FaultRule
    draw: random.Random
    visits: int = 0
    hits: int = 0


@dataclass(slots=True)
class FaultPlan:
    """Rules and a seed. ``injected`` counts what happened, by ``point kind``."""

    rules: tuple[FaultRule, ...] = ()
    seed: int = 0
    injected: dict[str, int] = field(default_factory=dict)
    _live: dict[str, list[_Live]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for place, rule in enumerate(self.rules):
            live = _Live(rule, random.Random(f"{self.seed}-{place}-{rule.point}"))
            self._live.setdefault(rule.point, []).append(live)

    @classmethod
    def none(cls) -> Self:
        """Return a plan in which nothing goes wrong."""
        return cls()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a plan from TOML: ``seed = 1`` and ``[[fault]]`` tables with a rule's fields."""
        try:
            data = tomllib.loads(path.read_text())
        except OSError as error:
            raise FaultPlanError(f"{path}: {error.strerror}") from error
        except RecursionError as error:
            raise FaultPlanError(f"{path}: nested too deeply") from error
        except ValueError as error:  # not TOML, not UTF-8, or a number of thousands of digits
            raise FaultPlanError(f"{path}: not valid TOML: {error}") from error
        return cls.parse(data, source=str(path))

    @classmethod
    def parse(cls, data: dict[str, Any], *, source: str = "fault plan") -> Self:
        """Build a plan from parsed TOML, checking every key."""
        unknown = set(data) - {"seed", "fault"}
        if unknown:
            raise FaultPlanError(f"{source}: unknown keys {sorted(unknown)}; known: seed, fault")
        seed, tables = data.get("seed", 0), data.get("fault", [])
        if type(seed) is not int or not isinstance(tables, list):
            raise FaultPlanError(f"{source}: seed must be a whole number, fault a list of tables")
        if not all(isinstance(table, dict) for table in tables):
            raise FaultPlanError(f"{source}: each fault must be a table with a rule's fields")
        rules = []
        for number, table in enumerate(tables, 1):
            unknown = set(table) - set(FaultRule.__dataclass_fields__)
            if unknown:
                known = ", ".join(FaultRule.__dataclass_fields__)
                raise FaultPlanError(
                    f"{source}: fault {number}: unknown keys {sorted(unknown)}; known: {known}"
                )
            missing = {"point", "kind"} - set(table)
            if missing:
                raise FaultPlanError(f"{source}: fault {number}: missing {sorted(missing)}")
            if table["kind"] not in get_args(FaultKind):
                raise FaultPlanError(
                    f"{source}: fault {number}: unknown kind {table['kind']!r}; kinds are "
                    f"{', '.join(get_args(FaultKind))}"
                )
            try:
                rules.append(FaultRule(**table))
            except FaultPlanError as error:
                raise FaultPlanError(f"{source}: fault {number}: {error}") from error
        return cls(tuple(rules), seed)

    def draw(self, point: str, name: str = "") -> Fault | None:
        """Return the fault that happens at this visit of ``point``, if any."""
        for live in self._live.get(point, ()):
            rule = live.rule
            if rule.where and rule.where not in name:
                continue
            live.visits += 1
            if live.visits <= rule.skip or (rule.limit is not None and live.hits >= rule.limit):
                continue
            if rule.probability < 1 and live.draw.random() >= rule.probability:
                continue
            live.hits += 1
            label = f"{point} {rule.kind}"
            self.injected[label] = self.injected.get(label, 0) + 1
            return Fault(rule.kind, rule.delay_s, live.draw.getrandbits(32))
        return None
