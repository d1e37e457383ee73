"""A file and flags -> Job: strictly, every problem at once, every key used or refused.

A file's tables and the flags are first laid flat, under dotted keys (`decoder.layers`), so that one rule
serves TOML, YAML and the command line. A flag goes before the file. What is not a table, given for a table,
is its first field: `precision = "fp16"` is `precision.mode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from thrice.errors import ConfigError, Problem
from thrice.spec.convert import Flag, Unfit, convert
from thrice.spec.job import Job
from thrice.spec.read import read
from thrice.spec.synonyms import unknown

EXCLUSIVE = {"max_steps": "max_tokens", "max_tokens": "max_steps"}
"""Two ways to say one thing: a flag for one displaces the file's other."""


class Schema(NamedTuple):
    """What may be given."""

    tables: dict[str, type[Any]]
    """Name of a table -> its dataclass, techniques included."""
    hints: dict[str, Any]
    """Dotted key -> the type of its value."""


def schema(techniques: Mapping[str, type[Any]]) -> Schema:
    top = _hints(Job)
    del top["techniques"]
    tables = {name: hint for name, hint in top.items() if is_dataclass(hint)} | dict(techniques)
    hints = {name: hint for name, hint in top.items() if name not in tables}
    for table, cls in tables.items():
        hints |= {f"{table}.{name}": hint for name, hint in _hints(cls).items()}
    return Schema(tables, hints)


def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def load(
    source: str | Path | None,
    overrides: Iterable[tuple[str, str]] = (),
    techniques: Mapping[str, type[Any]] | None = None,
) -> Job:
    """The Job that a TOML or YAML file (None: the built-in quickstart) and the flags over it ask for.

    `techniques` maps a technique's name to its dataclass; those that are named end up in `Job.techniques`, in
    the mapping's order. Raises UsageError for a file that cannot be read as such, and ConfigError with every
    problem of what is in it.
    """
    known = schema(techniques or {})
    problems: list[Problem] = []
    file, named = _flatten(read(source).items(), known, problems)
    flags, flagged = _flatten(((key, Flag(value)) for key, value in overrides), known, problems)
    for flag in flags.keys() & EXCLUSIVE.keys():
        file.pop(EXCLUSIVE[flag], None)
    good: dict[str, Any] = {}
    bad: set[str] = set()
    for key, value in (file | flags).items():
        if key not in known.hints:
            problems += unknown(key, value, known.hints, known.tables)
            continue
        try:
            good[key] = convert(value, known.hints[key], key)
        except Unfit as unfit:
            bad.add(key)
            problems.append(Problem(key=key, value=value, why=unfit.why, fix=unfit.fix))
    job = _job(good, bad, known, [name for name in techniques or {} if name in named | flagged], problems)
    if problems or job is None:
        where = str(source) if source is not None else "the built-in quickstart"
        raise ConfigError(problems, where + " and the flags over it" if flags else where)
    return job


def parse_flags(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """`--max-steps 30 --decoder.layers=6` as (dotted key, value) pairs, for `load`.

    Each flag has one value; a tuple's elements are separated by commas. Raises ConfigError with everything
    that is not of this form.
    """
    pairs: list[tuple[str, str]] = []
    problems: list[Problem] = []
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or not key:
            why = "a key with two dashes was expected here"
            problems.append(Problem(key=flag + equals + value, why=why, fix="write --key value"))
        elif equals:
            pairs.append((key, value))
        elif rest and not rest[0].startswith("--"):
            pairs.append((key, rest.pop(0)))
        else:
            problems.append(Problem(key=flag, why="it has no value", fix=f"write {flag} VALUE"))
    if problems:
        raise ConfigError(problems, "the flags")
    return pairs


def _flatten(
    given: Iterable[tuple[str, object]], known: Schema, problems: list[Problem]
) -> tuple[dict[str, object], set[str]]:
    """({dotted key: value}, the tables that were named)."""
    flat: dict[str, object] = {}
    named: set[str] = set()
    for name, whole in given:
        named.add(name.partition(".")[0])
        for key, value in _leaves(name, whole, known):
            if value is None and key in known.tables:
                problems.append(Problem(key=key, why="it is empty", fix="give it a value, or leave it out"))
            elif key in flat:
                why = f"{flat[key]!r} is given for it too"
                problems.append(Problem(key=key, value=value, why=why, fix="keep one"))
            else:
                flat[key] = value
    return flat, named


def _leaves(name: str, value: object, known: Schema) -> Iterator[tuple[str, object]]:
    if name not in known.tables or value is None:
        yield name, value
    elif isinstance(value, dict):
        yield from ((f"{name}.{key}", inner) for key, inner in value.items())
    else:
        yield f"{name}.{fields(known.tables[name])[0].name}", value


def _job(
    good: dict[str, Any], bad: set[str], known: Schema, asked: Sequence[str], problems: list[Problem]
) -> Job | None:
    """The Job of the values that could be read, every other one left at its default."""
    built = {}
    for table, cls in known.tables.items():
        if table in asked or table in _hints(Job):
            built[table] = _build(cls, f"{table}.", good, bad, known.hints, problems)
    chosen = tuple(built.pop(name) for name in asked)
    top = {**built, "techniques": tuple(technique for technique in chosen if technique is not None)}
    job: Job | None = _build(Job, "", good | top, bad, known.hints, problems)
    return job


def _build(
    cls: type[Any],
    prefix: str,
    good: Mapping[str, Any],
    bad: set[str],
    hints: Mapping[str, Any],
    problems: list[Problem],
) -> Any:
    """An instance from the keys under `prefix`, its own `check` included; None where a field has to be given.

    A problem counts only if it is there whatever the values that could not be read: the check is made with
    them left out, and again with a number in the place of each that may be None.
    """
    given = {field.name: good[prefix + field.name] for field in fields(cls) if prefix + field.name in good}
    unread = [field.name for field in fields(cls) if prefix + field.name in bad]
    for field in fields(cls):
        if field.default is field.default_factory is MISSING and field.name not in given:
            if field.name not in unread:
                problems.append(Problem(key=prefix + field.name, why="it is missing, and has no default"))
            return None
    instance = cls(**given)
    numbers = {name: 1 for name in unread if {NoneType, int} <= set(get_args(hints[prefix + name]))}
    otherwise = list(replace(instance, **numbers).check())
    for problem in instance.check():
        if problem.key not in unread and problem in otherwise:
            problems.append(replace(problem, key=prefix + problem.key))
    return instance
