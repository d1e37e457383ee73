"""`thrice train` in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from thrice.errors import Interrupted

STEP = re.compile(r" *\d+ ")
"""How a line of progress begins."""


def train_in_child(job_file: Path, log: Path, *, resume: bool, say: Callable[[str], None]) -> tuple[int, str | None]:
    """(exit code, why it failed) of training the job; its lines of progress go to `say`, all it prints to `log`.

    Whatever is raised meanwhile, Interrupted first of all, reaches the caller after the child has saved and ended.
    """
    command = [sys.executable, "-m", "thrice.cli", "train", str(job_file), *(["--resume"] if resume else [])]
    with (
        log.open("w", encoding="utf-8") as kept,
        # a session of its own: a Ctrl-C at the terminal reaches the parent alone, which hands it on
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for line in child.stdout:
                kept.write(line)
                if STEP.match(line):
                    say(line.rstrip())
        except BaseException:
            _stop(child)
            raise
    return child.returncode, _why(child.returncode, log.read_text(encoding="utf-8"))


def _stop(child: subprocess.Popen[str]) -> None:
    """As Ctrl-C at its own terminal: it finishes its step and saves; asked again, it stops at once."""
    for _ in range(2):
        child.send_signal(signal.SIGINT)
        try:
            child.communicate()
            return
        except (Interrupted, KeyboardInterrupt):
            continue
    child.kill()


def _why(code: int, printed: str) -> str | None:
    """The error that the child printed last, all its lines; None where it ended well."""
    if code == 0:
        return None
    if code < 0:
        memory = "; perhaps the system had no memory left" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{memory}"
    said = re.split(r"^thrice: ", printed.strip(), flags=re.MULTILINE)
    # what is no error of ours is a traceback, whose last line is the error
    return said[-1] if len(said) > 1 else said[0].rpartition("\n")[2].strip() or "it said nothing"
