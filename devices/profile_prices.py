"""What parts of a KV tier cost: a kind of profile, so that each price has its source.

Lower and upper ends, US dollars. DRAM and SSDs are per GiB; a controller is what a CXL-HM device
has beside its DRAM and its SSDs (the FPGA board of the prototype); a port is 100 Gb/s of network on
one side. Left out: servers, switches, cables, power, and how prices move with time and volume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from cxlbench.devices import profile_rules as rules
from cxlbench.devices.profile_schema import Check, Number, Profile
from cxlbench.devices.units import Dimension

_Dollars = Annotated[float, Number(Dimension.COST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricesProfile(Profile):
    """Prices, each as the lower and the upper end of an estimate."""

    kind: ClassVar[str] = "prices"
    checks: ClassVar[tuple[Check, ...]] = (
        Check(("dram_per_gib_low", "dram_per_gib_high"), rules.ordered),
        Check(("device_dram_per_gib_low", "device_dram_per_gib_high"), rules.ordered),
        Check(("ssd_per_gib_low", "ssd_per_gib_high"), rules.ordered),
        Check(("controller_low", "controller_high"), rules.ordered),
        Check(("port_100g_low", "port_100g_high"), rules.ordered),
    )

    dram_per_gib_low: _Dollars
    dram_per_gib_high: _Dollars
    device_dram_per_gib_low: _Dollars
    device_dram_per_gib_high: _Dollars
    ssd_per_gib_low: _Dollars
    ssd_per_gib_high: _Dollars
    controller_low: _Dollars
    controller_high: _Dollars
    port_100g_low: _Dollars
    port_100g_high: _Dollars
