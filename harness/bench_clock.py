"""How good the two clocks are on this host: virtual events a second, and wall-clock honesty.

The virtual figure is timer events a second with many pending. The wall figures are what the design
promises for few transfers in flight: lateness of every deadline, and the bandwidth that four paced
transfers with real copies reach over 1 s windows, as a share of what was asked.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import numpy as np

from cxlbench.emu.clock import VirtualClock, WallClock
from cxlbench.emu.pipe import Pipe, finished
from cxlbench.harness.fidelity import Fidelity, measure

COPY_BYTES = 1 << 18
TRANSFER_S = 1.25e-3

MIN_TIMERS_PER_S = 100_000
"""The bar in virtual time, with 1,000 timers pending; those of real time are in `fidelity.py`."""


@dataclass(frozen=True, slots=True)
class ClockBench:
    """Figures of one run; see the module's text."""

    virtual_timers: int
    virtual_pending: int
    virtual_timers_per_s: float
    wall_in_flight: int
    wall_seconds: float
    fidelity: Fidelity

    @property
    def bandwidth_error(self) -> float:
        """The worst 1 s window, as a share of what was asked."""
        return self.fidelity.worst_error


def bench_clock(
    *, timers: int = 300_000, pending: int = 1000, seconds: float = 5.0, seed: int = 0
) -> ClockBench:
    """Measure both clocks; takes about ``seconds`` and a few more.

    Raises ``ValueError`` if a number is not positive.
    """
    if timers < 1 or pending < 1 or seconds <= 0:
        raise ValueError(
            f"timers, pending and seconds must be positive, got {timers}, {pending}, {seconds}"
        )
    in_flight = 4
    return ClockBench(
        timers,
        pending,
        _virtual_rate(timers, pending, seed),
        in_flight,
        seconds,
        _wall(in_flight, seconds),
    )


def _virtual_rate(timers: int, pending: int, seed: int) -> float:
    draw = random.Random(seed)
    each = max(1, timers // pending)
    with VirtualClock() as clock:
        delays = [[draw.random() for _ in range(each)] for _ in range(pending)]

        async def sleeper(mine: list[float]) -> None:
            for delay in mine:
                await clock.sleep(delay)

        async def main() -> None:
            await clock.gather(*[sleeper(mine) for mine in delays])

        begin = time.perf_counter()
        clock.run(main())
        return each * pending / (time.perf_counter() - begin)


def _wall(in_flight: int, seconds: float) -> Fidelity:
    """Run ``in_flight`` paced streams, each on a pipe of its own, with a real copy a transfer."""
    with WallClock() as clock:
        pipes = [
            Pipe(clock, f"stream{number}", COPY_BYTES / (TRANSFER_S * (1 + number / 10)))
            for number in range(in_flight)
        ]
        source = np.ones(COPY_BYTES, dtype=np.uint8)
        target = np.zeros_like(source)

        async def stream(pipe: Pipe) -> None:
            start = clock.now()
            while clock.now() - start < seconds:
                booking = pipe.reserve(COPY_BYTES)
                np.copyto(target, source)
                await finished(clock, booking)

        async def main() -> None:
            await clock.gather(*[stream(pipe) for pipe in pipes])

        clock.run(main())
        return measure(clock, pipes)
