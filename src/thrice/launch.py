"""Starting the processes of a run on this machine, through torchrun's elastic agent, and ending with one message.

A worker is this very command again, with the agent's variables set. It leaves its error in a file (worker.py), so that
the parent can say once, and by rank and host, what went wrong first: the others' errors are consequences.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from thrice.errors import PIPE_CLOSED, Interrupted, ThriceError
from thrice.spec.job import Job
from thrice.worker import NOTES, Failure, failures, pids

STOPS_AT_ONCE_S = 5.0
"""A worker that has not ended so long after the second Ctrl-C is killed: it hangs where no Python runs."""
AFTERWARDS_S = 5.0
"""A worker that is killed so long after another has failed is one that the agent gave up: a consequence."""


def launch(arguments: Sequence[str], job: Job, *, say: Callable[[str], None]) -> None:
    """Runs `thrice` with `arguments` in `job.processes` processes of this machine, to their end.

    Raises what ended them: Interrupted with the signal's exit code, ThriceError with that of the first failure, or
    BrokenPipeError. A run whose process was killed, or did not come, is started again from its last checkpoint,
    `launch.restarts` times; each start has an agent of its own, for a restart by torchrun's meets stale addresses.
    """
    threads = _threads(job.processes)
    say(f"processes  {job.processes} on this machine, as by: {torchrun(arguments, job.processes, threads)}")
    command = list(arguments)
    for left in range(job.launch.restarts, -1, -1):
        failure = _run(command, job.processes, threads)
        if failure is None:
            return
        is_lost = command[0] == "train" and (failure.was_killed or failure.is_consequence)
        if not (is_lost and left):
            raise _ended(failure, is_lost=is_lost)
        say(f"restart    {failure}\n           it goes on from the last checkpoint; restarts left: {left - 1}")
        command += [] if "--resume" in command else ["--resume"]


def _ended(failure: Failure, *, is_lost: bool) -> Exception:
    if failure.exit_code == PIPE_CLOSED:
        return BrokenPipeError()
    if failure.exit_code in (130, 143):
        return Interrupted(failure.message, failure.exit_code)
    how_on = "\n  --resume goes on from the last checkpoint; launch.restarts does so by itself" if is_lost else ""
    error = ThriceError(_shown(failure) + how_on)
    error.exit_code = failure.exit_code
    return error


def _shown(failure: Failure) -> str:
    """With the process that it is of, but where all would say the same: a usage error, a failed verification."""
    return failure.message if failure.exit_code in (2, 4) else str(failure)


def torchrun(arguments: Sequence[str], processes: int, threads: str) -> str:
    """The command that does the same."""
    words = ["torchrun", "--standalone", "--nproc-per-node", str(processes), "-m", "thrice.cli", *arguments]
    return f"OMP_NUM_THREADS={threads} {shlex.join(words)}"


def _threads(processes: int) -> str:
    """For each worker, unless the user has said it: two threads that want one core wait for each other."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes)))


def _run(arguments: Sequence[str], processes: int, threads: str) -> Failure | None:
    """One start of all workers; how the run failed, or None."""
    with tempfile.TemporaryDirectory(prefix="thrice-") as name, _forwarded(Path(name)) as received:
        folder = Path(name)
        # one stderr is enough, for all warn of the same; what a worker said that died in silence is kept
        aside = range(0) if "--debug" in arguments else range(1, processes)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id="thrice",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port, taken by whoever listens on it
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=name, redirects=dict.fromkeys(aside, Std.ERR)),
            signals_to_handle="SIGQUIT",  # those of a user are ours: a worker that saves is not killed after 30 s
        )
        with _environment({NOTES: name, "OMP_NUM_THREADS": threads}), _quiet("torch.distributed.elastic"):
            try:
                elastic_launch(config, sys.executable)("-m", "thrice.cli", *arguments)
            except ChildFailedError as error:
                return first(failures(folder), [*_silent(folder, error)], received)
            except SignalException as error:  # before any worker was there
                raise Interrupted(
                    f"{error.sigval.name} before any step; nothing was lost", 128 + error.sigval
                ) from None
    return None


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """The agent hands its own environment on."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Without the agent's log, each of whose loggers has a level of its own: what is in it is said by us, once."""
    logger = logging.getLogger(name)
    nowhere, before = logging.NullHandler(), logger.propagate
    logger.addHandler(nowhere)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(nowhere)


@contextmanager
def _forwarded(folder: Path) -> Iterator[list[int]]:
    """Signals that ask to stop go on to the workers, each once; collects them.

    The agent starts each worker in a session of its own, so a Ctrl-C at the terminal reaches the parent alone. A
    terminal that closes is a SIGTERM to them.
    """
    received: list[int] = []
    killer = threading.Timer(STOPS_AT_ONCE_S, lambda: _send(pids(folder), signal.SIGKILL))
    killer.daemon = True

    def forward(number: int, frame: FrameType | None) -> None:
        number = signal.SIGTERM if number == signal.SIGHUP else number
        received.append(number)
        workers = pids(folder)
        if not workers:
            raise SignalException("", signal.Signals(number))
        _send(workers, signal.Signals(number))
        if received.count(signal.SIGINT) == 2:
            killer.start()

    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            previous[number] = signal.signal(number, forward)
    try:
        yield received
    finally:
        killer.cancel()
        for each, own in previous.items():
            signal.signal(each, own)


def _send(workers: Sequence[int], number: signal.Signals) -> None:
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, number)


def _silent(folder: Path, error: ChildFailedError) -> Iterator[Failure]:
    """The workers that died and left no error."""
    noted = {failure.rank for failure in failures(folder)}
    for rank, one in error.failures.items():
        if rank in noted:
            continue
        how = f"killed by {signal.Signals(-one.exitcode).name}" if one.exitcode < 0 else f"exit code {one.exitcode}"
        if one.exitcode == -signal.SIGKILL:
            how += "; perhaps the system had no memory left"
        said = [line for path in folder.glob(f"*/*/{one.local_rank}/stderr.log") for line in _last_lines(path)]
        yield Failure(
            rank=rank,
            host=socket.gethostname(),
            message="\n    ".join([how, *said]),
            exit_code=PIPE_CLOSED if one.exitcode == PIPE_CLOSED else 1,
            at=float(one.timestamp),
            was_killed=one.exitcode < 0,
            is_consequence=one.exitcode == -signal.SIGTERM,  # the agent's
        )


def _last_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line for line in lines if line.strip()][-5:]


def first(noted: Sequence[Failure], silent: Sequence[Failure], received: Sequence[int]) -> Failure:
    """What ended the run: a worker that was killed or its own error, before those who lost it.

    `noted` are by time, `received` the signals that the user has sent.
    """
    own = [failure for failure in noted if not failure.is_consequence]
    if received and not own:  # some had begun to train and some had not
        return Failure(
            rank=0,
            host=socket.gethostname(),
            message=f"{signal.Signals(received[0]).name}: the processes were stopped, and nothing more was saved",
            exit_code=128 + received[0],
            at=0.0,
        )
    began = min((failure.at for failure in noted), default=float("inf"))
    hung = [one for one in silent if one.at >= began + AFTERWARDS_S]
    killed = [one for one in silent if not one.is_consequence and one not in hung]
    cause = [*killed, *own, *noted, *silent][0]
    if cause.is_consequence and hung:
        who = ", ".join(f"rank {one.rank} on {one.host}" for one in hung)
        return replace(cause, message=f"{cause.message}\n  did not end by itself, and was killed: {who}")
    return cause
