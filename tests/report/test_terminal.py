"""What the terminal shows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from runs import tiny
from thrice.certificate import Certificate, Row
from thrice.data.load import load_data
from thrice.errors import ConfigError, DataError
from thrice.report.terminal import as_json, certificate_table, dry_run, dry_run_lines, printable
from thrice.spec.job import Decoder, Optimizer
from thrice.techniques.precision import Precision


def row(kind: str, deviation: float, tensor: str = "") -> Row:
    return Row(step=1, kind=kind, tensor=tensor, deviation=deviation, floor=1e-7, allowed=4e-7, where="[0]: 1 for 2")


def test_certificate_table_shows_the_worst_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    name = "blocks.11.attention.q_projection_of_a_long_name.weight"
    rows = [row("loss", 0.0), row("gradient", 1e-8, "embedding.weight"), row("gradient", math.nan, name)]
    certificate_table(
        Certificate(
            claim="ROUNDING",
            steps=1,
            samples=[[0]],
            notes=["a [note]"],
            job="",
            torch="2",
            device="cpu",
            processes=1,
            rows=rows,
        )
    )
    said = capsys.readouterr().out
    assert "claim ROUNDING · 1 steps on cpu" in said
    assert said.count("DIFFERS") == 1
    assert "a [note]" in said, "no markup"
    assert "…" not in said, "names are folded, not cut"


def test_json_has_no_word_for_nan() -> None:
    content = {"a": [1.5, math.nan, (math.inf, "inf")], "b": {"c": -math.inf, "d": None, "e": True}}
    assert json.loads(as_json(content), parse_constant=lambda word: pytest.fail(word)) == {
        "a": [1.5, None, [None, "inf"]],
        "b": {"c": None, "d": None, "e": True},
    }


def test_what_a_model_writes_cannot_command_the_terminal() -> None:
    assert printable("a\tb\nc é 中 \x1b[31m\x07\r\x00\x9b") == "a\tb\nc é 中 �[31m����"


def test_dry_run_splits_as_a_run_does(corpus: Path, tmp_path: Path) -> None:
    job = tiny(corpus, tmp_path / "run", decoder=Decoder(layers=1, hidden=32, heads=1))
    dry = dry_run(job)
    data = load_data(job)
    assert dry.samples == (len(data.train), len(data.validation))
    assert dry.survey.tokens == len(data.store)


def test_dry_run_names_what_is_left_out(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/text.txt").write_bytes(corpus.read_bytes())
    (tmp_path / "data/image.png").write_bytes(b"\x89PNG\0\0")
    job = tiny(tmp_path / "data", tmp_path / "run", decoder=Decoder(layers=1, hidden=32, heads=1))
    assert f"           left out, because it is not text: {tmp_path}/data/image.png" in dry_run_lines(dry_run(job))


def test_dry_run_raises_what_a_run_would(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the data is too short"):
        dry_run(tiny(corpus, tmp_path / "run", sequence=20_000))
    with pytest.raises(DataError, match='last_window = "drop" would drop everything'):
        dry_run(tiny(corpus, tmp_path / "run", last_window="drop", global_batch=480, micro_batch=48))
    with pytest.raises(ConfigError, match=r"optimizer\.implementation"):
        dry_run(
            tiny(
                corpus,
                tmp_path / "run",
                optimizer=Optimizer(implementation="fused"),
                techniques=(Precision(mode="bf16-pure"),),
            )
        )
