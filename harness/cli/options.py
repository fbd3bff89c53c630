"""Option types and options that several commands share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cxlbench.devices.units import Dimension, UnitError, parse_quantity, to_base

F = TypeVar("F", bound=Callable[..., Any])

_FIO_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS = {"k": 10, "m": 20, "g": 30, "t": 40}


if TYPE_CHECKING:
    _SizeBase = click.ParamType[int]
else:
    _SizeBase = click.ParamType


class SizeType(_SizeBase):
    """A size in bytes: ``16MiB``, ``64 GiB``, ``1GB``, fio's ``4k`` and ``1m``, or bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return bytes."""
        if isinstance(value, int):
            return value
        text = str(value).strip()
        short = _FIO_SIZE.fullmatch(text)
        try:
            if short is not None:
                exact = Decimal(short[1]) * (1 << _POWERS[short[2].lower()])
                nbytes = int(to_base(exact, "B", Dimension.SIZE))
            elif text.isdecimal():
                nbytes = int(text)
            else:
                nbytes = int(to_base(*parse_quantity(text, Dimension.SIZE), Dimension.SIZE))
        except UnitError as error:
            self.fail(f"{text!r} {error}", param, ctx)
        if nbytes < 1:
            self.fail(f"{text!r} is no size above zero", param, ctx)
        return nbytes


class FiniteRange(click.FloatRange):
    """A range of numbers in which neither ``nan`` nor ``inf`` is one."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


SIZE = SizeType()
POSITIVE = FiniteRange(min=0, min_open=True)
ZERO_OR_MORE = FiniteRange(min=0)
COUNT = click.IntRange(min=1)
SCALE = FiniteRange(min=1)
FOLDER = click.Path(file_okay=False, path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)


def examples(*commands: str) -> str:
    """Return the end of a help text: commands to try, a line each."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


def given(names: Iterable[str]) -> list[str]:
    """Return those of the running command's parameters that the user gave, as ``--option``."""
    context = click.get_current_context()
    options = {
        param.name: param.opts[0] for param in context.command.params if param.name is not None
    }
    typed = click.core.ParameterSource.COMMANDLINE
    return [options[name] for name in names if context.get_parameter_source(name) is typed]


def refuse_idle(names: Iterable[str], why: str) -> None:
    """Refuse options that the user gave and that would do nothing; ``why`` says for what they are.

    Raises:
        click.UsageError: one of ``names`` was given.
    """
    idle = given(names)
    if idle:
        raise click.UsageError(f"{', '.join(idle)} would do nothing here: {why}")


def json_option(function: F) -> F:
    """Add ``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document on standard output."
    )(function)


SET_HELP = (
    "Replace a number of the profile, with its unit: --set dram_capacity=32GiB "
    "--set ssd.read_latency=80us. Repeatable."
)


def set_option(function: F) -> F:
    """Add ``--set``: numbers of a profile that the user replaces."""
    return set_option_for(SET_HELP)(function)


def set_option_for(text: str) -> Callable[[F], F]:
    """Add ``--set`` with a help text of its own."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        callback=_overrides,
        help=text,
    )


def scale_option(default: str) -> Callable[[F], F]:
    """Add ``--scale``; ``default`` says what is taken without it."""
    return click.option(
        "--scale",
        type=SCALE,
        help="Divide bytes and bytes/s by this; latencies and counts stay, so that seconds are "
        f"those of the full-size system. {default}",
    )


def folder_option(function: F) -> F:
    """Add ``--folder``."""
    return click.option(
        "--folder",
        type=FOLDER,
        help="Backing files go to a folder of their own in here, which is removed at the end. "
        "[default: main memory]",
    )(function)


SEED_HELP = "Same seed, same result (in virtual time)."


def seed_option(function: F) -> F:
    """Add ``--seed``."""
    return seed_option_for(SEED_HELP)(function)


def seed_option_for(text: str) -> Callable[[F], F]:
    """Add ``--seed`` with a help text of its own."""
    return click.option(
        "--seed", type=click.IntRange(min=0), default=1, show_default=True, help=text
    )


def _overrides(
    ctx: click.Context, param: click.Parameter, given: tuple[str, ...]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise click.BadParameter(
                f"{text!r} is not KEY=VALUE, such as dram_capacity=32GiB", ctx, param
            )
        if key.strip() in found:
            raise click.BadParameter(f"{key.strip()!r} is given twice", ctx, param)
        found[key.strip()] = value.strip()
    return found
