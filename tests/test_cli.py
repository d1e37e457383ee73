"""The command line: what is typed, what is shown, the exit code; and that nothing is lost whatever is wrong."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import thrice.train
import thrice.verify
from runs import exit_code, forked, metrics, saved_steps, tiny
from thrice.cli import main
from thrice.job_file import load_job
from thrice.spec.dump import dump
from thrice.spec.job import Checkpoint, Decoder
from thrice.spec.read import starter

pytestmark = pytest.mark.usefixtures("one_thread", "short_sample")


@pytest.fixture
def file(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's file in the working folder, its run to be kept beside it."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(dump(tiny(corpus, tmp_path / "run", max_steps=2, micro_batch=48)))
    return path


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, *arguments], env=environment, text=True, check=False, **options)


# help, version, init


def test_help_waits_for_no_torch() -> None:
    """That is what makes it answer in a fraction of a second."""
    code = (
        "import sys; from thrice.cli import main; codes = [main(['--help']), main(['train', '-h']), main([]), "
        "main(['--version']), main(['trian'])]; print(codes, {'torch', 'numpy', 'rich'} & set(sys.modules))"
    )
    done = python("-c", code, capture_output=True)
    assert done.stdout.splitlines()[-1] == "[0, 0, 2, 0, 2] set()"
    assert done.stdout.count("thrice train [FILE]") == 3
    assert "did you mean thrice train?" in done.stderr


def test_every_switch_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    said = capsys.readouterr().out
    for switch in set().union(*thrice.cli.SWITCHES.values()):
        assert switch in said


def test_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    assert "thrice.toml written; now: thrice train thrice.toml" in capsys.readouterr().out
    assert (tmp_path / "thrice.toml").read_text() == starter()
    (tmp_path / "thrice.toml").write_text("mine")
    assert main(["init"]) == 2
    assert "is there already, and is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "thrice.toml").read_text() == "mine"
    assert main(["init", "other.yaml"]) == 2
    assert main(["init", "no/such/folder.toml"]) == 2
    assert main(["init", "a.toml", "b.toml"]) == 2
    assert os.listdir(tmp_path) == ["thrice.toml"]


# train


def test_train_and_resume(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), "--max-steps", "1", "--trace"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for line in (
        "\nmodel      decoder · ",
        "\nbatch      global_batch 48 = micro_batch 48 × grad_accum_steps 1 × data_parallel 1 · 1,536 tokens per step",
        "\n   step     loss        lr grad_norm     tok/s   mfu mem(%) eta\n",
        "\n      1   5.",
        "\nclaim      BITWISE: ",
        "\ndone       1 steps · validation loss 5.",
        "\na sample of what it writes:\n",
    ):
        assert line in "\n" + out
    assert (tmp_path / "run/trace.json").is_file()
    # without a file, a run goes on with its own; a flag says what is new
    assert main(["train", "--resume", "--run_dir", str(tmp_path / "run"), "--max_steps", "3"]) == 0
    assert "resume     changed max_steps: saved 1, now 3" in capsys.readouterr().out
    assert [row["step"] for row in metrics(tmp_path / "run") if "loss" in row] == [1, 2, 3]
    # and a run that is there is not overwritten
    before = tree(tmp_path / "run")
    assert main(["train", str(file)]) == 2
    assert "--resume goes on with the run that is there; another --run_dir keeps both" in capsys.readouterr().err
    assert tree(tmp_path / "run") == before


@pytest.mark.parametrize(
    "flags",
    [
        ["--max_steps", "1", "--checkpoint.keep_last", "1"],
        ["--max-steps", "1", "--checkpoint.keep-last", "1"],
        ["--max_steps=1", "--checkpoint.keep-last=1"],
    ],
)
def test_both_spellings(flags: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), *flags, "--print_config"]) == 0
    said = capsys.readouterr().out
    assert "max_steps = 1\n" in said
    assert "keep_last = 1\n" in said


def test_print_config_comes_back(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--precision",
        "fp16",
        "--precision.initial_scale",
        "64",
        "--recompute",
        "every_k",
        "--optimizer.clip",
        "none",
    ]
    assert main(["train", str(file), *flags, "--print-config"]) == 0
    printed = capsys.readouterr().out
    again = tmp_path / "again.toml"
    again.write_text(printed)
    pairs = [(key.removeprefix("--"), value) for key, value in zip(flags[::2], flags[1::2], strict=True)]
    assert load_job(again) == load_job(file, pairs)
    assert main(["train", str(again), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_run_dir_is_named_after_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(starter())
    assert load_job(path).run_dir == "runs/mine"
    assert load_job().run_dir == "runs/quickstart"


# --dry-run


def test_dry_run_writes_nothing(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("THRICE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    before = tree(tmp_path)
    assert main(["train", str(file), "--dry-run"]) == 0
    assert tree(tmp_path) == before
    said = capsys.readouterr().out
    assert said.endswith("\nnothing was started\n")
    lines = {line[:10].strip(): line[11:] for line in said.splitlines()}
    assert lines["batch"].startswith("global_batch 48 = micro_batch 48 × grad_accum_steps 1 × data_parallel 1")
    assert "of tensors at the peak of a step" in lines["memory"]
    for category in ("parameters", "optimizer_states", "activations"):
        assert category in lines["memory"]
    assert lines["claim"].startswith("BITWISE")
    assert "283 samples to train on, 5 held out (to be tokenised first, once)" in lines["data"]
    assert lines["run"].endswith("run would be made")


def test_dry_run_says_what_train_will(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), "--dry-run", "--json"]) == 0
    dry = json.loads(capsys.readouterr().out)
    assert sum(dry["at_peak_bytes"].values()) == dry["peak_bytes"] > 0
    assert main(["train", str(file), "--trace"]) == 0
    record = json.loads((tmp_path / "run/record.json").read_text())
    assert dry["ledger"] == record["applied"]["ledger"]
    assert dry["claim"] == record["applied"]["claim"]
    assert dry["parameters"] == record["applied"]["parameters"]
    assert dry["tokens"] == record["applied"]["corpus"]["tokens"]
    assert dry["step_flops"] == sum(json.loads((tmp_path / "run/trace.json").read_text())["flops_by_phase"].values())
    capsys.readouterr()
    assert main(["train", str(file), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "EXISTS: --resume goes on with it, and without that a run refuses" in said
    assert "(tokenised already)" in said


# verify


def test_verify(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(tmp_path)
    assert main(["verify", str(file), "--steps", "2", "--micro_batch", "24"]) == 0
    out, err = capsys.readouterr()
    assert "verified: ROUNDING holds over 2 steps" in out
    for word in ("sample_ids", "loss", "grad_norm", "gradient", "parameter", "noise", "allowed"):
        assert word in out
    assert err == ""
    assert main(["verify", str(file), "--steps", "1", "--json"]) == 0
    certificate = json.loads(capsys.readouterr().out)
    assert certificate["ok"] is True
    assert certificate["claim"] == "BITWISE"
    assert certificate["first_difference"] is None
    assert tree(tmp_path) == before, "it proves, and leaves nothing behind"


@pytest.mark.parametrize("json_", [False, True])
def test_verify_fails(
    json_: bool, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planted fault: the last micro-batch of each window is dropped."""
    plain = thrice.verify.train_step
    monkeypatch.setattr(thrice.verify, "train_step", lambda session, window: plain(session, window[:-1]))
    assert main(["verify", str(file), "--steps", "1", "--micro_batch", "24", *(["--json"] if json_ else [])]) == 4
    out, err = capsys.readouterr()
    assert err.startswith(
        "thrice: this is not the training it claims to be (ROUNDING)\n  first difference: step 1, loss"
    )
    assert "verified" not in out
    if json_:
        certificate = json.loads(out)
        assert certificate["ok"] is False
        assert certificate["first_difference"]["kind"] == "loss"
    else:
        assert "DIFFERS" in out


# bad input


BAD_WORDS = {
    "no command": (["trian"], "'trian' is not a command\n  did you mean thrice train? there are: train, verify,"),
    "no such file": (["train", "jobb.toml"], "jobb.toml: there is no such file\n    → did you mean job.toml?"),
    "a folder": (["train", "."], ". is a folder, and a job is a file"),
    "file after flags": (["train", "--seed", "1", "job.toml"], "FILE comes before the flags: thrice train FILE --KEY"),
    "two values": (["train", "--data", "a.txt", "b.txt"], "joined by commas: --data a.txt,b.txt"),
    "a misspelt switch": (["train", "job.toml", "--dryrun"], "there is no such switch\n  did you mean --dry-run?"),
    "another's switch": (["verify", "job.toml", "--resume"], "--resume: verify has no such switch\n  it has: --debug"),
    "no value": (["train", "job.toml", "--seed"], "--seed: it has no value\n    → write --seed VALUE"),
    "two things to do": (["train", "a.toml", "--dry-run", "--print-config"], "--dry-run and --print-config: they are"),
    "trace of no run": (["train", "job.toml", "--dry-run", "--trace"], "--dry-run and --trace: they are"),
    "json of a run": (["train", "job.toml", "--json"], "--json: train prints a log; only --dry-run has"),
    "steps": (["verify", "job.toml", "--steps", "0"], "--steps 0: a whole number of optimizer steps is wanted"),
    "odd steps": (["verify", "job.toml", "--steps", "²"], "--steps ²: a whole number of optimizer steps is wanted"),
    "an unknown key": (["train", "job.toml", "--zorro", "1"], "zorro = '1'"),
    "a foreign key": (["train", "job.toml", "--per_device_train_batch_size", "8"], "micro_batch"),
    "an unknown technique": (["train", "job.toml", "--offload", "2"], "offload = '2'"),
    "a technique's mode": (["train", "job.toml", "--precision", "bf16-mixed"], '--precision.mode bf16'),
    "no divisor": (["train", "job.toml", "--micro_batch", "7"], "global_batch = 48: it does not divide by"),
    "positions": (["train", "job.toml", "--decoder.max_positions", "16"], "sequence = 32: the model has 16 positions"),
    "vocabulary": (["train", "job.toml", "--decoder.vocabulary", "10"], 'vocabulary = 10: the tokenizer "byte" has'),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_WORDS)
def test_bad_words(case: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = BAD_WORDS[case]
    before = tree(tmp_path)
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith("thrice: ")
    assert message in err
    assert out == ""
    assert "Traceback" not in err
    assert tree(tmp_path) == before


def test_every_problem_at_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--lr", "-1", "--sequence", "0", "--decoder.dropout", "1.5", "--log_every", "x", "--colour", "blue"]
    assert main(["train", str(file), *flags]) == 2
    err = capsys.readouterr().err
    assert "5 problems" in err
    for key in ("lr = -1.0", "sequence = 0", "decoder.dropout = 1.5", "log_every = 'x'", "colour = 'blue'"):
        assert f"\n  {key}: " in err


def _files(folder: Path) -> dict[str, str]:
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("too short")
    (folder / "junk.bin").write_bytes(os.urandom(1000) + b"\0\xff")
    (folder / "latin1.txt").write_bytes("é".encode("latin1") * 300)
    return {
        "missing.txt": "missing.txt: no such file or folder",
        "*.md": "matches no file",
        "empty.txt": "the corpus is empty",
        "short.txt": "the data is too short: it has 10 tokens; one sample of sequence = 32 takes 33",
        "junk.bin": "not text",
        "latin1.txt": "not UTF-8 text: byte 0 is 0xe9",
    }


READ_THROUGH = ["junk.bin", "latin1.txt"]
"""Found out only where the files are read."""
FOUND_AT_ONCE = ["missing.txt", "*.md", "empty.txt", "short.txt"]


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, name) for command in ("train", "verify") for name in (*FOUND_AT_ONCE, *READ_THROUGH)]
    + [("train --dry-run", name) for name in FOUND_AT_ONCE],
)
def test_bad_data(command: str, name: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = _files(tmp_path)
    verb, *switches = command.split()
    before = tree(tmp_path)
    assert main([verb, str(file), *switches, "--data", name]) == 5
    out, err = capsys.readouterr()
    assert err.startswith("thrice: ")
    assert messages[name] in err
    assert "→" in err
    assert out == ""
    assert "Traceback" not in err
    assert tree(tmp_path) == before


def test_impossible_run_dir(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), "--run_dir", str(file)]) == 5
    assert "cannot be made" in capsys.readouterr().err
    assert main(["train", str(file), "--run_dir", "x" * 300]) == 5
    assert "File name too long" in capsys.readouterr().err


def test_damaged_checkpoints(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file)]) == 0
    weights = tmp_path / "run/checkpoints/step-00000002/weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    before = tree(tmp_path)
    capsys.readouterr()
    assert main(["train", str(file), "--resume", "--max_steps", "3"]) == 5
    out, err = capsys.readouterr()
    assert "resume     rejected" in out
    assert "weights.safetensors has" in out
    assert "nothing was changed" in err
    assert tree(tmp_path) == before


# what ends it from outside


def test_interrupted_before_the_first_step(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path)
    monkeypatch.setattr(thrice.train, "load_data", lambda job: signal.raise_signal(signal.SIGINT))
    assert main(["train", str(file)]) == 130
    assert capsys.readouterr().err == "thrice: interrupted before any step; nothing was lost\n"
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_reach_the_exit_code(number: signal.Signals, code: int, file: Path, tmp_path: Path) -> None:
    """A child that signals itself in its first step: it finishes that, saves, and says so."""
    plain = thrice.train.train_step

    def act() -> int:
        def signalled(session, window):
            os.kill(os.getpid(), number)
            return plain(session, window)

        thrice.train.train_step = signalled
        return main(["train", str(file)])

    assert exit_code(forked(act, tmp_path / "output")) == code
    said = (tmp_path / "output").read_text()
    assert f"thrice: {number.name} after step 1: the step was finished and saved\n  --resume goes on from it" in said
    assert "Traceback" not in said
    assert saved_steps(tmp_path / "run") == [1]
    assert main(["train", str(file), "--resume"]) == 0
    assert saved_steps(tmp_path / "run") == [1, 2]


@pytest.mark.parametrize("command", ["--help", "init"])
def test_closed_pipe_is_quiet(command: str, tmp_path: Path) -> None:
    """As in `thrice … | head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    done = python("-m", "thrice.cli", command, stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path)
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


def test_closed_pipe_in_training_loses_no_step(file: Path, tmp_path: Path) -> None:
    def act() -> int:
        reader, writer = os.pipe()
        sys.stdout = os.fdopen(writer, "w")
        plain = thrice.train.train_step

        def closing(session, window):
            os.close(reader)
            return plain(session, window)

        thrice.train.train_step = closing
        return main(["train", str(file)])

    assert exit_code(forked(act, tmp_path / "output")) == 141
    assert (tmp_path / "output").read_text() == ""
    assert saved_steps(tmp_path / "run") == [1]


def test_what_was_not_foreseen(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(job):
        return {}["what"]

    monkeypatch.setattr(thrice.train, "load_data", broken)
    assert main(["train", str(file)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("thrice: KeyError: 'what'\n  at ")
    assert "test_cli.py:" in err
    assert "Traceback" not in err
    assert main(["train", str(file), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_debug_shows_the_traceback_of_an_error_of_ours(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), "--data", "missing.txt", "--debug"]) == 5
    assert "Traceback" in capsys.readouterr().err


def test_a_terminal_without_the_signs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["train", str(file), "--dry-run"]) == 0
    assert b"global_batch 48 = micro_batch 48 ? grad_accum_steps 1" in raw.getvalue()


def test_every_field_is_used_or_refused(file: Path, tmp_path: Path) -> None:
    """DeepSpeed#653: a misspelt section was silently ignored. Of ours, each field that is set is in the run."""
    assert main(["train", str(file), "--checkpoint.every_steps", "1", "--checkpoint.keep_last", "1"]) == 0
    assert saved_steps(tmp_path / "run") == [2]
    job = load_job(tmp_path / "run/job.toml")
    assert job.checkpoint == Checkpoint(every_steps=1, keep_last=1)
    assert job.decoder == Decoder(layers=2, hidden=32, heads=2, dropout=0.1)
