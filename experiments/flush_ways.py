"""Ways to write metadata back to a shared memory without coherence, and what each does.

``publication`` passes records from one node to another; ``tract_with`` runs TraCT's own stress
program with every ``clflush`` replaced. Both on a pod in virtual time with the costs of a profile.
``flush_cost.py`` says what is compared and why.

Units: s, words of 8 B, lines of 64 B. Left out: crashes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cxlbench.devices.profile import SharedType3Profile
from cxlbench.emu.clock import VirtualClock
from cxlbench.emu.pod_ops import LINE, WORD, clflush, clflushopt, load, mfence, pause, store
from cxlbench.emu.pod_virtual import VirtualPod
from cxlbench.emu.pod_virtual_memory import VirtualMemory
from cxlbench.harness.experiment import Row
from cxlbench.harness.pod_profile import virtual_costs
from cxlbench.tract.chains import stop_manager
from cxlbench.tract.fsck import fsck
from cxlbench.tract.layout import Sizes
from cxlbench.tract.manager import manage
from cxlbench.tract.region import format_region
from cxlbench.tract.stress import HITS, INSERTED, LOOKUPS, N_TOTALS, WRONG, work
from cxlbench.tract.words import load_fresh

NODES = 2
CLFLUSH = "clflush"
WAITING = "clflushopt, fence waits"
POSTED = "clflushopt, fence does not wait"
WAYS = (CLFLUSH, WAITING, POSTED)

# -- publication --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Records of one size, published one way."""

    way: str
    lines: int
    records: int
    publish_s: float
    """Mean time from the first store to the flag, which is flushed too."""
    words: int
    stale_words: int
    """Words of the record that a reader who had seen the flag found old."""

    def row(self) -> Row:
        """Return the row of results."""
        return {
            "table": "publication",
            "way": self.way,
            "lines": self.lines,
            "publish_s": self.publish_s,
            "per_line_s": self.publish_s / self.lines,
            "words": self.words,
            "stale_words": self.stale_words,
        }


def publication(
    memory: SharedType3Profile, way: str, lines: int, records: int, *, seed: int
) -> Publication:
    """Publish records of ``lines`` lines from node 0 to node 1."""
    record, flag, answer = 0, lines * LINE, (lines + 1) * LINE
    clock = VirtualClock()
    pod = VirtualPod(
        clock,
        (lines + 2) * LINE,
        virtual_costs(memory),
        nodes=NODES,
        fences_wait_for_arrival=way == WAITING,
        seed=seed,
    )
    pod.lock_words(flag, 2 * LINE)
    took: list[float] = []
    stale: list[bool] = []

    def write(mem: VirtualMemory) -> None:
        for number in range(1, records + 1):
            begin_s = clock.now() + mem.debt_s
            for line in range(lines):
                store(mem, record + line * LINE, number)
                (clflush if way == CLFLUSH else clflushopt)(mem, record + line * LINE)
            if way != CLFLUSH:
                mfence(mem)
            store(mem, flag, number)
            clflush(mem, flag)
            took.append(clock.now() + mem.debt_s - begin_s)
            _await(mem, answer, number)

    def read(mem: VirtualMemory) -> None:
        for number in range(1, records + 1):
            _await(mem, flag, number)
            stale.extend(load_fresh(mem, record + at * LINE) != number for at in range(lines))
            store(mem, answer, number)
            clflush(mem, answer)

    async def both() -> None:
        await clock.gather(pod.run(0, write), pod.run(1, read))

    with clock:
        clock.run(both())
    return Publication(
        way=way,
        lines=lines,
        records=records,
        publish_s=float(np.mean(took)),
        words=len(stale),
        stale_words=sum(stale),
    )


def _await(mem: VirtualMemory, at: int, number: int) -> None:
    while True:
        clflush(mem, at)
        if load(mem, at) >= number:
            return
        pause(mem, at, WORD)


# -- TraCT's own programs -----------------------------------------------------------------------


class RunawayError(RuntimeError):
    """A program flushed so often that it must be going round in circles."""


class Flushes:
    """A node's memory that counts flushes, and replaces ``clflush`` where asked to."""

    def __init__(self, mem: VirtualMemory, *, posted: bool, most: int) -> None:
        self._mem = mem
        self._posted = posted
        self._left = most
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mem, name)

    def clflush(self, off: int) -> None:
        """Write a line back and drop it: at once, or posted with a fence behind it."""
        self.count += 1
        if self.count > self._left:
            raise RunawayError(f"{self.count} flushes by one program")
        if self._posted:
            self._mem.clflushopt(off)
            self._mem.mfence()
        else:
            self._mem.clflush(off)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stressed:
    """TraCT's programs under load, with one way of flushing."""

    way: str
    blocks: int
    """Blocks looked up."""
    hits: int
    inserted: int
    wrong_words: int
    flushes: int
    duration_s: float
    problems: int
    """What the checker found in the region."""
    ended: str
    """How the run ended, if not by itself."""

    @property
    def sound(self) -> bool:
        """Whether nothing was wrong."""
        return not (self.wrong_words or self.problems or self.ended)

    @property
    def outcome(self) -> str:
        """Return what was wrong, in words."""
        if self.sound:
            return "sound"
        said = [f"{self.wrong_words} wrong words"] if self.wrong_words else []
        said += [f"{self.problems} problems in the region"] if self.problems else []
        return ", ".join([*said, self.ended] if self.ended else said)

    def row(self) -> Row:
        """Return the row of results."""
        return {
            "table": "tract",
            "way": self.way,
            "blocks_looked_up": self.blocks,
            "hits": self.hits,
            "inserted": self.inserted,
            "flushes": self.flushes,
            "duration_s": self.duration_s,
            "per_block_s": self.duration_s / max(1, self.blocks),
            "wrong_words": self.wrong_words,
            "problems": self.problems,
            "ended": self.ended,
        }


PAYLOAD_WORDS = 16
MOST_FLUSHES = 200_000


def tract_with(memory: SharedType3Profile, way: str, rounds: int, *, seed: int) -> Stressed:
    """Run TraCT's stress program on each node with one way of flushing."""
    clock = VirtualClock()
    size_bytes = 1 << 20
    pod = VirtualPod(
        clock,
        size_bytes,
        virtual_costs(memory),
        nodes=NODES,
        fences_wait_for_arrival=way == WAITING,
        seed=seed,
    )
    sizes = Sizes(nodes=NODES, slots=64, chunks=40, chunk_bytes=PAYLOAD_WORDS * WORD)
    lay = pod.alone(format_region, sizes, size_bytes)
    pod.lock_words(lay.epoch_at, lay.roots_at - lay.epoch_at)
    totals = [np.zeros(N_TOTALS, np.int64) for _ in range(NODES)]
    flushes: list[Flushes] = []

    def flushing(function: Callable[..., Any]) -> Callable[..., Any]:
        def program(mem: VirtualMemory, *args: Any) -> Any:
            flushes.append(Flushes(mem, posted=way != CLFLUSH, most=MOST_FLUSHES))
            return function(flushes[-1], *args)

        return program

    async def all_of_them() -> None:
        for node in range(NODES):
            pod.start(node, flushing(manage), lay)
        await clock.gather(
            *(
                pod.run(node, flushing(work), lay, seed + node, rounds, 60, PAYLOAD_WORDS, found)
                for node, found in enumerate(totals)
            )
        )
        for node in range(NODES):
            await pod.run(node, stop_manager, lay)
        await pod.joined()

    ended = ""
    with clock:
        try:
            clock.run(all_of_them())
        except Exception as error:
            if way != POSTED:
                raise
            ended = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        duration_s = clock.now()
        problems = 0 if ended else len(pod.alone(fsck, lay).problems)
    total = np.sum(totals, axis=0)
    return Stressed(
        way=way,
        blocks=int(total[LOOKUPS]),
        hits=int(total[HITS]),
        inserted=int(total[INSERTED]),
        wrong_words=int(total[WRONG]),
        flushes=sum(one.count for one in flushes),
        duration_s=duration_s,
        problems=problems,
        ended=ended,
    )
