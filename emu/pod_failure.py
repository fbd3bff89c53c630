"""What can go wrong in an explored run, as data: the kind, the cause, and who was involved."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cxlbench.emu.causality import Cause
from cxlbench.emu.pod_model import Store


class Kind(StrEnum):
    """Kinds of failures; a schedule is shrunk while its kind and cause stay the same."""

    CAUSALITY = "causality violation"
    WRITE_RACE = "write-write race"
    LINE_RACE = "line race"
    REGRESS = "regress"
    EXCLUSION = "mutual exclusion"
    WAITING = "bounded waiting"
    HANG = "hang"
    EXCEPTION = "exception"
    INVARIANT = "invariant"


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a run.

    ``cause`` is judged only in a recorded run. ``earlier`` and ``later`` are the two stores that
    the failure is about, where it is about two: the one that was returned, replaced or raced with,
    and the one that should have been there.
    """

    kind: Kind
    step: int
    task: int
    """Index of the task in which it was found; -1 if in none."""
    message: str
    word: int = -1
    earlier: Store | None = None
    later: Store | None = None
    carrier: Store | None = None
    """Of a regress: the store whose line went out."""
    cause: Cause | None = None
    traceback: str = ""


class PodUsageError(ValueError):
    """A program asked the pod for something that no pod can do."""


class NotReproducedError(RuntimeError):
    """A run that failed did not fail again under the same choices."""
