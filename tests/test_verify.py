"""verify can fail: each planted fault, of the kinds that others have shipped, is caught and located."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from thrice.certificate import Certificate
from thrice.compose import compose
from thrice.data.batches import Batch, Position, Windows, order
from thrice.data.load import Data, load_data
from thrice.errors import ConfigError
from thrice.model import decoder as decoder_module
from thrice.optim.scaler import LossScaler
from thrice.reference import plain_windows
from thrice.runtime.session import Session
from thrice.runtime.technique import Technique
from thrice.spec.job import BatchRamp, Decoder, Job, Optimizer
from thrice.techniques import recompute as recompute_module
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute
from thrice.verify import verify


def job_for(corpus: Path, **changes: object) -> Job:
    wanted = {
        "data": (str(corpus),), "sequence": 32, "global_batch": 4, "micro_batch": 2, "max_steps": 8, "lr": 1e-3,
        "decoder": Decoder(layers=2, hidden=32, heads=4, kv_heads=2),
    }  # fmt: skip
    return Job(**{**wanted, **changes})


def caught(certificate: Certificate, kind: str) -> None:
    """It failed, and the first difference is of the kind that the fault touches first."""
    first = certificate.first_difference
    assert not certificate.ok
    assert first is not None
    assert first.kind == kind, first
    assert first.deviation > 2 * first.allowed, "not a near miss that luck could hide"


def composed_with(fault: Callable[[Session], None]) -> Callable[..., Session]:
    """`compose`, and then the fault."""

    def faulty(job: Job, **options: object) -> Session:
        session = compose(job, **options)
        fault(session)
        return session

    return faulty


def test_an_honest_job_passes(corpus: Path) -> None:
    job = job_for(corpus)
    certificate = verify(job, load_data(job), steps=3)
    assert certificate.ok
    assert certificate.claim == "ROUNDING"
    assert certificate.first_difference is None
    restored = json.loads(json.dumps(certificate.as_dict()))
    assert restored["ok"] is True
    kinds = {"sample_ids", "loss", "gradient", "grad_norm", "parameter", "update"}
    assert {row["kind"] for row in restored["rows"]} == kinds
    parameters = [row for row in restored["rows"] if row["kind"] == "parameter" and row["step"] == 3]
    assert len(parameters) == len(list(compose(job, vocabulary=256).model.parameters()))


def test_divided_by_the_number_of_micro_batches_again(corpus: Path) -> None:
    def fault(session: Session) -> None:
        whole = session.loss
        session.loss = lambda logits, targets: whole(logits, targets) / session.ledger.grad_accum_steps

    job = job_for(corpus)
    caught(verify(job, load_data(job), steps=2, compose=composed_with(fault)), "loss")


def test_mean_of_means(corpus: Path) -> None:
    """Each micro-batch by its own count: only unequal micro-batches, as in the last window, show it."""

    def fault(session: Session) -> None:
        whole = session.loss

        def mean_of_means(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            per_token = whole(logits, targets) / targets.numel()
            return per_token * (32 * 3 / 2 if targets.shape[0] == 1 or session.progress.step == 1 else targets.numel())

        session.loss = mean_of_means

    job = job_for(corpus)
    certificate = verify(job, load_data(job), steps=2, compose=composed_with(fault))
    caught(certificate, "loss")
    assert certificate.first_difference is not None
    assert certificate.first_difference.step == 2


def test_gradient_of_one_micro_batch_lost(corpus: Path) -> None:
    """The loss is right and the gradient is not: comparing losses would see nothing in the first step."""

    def fault(session: Session) -> None:
        whole, calls = session.loss, iter(range(100))

        def lost(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            loss = whole(logits, targets)
            return loss if next(calls) % 2 == 0 else loss.detach() + 0 * loss

        session.loss = lost

    job = job_for(corpus)
    caught(verify(job, load_data(job), steps=2, compose=composed_with(fault)), "grad_norm")


def test_clipped_before_it_is_unscaled(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient comes out smaller by the scale, and AdamW, which has no sense of size, hides it in the loss."""
    job = job_for(
        corpus,
        optimizer=Optimizer(clip=0.5),
        techniques=(Precision(mode="fp16", initial_scale=1024.0),),
    )
    assert verify(job, load_data(job), steps=2).ok

    unscale = LossScaler.unscale_

    def clip_then_unscale(self: LossScaler, gradients: list[torch.Tensor]) -> None:
        norm = nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, min(1.0, 0.5 / float(norm)))
        unscale(self, gradients)

    monkeypatch.setattr(LossScaler, "unscale_", clip_then_unscale)
    caught(verify(job, load_data(job), steps=2), "grad_norm")


def test_unscaled_twice(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(corpus, techniques=(Precision(mode="fp16", initial_scale=1024.0),))
    unscale = LossScaler.unscale_

    def twice(self: LossScaler, gradients: list[torch.Tensor]) -> None:
        unscale(self, gradients)
        unscale(self, gradients)

    monkeypatch.setattr(LossScaler, "unscale_", twice)
    caught(verify(job, load_data(job), steps=2), "grad_norm")


def test_last_window_dropped(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(corpus)
    at = Windows.at

    def dropping(self: Windows, position: Position, global_batch: int) -> tuple[np.ndarray, Position]:
        return at(replace(self, last_window="drop"), position, global_batch)

    monkeypatch.setattr(Windows, "at", dropping)
    certificate = verify(job, load_data(job), steps=3)
    caught_first = certificate.first_difference
    assert caught_first is not None
    assert (caught_first.kind, caught_first.step) == ("sample_ids", 3)


def test_data_order_ignores_the_seed(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(corpus, seed=7)
    data = load_data(job)
    certificate = verify(job, replace(data, windows=replace(data.windows, seed=0)), steps=2)
    first = certificate.first_difference
    assert first is not None
    assert (first.kind, first.step) == ("sample_ids", 1)


def test_a_sample_is_changed_on_its_way(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(corpus)
    window = Data.window

    def shifted(self: Data, position: Position, global_batch: int, **share: int) -> tuple[list[Batch], Position]:
        batches, after = window(self, position, global_batch, **share)
        return [replace(batch, inputs=batch.inputs.roll(1, dims=1)) for batch in batches], after

    monkeypatch.setattr(Data, "window", shifted)
    caught(verify(job, load_data(job), steps=2), "loss")


@pytest.mark.parametrize("strategy", ["full", "selective", "every_k", "attention_only"])
def test_wrong_dropout_mask_in_recomputation(strategy: str, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is right, the gradient belongs to another mask."""
    dropout = 0.0 if strategy == "attention_only" else 0.2
    job = job_for(
        corpus,
        micro_batch=4,
        decoder=Decoder(layers=2, hidden=32, heads=4, dropout=dropout),
        techniques=(Recompute(strategy=strategy),),
    )
    assert verify(job, load_data(job), steps=2).ok

    def forgetful(*args: object, **options: object) -> object:
        return torch_checkpoint.checkpoint(*args, preserve_rng_state=False, **options)

    monkeypatch.setattr(recompute_module, "checkpoint", forgetful)
    certificate = verify(job, load_data(job), steps=2)
    if strategy == "attention_only":
        assert certificate.ok, "our attention draws nothing at random, so there is no mask to get wrong"
    else:
        caught(certificate, "grad_norm")


def test_swapped_rotary_pair(corpus: Path) -> None:
    """Pairs (i, i + 1) in place of (i, i + C/2): it trains as well, and it is another model."""

    def fault(session: Session) -> None:
        def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            first, second = x[..., ::2], x[..., 1::2]
            cos, sin = cos[:, None], sin[:, None]
            return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)

        step = session.compute

        class Swapped:
            def __enter__(self) -> None:
                self.right = decoder_module.rotate
                decoder_module.rotate = interleaved
                self.inner = step()
                self.inner.__enter__()

            def __exit__(self, *error: object) -> None:
                self.inner.__exit__(*error)
                decoder_module.rotate = self.right

        session.compute = Swapped

    job = job_for(corpus)
    caught(verify(job, load_data(job), steps=2, compose=composed_with(fault)), "loss")


def test_update_with_another_rate(corpus: Path) -> None:
    """Loss, gradient and norm of the first step are right; only the parameters tell."""

    def fault(session: Session) -> None:
        right = session.lr_at
        session.lr_at = lambda steps, samples: right(steps, samples) * 1.01

    job = job_for(corpus)
    caught(verify(job, load_data(job), steps=1, compose=composed_with(fault)), "parameter")


def test_one_tensor_frozen(corpus: Path) -> None:
    def fault(session: Session) -> None:
        session.optimizer.param_groups[0]["params"].pop(3)

    job = job_for(corpus)
    certificate = verify(job, load_data(job), steps=1, compose=composed_with(fault))
    caught(certificate, "parameter")
    accused = [(row.kind, row.tensor) for row in certificate.rows if not row.ok]
    assert [kind for kind, _ in accused] == ["parameter", "update"]
    assert len({tensor for _, tensor in accused}) == 1, "and no other tensor is accused"


@pytest.mark.parametrize("precision", [(), (Precision(mode="bf16"),)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("steps", [1, 3])
def test_weight_decay_lost(precision: tuple[Technique, ...], steps: int, corpus: Path) -> None:
    """An embedding of its own has rows without a gradient, and what noise does to those hid everything else."""

    def fault(session: Session) -> None:
        for group in session.optimizer.param_groups:
            group["weight_decay"] = 0.0

    job = job_for(corpus, techniques=precision)
    job = replace(job, decoder=replace(job.decoder, tied=False, vocabulary=300))
    assert verify(job, load_data(job), steps=steps).ok
    certificate = verify(job, load_data(job), steps=steps, compose=composed_with(fault))
    updates = [row for row in certificate.rows if row.kind == "update" and row.step == 1]
    decayed = {name for name, p in compose(job, vocabulary=256).model.named_parameters() if p.ndim >= 2}
    assert {row.tensor for row in updates if not row.ok} == decayed


def test_one_bit_breaks_a_bitwise_claim(corpus: Path) -> None:
    def fault(session: Session) -> None:
        with torch.no_grad():
            weight = session.model.get_parameter("blocks.1.mlp.up.weight")
            weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(1.0))

    job = job_for(corpus, micro_batch=4)
    assert verify(job, load_data(job), steps=1).ok
    certificate = verify(job, load_data(job), steps=1, compose=composed_with(fault))
    assert not certificate.ok
    assert certificate.first_difference is not None


@pytest.mark.parametrize(("mode", "worse"), [("bf16", torch.float8_e4m3fn), ("bf16-pure", torch.float8_e4m3fn)])
def test_lower_than_the_precision_asked_for(mode: str, worse: torch.dtype, corpus: Path) -> None:
    """A tensor that is quietly rounded to 8 bits does not pass as bfloat16."""

    def fault(session: Session) -> None:
        session.model.get_submodule("blocks.0.mlp").register_forward_hook(
            lambda module, args, output: output + (output.to(worse).to(output.dtype) - output).detach()
        )

    job = job_for(corpus, techniques=(Precision(mode=mode),))
    assert verify(job, load_data(job), steps=2).ok
    assert not verify(job, load_data(job), steps=2, compose=composed_with(fault)).ok


def test_windows_are_the_laws_and_not_the_loaders(corpus: Path) -> None:
    job = job_for(corpus)
    jumps, ids = walked(job, 11, 3, 4)
    assert [len(window) for window in ids] == [4, 4, 3, 4]
    assert sorted(i for window in ids[:3] for i in window) == list(range(11))
    assert jumps == [None, None, None, None], "an epoch of three windows needs no jump"
    jumps, ids = walked(job, 99, 2, 2)
    assert (jumps[1], len(ids[1])) == (Position(epoch=0, offset=96), 3)
    jumps, ids = walked(replace(job, last_window="drop"), 99, 2, 2)
    assert (jumps[1], len(ids[1])) == (Position(epoch=0, offset=92), 4)
    growing = replace(job, batch_ramp=BatchRamp(start=2, samples=6))
    jumps, ids = walked(growing, 99, 9, 5)
    assert [len(window) for window in ids] == [2, 2, 2, 4, 4]
    assert [i for window in ids for i in window] == [int(i) for i in order(growing.seed, 0, 99, range(14))], (
        "a ramp changes no sample's place"
    )


def walked(job: Job, count: int, steps: int, windows: int) -> tuple[list[Position | None], list[list[int]]]:
    taken: list[list[int]] = []
    jumps = []
    for jump, ids in plain_windows(job, count, steps, taken):
        jumps.append(jump)
        taken.append(ids)
        if len(taken) == windows:
            break
    return jumps, taken


def test_a_growing_batch(corpus: Path) -> None:
    job = job_for(
        corpus, global_batch=8, batch_ramp=BatchRamp(start=2, samples=9), lr_scaling="linear", base_global_batch=8
    )
    certificate = verify(job, load_data(job), steps=5)
    assert certificate.ok, certificate.first_difference
    assert [len(ids) for ids in certificate.samples] == [2, 2, 4, 6, 3], "the last is what 283 samples leave"
    assert any("grows from 2 to 8" in note for note in certificate.notes)


def test_a_ramp_that_counts_steps_and_not_samples(corpus: Path) -> None:
    def fault(session: Session) -> None:
        ledger = session.ledger
        session.ledger = replace(ledger, ramp=replace(ledger.ramp, samples=2 * ledger.ramp.samples))

    job = job_for(corpus, global_batch=8, batch_ramp=BatchRamp(start=2, samples=9))
    certificate = verify(job, load_data(job), steps=5, compose=composed_with(fault))
    assert certificate.first_difference is not None
    assert certificate.first_difference.kind == "sample_ids"


def test_lr_scaled_twice(corpus: Path) -> None:
    def fault(session: Session) -> None:
        right = session.lr_at
        session.lr_at = lambda steps, samples: right(steps, samples) * 4 / 2

    job = job_for(corpus, lr_scaling="linear", base_global_batch=2)
    assert verify(job, load_data(job), steps=1).ok
    caught(verify(job, load_data(job), steps=1, compose=composed_with(fault)), "parameter")


def test_skipped_steps_are_noted_and_not_counted(corpus: Path) -> None:
    """A loss scale far too large overflows; the verified steps are those that were taken."""
    job = job_for(corpus, techniques=(Precision(mode="fp16", initial_scale=2.0**40),))
    certificate = verify(job, load_data(job), steps=2)
    assert certificate.ok, certificate.first_difference
    assert certificate.steps == 2
    assert any("skipped" in note for note in certificate.notes)


def test_a_refused_job_is_refused(corpus: Path) -> None:
    job = job_for(corpus, techniques=(Precision(mode="bf16-pure"),), optimizer=Optimizer(implementation="fused"))
    with pytest.raises(ConfigError, match="fused"):
        verify(job, load_data(job), steps=1)
