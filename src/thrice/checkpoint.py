"""A session to a checkpoint and back: weights, optimizer, scaler, schedule, data position, random state.

`runtime/store.py` puts it on disk. Tensors are kept under parameter names, so that what is saved does not
depend on how the optimizer groups its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thrice.data.batches import Position
from thrice.errors import CheckpointError, UsageError
from thrice.runtime import store
from thrice.runtime.session import Progress, Session
from thrice.spec import seed
from thrice.spec.dump import dump, settings
from thrice.techniques.optimizer_states import OptimizerStates
from thrice.techniques.precision import Precision

FIXED = (
    "model", "corpus", "tokenizer", "sequence", "global_batch", "last_window", "seed", "decoder",
    "optimizer.name", "evaluation.fraction", "precision", "optimizer_states", "batch_ramp",
)  # fmt: skip
"""What a run may not change when it goes on: another value makes its state meaningless. The rest may change,
and is said aloud."""


def save(session: Session, folder: Path, *, corpus: str, metrics_rows: int) -> Path:
    """Writes the checkpoint of the session's step.

    `corpus` is the fingerprint of its data; `metrics_rows` how many rows its metrics.jsonl has by now. Every rank
    calls it, and rank 0 writes what is the same on all, and the random state of each.
    """
    random = session.world.gather(_random_state(session.device))
    state = {
        "progress": asdict(session.progress),
        "scaler": session.scaler.state_dict() if session.scaler is not None else None,
        "job": dump(session.job),
        "ledger": session.ledger.as_dict(),
        "corpus": corpus,
        "metrics_rows": metrics_rows,
        "torch": torch.__version__,
    }
    tensors = {
        "weights": dict(session.model.named_parameters()) | dict(_buffers(session.model)),
        "optimizer": _optimizer_tensors(session),
        "random": {_of_rank(name, rank): each for rank, own in enumerate(random) for name, each in own.items()},
    }
    if session.world.rank:
        return store.path_of(folder, session.progress.step)
    return store.save(folder, session.progress.step, tensors, state, keep_last=session.job.checkpoint.keep_last)


def resume(session: Session, folder: Path, *, corpus: str, say: Callable[[str], None]) -> int | None:
    """Puts the latest checkpoint in `folder` that loads into the session, and says what it did.

    Returns the rows of metrics.jsonl at that time, or None where there is no checkpoint yet: the session is as
    it was. Raises CheckpointError where there are some and none can be used, and what `restore` raises.
    """
    # rank 0 says which: all go on from one
    path, rejected = session.world.broadcast(store.latest(folder) if session.world.rank == 0 else (None, []))
    for line in rejected:
        say(f"resume     rejected {line}")
    if path is None and rejected:
        raise CheckpointError(
            f"none of the checkpoints in {folder} can be used ({len(rejected)} rejected, each named above)\n"
            "  nothing was changed: put a good one there, or start a new run with another run_dir"
        )
    if path is None:
        say(f"resume     {folder.parent} has no checkpoint yet: starting from the beginning")
        return None
    changed, rows = restore(session, path, corpus)
    for line in changed:
        say(f"resume     changed {line}")
    say(f"resume     from {path}, after step {session.progress.step}")
    return rows


def restore(session: Session, path: Path, corpus: str) -> tuple[list[str], int]:
    """Puts the checkpoint `path` into the session.

    Returns a line for each setting that is not the saved one, and the rows of metrics.jsonl at that time.

    Raises CheckpointError for one that does not fit the model, and UsageError where the job differs in what
    must stay. Nothing in the session has changed then.
    """
    tensors, state = store.load(path)
    changed = _changes(state, session, corpus)
    forbidden = [key for key in changed if key in FIXED or key.partition(".")[0] in FIXED]
    if forbidden:
        raise UsageError(
            f"the run cannot go on from {path}: what has to stay as it was has changed\n"
            + "".join(f"  {_changed(key, *changed[key])}\n" for key in forbidden)
            + "  put those values back, or start a new run with another run_dir"
        )
    weights = dict(session.model.named_parameters()) | dict(_buffers(session.model))
    _check_fit(path, weights, tensors["weights"])
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(tensors["weights"][name])
    _restore_optimizer(session, tensors["optimizer"])
    if session.scaler is not None and state["scaler"] is not None:
        session.scaler.load_state_dict(state["scaler"])
    progress = dict(state["progress"])
    session.progress = Progress(**{**progress, "position": Position(**progress["position"])})
    _restore_random(session, tensors["random"])
    return [_changed(key, was, now) for key, (was, now) in changed.items()], state["metrics_rows"]


def _changed(key: str, was: str, now: str) -> str:
    shown = "data (SHA-256 of its tokens)" if key == "corpus" else key
    return f"{shown}: saved {was}, now {now}"


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to the state: running statistics, not tables that are computed anew."""
    persistent = model.state_dict().keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)


def _optimizer_tensors(session: Session) -> dict[str, Tensor]:
    """Of whole parameters on rank 0, however ranks divide them: any number of ranks can go on from it. Collective."""
    return session.whole(
        {
            f"{name}:{key}": value
            for name, tensor in session.trained()
            for key, value in session.optimizer.state.get(tensor, {}).items()
        }
    )


def _restore_optimizer(session: Session, saved: dict[str, Tensor]) -> None:
    # not load_state_dict: it casts states to their parameter's dtype, and float32 moments of a bfloat16
    # parameter would lose their bits
    trained = dict(session.trained())
    pieces = {} if session.shards is None else session.shards.share.pieces
    fused = session.optimizer.defaults.get("fused")
    session.optimizer.state.clear()
    for name, tensor in saved.items():
        parameter, _, key = name.rpartition(":")
        if pieces and parameter not in trained:  # it is another rank's
            continue
        target = trained[parameter]
        # torch counts steps on the host, but for its fused kernels and ours
        home = torch.device("cpu") if key == "step" and fused is False else session.device
        own = pieces[target].of(key, tensor) if target in pieces else tensor
        session.optimizer.state[target][key] = own.to(home)


def _random_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state()
    return states


def _of_rank(name: str, rank: int) -> str:
    return f"{name}.{rank}" if rank else name


def _restore_random(session: Session, saved: dict[str, Tensor]) -> None:
    rank, device = session.world.rank, session.device.type
    own = {name: saved[_of_rank(name, rank)] for name in ("cpu", device) if _of_rank(name, rank) in saved}
    if "cpu" not in own:  # a rank that the saved run did not have begins a stream of its own
        torch.manual_seed(seed.key(session.job.seed, "dropout", rank, session.progress.step))
        return
    torch.set_rng_state(own["cpu"])
    if device != "cpu" and device in own:
        torch.get_device_module(session.device).set_rng_state(own[device])


def _check_fit(path: Path, wanted: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    problems = [f"missing: {name}" for name in wanted.keys() - saved.keys()]
    problems += [f"unexpected: {name}" for name in saved.keys() - wanted.keys()]
    problems += [
        f"{name}: saved {tuple(saved[name].shape)} {saved[name].dtype}, the model has "
        f"{tuple(wanted[name].shape)} {wanted[name].dtype}"
        for name in wanted.keys() & saved.keys()
        if (saved[name].shape, saved[name].dtype) != (wanted[name].shape, wanted[name].dtype)
    ]
    if problems:
        raise CheckpointError(f"{path} does not fit the model\n  " + "\n  ".join(sorted(problems)[:10]))


def _changes(state: dict[str, Any], session: Session, corpus: str) -> dict[str, tuple[str, str]]:
    """Dotted key -> (saved, current) of each setting that differs."""
    was, now = settings(state["job"]), settings(dump(session.job))
    # said otherwise, but the same: where it is kept, where the data lies, and how the batch was spelt
    for key in ("run_dir", "data", "global_batch", "micro_batch", "grad_accum_steps"):
        was.pop(key, None)
        now.pop(key, None)
    for key in ("global_batch", "micro_batch"):
        was[key], now[key] = str(state["ledger"][key]), str(session.ledger.as_dict()[key])
    was["corpus"], now["corpus"] = state["corpus"][:12], corpus[:12]
    for given in (was, now):
        # what leaving them out means
        given.setdefault("precision.mode", f'"{Precision().mode}"')
        given.setdefault("optimizer_states.format", f'"{OptimizerStates().format}"')
    return {
        key: (was.get(key, "not given"), now.get(key, "not given")) for key in was | now if was.get(key) != now.get(key)
    }
