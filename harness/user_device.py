"""A device of the user's own, named as ``module:function`` (docs/devices.md).

The function is called with a clock and a ``DeviceSite`` and returns a ``MemoryDevice``. What it
does wrong there is told in words; what the device does wrong later keeps its traceback.
"""

from __future__ import annotations

import functools

from cxlbench.emu.clock import Clock
from cxlbench.emu.user_objects import UserObjectError, load_callable
from cxlbench.harness.rig import DeviceMaker, DeviceSite
from cxlbench.kv.device import MemoryDevice

ON_A_DEVICE = sorted(
    {
        name
        for kind in MemoryDevice.__mro__
        for name in {**vars(kind), **vars(kind).get("__annotations__", {})}
        if not name.startswith("_")
    }
)
"""What a device must have: methods and attributes of the protocol."""


def load_user_device(spec: str) -> DeviceMaker:
    """Return the maker that ``spec`` names.

    Raises:
        UserObjectError: there is none; later, when it is called: it fails, or makes no device.
    """
    made = f"{spec.partition(':')[2]}(clock, site)"
    make = load_callable(spec, what="device")

    @functools.wraps(make)
    def maker(clock: Clock, site: DeviceSite) -> MemoryDevice:
        try:
            device: MemoryDevice = make(clock, site)
        except (AttributeError, LookupError, NameError, TypeError) as error:
            hint = (
                "; it is a class: name a function that makes one of it"
                if isinstance(make, type)
                else ""
            )
            raise UserObjectError(
                f"device {spec!r}: {made} failed with {type(error).__name__}: {error}{hint} "
                "(docs/devices.md; cxlbench --debug shows where)"
            ) from error
        missing = [name for name in ON_A_DEVICE if not hasattr(device, name)]
        if missing:
            raise UserObjectError(
                f"device {spec!r}: {made} returned {device!r}, which is no device: it has no "
                f"{', '.join(missing)} (kv/device.py)"
            )
        return device

    return maker
