"""Runs of several processes by the command line: how they start, how they end, and who says what."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from runs import metrics, saved_steps, tiny
from thrice.cli import main
from thrice.launch import first
from thrice.runtime.dist import World
from thrice.spec.dump import dump
from thrice.spec.job import Checkpoint, Evaluation, Job, Launch
from thrice.train import train
from thrice.worker import Failure

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
processes = pytest.mark.xdist_group("processes")

HOST = socket.gethostname()


@pytest.fixture
def job(corpus: Path, tmp_path: Path) -> Job:
    """Two processes, and no evaluation."""
    evaluation = Evaluation(every_steps=None, max_samples=2)
    return tiny(corpus, tmp_path / "run", processes=2, micro_batch=24, evaluation=evaluation)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `thrice` with the arguments and variables given; what is left of it is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def of(*arguments: str, module: str = "thrice.cli", **variables: str) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, sys.path))
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **variables},
            cwd=tmp_path,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        started.append(child)
        return child

    yield of
    for child in started:
        for pid in [*workers_of(child), child.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        child.communicate()


def written(job: Job, folder: Path) -> str:
    path = folder / "job.toml"
    path.write_text(dump(job))
    return str(path)


def workers_of(parent: subprocess.Popen[str]) -> list[int]:
    """Process ids by rank."""
    try:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    except OSError:
        return []
    ranks = {}
    for pid in children:
        rank = re.search(rb"\0RANK=(\d+)", Path(f"/proc/{pid}/environ").read_bytes())
        if rank:
            ranks[int(rank[1])] = int(pid)
    return [ranks[rank] for rank in sorted(ranks)]


def at_step(child: subprocess.Popen[str], step: int) -> None:
    """Reads what it prints until that step is taken."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.split()[:1] == [str(step)]:
            return
    raise AssertionError(child.communicate())


def no_process(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


# one machine


@processes
def test_it_goes_on_after_a_worker_is_killed(
    job: Job, tmp_path: Path, start: Callable[..., subprocess.Popen[str]], workers: Callable[[int], object]
) -> None:
    """The run ends with the losses of one that was never killed."""
    job = replace(job, max_steps=90, checkpoint=Checkpoint(every_steps=20), launch=Launch(restarts=1, timeout_s=60))
    child = start("train", written(job, tmp_path))
    at_step(child, 30)
    os.kill(workers_of(child)[1], signal.SIGKILL)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    said = out + err
    assert said.count("restart ") == 1
    assert f"restart    rank 1 on {HOST}: killed by SIGKILL" in said
    assert "restarts left: 0" in said
    assert re.search(r"resume +.*step 20", out)
    whole = replace(job, run_dir=str(tmp_path / "whole"))
    workers(2).call(trained, whole)  # type: ignore[attr-defined]
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def trained(world: World, job: Job) -> None:
    train(job, world=world)


@processes
def test_a_killed_worker_ends_all(job: Job, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    child = start("train", written(replace(job, max_steps=100_000), tmp_path))
    at_step(child, 3)
    pids = workers_of(child)
    before = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    _, err = child.communicate(timeout=60)
    assert time.monotonic() - before < 10
    assert child.returncode == 1
    assert no_process(pids)
    assert f"thrice: rank 1 on {HOST}: killed by SIGKILL; perhaps the system had no memory left\n  --resume goes" in err
    assert err.count("thrice: ") == 1
    assert "Traceback" not in err
    assert "torch.distributed" not in err
    assert f"as by: OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 1)} torchrun --standalone" in err


@processes
def test_ctrl_c(job: Job, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    """A terminal sends it to the parent's whole group; each worker has it once, for a second would stop it at once."""
    child = start("train", written(replace(job, max_steps=100_000), tmp_path))
    at_step(child, 3)
    os.killpg(child.pid, signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    step = saved_steps(tmp_path / "run")[-1]
    assert f"thrice: SIGINT after step {step}: the step was finished and saved\n  --resume goes on from it" in err
    assert err.count("thrice: ") == 1
    assert err.count("finishing this step") == 1


@processes
def test_verify(job: Job, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    out, err = start("verify", written(job, tmp_path), "--steps", "1", "--json").communicate(timeout=60)
    certificate = yaml.safe_load(out)
    assert certificate["ok"] is True, err


def test_what_is_wrong_is_said_before_a_process_starts(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("thrice.launch.launch", lambda *_, **__: pytest.fail("started"))
    file = written(job, tmp_path)
    assert main(["train", file, "--processes", "5"]) == 2
    assert capsys.readouterr().err.count("thrice: ") == 1
    assert main(["train", file, "--optimizer_in_backward", "true", "--micro_batch", "12"]) == 2
    assert capsys.readouterr().err.count("thrice: ") == 1
    assert main(["train", file, "--print-config"]) == 0
    assert "processes = 2" in capsys.readouterr().out
    assert main(["train", file, "--dry-run"]) == 0


# under a launcher


@processes
def test_the_world_is_the_one_asked_for(job: Job, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    file = written(job, tmp_path)
    here = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    alone = start("train", file, "--processes", "1", "--micro_batch", "48", **here)
    run = ("--standalone", "--nproc-per-node", "2", "-m", "thrice.cli")
    of_two = start(*run, "train", file, "--processes", "4", "--micro_batch", "12", module="torch.distributed.run")
    err = alone.communicate(timeout=60)[1]
    assert alone.returncode == 2
    assert "thrice: processes = 1: the launcher has started 2\n" in err
    err = of_two.communicate(timeout=60)[1]
    assert of_two.returncode != 0
    assert err.count("processes = 4: the launcher has started 2\n") == 1
    assert not (tmp_path / "run").exists()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def by_hand(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@processes
def test_processes_of_two_runs(job: Job, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    file, port = written(job, tmp_path), free_port()
    both = [start("train", file, "--seed", str(rank), **by_hand(rank, port)) for rank in range(2)]
    said = [child.communicate(timeout=60)[1] for child in both]
    assert [child.returncode for child in both] == [2, 2]
    assert said[0].startswith(
        "thrice: the processes are not of one run\n  the job's seed is 1 on rank 1 and 0 on rank 0"
    )
    assert said[1].startswith(f"thrice: rank 1 on {HOST}: the processes are not of one run\n")
    assert not (tmp_path / "run").exists()


@processes
def test_an_error_of_rank_0_ends_the_others(
    job: Job, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """What it alone finds, before the first step: the others wait for it, and say nothing."""
    file, port = written(replace(job, micro_batch="auto", data=("missing.txt",)), tmp_path), free_port()
    both = [start("train", file, **by_hand(rank, port)) for rank in range(2)]
    said = [child.communicate(timeout=60)[1] for child in both]
    assert [child.returncode for child in both] == [5, 5]
    assert said[0].startswith("thrice: ")
    assert "missing.txt" in said[0]
    assert said[1] == ""


@processes
def test_nobody_to_join(job: Job, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    """A port that is another's, and a rank 0 that is not there: both end in time."""
    file = written(replace(job, launch=Launch(timeout_s=3)), tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        occupied = start("train", file, **by_hand(0, taken.getsockname()[1]))
        unreachable = start("train", file, **by_hand(1, free_port()))
        for rank, child in enumerate([occupied, unreachable]):
            err = child.communicate(timeout=40)[1]
            assert child.returncode == 2, err
            assert f"rank {rank} on {HOST} could not join the others at 127.0.0.1:" in err
            assert "the port may be in use, rank 0's host unreachable, or a process not started" in err


# what is said of several failures


def failure(rank: int, at: float, **how: object) -> Failure:
    return Failure(rank=rank, host="host", message=f"of {rank}", exit_code=1, at=at, **how)  # type: ignore[arg-type]


LOST = {"is_consequence": True}
KILLED = {"was_killed": True}
ENDED_BY_AGENT = {"was_killed": True, "is_consequence": True}


@pytest.mark.parametrize(
    ("noted", "silent", "expected"),
    [
        ([failure(0, 1.0, **LOST), failure(1, 2.0)], [], 1),
        ([failure(0, 1.0), failure(1, 2.0)], [], 0),
        ([failure(0, 1.0, **LOST)], [failure(1, 1.0, **KILLED)], 1),
        ([failure(0, 1.0, **LOST)], [failure(1, 31.0, **KILLED)], 0),  # it hung, and the agent gave it up
        ([failure(1, 1.0)], [failure(0, 1.0, **ENDED_BY_AGENT)], 1),
        ([], [failure(0, 1.0, **ENDED_BY_AGENT), failure(1, 1.0, **KILLED)], 1),
        ([], [failure(1, 1.0, **ENDED_BY_AGENT)], 1),
    ],
)
def test_the_first_failure_is_the_cause(noted: list[Failure], silent: list[Failure], expected: int) -> None:
    assert first(noted, silent, []).rank == expected


def test_a_worker_that_hung_is_named() -> None:
    ended = first([failure(0, 1.0, **LOST)], [failure(1, 31.0, **KILLED)], [])
    assert ended.message == "of 0\n  did not end by itself, and was killed: rank 1 on host"


def test_a_signal_before_all_have_begun() -> None:
    ended = first([failure(0, 1.0, **LOST)], [failure(1, 1.0, **ENDED_BY_AGENT)], [signal.SIGTERM])
    assert ended.exit_code == 143
    assert ended.message.startswith("SIGTERM: ")


# several machines


def emitted(file: str, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["launch", file, *flags]) == 0
    return capsys.readouterr().out


def test_slurm(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = emitted(written(job, tmp_path), capsys, "--emit", "slurm", "--nodes", "2", "--run_dir", "a b")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    for line in ("#SBATCH --nodes=2\n", "#SBATCH --ntasks-per-node=1\n", "srun --kill-on-bad-exit=1 thrice train /"):
        assert line in script
    assert "'--run_dir=a b' --processes 2 --resume\n" in script


@pytest.mark.parametrize("kind", ["kubernetes", "skypilot"])
def test_yaml(kind: str, job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = list(
        yaml.safe_load_all(emitted(written(job, tmp_path), capsys, "--emit", kind, "--nodes=2", "--max_steps", "3"))
    )
    if kind == "kubernetes":
        service, batch = parts
        assert batch["spec"]["completions"] == batch["spec"]["parallelism"] == 2
        assert batch["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
        command = batch["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    else:
        assert parts[0]["num_nodes"] == 2
        command = parts[0]["run"]
    assert subprocess.run(["bash", "-n"], input=command, text=True, check=False).returncode == 0
    assert 'torchrun --nnodes 2 --nproc-per-node 1 --node-rank "$' in command
    assert command.endswith(" --max_steps=3 --processes 2 --resume\n")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--emit", "slurn"], "--emit slurn: there is no such job file\n  did you mean slurm? there are: slurm, kub"),
        (["--emit", "slurm", "--nodes", "3"], "--nodes 3: processes = 2 does not divide by it"),
        (["--emit", "slurm", "--nodes", "0"], "--nodes 0: a whole number of machines is wanted"),
        ([], "launch prints a job file: --emit slurm, kubernetes, skypilot"),
        (["--emit", "slurm", "--zorro", "1"], "zorro = '1'"),
    ],
)
def test_job_file_of_nothing(
    flags: list[str], expected: str, job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", written(job, tmp_path), *flags]) == 2
    assert expected in capsys.readouterr().err
