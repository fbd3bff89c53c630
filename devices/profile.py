"""Device profiles: what users of the devices import, and what ``cxlbench profiles`` prints.

A profile is the data sheet of one piece of hardware, as numbers with a unit, a statistic and a
source each. This module gathers the parts: the kinds (``profile_kinds.py``), the loader
(``profile_loader.py``), the rule of scale (``profile_scale.py``), and adds the lists that a person
reads. How to write a profile is in ``docs/devices.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

from cxlbench.devices.profile_baselines import (
    LocalCacheProfile,
    ObjectStoreProfile,
    RemoteVolumeProfile,
    ValueServerProfile,
)
from cxlbench.devices.profile_files import builtin_profiles, own_profiles
from cxlbench.devices.profile_kinds import (
    KINDS,
    AcceleratorProfile,
    CmmHProfile,
    CopyEngineProfile,
    CxlHmProfile,
    ExpanderProfile,
    LinkProfile,
    ServingEngineProfile,
    SharedType3Profile,
    SoftwareProfile,
    SsdProfile,
)
from cxlbench.devices.profile_loader import load_as, load_profile
from cxlbench.devices.profile_prices import PricesProfile
from cxlbench.devices.profile_scale import ScaleError, scale_profile, scaled_bytes
from cxlbench.devices.profile_schema import (
    Number,
    Problem,
    Profile,
    ProfileError,
    Provenance,
    Quantity,
    Scaling,
    schema_of,
)
from cxlbench.devices.units import format_base, format_number

__all__ = [
    "KINDS",
    "AcceleratorProfile",
    "CmmHProfile",
    "CopyEngineProfile",
    "CxlHmProfile",
    "DescriptionRow",
    "ExpanderProfile",
    "LinkProfile",
    "LocalCacheProfile",
    "ObjectStoreProfile",
    "PricesProfile",
    "Problem",
    "Profile",
    "ProfileError",
    "ProfileSummary",
    "Provenance",
    "Quantity",
    "RemoteVolumeProfile",
    "ScaleError",
    "ServingEngineProfile",
    "SharedType3Profile",
    "SoftwareProfile",
    "SsdProfile",
    "ValueServerProfile",
    "describe_profile",
    "list_profiles",
    "load_as",
    "load_profile",
    "scale_profile",
    "scaled_bytes",
]


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """One line of a list of profiles. ``error`` says why a user's file cannot be loaded."""

    name: str
    kind: str
    description: str
    is_builtin: bool
    error: str | None = None


class DescriptionRow(NamedTuple):
    """One quantity of a profile as text: ``tabulate(rows, headers="keys")`` prints the table."""

    name: str
    value: str
    statistic: str
    source: str
    mark: str
    """``assumption`` where no source gives the value, ``override`` where the user does."""


def list_profiles(folder: Path | None = None) -> list[ProfileSummary]:
    """Return the profiles of a user's ``folder``, if given, and the built-in ones, by name.

    A file of the folder stands for the built-in profile of the same name. One that cannot be
    loaded is listed with its error, so that a broken file hides no other.
    """
    own: list[Traversable] = list(own_profiles(folder)) if folder is not None else []
    names = {path.name for path in own}
    found = [_summary(path, is_builtin=False) for path in own]
    found += [_summary(f, is_builtin=True) for f in builtin_profiles() if f.name not in names]
    return sorted(found, key=lambda summary: summary.name)


def describe_profile(profile: Profile) -> list[DescriptionRow]:
    """Return one row per field, in the order of the kind; references follow as ``ssd.capacity``.

    Values are as the profile writes them, of the full-size device; a scaled profile adds what the
    field is at its scale.
    """
    return list(_rows(profile, ""))


def _rows(profile: Profile, prefix: str) -> Iterator[DescriptionRow]:
    for key in schema_of(type(profile)):
        name, value = prefix + key.name, getattr(profile, key.name)
        if isinstance(value, Profile):
            yield DescriptionRow(name, value.name, "", value.description, "")
            yield from _rows(value, f"{name}.")
        elif isinstance(key.rule, Number):
            quantity = profile.provenance.get(key.name)
            if quantity is None:
                continue
            mark = "assumption" if quantity.assumption else ""
            mark = "override" if quantity.statistic == "override" else mark
            text = _written(profile, key.rule, value, quantity)
            yield DescriptionRow(name, text, quantity.statistic, quantity.source, mark)
        elif value is not None:
            yield DescriptionRow(name, str(value), "", "", "")


def _written(profile: Profile, rule: Number, value: float, quantity: Quantity) -> str:
    unit = "" if quantity.unit in ("count", "ratio", "flag") else f" {quantity.unit}"
    text = format_number(quantity.value) + unit
    if profile.scale != 1 and rule.scaling is not Scaling.NONE:
        at = format_base(value, rule.dimension)
        text += f" ({at} at scale {format_number(profile.scale)})"
    return text


def _summary(where: Traversable, *, is_builtin: bool) -> ProfileSummary:
    name = where.name.removesuffix(".toml")
    try:
        profile = load_profile(name if is_builtin else Path(str(where)))
    except ProfileError as error:
        return ProfileSummary(name, "?", "", is_builtin, str(error))
    return ProfileSummary(name, profile.kind, profile.description, is_builtin)
