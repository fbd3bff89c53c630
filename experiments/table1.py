"""HyMCache table 1 and §5: what the remote tiers cost.

Arithmetic on the costs that the profiles carry, with their sources: the FPGA prototype of 64 GB of
DRAM, two SSDs and a board against 1 TB of RDIMM. Nothing is simulated. Beside the claims: dollars
for each GiB of capacity, which is what a buyer compares.

Left out: servers, switches, power, what a product without an FPGA board would cost.
"""

from __future__ import annotations

from cxlbench.devices.profile import CxlHmProfile, ExpanderProfile
from cxlbench.experiments.testbed import GIB
from cxlbench.harness.claims import PaperClaim
from cxlbench.harness.experiment import Check, Context, Experiment, Findings, Row, about_of

CLAIMS = (
    PaperClaim(
        name="cheaper-low",
        statement="CXL-HM is cheaper than 1 TB of DRAM by 2.8 times (dearest against cheapest)",
        source="HyMCache §5, table 1",
        expected=2.8,
        neutral=1.0,
        band=0.05,
        unit="x",
    ),
    PaperClaim(
        name="cheaper-high",
        statement="and by up to 3.8 times (cheapest against dearest)",
        source="HyMCache §5, table 1",
        expected=3.8,
        neutral=1.0,
        band=0.05,
        unit="x",
    ),
    PaperClaim(
        name="less-dram",
        statement="with 16 times less DRAM",
        source="HyMCache abstract",
        expected=16.0,
        neutral=1.0,
        band=0.01,
        unit="x",
    ),
)


def run(context: Context) -> Findings:
    """Do the arithmetic."""
    device = context.profile(CxlHmProfile, "cxl-hm-prototype")
    memory = context.profile(ExpanderProfile, "remote-dram-1tb")
    ssd_bytes = device.ssd_count * device.ssd.capacity
    tiers = (
        ("CXL-HM", device.dram_capacity, ssd_bytes, device.cost_low, device.cost_high),
        ("remote DRAM", memory.capacity, 0, memory.cost_low, memory.cost_high),
    )
    rows: list[Row] = []
    for name, dram, ssd, low, high in tiers:
        capacity = max(dram, ssd) / GIB
        rows.append(
            {
                "tier": name,
                "DRAM_GiB": dram / GIB,
                "SSD_GiB": ssd / GIB,
                "cost_low_USD": low,
                "cost_high_USD": high,
                "USD_per_GiB": None if low is None else low / capacity,
            }
        )
    costs = (device.cost_low, device.cost_high, memory.cost_low, memory.cost_high)
    known = all(cost is not None for cost in costs)
    low, high = (
        (
            (memory.cost_low or 0) / (device.cost_high or 1),
            (memory.cost_high or 0) / (device.cost_low or 1),
        )
        if known
        else (None, None)
    )
    measured = (low, high, memory.capacity / device.dram_capacity)
    reasons = {
        "cheaper-low": _division(memory.cost_low, device.cost_high),
        "cheaper-high": _division(memory.cost_high, device.cost_low),
    }
    return Findings(
        rows=rows,
        claims=[
            claim.judge(
                value, reason=reasons.get(claim.name, ""), at="costs and sizes of the profiles"
            )
            for claim, value in zip(CLAIMS, measured, strict=True)
        ],
        checks=[Check(name="every cost is known", ok=known)],
        notes=(
            "The FPGA board is 91-95 % of the prototype's cost (HyMCache §5): the SSDs and the "
            "DRAM alone would be far cheaper.",
        ),
    )


def _division(above: float | None, below: float | None) -> str:
    if above is None or below is None:
        return "a cost is not known"
    return f"{above:,.0f} over {below:,.0f} USD"


EXPERIMENT = Experiment(
    name="table1",
    title="Cost of the remote tiers",
    source="HyMCache table 1",
    about=about_of(__doc__),
    knobs=(),
    profiles=("cxl-hm-prototype", "pm1743-class", "remote-dram-1tb"),
    claims=CLAIMS,
    run=run,
)
