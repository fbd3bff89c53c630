"""Whether the emulator in real time and the serving model in virtual time agree.

``cxlbench bench model`` serves three small workloads twice, each with the same program text: the
serving engine's model of one GPU on the real HyMCache over one CXL-HM. In virtual time blocks are
tags; in real time they are bytes, which are moved, flushed to files or RAM, and checked. Sizes and
bandwidths are divided by ``SCALE`` in both. GPUs keep no prefixes: every hit comes from the tier.

What is compared are means: a block read (from asked to really there), the time to the first token
(host's lateness included), and the hit rate. Whether both agree within the bar says something of
the host, too: a busy one is late.

Units: s, blocks, bytes at full size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cxlbench.devices.profile import (
    AcceleratorProfile,
    CxlHmProfile,
    ServingEngineProfile,
    load_as,
)
from cxlbench.emu.clock import Clock, VirtualClock, WallClock
from cxlbench.harness.content import BlockContent
from cxlbench.harness.fidelity import Fidelity, measure
from cxlbench.harness.generator import GeneratorKnobs, generate
from cxlbench.harness.rig import Rig, RigSpec, scaled_block_bytes
from cxlbench.harness.rig_checks import check_rig
from cxlbench.harness.serve.cluster import ClusterSpec
from cxlbench.harness.serve.drive import Drive, Order
from cxlbench.harness.serve.roofline import Roofline
from cxlbench.harness.serve.run import Simulated, simulate
from cxlbench.harness.tiers.hymcache import HyMCacheTier
from cxlbench.harness.tiers.tier import Tier, TierSite
from cxlbench.kv.connector import BlockTimes
from cxlbench.kv.geometry import model_shape

BAR = 0.10
"""How far a mean in real time may lie from the one in virtual time, relatively."""
SCALE = 128
CAPACITY_BYTES = 32 << 30
MODEL = "Llama-3.1-8B"
BLOCK_TOKENS = 128
FIGURES = ("block read", "TTFT", "hit rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One small experiment."""

    name: str
    knobs: GeneratorKnobs
    concurrency: int
    prefetch: bool = True
    dram: str = "64 GiB"
    """Of the device, for staging and write buffer."""


def cases(*, seed: int = 1, sessions: int = 8) -> tuple[Case, ...]:
    """Return the three experiments; ``sessions`` is how many conversations the first has."""
    chat = GeneratorKnobs(
        sessions=sessions,
        turns=4,
        shared_system_tokens=0,
        first_input_tokens=1500,
        first_input_stddev=300,
        turn_input_tokens=400,
        turn_input_stddev=100,
        output_tokens=4,
        think_s=0,
        seed=seed,
    )
    agents = GeneratorKnobs(
        sessions=max(1, sessions // 2),
        turns=4,
        shared_system_tokens=12_288,
        first_input_tokens=300,
        turn_input_tokens=300,
        output_tokens=4,
        think_s=0,
        seed=seed,
    )
    return (
        Case(name="conversations", knobs=chat, concurrency=4),
        Case(name="long shared prefix", knobs=agents, concurrency=2),
        Case(name="no prefetch, 2 GiB", knobs=chat, concurrency=4, prefetch=False, dram="2 GiB"),
    )


@dataclass(frozen=True, slots=True)
class Half:
    """One of the two runs of a case."""

    requests: int
    loaded_blocks: int
    block_read_mean_s: float
    ttft_mean_s: float
    hit_rate: float
    laws_broken: tuple[str, ...]

    def figures(self) -> Mapping[str, float]:
        """Return what is compared, by the names of ``FIGURES``."""
        means = (self.block_read_mean_s, self.ttft_mean_s, self.hit_rate)
        return dict(zip(FIGURES, means, strict=True))


@dataclass(frozen=True, slots=True)
class Compared:
    """A case in real and in virtual time."""

    name: str
    wall: Half
    virtual: Half
    fidelity: Fidelity

    def ratios(self) -> Mapping[str, float]:
        """Return the real over the virtual figures."""
        modelled = self.virtual.figures()
        return {name: value / modelled[name] for name, value in self.wall.figures().items()}

    @property
    def correct(self) -> bool:
        """Whether every law held in both: no wrong byte, nothing lost, nothing held."""
        return not self.wall.laws_broken and not self.virtual.laws_broken


class _RigTier(HyMCacheTier):
    """HyMCache on a rig that was made elsewhere: scaled, and of real bytes if it is so."""

    def __init__(self, rig: Rig) -> None:
        self.name = "hymcache"
        self.rig = rig
        self.pipes = rig.pipes


def serve(
    case: Case, clock: Clock, *, folder: Path | None = None, scale: int = SCALE
) -> tuple[Half, Fidelity | None]:
    """Run a case on ``clock``: with real bytes (in ``folder``, else in RAM) if it is real time."""
    phantom = clock.kind == "virtual"
    shape = model_shape(MODEL)
    spec = RigSpec(
        device=load_as(CxlHmProfile, "cxl-hm-prototype", overrides={"dram_capacity": case.dram}),
        block_bytes=shape.block_bytes(BLOCK_TOKENS),
        device_capacity_bytes=CAPACITY_BYTES,
        prefetch=case.prefetch,
        scale=scale,
        seed=case.knobs.seed,
    )
    check_rig(spec)
    blocks: list[BlockTimes] = []
    rigs: list[Rig] = []

    def make(clock: Clock, site: TierSite) -> Tier:
        rigs.append(
            Rig(
                clock,
                spec,
                phantom=phantom,
                folder=folder,
                on_block=lambda _, times: blocks.append(times),
            )
        )
        return _RigTier(rigs[0])

    cluster = ClusterSpec(
        roofline=Roofline(
            shape,
            load_as(AcceleratorProfile, "a100-80g"),
            load_as(ServingEngineProfile, "vllm-default"),
        ),
        block_tokens=BLOCK_TOKENS,
        prefix_caching=False,
    )
    result = simulate(
        generate(case.knobs, name=case.name),
        cluster,
        make,
        Drive(order=Order.ROUNDS, concurrency=case.concurrency),
        clock=clock,
        content=BlockContent(scaled_block_bytes(spec), phantom=phantom, seed=spec.seed),
        seed=spec.seed,
    )
    fidelity = None if phantom else measure(clock, rigs[0].pipes)
    return _half(result, blocks), fidelity


def _half(result: Simulated, blocks: Sequence[BlockTimes]) -> Half:
    reads = [times.done_s - times.asked_s for times in blocks]
    served = result.served
    return Half(
        requests=len(served),
        loaded_blocks=sum(record.loaded for record in served),
        block_read_mean_s=sum(reads) / max(len(reads), 1),
        ttft_mean_s=sum(record.ttft_s + record.late_s for record in served) / max(len(served), 1),
        hit_rate=result.hit_rate,
        laws_broken=tuple(law.name for law in result.laws if not law.ok),
    )


def bench_model(
    *,
    folder: Path | None = None,
    seed: int = 1,
    sessions: int = 8,
    progress: Callable[[str, int, int], None] = lambda *_: None,
) -> tuple[Compared, ...]:
    """Run all cases under both clocks.

    Raises:
        HostLimitError: this host has no such folder or memory.
    """
    found = []
    all_cases = cases(seed=seed, sessions=sessions)
    for number, case in enumerate(all_cases):
        progress(f"{case.name}, real time", number, len(all_cases))
        virtual, _ = serve(case, VirtualClock())
        wall, fidelity = serve(case, WallClock(), folder=folder)
        assert fidelity is not None
        found.append(Compared(case.name, wall, virtual, fidelity))
    progress("done", len(all_cases), len(all_cases))
    return tuple(found)
