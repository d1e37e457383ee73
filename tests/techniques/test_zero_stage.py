"""Divided optimizer states: the same training as without, every gradient counted, and a run that any layout goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import thrice.train
from plain import TOLERANCE, VOCABULARY, dealt, gradients_taken, job, window
from plain import session as alone
from runs import tiny
from thrice import checkpoint
from thrice.compose import compose, refuse
from thrice.data.batches import IGNORE, Batch
from thrice.data.load import load_data
from thrice.errors import ConfigError
from thrice.optim.build import build_optimizer
from thrice.runtime import flat_shards, store
from thrice.runtime.dist import ALONE, World
from thrice.runtime.session import Session
from thrice.runtime.technique import Arithmetic
from thrice.spec.job import Decoder, Job, Optimizer
from thrice.step import train_step
from thrice.techniques.data_parallel import DataParallel
from thrice.techniques.optimizer_states import OptimizerStates
from thrice.techniques.precision import Precision
from thrice.techniques.zero_stage import ZeroStage
from thrice.verify import verify

pytestmark = pytest.mark.xdist_group("processes")

ZERO = ZeroStage(level=1)
SECOND = ZeroStage(level=2, bucket_bytes=10_000)
SMALL = ZeroStage(level=1, bucket_bytes=10_000)
"""Several buckets, so that pieces begin and end within many of the parameters."""
ADAMW = Optimizer(name="adamw", weight_decay=0.1, clip=1.0)


# the same training


def stepped(world: World, asked: Job, windows: list[list[Batch]]):
    """(results, the gradients of each window, the parameters after each)."""
    session = compose(asked, vocabulary=VOCABULARY, world=world)
    taken = gradients_taken(session)
    results, gradients, parameters = [], [], []
    for batches in windows:
        results.append(train_step(session, dealt(batches, world)))
        gradients.append(dict(taken))
        parameters.append({name: parameter.detach().clone() for name, parameter in session.model.named_parameters()})
    return results, gradients, parameters


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("name", "technique"), [("sgd", SMALL), ("adamw", SMALL), ("sgd", SECOND)])
def test_a_loop_by_hand(name: str, technique: ZeroStage, size: int, workers) -> None:
    """Three steps on batches of unequal shares, one of them without any target on rank 0."""
    asked = job(processes=size, global_batch=8, optimizer=replace(ADAMW, name=name), lr=0.01)
    asked = replace(asked, techniques=(technique,))
    shares = [(16,) * 8, (2, 6, 16, 1, 9, 3, 16, 11), (0, 5, 9, 16, 0, 7, 2, 1)]
    windows = [window(*valid, seed=seed) for seed, valid in enumerate(shares)]
    model = alone(job()).model
    of = [[p for p in model.parameters() if (p.ndim >= 2) is matrix] for matrix in (True, False)]
    groups = [{"params": of[0], "weight_decay": 0.1}, {"params": of[1], "weight_decay": 0.0}]
    if name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=asked.optimizer.betas, eps=asked.optimizer.eps)
    norms, gradients, parameters = [], [], []
    for batches in windows:
        inputs, targets = (torch.cat([getattr(batch, part) for batch in batches]) for part in ("inputs", "targets"))
        nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        parameters.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    outcomes = workers(size).call(stepped, asked, windows)
    assert max(norms) > 1.0, "clipped"
    for rank, (results, whole, got) in enumerate(outcomes):
        assert [result.grad_norm for result in results] == pytest.approx(norms, rel=1e-5), "of all shards, once"
        if rank == 0:
            torch.testing.assert_close(whole, gradients, **TOLERANCE)
        # AdamW makes of a gradient near 0 a step of either sign: a thousandth of one step of 0.01
        torch.testing.assert_close(got, parameters, rtol=1e-5, atol=1e-5 if name == "adamw" else 1e-7)
        assert all(torch.equal(got[-1][name], outcomes[0][2][-1][name]) for name in got[-1])


def verified(world: World, asked: Job, steps: int = 4):
    return verify(asked, load_data(asked), steps=steps, world=world)


FP16 = Precision(mode="fp16", initial_scale=1024.0)
CERTIFIED = {
    "fp32": (SMALL,),
    "bf16": (ZERO, Precision(mode="bf16")),
    "fp16": (SMALL, FP16),
    "level 2": (SECOND,),
    "level 2, fp16": (SECOND, FP16),
    "level 2, pure": (SECOND, Precision(mode="bf16-pure"), OptimizerStates(format="bf16")),
    "stochastic": (SMALL, Precision(mode="bf16-pure")),
    "compensated": (SMALL, Precision(mode="bf16-pure", rounding="compensated"), OptimizerStates(format="bf16")),
    "8bit": (SMALL, OptimizerStates(format="8bit")),
    "beside data_parallel": (DataParallel(degree=2), ZERO),
}


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "lars", "sgd"])
@pytest.mark.parametrize("stack", CERTIFIED)
def test_certified_on_two(stack: str, optimizer: str, corpus: Path, tmp_path: Path, workers) -> None:
    """Distinct data, dropout, accumulation over 4 micro-batches, and the epoch's last window of 43 samples for 48."""
    if optimizer in ("lars", "sgd") and stack not in ("fp32", "fp16", "stochastic", "level 2"):
        pytest.skip("nothing of its own there")
    asked = tiny(corpus, tmp_path / "run", processes=2, micro_batch=6, techniques=CERTIFIED[stack])
    asked = replace(asked, optimizer=replace(asked.optimizer, name=optimizer))
    if FP16 in CERTIFIED[stack]:  # float16 is emulated
        asked = replace(asked, micro_batch=1, global_batch=8)
    assert asked.ledger().grad_accum_steps == 4
    certificates = workers(2).call(verified, asked)
    assert certificates[0].ok, certificates[0].first_difference
    assert {row.kind for row in certificates[0].rows} >= {"replica", "gradient", "update"}
    assert all(certificate == certificates[0] for certificate in certificates)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "lars"])
@pytest.mark.parametrize("stack", ["fp32", "stochastic", "8bit", "level 2"])
def test_certified_on_four(stack: str, optimizer: str, corpus: Path, tmp_path: Path, workers) -> None:
    """The last window is 3 of 4 samples: one rank has none, and one piece is shorter than the others."""
    asked = tiny(corpus, tmp_path / "run", processes=4, micro_batch=1, global_batch=4, techniques=CERTIFIED[stack])
    asked = replace(asked, optimizer=replace(asked.optimizer, name=optimizer))
    certificate = workers(4).call(verified, asked, 3)[0]
    assert certificate.ok, certificate.first_difference


@pytest.mark.parametrize("techniques", [(ZERO, DataParallel()), (DataParallel(degree=2), ZERO)])
def test_plain_replicas_beside_it_leave_it_to_it(techniques, workers) -> None:
    asked = job(processes=2, techniques=techniques)
    for applied in workers(2).call(applied_by, asked):
        assert list(applied) == ["zero_stage", "data_parallel"]
        assert applied["data_parallel"] == "gradients are added up where they are divided"


def applied_by(world: World, asked: Job) -> dict[str, str]:
    return compose(asked, vocabulary=VOCABULARY, world=world).applied


def test_level_0_is_plain_replicas(workers) -> None:
    asked = job(processes=2, techniques=(ZeroStage(),))
    windows = [window(16, 5, 16, 3)]
    for got, expected in zip(
        workers(2).call(stepped, asked, windows),
        workers(2).call(stepped, replace(asked, techniques=()), windows),
        strict=True,
    ):
        assert all(torch.equal(got[2][0][name], tensor) for name, tensor in expected[2][0].items())


def names_and_ties(world: World, asked: Job):
    session = compose(asked, vocabulary=VOCABULARY, world=world)
    train_step(session, dealt(window(16, 16, 16, 16), world))
    everything = dict(session.model.named_parameters(remove_duplicate=False))
    return {name: (tuple(p.shape), p.data_ptr(), p.stride()) for name, p in everything.items()}


def test_parameters_keep_their_names_shapes_and_ties(workers) -> None:
    model = alone(job()).model
    everything = dict(model.named_parameters(remove_duplicate=False))
    assert len(everything) > len(dict(model.named_parameters())), "one is tied"
    for got in workers(2).call(names_and_ties, job(processes=2, techniques=(SMALL,))):
        assert {name: (shape, stride) for name, (shape, _, stride) in got.items()} == {
            name: (tuple(p.shape), p.stride()) for name, p in everything.items()
        }
        for one in everything:
            for other in everything:
                assert (got[one][1] == got[other][1]) == (everything[one] is everything[other])


# memory and messages


def shares(world: World, asked: Job) -> tuple[int, int]:
    """(bytes of this rank's states, bytes of gradients left after backward)."""
    session = compose(asked, vocabulary=VOCABULARY, world=world)
    left = 0

    def take(*_: object) -> None:
        nonlocal left
        assert all(parameter.grad is None for parameter in session.model.parameters())
        left = sum(tensor.grad.nbytes for _, tensor in session.trained())

    session.optimizer.register_step_pre_hook(take)
    train_step(session, dealt(window(*[16] * 8), world))
    states = (value for state in session.optimizer.state.values() for key, value in state.items() if key != "step")
    return sum(value.nbytes for value in states), left


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("bucket_bytes", [25 << 20, 400_000])
def test_each_rank_holds_its_share_of_the_states(size: int, bucket_bytes: int, workers) -> None:
    decoder = Decoder(layers=3, hidden=96, heads=4, mlp_hidden=250)
    technique = ZeroStage(level=1, bucket_bytes=bucket_bytes)
    asked = job(processes=size, global_batch=8, decoder=decoder, optimizer=ADAMW, techniques=(technique,))
    elements = sum(p.numel() for p in alone(replace(asked, processes=1, techniques=())).model.parameters())
    held = workers(size).call(shares, asked)
    assert sum(states for states, _ in held) == 8 * elements, "AdamW's two, in float32, each element once"
    for states, gradients in held:
        assert states == pytest.approx(8 * elements / size, rel=0.02)
        assert gradients == states // 2


def counted(world: World, asked: Job, micro_batches: int):
    """What was sent by the end of each micro-batch, and by the end of the step."""
    session = compose(asked, vocabulary=VOCABULARY, world=world)
    sent: list[tuple[str, int]] = []
    after: list[list[tuple[str, int]]] = []
    originals = flat_shards.reduce_scatter, flat_shards.all_gather

    def watched(name: str, collective: Callable[..., object]) -> Callable[..., object]:
        def call(out: Tensor, into: Tensor, **options: object) -> object:
            sent.append((name, max(out.nbytes, into.nbytes)))
            return collective(out, into, **options)

        return call

    flat_shards.reduce_scatter, flat_shards.all_gather = (
        watched("reduce", originals[0]), watched("gather", originals[1])
    )  # fmt: skip
    forward = session.loss

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        after.append(list(sent))
        return forward(output, targets)

    session.loss = loss
    in_backward: list[int] = []
    first = next(session.model.parameters())  # the last whose gradient is complete
    first.register_post_accumulate_grad_hook(lambda _: in_backward.append(len(sent)))
    try:
        train_step(session, dealt(window(*[16] * (micro_batches * world.size)), world))
    finally:
        flat_shards.reduce_scatter, flat_shards.all_gather = originals
    return after, sent, in_backward, len(session.shards.buckets), sum(p.nbytes for p in session.model.parameters())


@pytest.mark.parametrize("technique", [ZERO, SMALL])
def test_one_reduction_a_window(technique: ZeroStage, workers) -> None:
    """Four micro-batches on each of two ranks; each gradient and each parameter travels once."""
    asked = job(processes=2, global_batch=8, techniques=(technique,))
    for after, sent, in_backward, buckets, whole in workers(2).call(counted, asked, 4):
        assert after == [[]] * 4, "nothing before the last backward"
        assert [name for name, _ in sent] == ["reduce"] * buckets + ["gather"] * buckets
        assert (buckets > 1) == (technique is SMALL)
        for kind in ("reduce", "gather"):
            moved = sum(count for name, count in sent if name == kind)
            assert whole <= moved <= 1.05 * whole
        assert in_backward[:3] == [0, 0, 0]
        assert in_backward[3] >= buckets - 1, "all but the last went while backward was running"


def underway(world: World, asked: Job):
    """The largest number of buckets that were on their way at once, and what each micro-batch left of gradients."""
    session = compose(asked, vocabulary=VOCABULARY, world=world)
    buckets, most = session.shards.buckets, 0
    for bucket in buckets:
        send = bucket.send

        def sending(send=send) -> None:
            nonlocal most
            send()
            most = max(most, sum(each._underway is not None for each in buckets))

        bucket.send = sending
    around, left = session.replicas.micro_batch, []

    @contextmanager
    def watched(*, last: bool):
        with around(last=last):
            yield
        whole = sum(parameter.grad is not None for parameter in session.model.parameters())
        left.append((whole, sum(bucket._gradient.nbytes for bucket in buckets if bucket._gradient is not None)))

    session.replicas.micro_batch = watched
    train_step(session, dealt(window(*[16] * 8), world))
    return most, left, sum(parameter.nbytes for parameter in session.model.parameters())


def test_level_2_holds_no_gradients_taken(workers) -> None:
    """Four micro-batches on each of two ranks: sent in each, a shard is left, and few buckets are on their way."""
    asked = job(processes=2, global_batch=8, techniques=(SECOND,))
    for most, left, whole in workers(2).call(underway, asked):
        assert most == flat_shards.UNDERWAY
        assert [count for count, _ in left] == [0, 0, 0, 0]
        for _, shard in left[:3]:
            assert shard == pytest.approx(whole / 2, rel=0.05)
    for after, sent, _, buckets, _ in workers(2).call(counted, asked, 4):
        assert [len(each) for each in after] == [0, buckets, 2 * buckets, 3 * buckets]
        assert [name for name, _ in sent] == ["reduce"] * 4 * buckets + ["gather"] * buckets


# faults that verify has to see


def faulty(world: World, asked: Job, plant: Callable[[Session], None]):
    def composed(*rest: object, **options: object) -> Session:
        session = compose(*rest, **options)
        plant(session)
        return session

    return verify(asked, load_data(asked), steps=2, compose=composed, world=world)


def left_out(session: Session) -> None:
    """DeepSpeed's classic: what a rank does not own it drops before the reduction."""
    for bucket in session.shards.buckets:
        send = bucket.send

        def dropping(bucket=bucket, send=send) -> None:
            if session.world.rank == 1:
                for parameter in bucket.parameters[:1]:
                    parameter.grad.zero_()
            send()

        bucket.send = dropping


def averaged(session: Session) -> None:
    for bucket in session.shards.buckets:
        hand_over = bucket.hand_over

        def halved(used, bucket=bucket, hand_over=hand_over) -> None:
            hand_over(used)
            for tensor in bucket.own:
                tensor.grad /= 2

        bucket.hand_over = halved


def stale(session: Session) -> None:
    session.shards.updated = lambda: None


def stale_once(session: Session) -> None:
    updated, calls = session.shards.updated, []

    def second_only() -> None:
        calls.append(1)
        if len(calls) > 1:
            updated()

    session.shards.updated = second_only


def twice_on_one(session: Session) -> None:
    if session.world.rank == 1:
        step = session.optimizer.step

        def twice() -> None:
            step.__wrapped__(session.optimizer)  # without the hooks, which are collective
            step()

        session.optimizer.step = twice


def norm_of_the_shard(session: Session) -> None:
    session.norm = nn.utils.get_total_norm


def norms_of_pieces(session: Session) -> None:
    """LAMB's trust ratio of a piece in place of the tensor's."""
    session.optimizer.share = replace(session.optimizer.share, sum_=lambda tensor: tensor)


@pytest.mark.parametrize("technique", [SMALL, SECOND])
@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (left_out, "grad_norm"),
        (averaged, "grad_norm"),
        (norm_of_the_shard, "grad_norm"),
        (stale, "parameter"),
        (stale_once, "parameter"),
        (twice_on_one, "parameter"),
        (norms_of_pieces, "parameter"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_planted_fault_is_caught(
    plant, kind: str, technique: ZeroStage, corpus: Path, tmp_path: Path, workers
) -> None:
    asked = tiny(corpus, tmp_path / "run", processes=2, micro_batch=6, techniques=(technique,))
    if plant is norms_of_pieces:
        asked = replace(asked, optimizer=replace(asked.optimizer, name="lamb"))
    for certificate in workers(2).call(faulty, asked, plant):
        assert not certificate.ok
        first = certificate.first_difference
        assert first.kind == kind, first
        assert first.deviation > 2 * first.allowed


# overflow, and parameters without a gradient


def overflowed(world: World, asked: Job):
    session = compose(asked, vocabulary=VOCABULARY, world=world)
    batches = dealt(window(16, 16), world)
    train_step(session, batches)

    def everything() -> dict[str, Tensor]:
        states = {(n, key): value for n, t in session.trained() for key, value in session.optimizer.state[t].items()}
        return copy.deepcopy({**session.model.state_dict(), **states})

    before = everything()
    if world.rank == 1:
        hook = next(session.model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    bad = train_step(session, batches)
    after = everything()
    same = before.keys() == after.keys() and all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    if world.rank == 1:
        hook.remove()
    return bad.taken, same, session.scaler.scale, train_step(session, batches).taken, session.progress


def test_an_overflow_on_one_rank_moves_nothing_on_any(workers) -> None:
    asked = job(processes=2, global_batch=2, optimizer=ADAMW, techniques=(FP16, SMALL))
    one, other = workers(2).call(overflowed, asked)
    assert one == other
    assert one[:4] == (False, True, 512.0, True)
    assert (one[4].step, one[4].skipped_steps) == (2, 1)


class Odd(nn.Module):
    """A part that is never used, and one that only some samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.spare = nn.Linear(8, 8)
        self.rare = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.table(inputs)
        if inputs.shape[0] and int(inputs[0, 0]) == 0:
            hidden = hidden + self.rare(hidden)
        return self.head(hidden)


def with_odd(world: World, asked: Job, windows: list[list[Batch]]):
    torch.manual_seed(world.rank)  # a caller's models need not be the same
    session = compose(asked, vocabulary=VOCABULARY, model=Odd(), world=world)
    for batches in windows:
        train_step(session, dealt(batches, world))
    return {name: parameter.detach() for name, parameter in session.model.named_parameters()}


@pytest.mark.parametrize("technique", [SMALL, SECOND])
def test_what_no_rank_uses_stays_and_what_one_uses_moves_on_all(technique: ZeroStage, workers) -> None:
    """Weight decay and momentum would move what has no gradient; the plain optimizer leaves it alone."""
    windows = [window(16, 5, seed=seed) for seed in range(3)]
    for place, batches in enumerate(windows):
        for index, batch in enumerate(batches):
            batch.inputs[0, 0] = 0 if (place, index) == (1, 1) else 1  # in the second window, on rank 1 alone
    asked = job(processes=2, global_batch=2, optimizer=ADAMW, lr=0.01, techniques=(technique,))
    plain = replace(asked, processes=1, techniques=())
    expected = with_odd(ALONE, plain, windows)
    torch.manual_seed(0)
    start = dict(Odd().named_parameters())
    for got in workers(2).call(with_odd, asked, windows):
        torch.testing.assert_close(got, expected, **TOLERANCE)
        assert torch.equal(got["spare.weight"], start["spare.weight"])
        assert not torch.equal(got["rare.weight"], start["rare.weight"])


# going on with another layout

STORED = {
    "fp32": (),
    "pure": (Precision(mode="bf16-pure", rounding="compensated"), OptimizerStates(format="bf16")),
    "8bit": (OptimizerStates(format="8bit"),),
}


def laid_out(asked: Job, layout: str) -> Job:
    """ "zero1-4": four ranks at level 1; "plain-1": one process."""
    kind, size = layout.split("-")
    divided = {"zero1": (SMALL,), "zero2": (SECOND,), "plain": ()}[kind]
    return replace(asked, processes=int(size), techniques=(*asked.techniques, *divided))


def saved(world: World, asked: Job, folder: Path) -> None:
    data = load_data(asked)
    session = compose(asked, vocabulary=256, world=world)
    for _ in range(2):
        after(world, session, data)
    checkpoint.save(session, folder, corpus="", metrics_rows=0)


def after(world: World, session: Session, data) -> None:
    position = session.progress.position
    batches, session.progress.position = data.window(position, rank=world.rank, ranks=world.size)
    assert train_step(session, batches).taken


def gone_on(world: World, asked: Job, path: Path):
    """(what is said, the states as they would be saved again, the parameters after one more step)."""
    data = load_data(asked)
    session = compose(asked, vocabulary=256, world=world)
    changed, _ = checkpoint.restore(session, path, "")
    states = {name: state.clone() for name, state in checkpoint._optimizer_tensors(session).items()}
    after(world, session, data)
    return changed, states, {name: parameter.detach() for name, parameter in session.model.named_parameters()}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("from_", "to"),
    [
        ("zero1-2", "plain-1"),
        ("plain-1", "zero1-2"),
        ("zero1-2", "zero1-4"),
        ("zero1-4", "zero2-2"),
        ("plain-2", "zero1-2"),
        ("zero2-2", "plain-2"),
    ],
)
def test_any_layout_goes_on(from_: str, to: str, stored: str, corpus: Path, tmp_path: Path, workers) -> None:
    """DeepSpeed#2898, #5105: moments that are shifted at another world size. Equal bit for bit, and the next step."""
    decoder = Decoder(layers=2, hidden=48, heads=2, mlp_hidden=100)  # matrices of 4,800 elements: no whole blocks
    plain = tiny(corpus, tmp_path, micro_batch=12, decoder=decoder, techniques=STORED[stored])
    call = {size: workers(size).call if size > 1 else _alone for size in (1, 2, 4)}
    before, now = laid_out(plain, from_), laid_out(plain, to)
    call[before.processes](saved, before, tmp_path / "saved")
    path = tmp_path / "saved" / "step-00000002"
    tensors, _ = store.load(path)
    outcomes = call[now.processes](gone_on, now, path)
    changed, states, _ = outcomes[0]
    assert states.keys() == tensors["optimizer"].keys()
    for name, state in states.items():
        right = tensors["optimizer"][name]
        assert (state.dtype, state.shape) == (right.dtype, right.shape), name
        assert torch.equal(state, right), name
    assert any("zero_stage" in line for line in changed) == (from_[:5] != to[:5])
    expected = _alone(gone_on, replace(plain, processes=1), path)[0]
    assert expected[1].keys() == states.keys(), "what one process keeps"
    # a step of 3e-3 / 3 in the warm-up, of which AdamW's smallest gradients may take another part
    allowed = {"fp32": 2e-6, "pure": 1e-2, "8bit": 2e-6}[stored]
    for _, _, parameters in outcomes:
        for name, parameter in parameters.items():
            torch.testing.assert_close(parameter, expected[2][name], rtol=0, atol=allowed)


def _alone(function: Callable[..., object], *arguments: object) -> list:
    return [function(ALONE, *arguments)]


def trained(world: World, asked: Job, resume: bool = False) -> list[str]:
    lines: list[str] = []
    thrice.train.train(asked, resume=resume, say=lines.append, world=world)
    return lines


def test_a_whole_run_stopped_and_gone_on_is_bitwise_the_same(corpus: Path, tmp_path: Path, workers) -> None:
    constant = replace(tiny(corpus, tmp_path).schedule, decay="constant")
    asked = tiny(
        corpus, tmp_path / "whole", processes=2, micro_batch=6, schedule=constant, techniques=(SMALL, *STORED["pure"])
    )
    workers(2).call(trained, asked)
    half = replace(asked, run_dir=str(tmp_path / "half"))
    workers(2).call(trained, replace(half, max_steps=4))
    workers(2).call(trained, half, True)
    one, other = (store.load(tmp_path / name / "checkpoints" / "step-00000008")[0] for name in ("whole", "half"))
    for group in ("weights", "optimizer"):
        assert one[group].keys() == other[group].keys()
        assert all(torch.equal(tensor, other[group][name]) for name, tensor in one[group].items())


# the noise of stochastic rounding


def rounded(world: World, asked: Job) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(parameters after an update of pieces, after one of whole parameters) on the same gradients."""
    session = compose(asked, vocabulary=VOCABULARY, world=world)
    whole = copy.deepcopy(session.model)
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()
    plain = build_optimizer(whole, asked.optimizer, lr=0.01, seed=asked.seed, rounding="stochastic")
    generator = torch.Generator().manual_seed(1)
    own = dict(session.trained())
    for (name, parameter), gradients in zip(
        whole.named_parameters(),
        [torch.randn(p.shape, generator=generator) for p in whole.parameters()],
        strict=True,
    ):
        parameter.grad_dtype = torch.float32
        parameter.grad = gradients
        if name in own:
            own[name].grad = session.shards.share.pieces[own[name]].of("", gradients)
    for group in session.optimizer.param_groups:
        group["lr"] = 0.01
    session.optimizer.step()
    session.updated()
    plain.step()
    return tuple({n: p.detach() for n, p in model.named_parameters()} for model in (session.model, whole))


def test_stochastic_rounding_does_not_depend_on_the_cut(workers) -> None:
    asked = job(processes=2, optimizer=ADAMW, techniques=(SMALL, Precision(mode="bf16-pure")))
    for got, expected in workers(2).call(rounded, asked):
        for name, tensor in expected.items():
            # the same noise: but for what the kernel's vectors round otherwise at an edge, the same bits
            assert float((got[name] != tensor).float().mean()) < 1e-3, name


# refusals


def test_what_needs_whole_matrices_is_refused() -> None:
    asked = job(processes=2, optimizer=Optimizer(name="muon"), techniques=(ZERO,))
    assert [(problem.key, problem.value) for problem in refuse(asked)] == [("zero_stage", 1)]
    assert not list(refuse(replace(asked, processes=1)))


def test_compressed_gradients_are_refused() -> None:
    asked = job(processes=2, techniques=(ZERO, DataParallel(compression="bf16")))
    assert DataParallel(compression="bf16").arithmetic() == Arithmetic(reduced=torch.bfloat16)
    assert ["travel as they are" in problem.why for problem in refuse(asked)] == [True]


def test_a_level_that_there_is_not_yet() -> None:
    (problem,) = ZeroStage(level=3).check()
    assert (problem.key, problem.value, problem.why) == ("level", 3, "this version has 0, 1 and 2")


def too_few(world: World, asked: Job) -> None:
    model = nn.Embedding(VOCABULARY, VOCABULARY).requires_grad_(False)
    model.scale = nn.Parameter(torch.ones(()))
    compose(asked, vocabulary=VOCABULARY, model=model, world=world)


def test_fewer_elements_than_ranks(workers) -> None:
    with pytest.raises(ConfigError, match="too few for 2 processes"):
        workers(2).call(too_few, job(processes=2, techniques=(ZERO,)))


def test_alone_it_says_so_and_does_nothing() -> None:
    said = alone(job(techniques=(ZERO,)))
    assert said.applied["zero_stage"] == "one process, nothing to divide"
    assert said.shards is None
    assert alone(job(processes=2, techniques=(ZERO,))).applied["zero_stage"] == "one of 2 shares, not divided"
