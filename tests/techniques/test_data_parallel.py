"""Replicas: the gradient of the whole batch, one exchange a window, and every rank's share counted as it should be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thrice.train
from plain import SEQUENCE, TOLERANCE, VOCABULARY, dealt, gradients_taken, job, window
from runs import assert_same_state, metrics, run, tiny
from thrice.compose import compose
from thrice.data.batches import IGNORE, Batch
from thrice.data.load import load_data
from thrice.errors import ConfigError, DataError, Diverged, ThriceError, UsageError
from thrice.runtime import store
from thrice.runtime.dist import World
from thrice.runtime.session import Session
from thrice.spec.job import Decoder, Job
from thrice.step import StepResult, evaluate, train_step
from thrice.techniques.data_parallel import DataParallel
from thrice.techniques.precision import Precision
from thrice.verify import verify

pytestmark = pytest.mark.xdist_group("processes")


def stepped(world: World, asked: Job, windows: list[list[Batch]]):
    """(what each window came to, the gradients of each, the parameters at the end)."""
    session = compose(asked, vocabulary=VOCABULARY, world=world)
    taken = gradients_taken(session)
    results, gradients = [], []
    for batches in windows:
        results.append(train_step(session, dealt(batches, world)))
        gradients.append({name: gradient.clone() for name, gradient in taken.items()})
    return results, gradients, {name: parameter.detach() for name, parameter in session.model.named_parameters()}


def plain(asked: Job, windows: list[list[Batch]]) -> list[dict[str, Tensor]]:
    """The gradient of each window, by a loop of plain torch over the whole of it at once."""
    session = compose(replace(asked, processes=1), vocabulary=VOCABULARY)
    model, gradients = session.model, []
    for batches in windows:
        inputs, targets = (torch.cat([getattr(batch, part) for batch in batches]) for part in ("inputs", "targets"))
        nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        session.optimizer.step()
        session.optimizer.zero_grad()
    return gradients


@pytest.mark.parametrize(
    "valid",
    [(16, 16, 16, 16), (2, 6, 16, 1), (0, 16, 0, 9), (0, 5, 0, 0)],
    ids=["even", "unequal", "a rank without targets", "one micro-batch with targets"],
)
def test_gradient_of_the_whole_batch(valid: tuple[int, ...], workers) -> None:
    """transformers#34242: a mean of the ranks' means is 1.8 off. Two ranks, two micro-batches each."""
    asked = job(processes=2)
    windows = [window(*valid, seed=seed) for seed in range(2)]
    right = plain(asked, windows)
    outcomes = workers(2).call(stepped, asked, windows)
    for results, gradients, parameters in outcomes:
        assert [result.tokens for result in results] == [sum(valid)] * 2
        for got, expected in zip(gradients, right, strict=True):
            torch.testing.assert_close(got, expected, **TOLERANCE)
        norm = torch.linalg.vector_norm(torch.stack([each.norm() for each in right[0].values()]))
        assert results[0].grad_norm == pytest.approx(norm.item(), rel=1e-5), "of the whole, not of a rank's share"
        assert all(torch.equal(parameters[name], outcomes[0][2][name]) for name in parameters)


def test_a_window_without_any_target_takes_no_step(workers) -> None:
    for results, *_ in workers(2).call(stepped, job(processes=2), [window(0, 0, 0, 0)]):
        assert results == [StepResult(taken=False, loss=None, grad_norm=None, lr=0.1, tokens=0)]


def counted(world: World, asked: Job, batches: list[Batch], technique: DataParallel) -> tuple[list[int], int]:
    """(bytes of each all-reduce of gradients within a step, bytes of all gradients)."""
    asked = replace(asked, techniques=(technique,))
    session = compose(asked, vocabulary=VOCABULARY, world=world)
    train_step(session, dealt(batches, world))  # DDP orders its buckets anew after the first backward
    sent: list[int] = []
    reduce = dist.all_reduce

    def watched(tensor: Tensor, *rest: object, **options: object) -> object:
        if tensor.dtype is not torch.float64:  # counts and losses are float64
            sent.append(tensor.nbytes)
        return reduce(tensor, *rest, **options)

    dist.all_reduce = watched
    try:
        train_step(session, dealt(batches, world))
    finally:
        dist.all_reduce = reduce
    return sent, sum(parameter.nbytes for parameter in session.model.parameters())


@pytest.mark.parametrize("bucket_bytes", [25 << 20, 20_000])
@pytest.mark.parametrize(("compression", "share"), [("none", 1.0), ("bf16", 0.5)])
def test_one_reduction_a_window(compression, share: float, bucket_bytes: int, workers) -> None:
    """accelerate#1726: no-sync around backward alone still communicates. Four micro-batches on each of two ranks."""
    technique = DataParallel(bucket_bytes=bucket_bytes, compression=compression)
    for sent, whole in workers(2).call(counted, job(processes=2, global_batch=8), window(*[16] * 8), technique):
        assert sum(sent) == share * whole, (
            "each gradient once: 4 bytes a parameter, whatever the number of micro-batches"
        )
        assert (len(sent) == 1) == (bucket_bytes > whole)


def test_what_travels_in_bf16_is_rounded_so_and_no_more(workers) -> None:
    asked = job(processes=2, techniques=(DataParallel(compression="bf16"),))
    windows = [window(2, 6, 16, 1)]
    (right,) = plain(asked, windows)
    for _, (got,), _ in workers(2).call(stepped, asked, windows):
        assert any(not torch.equal(got[name], right[name]) for name in right)
        for name, gradient in right.items():  # two summands and their sum, of 8 bits each
            torch.testing.assert_close(got[name], gradient, rtol=2**-7, atol=2**-8 * float(gradient.abs().max()))


def overflowed(world: World, asked: Job):
    session = compose(asked, vocabulary=VOCABULARY, world=world)
    before = copy.deepcopy(session.model.state_dict())
    batches = dealt(window(16, 16), world)
    if world.rank == 1:
        parameter = next(session.model.parameters())
        hook = parameter.register_hook(lambda gradient: gradient * float("inf"))
    bad = train_step(session, batches)
    same = all(torch.equal(tensor, session.model.state_dict()[name]) for name, tensor in before.items())
    if world.rank == 1:
        hook.remove()
    return bad.taken, same, session.scaler.scale, train_step(session, batches).taken, session.progress


def test_an_overflow_on_one_rank_is_an_overflow_on_all(workers) -> None:
    asked = job(processes=2, global_batch=2, techniques=(Precision(mode="fp16", initial_scale=1024.0),))
    one, other = workers(2).call(overflowed, asked)
    assert one == other
    assert one[:4] == (False, True, 512.0, True)
    assert (one[4].step, one[4].skipped_steps) == (1, 1), "a skipped step does not move the schedule"


def diverged(world: World, asked: Job) -> str:
    session = compose(asked, vocabulary=VOCABULARY, world=world)
    if world.rank == 1:
        loss = session.loss
        session.loss = lambda output, targets: loss(output, targets) * float("nan")
    with pytest.raises(Diverged) as caught:
        train_step(session, dealt(window(16, 16, 16, 16), world))
    return str(caught.value)


def test_a_loss_that_is_not_finite_is_named_on_every_rank(workers) -> None:
    one, other = workers(2).call(diverged, job(processes=2))
    assert one == other
    assert "(samples 1, 3)" in one, "those of the rank that has it"


class Odd(nn.Module):
    """A model with a part that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.spare = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.table(inputs))


def with_spare(world: World, asked: Job):
    torch.manual_seed(world.rank)  # a caller's models need not be the same
    session = compose(asked, vocabulary=VOCABULARY, model=Odd(), world=world)
    for seed in range(2):
        train_step(session, dealt(window(16, 5, seed=seed), world))
    return session.applied["data_parallel"], {name: p.detach() for name, p in session.model.named_parameters()}


def test_unused_parameters_are_named_and_rank_0_gives_the_weights(workers) -> None:
    (said, one), (_, other) = workers(2).call(with_spare, job(processes=2, global_batch=2))
    assert "spare.weight, spare.bias" in said
    assert all(torch.equal(one[name], other[name]) for name in one)
    torch.manual_seed(0)
    assert torch.equal(one["spare.weight"], Odd().spare.weight)
    assert not torch.equal(one["head.weight"], Odd().head.weight)


def fickle(world: World, asked: Job) -> None:
    model = Odd()
    del model.spare  # where some parameter is never used, DDP looks for them in each step
    session = compose(asked, vocabulary=VOCABULARY, model=model, world=world)
    batches = dealt(window(16, 16), world)
    train_step(session, batches)
    model.forward = lambda inputs: model.head(model.table(inputs).detach())
    train_step(session, batches)


def test_a_parameter_that_is_used_only_sometimes_stops_the_run(workers) -> None:
    """DDP alone says it one wrong update later."""
    asked = job(processes=2, global_batch=2)
    with pytest.raises(ThriceError, match=r"rank 0 did not use .*table\.weight.*nothing was updated"):
        workers(2).call(fickle, replace(asked, techniques=(DataParallel(bucket_bytes=64),)))


# verify


def faulty(world: World, asked: Job, plant: Callable[[Session], None], steps: int = 2):
    def composed(*rest: object, **options: object) -> Session:
        session = compose(*rest, **options)
        plant(session)
        return session

    return verify(asked, load_data(asked), steps=steps, compose=composed, world=world)


def unscaled_on_one(session: Session) -> None:
    if session.world.rank == 1:
        for parameter in session.model.parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)


def not_exchanged(session: Session) -> None:
    session.replicas = None


def averaged(session: Session) -> None:
    summed = session.replicas._summed
    session.replicas._summed = lambda bucket: summed(bucket).then(lambda done: done.value() / 2)


def updated_twice_on_one(session: Session) -> None:
    if session.world.rank == 1:
        step = session.optimizer.step

        def twice() -> None:
            step()
            with torch.no_grad():
                next(session.model.parameters()).mul_(1.0 + 1e-6)

        session.optimizer.step = twice


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (unscaled_on_one, "grad_norm"),
        (not_exchanged, "grad_norm"),
        (averaged, "grad_norm"),
        (updated_twice_on_one, "replica"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_planted_fault_is_caught(plant, kind: str, corpus: Path, tmp_path: Path, workers) -> None:
    asked = tiny(corpus, tmp_path / "run", processes=2, micro_batch=6)
    for certificate in workers(2).call(faulty, asked, plant):
        assert not certificate.ok
        assert certificate.first_difference.kind == kind, certificate.first_difference
        assert certificate.first_difference.deviation > 2 * certificate.first_difference.allowed


def same_for_all(world: World, asked: Job):
    """Every rank takes rank 0's share: the fault that a test on identical data cannot see."""
    data = load_data(asked)
    own = type(data).window
    type(data).window = lambda self, *rest, rank, ranks: own(self, *rest, rank=0, ranks=ranks)
    try:
        return verify(asked, data, steps=2, world=world)
    finally:
        type(data).window = own


def test_the_same_share_on_every_rank_is_caught(corpus: Path, tmp_path: Path, workers) -> None:
    certificate = workers(2).call(same_for_all, tiny(corpus, tmp_path / "run", processes=2, micro_batch=6))[0]
    assert certificate.first_difference.kind == "sample_ids"


def verified(world: World, asked: Job):
    return verify(asked, load_data(asked), steps=4, world=world)


@pytest.mark.parametrize("changes", [{}, {"micro_batch": 1, "global_batch": 4}, {"batch_ramp": "on"}], ids=str)
def test_certified_on_four(changes: dict[str, object], corpus: Path, tmp_path: Path, workers) -> None:
    """With dropout; the last window of an epoch is 43 of 48 samples, or 3 of 4, which leaves one rank without any."""
    asked = tiny(corpus, tmp_path / "run", processes=4, micro_batch=6)
    if changes == {"batch_ramp": "on"}:
        changes = {"batch_ramp": replace(asked.batch_ramp, start=24, samples=48, increment=24)}
    certificates = workers(4).call(verified, replace(asked, **changes))
    assert certificates[0].ok, certificates[0].first_difference
    assert {row.kind for row in certificates[0].rows} >= {"replica", "gradient", "update"}
    # the reference takes the ranks' pieces in another order, and a floor is of a sample with itself
    assert max(row.allowed for row in certificates[0].rows if row.kind == "loss") < 1e-5
    assert all(certificate == certificates[0] for certificate in certificates)


# whole runs


def trained(world: World, asked: Job, resume: bool = False) -> list[str]:
    lines: list[str] = []
    thrice.train.train(asked, resume=resume, say=lines.append, world=world)
    return lines


def numbers(row: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in row.items() if value is not None}


def losses(run_dir: Path) -> list[tuple[object, ...]]:
    return [(row["step"], row["loss"], row["lr"]) for row in metrics(run_dir) if "lr" in row]


def test_a_run_is_the_same_on_any_number_of_ranks(corpus: Path, tmp_path: Path, workers) -> None:
    """Losses, rates and evaluations; accelerate#662: a rate that changes with the number of processes."""
    plain_decoder = Decoder(layers=2, hidden=32, heads=2)
    of = {
        size: tiny(corpus, tmp_path / f"on-{size}", processes=size, micro_batch=6, decoder=plain_decoder)
        for size in (1, 2, 4)
    }
    run(of[1])
    for size in (2, 4):
        said = workers(size).call(trained, of[size])
        assert said[0]
        assert not any(said[1:]), "rank 0 speaks"
        for ours, theirs in zip(metrics(tmp_path / f"on-{size}"), metrics(tmp_path / "on-1"), strict=True):
            # float32 losses and norms after eight steps of sums in another order
            assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-4)
        assert [row[2] for row in losses(tmp_path / f"on-{size}")] == [row[2] for row in losses(tmp_path / "on-1")]


def test_resumed_on_the_same_ranks_it_is_bitwise_the_same(corpus: Path, tmp_path: Path, workers) -> None:
    """With dropout, whose random state is each rank's own; mid-epoch."""
    asked = tiny(corpus, tmp_path / "whole", processes=2, micro_batch=6)
    workers(2).call(trained, asked)
    half = replace(asked, run_dir=str(tmp_path / "half"))
    workers(2).call(trained, replace(half, max_steps=4, schedule=replace(asked.schedule, decay="constant")))
    constant = replace(asked, run_dir=str(tmp_path / "constant"), schedule=replace(asked.schedule, decay="constant"))
    workers(2).call(trained, constant)
    workers(2).call(trained, replace(half, schedule=constant.schedule), True)
    assert_same_state(tmp_path / "half", tmp_path / "constant", 8)


@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (1, 2), (2, 4), (4, 2)])
def test_resumed_on_another_number_of_ranks(saved: int, resumed: int, corpus: Path, tmp_path: Path, workers) -> None:
    """The same order of the data, and equal to rounding."""
    constant = replace(tiny(corpus, tmp_path).schedule, decay="constant")
    asked = tiny(
        corpus, tmp_path / "run", micro_batch=6, schedule=constant, decoder=Decoder(layers=2, hidden=32, heads=2)
    )

    def go_on(size: int, **changes: object) -> list[str]:
        job_ = replace(asked, processes=size, **changes)
        return run(job_, resume=True) if size == 1 else workers(size).call(trained, job_, True)[0]

    go_on(saved, max_steps=4)
    lines = go_on(resumed)
    assert any(f"processes: saved {saved}, now {resumed}" in line for line in lines)
    run(replace(asked, run_dir=str(tmp_path / "plain")))
    expected, _ = store.load(tmp_path / "plain" / "checkpoints" / "step-00000008")
    got, _ = store.load(tmp_path / "run" / "checkpoints" / "step-00000008")
    for group in ("weights", "optimizer"):
        # Adam's second moments are squares of gradients, some of them near 0: a share of the largest is allowed
        for name, tensor in expected[group].items():
            torch.testing.assert_close(got[group][name], tensor, rtol=1e-3, atol=1e-5 * float(tensor.abs().max() + 1))


def evaluated(world: World, asked: Job, samples: int) -> tuple[float, int]:
    data = load_data(asked)
    session = compose(asked, vocabulary=data.tokenizer.vocabulary, world=world)
    ids = range(samples)[world.rank :: world.size]
    return evaluate(session, [data.train.batch([sample]) for sample in ids])


def test_evaluation_sees_each_sample_once(corpus: Path, tmp_path: Path, workers) -> None:
    """pytorch#25162: 10 samples on 4 ranks became 12, or 8; and ranks of 3 and 2 do not wait for each other."""
    asked = tiny(corpus, tmp_path / "run", processes=4, micro_batch=6)
    outcomes = workers(4).call(evaluated, asked, 10)
    loss, targets = evaluated(World(), replace(asked, processes=1, micro_batch=6), 10)
    assert outcomes == [outcomes[0]] * 4
    assert outcomes[0][1] == targets == 320
    assert outcomes[0][0] == pytest.approx(loss, rel=1e-6)


# bad input


def test_a_batch_that_the_ranks_do_not_divide_is_refused_with_the_nearest(corpus: Path, tmp_path: Path) -> None:
    asked = tiny(corpus, tmp_path / "run", processes=4, global_batch=48, micro_batch=5)
    problems = list(asked.check())
    assert [problem.key for problem in problems] == ["global_batch"]
    assert "micro_batch 5 × data_parallel 4 = 20" in problems[0].why
    assert "40 or 60" in problems[0].fix


def test_replicas_that_are_not_there_are_refused(corpus: Path, tmp_path: Path) -> None:
    asked = tiny(corpus, tmp_path / "run", processes=2, micro_batch=6, techniques=(DataParallel(degree=4),))
    assert [problem.key for problem in asked.check()] == ["data_parallel"]
    with pytest.raises(ConfigError, match="leave 2 for it"):
        asked.ledger()


def test_one_of_several_alone_is_refused(corpus: Path, tmp_path: Path) -> None:
    asked = tiny(corpus, tmp_path / "run", processes=2, micro_batch=6)
    with pytest.raises(UsageError, match="a world of 1"):
        run(asked)
    with pytest.raises(UsageError, match="a world of 1"):
        verify(asked, load_data(asked))


def spoilt(world: World, asked: Job) -> str:
    model = nn.Sequential(nn.Linear(SEQUENCE, 4), nn.Unflatten(1, (1, 4)))
    session = compose(asked, vocabulary=4, model=model, world=world)
    batch = Batch.of(torch.randn(1, SEQUENCE), torch.zeros(1, 1, dtype=torch.int64), (world.rank,))
    if world.rank == 1:
        batch.inputs[0, 3] = float("nan")
    with pytest.raises(DataError) as caught:
        train_step(session, [batch])
    return str(caught.value)


def test_data_that_is_not_finite_is_named_on_every_rank(workers) -> None:
    one, other = workers(2).call(spoilt, job(processes=2, global_batch=2))
    assert one == other
    assert "(samples 1)" in one
