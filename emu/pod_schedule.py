"""The choices of which a schedule consists, and what decides them.

A run is decided completely by its choices, in order: which task makes how many steps, and what
happens to the memory in between. They are plain triples, so that a schedule is a JSON file:

====================== ==========================================================================
``run, task, steps``   the task makes that many steps
``evict, node, line``  the node drops its copy; if dirty, its write-back is posted
``fill, node, line``   the node takes a clean copy, unasked
``land, node, line``   the node's oldest write-back of the line lands
``dma, handle, piece`` one line of a DMA is copied
``crash, node, bits``  the node dies; bit k: does its k-th write-back in flight land after all
``suspect, node, 0``   the node is declared dead, rightly or not; its recovery starts
``time, 0, 0``         nothing else can happen: time passes, and all who pause look again
====================== ==========================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cxlbench.emu.pod_run import Run
    from cxlbench.emu.pod_task import TaskMemory

Choice = tuple[str, int, int]


class Schedule(Protocol):
    """Decides one run. It is asked at the first step and whenever the steps it granted are used."""

    @property
    def eager(self) -> bool:
        """Whether to be asked also when a task wakes or starts."""

    def start(self, run: Run) -> None:
        """Begin; the scenario has been built."""

    def turn(self, run: Run, step: int) -> TaskMemory | None:
        """Apply what happens before ``step``, choose who goes on and ``run.grant`` it steps.

        Returns None if nobody can go on any more.
        """

    def in_flight(self, run: Run, choice: Choice) -> None:
        """Take note that ``choice``, a landing, may happen from now on."""

    def yielded(self, run: Run, task: TaskMemory) -> None:
        """Take note that ``task`` paused and goes on at once: there may be something new."""

    def draw(self, run: Run) -> int:
        """Return 32 bits of chance: what of a fenced node's write-backs landed."""
