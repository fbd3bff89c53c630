"""The rule of scale: a device 1/S the size whose seconds are those of the full-size one.

``scale = S`` divides bytes and bytes/s by S. Latencies, counts, rates of operations, ratios, lines
(64 B) and pages (4 KiB) stay. Frames, chunks, windows and buffers are divided too, but never go
below a page; capacities are whole grains, and refused below one; what must hold an object is
rounded up. Which field follows which rule is declared with the field (``Scaling`` in
``profile_schema.py``). Provenance stays that of the full-size device.

What misleads at a scale: once a window is held up at a page, there are fewer of them in the same
share of memory than at full size. Scales of powers of two up to 512 keep 2 MiB frames exact.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any, TypeVar

from cxlbench.devices.profile_schema import (
    Number,
    Profile,
    Scaling,
    rule_problems,
    schema_of,
)
from cxlbench.devices.units import PAGE_BYTES, Dimension, format_base, format_number

P = TypeVar("P", bound=Profile)


class ScaleError(ValueError):
    """Something does not exist at the scale asked for: below a page, or no longer possible."""


def scaled_bytes(nbytes: int, scale: float, *, what: str) -> int:
    """Return the bytes of an object at scale S, rounded down.

    Raises ``ScaleError``, naming ``what``, when less than a page is left.
    """
    result = math.floor(Fraction(nbytes) / _ratio(scale))
    if result < PAGE_BYTES:
        largest = nbytes // PAGE_BYTES
        remedy = f"use a scale of at most {largest}" if largest else "it is too small at any scale"
        whole = format_base(nbytes, Dimension.SIZE)
        raise ScaleError(
            f"{what} of {whole} is {result} B at scale {format_number(scale)}, below one page "
            f"of {PAGE_BYTES} B; {remedy}"
        )
    return result


def scale_profile(profile: P, scale: float) -> P:
    """Return ``profile`` with bytes and bytes/s divided by ``scale``, references included.

    ``scale`` is at least 1 and need not be whole; 1 returns the profile as it is. Raises
    ``ScaleError`` naming the field that cannot be scaled so far, and for a profile that is scaled
    already.
    """
    ratio = _ratio(scale)
    if profile.scale != 1:
        raise ScaleError(
            f"profile {profile.name!r} is at scale {format_number(profile.scale)} already; "
            "scale the full-size profile"
        )
    if ratio == 1:
        return profile
    keys = schema_of(type(profile))
    values: dict[str, Any] = {key.name: getattr(profile, key.name) for key in keys}
    numbers = [(key.name, key.rule) for key in keys if isinstance(key.rule, Number)]
    for name, rule in sorted(numbers, key=lambda item: item[1].grain is not None):
        if values[name] is None:
            continue
        grain = values[rule.grain] if rule.grain is not None else PAGE_BYTES
        try:
            values[name] = _scaled(values[name], rule.scaling, ratio, grain)
        except ScaleError as error:
            raise ScaleError(
                f"{name} of profile {profile.name!r} {error} at scale {format_number(scale)}"
            ) from None
    for key in keys:
        if key.refers_to is not None:
            values[key.name] = scale_profile(values[key.name], scale)
    for name, message in rule_problems(type(profile), values, full_size=False):
        raise ScaleError(
            f"{name} of profile {profile.name!r} {message} (at scale {format_number(scale)})"
        )
    return dataclasses.replace(profile, **values, scale=scale)


def _ratio(scale: float) -> Fraction:
    if isinstance(scale, bool) or not math.isfinite(scale) or scale < 1:
        raise ScaleError(f"scale is {scale!r}, expected a number of at least 1")
    return Fraction(scale)


def _scaled(value: Any, scaling: Scaling, ratio: Fraction, grain: int) -> Any:
    if scaling is Scaling.NONE or value == math.inf:  # a pipe without a limit
        return value
    exact = Fraction(value) / ratio
    if scaling is Scaling.BANDWIDTH:
        return float(exact)
    if scaling is Scaling.RESERVE:
        return math.ceil(exact / grain) * grain
    grains = math.floor(exact / grain)
    if scaling is Scaling.CAPACITY and grains == 0:
        raise ScaleError(f"is {math.floor(exact)} B, below one unit of {grain} B,")
    return max(1, grains) * grain
