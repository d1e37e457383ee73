"""Job -> TOML: the file that reproduces a run. It says every field, so that a default may change later."""

from __future__ import annotations

import json
from dataclasses import Field, fields, is_dataclass
from typing import Any

from thrice.spec.job import Job


def dump(job: Job) -> str:
    """A TOML file from which `load` makes an equal Job (techniques in the registry's order).

    A field that is None is left out where that is its default, and is the word "none" elsewhere. Raises
    ValueError for the text "none" in a field that may be None: a file cannot tell the two apart.
    """
    top, tables = [], []
    for field in fields(job):
        value = getattr(job, field.name)
        if field.name == "techniques":
            continue
        if is_dataclass(value):
            tables += ["", f"[{field.name}]", *_lines(value)]
        else:
            top += _line(field, value)
    for technique in job.techniques:
        tables += ["", f"[{technique.name}]", *_lines(technique)]
    return "\n".join(top + tables) + "\n"


def settings(dumped: str) -> dict[str, str]:
    """{dotted key: its value as TOML} of what `dump` wrote."""
    table, flat = "", {}
    for line in dumped.splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif " = " in line:
            key, _, value = line.partition(" = ")
            flat[table + key] = value
    return flat


def _lines(table: Any) -> list[str]:
    return [line for field in fields(table) for line in _line(field, getattr(table, field.name))]


def _line(field: Field[Any], value: object) -> list[str]:
    if value is None:
        return [] if field.default is None else [f"{field.name} = {toml(value)}"]
    if value == "none" and "None" in str(field.type):
        raise ValueError(f'{field.name} = "none" would be read back as no value at all')
    return [f"{field.name} = {toml(value)}"]


def toml(value: object) -> str:
    """Text, a number, a truth value, None or a list of them, as a file says it; floats keep every digit."""
    if value is None:
        return toml("none")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON escapes what TOML's basic strings must escape, but for the character DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(toml(element) for element in value) + "]"
    assert isinstance(value, (int, float)), f"{value!r} has no place in a job"
    return repr(value)
