"""The prefetch calls of a device that has nothing to stage: a transparent cache, plain DRAM."""

from __future__ import annotations

from cxlbench.emu.status import DeviceError, Status


class NoStaging:
    """Refuses every prefetch, so that no request is ever handed out."""

    name: str
    prefetch_depth = 0

    def chm_prefetch_object(self, address: int, size_bytes: int) -> None:
        """Refuse: there is nothing to stage."""

    async def chm_prefetch_wait(self, request: object) -> None:
        """Never called rightly: there is no request."""
        raise DeviceError(Status.NO_OBJECT, f"{self.name} has no staging")

    def chm_prefetch_release(self, request: object) -> None:
        """Never called rightly: there is no request."""
        raise DeviceError(Status.NO_OBJECT, f"{self.name} has no staging")
