"""How an operation on emulated hardware can end, and the errors that carry it.

A status travels with the data: a read that did not complete with ``OK`` gave no data.
"""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """The completion status of one operation, in the words of verbs where they have one."""

    OK = "ok"
    BOUNDS = "outside the memory region"
    BAD_RKEY = "no such rkey"
    REVOKED = "rkey revoked"
    LINK_DOWN = "link down"
    TIMEOUT = "timed out"
    IO_ERROR = "I/O error of the backing store"
    NO_OBJECT = "nothing is stored at this address"
    FLUSHED = "cancelled before it ran"
    BUSY = "too many operations are under way"


class DeviceError(Exception):
    """An operation on emulated hardware ended with a status other than OK."""

    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(f"{status.value}: {detail}")
        self.status = status
        self.detail = detail


class HostLimitError(Exception):
    """The host cannot do what was asked (no space, no permission, no such memory)."""
