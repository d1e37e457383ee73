"""A job's file, or the built-in one, as plain keys and values. What they mean is `load`'s matter."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from thrice.errors import UsageError

FORMATS = (".toml", ".yaml", ".yml")
_FIX = f"name a file ending in {', '.join(FORMATS)}"


def starter() -> str:
    """The commented file of the built-in quickstart."""
    return resources.files("thrice").joinpath("starter.toml").read_text(encoding="utf-8")


def read(source: str | Path | None) -> Mapping[str, object]:
    """The keys of a TOML or YAML file, or of the built-in quickstart where `source` is None.

    Raises UsageError for a file that is missing, unreadable, not UTF-8 or not in its format.
    """
    if source is None:
        return tomllib.loads(starter())
    path = Path(source)
    text = _text(path)
    return _toml(text, path) if path.suffix.lower() == ".toml" else _yaml(text, path)


def _text(path: Path) -> str:
    if os.path.isdir(path):  # Path.is_dir raises on a name that is too long
        raise UsageError(f"{path} is a folder, and a job is a file\n    → {_FIX}")
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{path}: a job is written in TOML or YAML\n    → {_FIX}")
    try:
        # utf-8-sig: some editors begin a file with a byte order mark.
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file\n    → {_instead(path)}") from None
    except UnicodeDecodeError as error:
        why = f"byte {error.start}: {error.reason}"
        raise UsageError(f"{path} is not UTF-8 text ({why})\n    → save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _instead(path: Path) -> str:
    siblings = [each.name for each in path.parent.glob("*") if each.suffix.lower() in FORMATS]
    close = get_close_matches(path.name, siblings, n=1)
    if close:
        return f"did you mean {path.with_name(close[0])}?"
    return "`thrice init` writes one to start from"


def _toml(text: str, path: Path) -> Mapping[str, object]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None


def _yaml(text: str, path: Path) -> Mapping[str, object]:
    try:
        keys = yaml.load(text, _Yaml)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise UsageError(f"{path} is not valid YAML: {error.problem or error.context}{where}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not valid YAML: {error}") from None
    if keys is None:
        return {}
    if not isinstance(keys, dict):
        what = "a list" if isinstance(keys, list) else f"the single value {keys!r}"
        raise UsageError(f"{path} holds {what} where keys are expected\n    → write `key: value` lines")
    return keys


class _Yaml(yaml.SafeLoader):
    """YAML whose plain numbers and keys are those of TOML, and which refuses a key given twice.

    PyYAML by itself reads 1e-4 as text, 010 as 8, 1:30 as 90, 2024-01-01 as a date and the key `on` as True.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here, and not in construct_mapping: there the keys of `<<` have been mixed in.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
                if key.value != "<<":
                    key.tag = "tag:yaml.org,2002:str"
        return node


_NUMBERS = {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
_Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?
        |[0-9][0-9_]*[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)
