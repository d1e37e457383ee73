"""thrice: train large models on the hardware you have, with proof that it is the same training.

The public face. Names are imported when first used, so that `thrice --help` does not wait for torch. What is
named like its module is imported from there: `from thrice.train import train`, `thrice.verify`, `thrice.compose`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thrice.data.load import load_data as load_data
    from thrice.job_file import load_job as load_job
    from thrice.micro_batch import settled as settled
    from thrice.observe.rehearse import rehearse as rehearse
    from thrice.observe.trace import Tracer as Tracer
    from thrice.runtime.dist import joined as joined
    from thrice.spec.job import Job as Job
    from thrice.step import train_step as train_step

_HOME = {
    "Job": "thrice.spec.job",
    "Tracer": "thrice.observe.trace",
    "joined": "thrice.runtime.dist",
    "load_data": "thrice.data.load",
    "load_job": "thrice.job_file",
    "rehearse": "thrice.observe.rehearse",
    "settled": "thrice.micro_batch",
    "train_step": "thrice.step",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'thrice' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
