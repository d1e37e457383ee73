"""A job file, with the registry's techniques."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from thrice.registry import TECHNIQUES
from thrice.spec.job import Job
from thrice.spec.load import load


def load_job(source: str | Path | None = None, overrides: Iterable[tuple[str, str]] = ()) -> Job:
    """The Job of a TOML or YAML file (None: the built-in quickstart) and (dotted key, value) pairs over it.

    Raises UsageError for a file that cannot be read, ConfigError with every problem of what is in it.
    """
    job = load(source, overrides, TECHNIQUES)
    if job.run_dir is None:
        job = replace(job, run_dir=f"runs/{Path(source).stem if source is not None else 'quickstart'}")
    return job
