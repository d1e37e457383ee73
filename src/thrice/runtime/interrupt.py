"""Signals that ask a run to stop, held back until it is between two steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM, to be acted on between steps; a SIGINT after the first acts at once."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        with suppress(OSError):  # not print: the handler may run in the midst of one
            os.write(2, b"finishing this step, then saving; Ctrl-C (again) stops at once\n")

    try:
        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are the caller's
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
