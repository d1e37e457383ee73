"""What a comparison is asked for: one job, with one or more fields varied and everything else the same.

A file and what is to vary become variants, every one of them loaded and composed before any runs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from thrice.compose import compose
from thrice.data.cache import cache_folder
from thrice.data.corpus import corpus_of
from thrice.data.tokens import survey
from thrice.errors import ConfigError, Infeasible, Problem, UsageError
from thrice.registry import TECHNIQUES
from thrice.spec.convert import Flag, Unfit, convert
from thrice.spec.job import Job, at_least
from thrice.spec.load import Schema, load, schema
from thrice.spec.read import read
from thrice.spec.synonyms import unknown


@final
@dataclass(frozen=True, kw_only=True)
class Compare:
    """The [compare] table of a file: an experiment that `thrice compare FILE` runs."""

    vary: tuple[str, ...] = ()
    """Each "field=a,b,c"; several form the product."""
    seeds: int = 1
    """Runs of each variant: with seed, seed + 1, …"""

    def check(self) -> Iterator[Problem]:
        yield from at_least(1, seeds=self.seeds)


KNOWN: dict[str, type[Any]] = {**TECHNIQUES, "compare": Compare}

FIXED = {
    "seed": "every variant runs with the same seeds; --seeds 3 takes three of them",
    "run_dir": "each run has a folder of its own; --out DIR says where they all are",
}
"""Keys that cannot be varied, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    label: str
    """The varied fields as they were typed: "precision=bf16 · recompute=full"."""
    job: Job

    @property
    def folder(self) -> str:
        """A name that any file system takes, different for every label."""
        plain = self.label.replace(" · ", ",")
        safe = re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", plain)[:100]
        return safe if safe == plain else f"{safe}-{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is to be run. The first variant is the baseline."""

    name: str
    out: Path
    variants: tuple[Variant, ...]
    refused: tuple[tuple[str, str], ...]
    """(label, reason) of the combinations that are left out."""
    seeds: int

    def runs(self) -> Iterator[tuple[Variant, Job, Path]]:
        """(variant, its job with a seed and a run_dir, the job's file); all variants of a seed before the next seed,
        so that what changes on the machine meanwhile falls on all of them."""
        for number in range(self.seeds):
            for variant in self.variants:
                seed = variant.job.seed + number
                folder = self.out / f"{variant.folder}-seed{seed}"
                yield (
                    variant,
                    replace(variant.job, seed=seed, run_dir=str(folder)),
                    folder.with_name(folder.name + ".toml"),
                )

    @property
    def over(self) -> Literal["steps", "tokens"]:
        """What the loss curves are laid over: where the variants' steps are not alike, the tokens."""
        return "steps" if len({_pace(variant.job) for variant in self.variants}) == 1 else "tokens"


def _pace(job: Job) -> tuple[object, ...]:
    batch = job.global_batch if job.micro_batch == "auto" else job.ledger().global_batch
    return batch, job.sequence, job.batch_ramp, job.max_steps, job.max_tokens


def expand(
    source: str | Path | None,
    overrides: Iterable[tuple[str, str]] = (),
    *,
    vary: Sequence[str] = (),
    out: str | Path | None = None,
    skip_refused: bool = False,
) -> Experiment:
    """The variants of a file (None: the built-in quickstart), each loaded and composed on fake tensors.

    Nothing is run or written. `vary` is a list of "field=a,b,c" (that of the file's [compare] where it is empty),
    `overrides` are (dotted key, value) for every variant. Raises ConfigError with everything wrong in any
    combination, which it names; with `skip_refused` a combination that cannot be is left out with its reason, unless
    something is wrong in all. Raises DataError for data that cannot be read.
    """
    pairs = list(overrides)
    varied = _varied(list(vary) or _vary_of(source), schema(KNOWN), pairs)
    tried: dict[str, tuple[Job, Compare] | None] = {}
    found: dict[str, list[Problem]] = {}
    for values in product(*varied.values()):
        label = " · ".join(f"{name}={value}" for name, value in zip(varied, values, strict=True))
        tried[label], found[label] = _load(source, [*pairs, *zip(varied, values, strict=True)])
    problems = _shared(found)
    if not problems and not skip_refused:
        problems = list(_named(found))
    problems += _twins({label: pair[0] for label, pair in tried.items() if pair is not None})
    if problems:
        raise ConfigError(problems, str(source or "the built-in quickstart"))
    good = {label: pair for label, pair in tried.items() if pair is not None and not found[label]}
    refused = tuple((label, "; ".join(map(_reason, ours))) for label, ours in found.items() if ours)
    if len(good) < 2:
        listed = "".join(f"\n  {label}: {reason}" for label, reason in refused)
        raise UsageError(f"{len(good)} of {len(tried)} variants can run, and nothing is left to compare{listed}")
    job, table = next(iter(good.values()))
    name = Path(source).stem if source is not None else "quickstart"
    return Experiment(
        name=name,
        out=Path(out or Path(job.run_dir or "runs/NAME").parent / f"compare-{name}").expanduser(),
        variants=tuple(Variant(label=label, job=job) for label, (job, _) in good.items()),
        refused=refused,
        seeds=table.seeds,
    )


def _load(source: str | Path | None, pairs: list[tuple[str, str]]) -> tuple[tuple[Job, Compare] | None, list[Problem]]:
    """(the job and the file's [compare], or None; what is wrong with it)."""
    try:
        job = load(source, pairs, KNOWN)
    except ConfigError as error:
        return None, list(error.problems)
    tables = [technique for technique in job.techniques if isinstance(technique, Compare)]
    job = replace(job, techniques=tuple(t for t in job.techniques if not isinstance(t, Compare)))
    return (job, tables[0] if tables else Compare()), list(_uncomposable(job))


def _uncomposable(job: Job) -> Iterator[Problem]:
    """Why its run would stop before the first step: what techniques refuse, also once they see the model."""
    # an open micro_batch is chosen by the run itself; the whole batch in one piece is what most accept
    settled = replace(job, micro_batch=None) if job.micro_batch == "auto" else job
    vocabulary = survey(job.tokenizer, corpus_of(job.data).documents, cache_folder()).vocabulary
    try:
        with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
            compose(settled, vocabulary=vocabulary, device=torch.device("cpu"))
    except ConfigError as error:
        yield from error.problems
    except Infeasible as error:
        if settled is job:  # a smaller micro_batch needs less
            key, _, why = str(error).partition(": ")
            yield Problem(key=key, why=why)


def _reason(problem: Problem) -> str:
    return str(problem).partition("\n")[0]


def _shared(found: Mapping[str, list[Problem]]) -> list[Problem]:
    """What is wrong in every combination: no fault of what is varied."""
    first, *others = found.values()
    return [problem for problem in first if all(str(problem) in map(str, ours) for ours in others)]


def _named(found: Mapping[str, list[Problem]]) -> Iterator[Problem]:
    """Each problem once, with the combinations that have it."""
    labels: dict[str, list[str]] = {}
    problems = {str(problem): problem for ours in found.values() for problem in ours}
    for label, ours in found.items():
        for problem in ours:
            labels.setdefault(str(problem), []).append(label)
    for said, problem in problems.items():
        first, *others = labels[said]
        more = f" (and {len(others)} more)" if others else ""
        yield replace(problem, key=f"{first}{more}: {problem.key}")


def _twins(jobs: Mapping[str, Job]) -> Iterator[Problem]:
    seen: list[tuple[str, Job]] = []
    for label, job in jobs.items():
        for other, same in seen:
            if same == job:
                yield Problem(key=label, why=f"it is the same job as {other}", fix="leave one of them out")
        seen.append((label, job))


def _vary_of(source: str | Path | None) -> Sequence[str]:
    """`vary` of the file's [compare]; empty where there is none."""
    table = read(source).get("compare")
    given = table.get("vary", ()) if isinstance(table, Mapping) else table or ()
    try:
        vary: tuple[str, ...] = convert(given, tuple[str, ...], "compare.vary")
    except Unfit as unfit:
        raise ConfigError(
            [Problem(key="compare.vary", value=given, why=unfit.why, fix=unfit.fix)], str(source)
        ) from None
    return vary


def _varied(vary: Sequence[str], known: Schema, overrides: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """{field as typed: its values}. Raises ConfigError with everything wrong."""
    if not vary:
        raise UsageError(
            "nothing is varied: say which field takes which values\n"
            '    → --vary precision=fp32,bf16, or vary = ["precision=fp32,bf16"] under [compare] in the file'
        )
    taken = {_full(key, known): f"it is varied, and set to {value!r} for all" for key, value in overrides}
    varied: dict[str, list[str]] = {}
    problems = [
        Problem(key=k, value=v, why="it is not for all runs", fix=FIXED[k]) for k, v in overrides if k == "run_dir"
    ]
    for text in vary:
        name, equals, listed = text.partition("=")
        name = name.strip().replace("-", "_")
        values = [value.strip() for value in listed.split(",")]
        key = _full(name, known)
        if not equals or not name:
            why = "a field and its values were expected"
            problems.append(Problem(key="vary", value=text, why=why, fix=f"--vary {name or 'precision'}=A,B"))
            continue
        problems += _wrong(name, key, values, known)
        if key in taken:
            problems.append(Problem(key=name, value=listed, why=taken[key], fix="keep one"))
        taken[key] = "it is varied already; the values of one field are one list"
        varied[name] = values
    if problems:
        raise ConfigError(problems, "what is to vary")
    return varied


def _full(name: str, known: Schema) -> str:
    """The dotted key of a field; a table alone stands for its first."""
    return f"{name}.{fields(known.tables[name])[0].name}" if name in known.tables else name


def _wrong(name: str, key: str, values: list[str], known: Schema) -> Iterator[Problem]:
    if key.startswith("compare.") or key in FIXED:
        yield Problem(key=name, why="it cannot be varied", fix=FIXED.get(key, "vary a key of the job"))
        return
    if key not in known.hints:
        yield from unknown(key, None, known.hints, known.tables)
        return
    if "" in values:
        why = "there is nothing between two commas or at an end"
        yield Problem(key=name, value=",".join(values), why=why, fix=f"--vary {name}=A,B")
        return
    if len(values) == 1:
        why = "one value is no variation"
        yield Problem(key=name, value=values[0], why=why, fix=f"--{name} {values[0]} sets it for every run")
    for value in dict.fromkeys(values):
        if values.count(value) > 1:
            yield Problem(key=name, value=value, why=f"it is given {values.count(value)} times", fix="keep one")
        try:
            convert(Flag(value), known.hints[key], key)
        except Unfit as unfit:
            yield Problem(key=name, value=value, why=unfit.why)
