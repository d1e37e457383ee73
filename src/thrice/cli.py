"""The command line: parse, call, and turn what went wrong into a message and an exit code.

Modules that need torch are imported by the command that uses them: `thrice --help` answers at once.
"""

from __future__ import annotations

import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from thrice import worker
from thrice.errors import (
    PIPE_CLOSED,
    ConfigError,
    Interrupted,
    LostPeer,
    ThriceError,
    UsageError,
    VerificationFailed,
    unforeseen,
)
from thrice.spec.load import parse_flags, schema
from thrice.spec.read import starter

if TYPE_CHECKING:
    from thrice.certificate import Certificate
    from thrice.runtime.dist import World
    from thrice.spec.job import Job

T = TypeVar("T")

HELP = """\
thrice: train large models on the hardware you have, with proof that it is the same training

  thrice train [FILE] [--KEY VALUE …]     train what FILE (TOML or YAML) asks for; without a file, the
                                          built-in quickstart
      --resume                            go on from the run folder's latest valid checkpoint
      --dry-run                           show everything that would happen, and start nothing
      --print-config                      print the file that reproduces the run, and start nothing
      --trace                             write bytes by category and FLOPs of one step to trace.json
  thrice verify [FILE] [--KEY VALUE …]    prove that the run computes what a plain loop computes
      --steps N                           optimizer steps to compare (default 4)
  thrice compare [FILE] --vary KEY=A,B …  train FILE once for each value (several --vary: each combination) and
                                          set the runs side by side: a table, compare.json, report.html
      --seeds K                           each variant with K seeds: what another seed changes is the yardstick
      --out DIR                           where the runs are kept (default runs/compare-NAME)
      --skip-refused                      leave out combinations that cannot be, with their reasons
      --resume                            reuse the runs that are done, go on with the others
      --dry-run                           check and list the runs, and start none
  thrice launch [FILE] --emit KIND        print the job file that trains FILE on several machines; KIND is slurm,
                                          kubernetes or skypilot
      --nodes M                           machines (default 1), each with its share of the processes
  thrice init [FILE]                      write a commented starter file (default thrice.toml)

  With processes = N, train and verify start N processes here, or join those of torchrun or srun (docs/processes.md).

  --KEY VALUE   any key of the file: --max_steps 30, --max-steps 30, --precision bf16, --decoder.layers 6
  --json        machine-readable output (verify, compare, and train with --dry-run)
  --debug       the full traceback when something fails
  --help, --version

exit codes: 0 done · 2 usage or config · 3 infeasible · 4 verification failed · 5 data or a file ·
6 out of memory · 130 interrupted (143 by SIGTERM) · 1 anything else, a run that diverged included
"""

SWITCHES = {
    "train": {"--resume", "--dry-run", "--print-config", "--trace", "--json", "--debug"},
    "verify": {"--json", "--debug"},
    "compare": {"--resume", "--skip-refused", "--dry-run", "--json", "--debug"},
    "launch": {"--debug"},
    "init": {"--debug"},
}

COMPARE_FLAGS = ("vary", "seeds", "out")
"""Of compare, beside the keys of the file."""

SPIN_COUNT = "20000"
"""How long a thread of a parallel region spins before it sleeps. OpenMP's own 15 times as long makes training several
times slower as soon as another program wants one of the cores (docs/log.md)."""

HEARD_FIRST_S = 2.0
"""How long a process waits with what others say as well: a launcher ends it meanwhile, once one has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    code = _main(list(sys.argv[1:] if argv is None else argv))
    if argv is None and code and worker.is_one():
        # a process group that was left in the midst has threads, and the interpreter's end aborts on them at times
        # ("terminate called without an active exception"), which would be the exit code
        sys.stderr.flush()
        os._exit(code)
    return code


def _main(arguments: list[str]) -> int:
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is imported, which has not happened yet
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sign that the terminal lacks ends no run
    try:
        try:
            code = _dispatch(arguments)
        except ThriceError as error:
            code = _failed(error, arguments)
        except KeyboardInterrupt:
            code = _failed(Interrupted("interrupted before any step; nothing was lost"), arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        return _failed(unforeseen(error), arguments, error)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or "--help" in arguments or "-h" in arguments or arguments[0] == "help":
        print(HELP, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"thrice {_version()}")
        return 0
    command, *words = arguments
    if command not in SWITCHES:
        near = get_close_matches(command, SWITCHES, n=1)
        meant = f"did you mean thrice {near[0]}? " if near else ""
        raise UsageError(f"{command!r} is not a command\n  {meant}there are: {', '.join(SWITCHES)}; see thrice --help")
    file, rest, switches = _sorted_out(command, words)
    if command == "init":
        _init(file, rest)
    elif command == "verify":
        _verify(file, parse_flags(rest), switches, arguments)
    elif command == "compare":
        _compare(file, parse_flags(rest), switches)
    elif command == "launch":
        _launch(file, parse_flags(rest))
    else:
        _train(file, parse_flags(rest), switches, arguments)
    return 0


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("thrice")
    except PackageNotFoundError:
        return "(from a source folder, not installed)"


def _sorted_out(command: str, words: list[str]) -> tuple[str | None, list[str], set[str]]:
    """(FILE, the flags with their values, the switches). Raises UsageError for a word that is none of these."""
    everywhere = set().union(*SWITCHES.values())
    switches: set[str] = set()
    rest: list[str] = []
    for word, after in pairwise([*words, "--"]):
        name = word.replace("_", "-")
        near = get_close_matches(name, SWITCHES[command], n=1, cutoff=0.8)
        if name in SWITCHES[command]:
            switches.add(name)
        elif name in everywhere:
            raise UsageError(f"{word}: {command} has no such switch\n  it has: {', '.join(sorted(SWITCHES[command]))}")
        elif word.startswith("--") and "=" not in word and after.startswith("--") and near:
            raise UsageError(f"{word}: there is no such switch\n  did you mean {near[0]}?")
        else:
            rest.append(word)
    file = rest.pop(0) if rest and not rest[0].startswith("-") else None
    for before, word in pairwise(["", *rest]):
        if not word.startswith("-") and (not before.startswith("--") or "=" in before):
            raise UsageError(
                f"{word!r}: a --KEY was expected here\n"
                f"  FILE comes before the flags: thrice {command} FILE --KEY VALUE; several values of one key are "
                "joined by commas: --data a.txt,b.txt"
            )
    return file, rest, switches


def _train(file: str | None, overrides: list[tuple[str, str]], switches: set[str], arguments: list[str]) -> None:
    from thrice.job_file import load_job
    from thrice.spec.dump import dump

    if len(ends := sorted(switches & {"--dry-run", "--print-config", "--trace"})) > 1:
        raise UsageError(f"{' and '.join(ends)}: they are different things to do, and train does one\n  keep one")
    if "--json" in switches and "--dry-run" not in switches:
        raise UsageError(
            "--json: train prints a log; only --dry-run has a machine-readable form\n"
            "  a run's numbers are in its folder: metrics.jsonl, a line for each step, and record.json"
        )
    resume = "--resume" in switches
    if file is None and resume:
        file = _job_of_run(overrides)
    job = load_job(file, overrides)
    if switches & {"--dry-run", "--print-config"} and worker.ranks()[0]:
        return  # that needs no processes, and rank 0 has answered
    if "--print-config" in switches:
        print(dump(job), end="")
        return
    from thrice.micro_batch import settled

    saved = _saved_job(job.run_dir) if resume else None
    if "--dry-run" in switches:
        from thrice.report.terminal import as_json, dry_run, dry_run_dict, dry_run_lines

        job = settled(job, saved=saved, measure=False, say=_say_aside)
        found = dry_run(job)
        print(as_json(dry_run_dict(found)) if "--json" in switches else "\n".join(dry_run_lines(found)))
        return
    from thrice.diagnose import explained
    from thrice.report.terminal import printable
    from thrice.train import train

    def act(world: World) -> None:
        chosen = _by_rank_0(world, lambda: settled(job, saved=saved, say=_say))
        trace = "--trace" in switches
        outcome = explained(
            chosen, lambda: train(chosen, resume=resume, trace=trace, say=_say, world=world), resuming=resume
        )
        if world.rank == 0:
            validation = "none held out" if outcome.validation_loss is None else f"{outcome.validation_loss:.4f}"
            print(f"\ndone       {outcome.steps} steps · validation loss {validation} · {outcome.run_dir}")
            print(f"\na sample of what it writes:\n{printable(outcome.sample)}")

    _in_processes(job, arguments, act)


def _in_processes(job: Job, arguments: list[str], act: Callable[[World], None]) -> None:
    """Calls `act` with the world of the job's processes: joined where a launcher has started them, or started here.

    Those that are started here run this same command again, and come back here.
    """
    from thrice.runtime.dist import joined, place

    here = place()
    if here is None and job.processes > 1:
        from thrice.launch import launch

        _must_be_legal(job)
        launch(arguments, job, say=_say_aside)
        return
    rank = 0 if here is None else here.rank
    worker.begin(rank)

    def failed(error: Exception) -> None:
        worker.note(rank, error if isinstance(error, ThriceError) else unforeseen(error))

    with joined(job.processes, timeout_s=job.launch.timeout_s, here=here, failed=failed) as world:
        world.agree(job)
        act(world)


def _must_be_legal(job: Job) -> None:
    """What can be known is said before any process starts; an open micro_batch is rank 0's to choose."""
    from thrice.compose import refuse

    if job.micro_batch != "auto" and (problems := list(refuse(job))):
        raise ConfigError(problems)


def _by_rank_0(world: World, act: Callable[[], T]) -> T:
    """What `act` returns on rank 0, on every rank. What it raises there ends the others too, which wait for it."""
    value: T | None = None
    failed: ThriceError | None = None
    if world.rank == 0:
        try:
            value = act()
        except ThriceError as error:
            failed = error
    if failed is not None:
        world.broadcast((None, (str(failed), failed.exit_code)))
        raise failed
    value, told = world.broadcast((value, None))
    if told is not None:
        raise worker.Told(*told)
    assert value is not None
    return value


def _verify(file: str | None, overrides: list[tuple[str, str]], switches: set[str], arguments: list[str]) -> None:
    from thrice.diagnose import explained
    from thrice.job_file import load_job
    from thrice.micro_batch import settled
    from thrice.train import load_data_in_turn
    from thrice.verify import verify

    given = [value for key, value in overrides if key == "steps"] or ["4"]
    if not given[-1].isdecimal() or int(given[-1]) < 1:
        raise UsageError(f"--steps {given[-1]}: a whole number of optimizer steps is wanted, 1 or more")
    job = load_job(file, [pair for pair in overrides if pair[0] != "steps"])

    def act(world: World) -> None:
        chosen = _by_rank_0(world, lambda: settled(job, say=_say_aside))
        data = load_data_in_turn(chosen, world)
        certificate = explained(chosen, lambda: verify(chosen, data, steps=int(given[-1]), world=world))
        _shown(certificate, is_json="--json" in switches, speaks=world.rank == 0)
        world.barrier()  # a launcher ends rank 0 once another has failed
        _must_hold(certificate)
        if world.rank == 0 and "--json" not in switches:
            print(f"verified: {certificate.claim} holds over {certificate.steps} steps")

    _in_processes(job, arguments, act)


def _shown(certificate: Certificate, *, is_json: bool, speaks: bool) -> None:
    from thrice.report.terminal import as_json, certificate_table

    if speaks and is_json:
        print(as_json(certificate.as_dict()), flush=True)
    elif speaks:
        certificate_table(certificate)


def _must_hold(certificate: Certificate) -> None:
    first = certificate.first_difference
    if first is not None:
        raise VerificationFailed(
            f"this is not the training it claims to be ({certificate.claim})\n"
            f"  first difference: step {first.step}, {first.kind} {first.tensor}: deviation {first.deviation:.3e}, "
            f"allowed {first.allowed:.3e}\n  at {first.where}"
        )


def _compare(file: str | None, flags: list[tuple[str, str]], switches: set[str]) -> None:
    from thrice.compare import run
    from thrice.experiment import KNOWN, expand
    from thrice.files import write_whole
    from thrice.report.comparison import comparison_dict, comparison_table, plan_dict, plan_lines
    from thrice.report.html import page
    from thrice.report.terminal import as_json
    from thrice.runtime.dist import place

    if place() is not None:
        raise UsageError("compare starts the processes of each run itself\n  start it without torchrun or srun")
    known = schema(KNOWN).hints
    for key, _ in flags:
        near = get_close_matches(key, COMPARE_FLAGS, n=1, cutoff=0.8)
        if near and key not in COMPARE_FLAGS and key not in known:
            raise UsageError(f"--{key}: there is no such key\n  did you mean --{near[0]}?")
    own = {key: [value for name, value in flags if name == key] for key in ("vary", "out")}
    experiment = expand(
        file,
        [("compare.seeds" if key == "seeds" else key, value) for key, value in flags if key not in own],
        vary=own["vary"],
        out=own["out"][-1] if own["out"] else None,
        skip_refused="--skip-refused" in switches,
    )
    as_data = "--json" in switches
    if "--dry-run" in switches:
        print(as_json(plan_dict(experiment)) if as_data else "\n".join(plan_lines(experiment)))
        return
    comparison = run(experiment, resume="--resume" in switches, say=_say_aside if as_data else _say)
    data = as_json(comparison_dict(comparison))
    write_whole(experiment.out / "compare.json", data + "\n")
    write_whole(experiment.out / "report.html", page(comparison))
    if as_data:
        print(data)
    else:
        comparison_table(comparison)
        print(f"\n{experiment.out / 'report.html'} has the curves, {experiment.out / 'compare.json'} everything")
    if failed := comparison.failed():
        runs = sum(len(summary.runs) for summary in comparison.summaries)
        raise ThriceError(
            f"{len(failed)} of {runs} runs failed; the others are kept and compared\n"
            "  what each printed is in its .log; --resume tries the failed ones again"
        )


def _launch(file: str | None, flags: list[tuple[str, str]]) -> None:
    from thrice.cluster import KINDS, emit
    from thrice.job_file import load_job

    own = dict(pair for pair in flags if pair[0] in ("emit", "nodes"))
    overrides = [pair for pair in flags if pair[0] not in own]
    if "emit" not in own:
        raise UsageError(f"launch prints a job file: --emit {', '.join(KINDS)}\n  here, thrice train starts processes")
    nodes = own.get("nodes", "1")
    if not re.fullmatch("[1-9][0-9]*", nodes):
        raise UsageError(f"--nodes {nodes}: a whole number of machines is wanted, 1 or more")
    job = load_job(file, overrides)
    _must_be_legal(job)
    given = [f"--{key}={value}" for key, value in overrides if key != "processes"]
    print(emit(own["emit"], job, [*([file] if file else []), *given], int(nodes)), end="")


def _init(file: str | None, rest: list[str]) -> None:
    if rest:
        raise UsageError(f"init takes a file name and nothing else, not {' '.join(rest)}")
    path = Path(file or "thrice.toml")
    if path.suffix != ".toml":
        raise UsageError(
            f"{path}: what init writes is TOML, and train goes by the name\n  thrice init {path.stem}.toml"
        )
    try:
        with path.open("x", encoding="utf-8") as target:
            target.write(starter())
    except FileExistsError:
        raise UsageError(f"{path} is there already, and is not overwritten\n  thrice init ANOTHER.toml") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    print(f"{path} written; now: thrice train {path}")


def _job_of_run(overrides: list[tuple[str, str]]) -> str | None:
    """A run that goes on without a file goes on with its own."""
    return _saved_job(([value for key, value in overrides if key == "run_dir"] or ["runs/quickstart"])[-1])


def _saved_job(run_dir: str | None) -> str | None:
    job = Path(run_dir or "runs/run").expanduser() / "job.toml"
    return str(job) if job.is_file() else None


def _say(line: str) -> None:
    print(line, flush=True)


def _say_aside(line: str) -> None:
    """Beside an output that may be read by a program."""
    print(line, file=sys.stderr, flush=True)


def _failed(error: ThriceError, arguments: Sequence[str], cause: Exception | None = None) -> int:
    sys.stdout.flush()
    if "--debug" in arguments:
        traceback.print_exception(cause or error)
    rank, local_rank = worker.ranks()
    if worker.is_launched():
        worker.note(rank, error)  # the parent says it, once
    elif not rank:
        print(f"thrice: {error}", file=sys.stderr)
    else:
        is_alike = isinstance(error, Interrupted | VerificationFailed | worker.Told)
        if is_alike or isinstance(error, LostPeer) or (isinstance(error, UsageError) and local_rank):
            time.sleep(HEARD_FIRST_S)
        if not is_alike:
            print(f"thrice: {worker.Failure.of(rank, error)}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
