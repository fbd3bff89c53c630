"""Ending in order: what must not be cut short by a second Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def heard_later() -> Iterator[None]:
    """Hold back the signals that end a run until the context is left, then let them be heard.

    What is inside must end by itself, and soon. Only the main thread can hold signals back.
    """
    before: dict[signal.Signals, Any] = {}
    heard: list[int] = []
    if threading.current_thread() is threading.main_thread():
        for ending in ENDING_SIGNALS:
            if signal.getsignal(ending) not in (None, signal.SIG_IGN):
                before[ending] = signal.signal(ending, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        for ending, handler in before.items():
            signal.signal(ending, handler)
    if heard:
        signal.raise_signal(heard[0])
