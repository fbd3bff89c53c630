"""Progress of long work on a terminal's error stream.

On a terminal a bar (tqdm); elsewhere, and where the cursor cannot be moved (TERM=dumb), a plain
line every two seconds. Work that is over within two seconds prints nothing where there is no
terminal. Nothing here ever writes to standard output, which may carry JSON.

Units: whatever is counted; s of the host's clock.
"""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import IO, Any, Self

QUIET_S = 2.0
"""How long work may take before it is worth a line, and the time between two lines."""


class Progress:
    """Shows ``(what, done, total)`` as it is told; as a context, the bar ends with the work."""

    def __init__(self, stream: IO[str], *, quiet_s: float | None = None) -> None:
        self._stream = stream
        self._quiet_s = QUIET_S if quiet_s is None else quiet_s
        self._terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shown_s = time.monotonic()
        self._what = ""
        self._bar: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` steps of ``what`` are done."""
        if self._terminal:
            self._draw(what, done, total)
            return
        now_s = time.monotonic()
        if now_s - self._shown_s >= self._quiet_s:
            self._shown_s = now_s
            self._stream.write(f"{what}: {done:,} of {total:,}\n")
            self._stream.flush()

    def _draw(self, what: str, done: int, total: int) -> None:
        if self._bar is None or what != self._what:
            from tqdm import tqdm

            self.close()
            self._what = what
            self._bar = tqdm(
                total=total, desc=what, file=self._stream, leave=False, dynamic_ncols=True
            )
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Take the bar off the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
