"""Reads device profiles from TOML, and refuses by name whatever cannot be right.

A file has ``kind``, ``name`` and ``description``, and one table per number::

    [read_bandwidth]
    value = 13.0
    unit = "GB/s"
    statistic = "vendor peak, sequential"
    source = "where the number stands"
    assumption = true        # only when no source gives it; source then says why this value

Unknown and missing keys, missing provenance, wrong dimensions and impossible values are all
collected, so that one run shows everything that is wrong with a file. A profile may name another
one (``ssd = "pm1743-class"``): first looked for beside the file itself, then among the built-in
ones. Which keys a kind has, and which values are possible, is in ``profile_kinds.py``.

Left out: inheritance between profiles. A variant is a whole file, or an override on load.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from cxlbench.devices.profile_files import find_profile, nearest
from cxlbench.devices.profile_kinds import KINDS
from cxlbench.devices.profile_schema import (
    Number,
    Problem,
    Profile,
    ProfileError,
    Provenance,
    Quantity,
    SchemaField,
    rule_problems,
    schema_of,
)
from cxlbench.devices.units import (
    Dimension,
    UnitError,
    format_base,
    format_number,
    parse_quantity,
    plain_number,
    to_base,
    unit_examples,
)

P = TypeVar("P", bound=Profile)

_HEADER = ("kind", "name", "description")
_QUANTITY_KEYS = ("value", "unit", "statistic", "source")
_MOST = {Dimension.SIZE: 2**60, Dimension.COUNT: 2**20}
"""Beyond these no hardware is, and emulating it would only run out of memory."""


def load_profile(
    name_or_path: str | Path,
    *,
    overrides: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Profile:
    """Load one profile, checked.

    ``name_or_path`` is a name (of ``folder/NAME.toml`` if there is one, else of a built-in profile)
    or the path of a file; what ends in ``.toml`` or holds a separator is a path. A name inside a
    profile is looked for beside that file, then in ``folder``, then among the built-in profiles.
    ``overrides`` replace values by text with a unit, and reach into references by dots:
    ``{"dram_capacity": "32 GiB", "ssd.read_bandwidth": "7 GB/s", "ssd": "my-ssd"}``; their
    provenance says ``override``. Raises ``ProfileError`` with everything that is wrong.
    """
    folders = (folder,) if folder is not None else ()
    where = find_profile(name_or_path, folders=folders, base=Path())
    return _Reading(where, dict(overrides or {}), folders).profile()


def load_as(
    kind: type[P],
    name_or_path: str | Path,
    *,
    overrides: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> P:
    """Load a profile that must be of ``kind``; otherwise as ``load_profile``."""
    profile = load_profile(name_or_path, overrides=overrides, folder=folder)
    return _of_kind(kind, profile, str(name_or_path))


@dataclass(slots=True)
class _Reading:
    """One file on its way to a profile: what was found, and every problem on the way."""

    where: Traversable
    overrides: dict[str, str]
    folders: tuple[Path, ...]
    within: tuple[str, ...] = ()
    """The files that name this one, outermost first."""
    values: dict[str, Any] = field(default_factory=dict)
    quantities: dict[str, Quantity] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def profile(self) -> Profile:
        table = self._table()
        kind = KINDS.get(str(table.get("kind")))
        if kind is None:
            given = table.get("kind")
            said = (
                f"is {given!r}, unknown{nearest(str(given), KINDS)}"
                if given
                else (f"is missing; possible: {', '.join(KINDS)}")
            )
            self._refuse("kind", said)
            raise ProfileError(tuple(self.problems))
        keys = schema_of(kind)
        name, description = self._header(table)
        self._unknown(table, keys)
        for key in keys:
            self._read(key, table)
        for key_name, message in rule_problems(kind, self.values):
            self._refuse(key_name, message)
        if self.problems:
            raise ProfileError(tuple(self.problems))
        ordered = tuple(
            (k.name, self.quantities[k.name]) for k in keys if k.name in self.quantities
        )
        return kind(
            name=name,
            description=description,
            provenance=Provenance(ordered),
            **self.values,
        )

    def _refuse(self, key: str, message: str) -> None:
        self.problems.append(Problem(self.where.name, key, message))

    def _table(self) -> dict[str, object]:
        try:
            text = self.where.read_text(encoding="utf-8")
            return tomllib.loads(text, parse_float=Decimal)
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8 text (byte {error.start})"
        except tomllib.TOMLDecodeError as error:
            reason = f"is not TOML: {error}"
        except ValueError as error:
            reason = f"holds a number that cannot be read: {error}"
        name = self.where.name
        raise ProfileError((Problem(name, "", f"profile file {name!r} {reason}"),))

    def _header(self, table: Mapping[str, object]) -> tuple[str, str]:
        stem = self.where.name.removesuffix(".toml")
        for key in ("name", "description"):
            value = table.get(key)
            if not isinstance(value, str) or not value.strip():
                self._refuse(key, "is missing" if value is None else "must be a non-empty text")
            elif key == "name" and value != stem:
                self._refuse(key, f"is {value!r}, expected the name of the file, {stem!r}")
        return str(table.get("name")), str(table.get("description"))

    def _unknown(self, table: Mapping[str, object], keys: tuple[SchemaField, ...]) -> None:
        names = [key.name for key in keys]
        for given in table:
            if given not in names and given not in _HEADER:
                self._refuse(given, f"is an unknown key{nearest(given, names)}")
        references = [key.name for key in keys if key.refers_to]
        for given in self.overrides:
            head, dot, _ = given.partition(".")
            if given not in names and not (dot and head in references):
                self._refuse(given, f"is an unknown key in overrides{nearest(given, names)}")

    def _read(self, key: SchemaField, table: Mapping[str, object]) -> None:
        override = self.overrides.get(key.name)
        given = table.get(key.name)
        if given is None and override is None:
            if key.required:
                self._refuse(key.name, f"is missing; {_expectation(key)}")
            return
        if isinstance(key.rule, Number):
            self._number(key.name, key.rule, given, override)
            return
        text = given if override is None else override
        if not isinstance(text, str) or not text.strip():
            self._refuse(key.name, f"is {text!r}, expected {_expectation(key)}")
        elif key.refers_to is not None:
            self._reference(key.name, key.refers_to, text)
        else:
            self.values[key.name] = text

    def _number(self, name: str, rule: Number, given: object, override: str | None) -> None:
        quantity = self._quantity(name, rule, given) if given is not None else None
        if override is not None:
            quantity = self._overridden(name, rule, override, quantity)
        if quantity is None:
            return
        try:
            base = to_base(quantity.value, quantity.unit, rule.dimension)
        except UnitError as error:
            self._refuse(name, str(error))
            return
        unit = "" if quantity.unit in ("count", "ratio") else f" {quantity.unit}"
        written = f"is {format_number(quantity.value)}{unit}"
        most = _MOST.get(rule.dimension) if rule.at_most is None else rule.at_most
        if base < 0 or (base == 0 and not rule.zero):
            self._refuse(
                name, f"{written}, expected {'zero or more' if rule.zero else 'above zero'}"
            )
        elif most is not None and base > most:
            self._refuse(name, f"{written}, expected at most {format_base(most, rule.dimension)}")
        else:
            self.values[name] = base
            self.quantities[name] = quantity

    def _quantity(self, name: str, rule: Number, given: object) -> Quantity | None:
        """Read a table with value and provenance; problems are noted, and None returned."""
        if not isinstance(given, dict):
            self._refuse(
                name,
                f"is the bare value {given!s}, expected a table [{name}] with "
                f"{', '.join(_QUANTITY_KEYS)}",
            )
            return None
        before = len(self.problems)
        allowed = (*_QUANTITY_KEYS, "assumption")
        for extra in given:
            if extra not in allowed:
                self._refuse(f"{name}.{extra}", f"is an unknown key{nearest(extra, allowed)}")
        for needed in _QUANTITY_KEYS:
            if needed not in given:
                hint = f" (such as {unit_examples(rule.dimension)})" if needed == "unit" else ""
                self._refuse(name, f"has no {needed}{hint}")
        for needed in ("unit", "statistic", "source"):
            text = given.get(needed, "-")
            if not isinstance(text, str) or not text.strip():
                self._refuse(name, f"has the {needed} {text!r}, expected a non-empty text")
        assumption = given.get("assumption", False)
        if not isinstance(assumption, bool):
            self._refuse(name, f"has assumption = {assumption!r}, expected true or false")
        elif given.get("statistic") == "assumption" and not assumption:
            self._refuse(name, 'has the statistic "assumption", but no assumption = true')
        value = given.get("value", 0)
        if not isinstance(value, (int, Decimal)):
            self._refuse(name, f"has the value {value!r}, expected a number")
        if len(self.problems) > before:
            return None
        number = value if isinstance(value, bool) else plain_number(value)
        texts = (given["unit"], given["statistic"], given["source"])
        return Quantity(number, *texts, assumption=assumption)

    def _overridden(
        self, name: str, rule: Number, text: str, old: Quantity | None
    ) -> Quantity | None:
        try:
            value, unit = parse_quantity(text, rule.dimension)
        except UnitError as error:
            self._refuse(name, f"(override) {error}")
            return None
        source = "given on load"
        if old is not None:
            source += f"; the profile says {format_number(old.value)} {old.unit} ({old.statistic})"
        return Quantity(value, unit, "override", source, assumption=False)

    def _reference(self, name: str, kind: type[Profile], text: str) -> None:
        inner = {
            key.removeprefix(f"{name}."): value
            for key, value in self.overrides.items()
            if key.startswith(f"{name}.")
        }
        beside = self.where.parent if isinstance(self.where, Path) else Path()
        base = Path() if name in self.overrides else beside
        folders = (beside, *self.folders)
        try:
            where = find_profile(text, folders=folders, base=base)
            within = (*self.within, str(self.where))
            if str(where) in within:
                self._refuse(name, f"{text!r} is the file itself, expected {_a_profile_of(kind)}")
                return
            found = _Reading(where, inner, folders, within).profile()
            self.values[name] = _of_kind(kind, found, where.name)
        except ProfileError as error:
            for problem in error.problems:
                self._refuse(name, f"{text!r} is refused: {problem}")


def _expectation(key: SchemaField) -> str:
    if key.refers_to is not None:
        return _a_profile_of(key.refers_to)
    if isinstance(key.rule, Number):
        return f"a table [{key.name}] with {key.rule.dimension.value}"
    return "a name"


def _a_profile_of(kind: type[Profile]) -> str:
    return f"the name of a profile of kind {kind.kind!r}"


def _of_kind(kind: type[P], profile: Profile, file: str) -> P:
    if isinstance(profile, kind):
        return profile
    message = f"is {profile.kind!r}, expected {kind.kind!r}"
    raise ProfileError((Problem(file, "kind", message),))
