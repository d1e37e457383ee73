"""Signals that ask a run to stop: held back until it is between two steps, or raised at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from thrice.errors import Interrupted


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

    with _handled_by(note):
        yield received


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted at once, so that a child can be stopped before its parent ends."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name, 128 + number)

    with _handled_by(stop):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    try:
        previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are the caller's
        yield
        return
    try:
        yield
    finally:
        for number, own in previous.items():
            signal.signal(number, own)
