import os
from pathlib import Path

import pytest

from thrice.errors import ConfigError, UsageError
from thrice.spec.read import read, starter


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read(path)
    assert caught.value.exit_code == 2
    assert not isinstance(caught.value, ConfigError)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_no_file_is_the_starter(tmp_path: Path) -> None:
    assert read(None) == read(written(tmp_path, "starter.toml", starter()))


@pytest.mark.parametrize("name", ["job.yaml", "job.yml", "job.YAML"])
def test_plain_yaml_numbers_are_those_of_toml(tmp_path: Path, name: str) -> None:
    text = "a: 1e-4\nb: 3\nc: 1_000\nd: 1.5\ne: -2E+3\nf: .5\ng: 0\nh: -7\ni: '1e-4'\nj: 1.\nk: [1e3, 2]"
    keys = read(written(tmp_path, name, text))
    expected = {
        "a": 1e-4, "b": 3, "c": 1000, "d": 1.5, "e": -2e3, "f": 0.5, "g": 0, "h": -7, "i": "1e-4", "j": 1.0,
        "k": [1e3, 2],
    }  # fmt: skip
    assert keys == expected
    assert list(map(type, keys.values())) == list(map(type, expected.values()))


def test_what_yaml_1_1_makes_other_numbers_of_stays_text(tmp_path: Path) -> None:
    path = written(tmp_path, "job.yaml", "octal: 010\nsexagesimal: 1:30\ndate: 2024-01-01\nversion: 1.2.3")
    assert read(path) == {"octal": "010", "sexagesimal": "1:30", "date": "2024-01-01", "version": "1.2.3"}


def test_yaml_anchors_and_merges_still_work(tmp_path: Path) -> None:
    path = written(tmp_path, "job.yaml", "a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\n")
    assert read(path)["b"] == {"x": 3, "y": 2}


@pytest.mark.parametrize("name", ["job.toml", "job.yaml"])
@pytest.mark.parametrize("text", ["", "\n\n", "# a comment\n"])
def test_an_empty_file_has_no_keys(tmp_path: Path, name: str, text: str) -> None:
    assert read(written(tmp_path, name, text)) == {}


def test_a_byte_order_mark_and_windows_line_ends_are_no_hindrance(tmp_path: Path) -> None:
    path = written(tmp_path, "job.toml", b"\xef\xbb\xbfseed = 1\r\nlr = 2.0\r\n")
    assert read(path) == {"seed": 1, "lr": 2.0}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.toml", "seed = 1\nlr = = 2\n", "at line 2, column 6"),
        ("job.toml", "seed = 1\nseed = 2\n", "at line 2"),
        ("job.toml", "seed = " + "1" * 5000, "not valid TOML"),
        ("job.toml", "a = " + "[" * 100_000, "not valid TOML"),
        ("job.yaml", "seed: 1\nlr: [1, 2\nx: 3\n", "at line 3, column 2"),
        ("job.yaml", "seed: 1\n\tlr: 2\n", "at line 2, column 1"),
        ("job.yaml", "seed: 1\nlr: 1e-4\nseed: 2\n", "'seed' is given twice (at line 3, column 1)"),
        ("job.yaml", "a:\n  layers: 1\n  layers: 2\n", "'layers' is given twice (at line 3, column 3)"),
        ("job.yaml", "a: !!python/object:os.system {}\n", "at line 1, column 4"),
        ("job.yaml", "a: !!int x\n", "not valid YAML"),
        ("job.yaml", "a: \x00\n", "not valid YAML"),
        ("job.yaml", "a: 1\n---\nb: 2\n", "at line 2, column 1"),
        ("job.yaml", "a: " + "[" * 800, "not valid YAML"),
        ("job.yaml", "- seed\n- lr\n", "holds a list where keys are expected"),
        ("job.yaml", "seed\n", "holds the single value 'seed'"),
        ("job.toml", b"seed = 1 # \xff\n", "not UTF-8 text (byte 11"),
        ("job.yaml", "seed: 1\n".encode("utf-16"), "not UTF-8 text (byte 0"),
        ("job.json", "{}", "name a file ending in .toml, .yaml, .yml"),
        ("job", "", "name a file ending in .toml, .yaml, .yml"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_where_and_why(tmp_path: Path, name: str, text: str | bytes, said: str) -> None:
    assert said in refusal(written(tmp_path, name, text))


def test_a_missing_file_names_the_one_most_alike(tmp_path: Path) -> None:
    written(tmp_path, "quickstart.toml", "")
    assert f"did you mean {tmp_path / 'quickstart.toml'}?" in refusal(tmp_path / "quikstart.toml")
    assert "thrice init" in refusal(tmp_path / "other.yaml")
    assert "there is no such file" in refusal(tmp_path / "no" / "such" / "folder.toml")


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert "is a folder" in refusal(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    assert "is a folder" in refusal(tmp_path / "folder.toml")


def test_an_unreadable_file_says_what_the_system_says(tmp_path: Path) -> None:
    inside = written(tmp_path, "plain.toml", "") / "job.toml"
    assert "cannot be read: Not a directory" in refusal(inside)
    assert "cannot be read: File name too long" in refusal(tmp_path / ("x" * 300 + ".toml"))


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_forbidden_file_says_so(tmp_path: Path) -> None:
    path = written(tmp_path, "job.toml", "seed = 1")
    path.chmod(0)
    assert "cannot be read: Permission denied" in refusal(path)
