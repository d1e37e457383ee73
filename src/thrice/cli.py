"""The command line: parse, call, and turn what went wrong into a message and an exit code.

Modules that need torch are imported by the command that uses them: `thrice --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from thrice.errors import Interrupted, ThriceError, UsageError, VerificationFailed
from thrice.spec.load import parse_flags
from thrice.spec.read import starter

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
  thrice init [FILE]                      write a commented starter file (default thrice.toml)

  --KEY VALUE   any key of the file: --max_steps 30, --max-steps 30, --precision bf16, --decoder.layers 6
  --json        machine-readable output (verify, train --dry-run)
  --debug       the full traceback when something fails
  --help, --version

exit codes: 0 done · 2 usage or config · 3 infeasible · 4 verification failed · 5 data or a file ·
6 out of memory · 130 interrupted (143 by SIGTERM) · 1 anything else, a run that diverged included
"""

SWITCHES = {
    "train": {"--resume", "--dry-run", "--print-config", "--trace", "--json", "--debug"},
    "verify": {"--json", "--debug"},
    "init": {"--debug"},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or "--help" in arguments or "-h" in arguments or arguments[0] == "help":
        print(HELP, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"thrice {version('thrice')}")
        return 0
    debug = "--debug" in arguments
    try:
        _dispatch(arguments)
        sys.stdout.flush()
    except ThriceError as error:
        return _failed(error, debug)
    except KeyboardInterrupt:
        return _failed(Interrupted("interrupted before a step was finished; nothing was lost"), debug)
    except BrokenPipeError:  # the reader of our output has gone: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _dispatch(arguments: list[str]) -> None:
    command, *rest = arguments
    if command not in SWITCHES:
        known = ", ".join(SWITCHES)
        raise UsageError(f"{command!r} is not a command\n  there are: {known}; see thrice --help")
    switches = {word for word in rest if word in SWITCHES[command]}
    rest = [word for word in rest if word not in switches]
    file = rest.pop(0) if rest and not rest[0].startswith("-") else None
    if command == "init":
        _init(file, rest)
    elif command == "verify":
        _verify(file, parse_flags(rest), switches)
    else:
        _train(file, parse_flags(rest), switches)


def _train(file: str | None, overrides: list[tuple[str, str]], switches: set[str]) -> None:
    from thrice.job_file import load_job
    from thrice.spec.dump import dump

    if file is None and "--resume" in switches:
        file = _job_of_run(overrides)
    job = load_job(file, overrides)
    if "--print-config" in switches:
        print(dump(job), end="")
        return
    if "--dry-run" in switches:
        from thrice.report.terminal import dry_run, dry_run_dict, dry_run_lines

        dry = dry_run(job)
        print(json.dumps(dry_run_dict(dry), indent=1) if "--json" in switches else "\n".join(dry_run_lines(dry)))
        return
    from thrice.diagnose import explained
    from thrice.train import train

    with explained(job):
        outcome = train(job, resume="--resume" in switches, trace="--trace" in switches, say=_say)
    validation = "none held out" if outcome.validation_loss is None else f"{outcome.validation_loss:.4f}"
    print(f"\ndone       {outcome.steps} steps · validation loss {validation} · {outcome.run_dir}")
    print(f"\na sample of what it writes:\n{outcome.sample}")


def _verify(file: str | None, overrides: list[tuple[str, str]], switches: set[str]) -> None:
    from thrice.data.load import load_data
    from thrice.diagnose import explained
    from thrice.job_file import load_job
    from thrice.report.terminal import certificate_table
    from thrice.verify import verify

    steps = [value for key, value in overrides if key == "steps"] or ["4"]
    if not steps[-1].isdigit() or int(steps[-1]) < 1:
        raise UsageError(f"--steps {steps[-1]}: a whole number of optimizer steps is wanted, 1 or more")
    job = load_job(file, [pair for pair in overrides if pair[0] != "steps"])
    with explained(job):
        certificate = verify(job, load_data(job), steps=int(steps[-1]))
    if "--json" in switches:
        print(json.dumps(certificate.as_dict(), indent=1))
    else:
        certificate_table(certificate)
    first = certificate.first_difference
    if first is not None:
        raise VerificationFailed(
            f"this is not the training it claims to be ({certificate.claim})\n"
            f"  first difference: step {first.step}, {first.kind} {first.tensor}: deviation {first.deviation:.3e}, "
            f"allowed {first.allowed:.3e}\n  at {first.where}"
        )
    if "--json" not in switches:
        print(f"verified: {certificate.claim} holds over {certificate.steps} steps")


def _init(file: str | None, rest: list[str]) -> None:
    if rest:
        raise UsageError(f"init takes a file name and nothing else, not {' '.join(rest)}")
    path = Path(file or "thrice.toml")
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
    folder = ([value for key, value in overrides if key == "run_dir"] or ["runs/quickstart"])[-1]
    job = Path(folder) / "job.toml"
    return str(job) if job.is_file() else None


def _say(line: str) -> None:
    print(line, flush=True)


def _failed(error: ThriceError, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    sys.stdout.flush()
    print(f"thrice: {error}", file=sys.stderr)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
