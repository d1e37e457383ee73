"""recompute: what each strategy drops, what that costs, and a budget that is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from thrice.compose import compose
from thrice.errors import ConfigError, Infeasible
from thrice.observe.rehearse import rehearse
from thrice.observe.trace import RECOMPUTE, Tracer
from thrice.runtime.session import Session
from thrice.spec.job import Decoder, Job
from thrice.step import train_step
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import MODES, Cost, Recompute, choose, costs

SPEC = Decoder(layers=3, hidden=32, heads=4, kv_heads=2, mlp_hidden=64)
SAMPLES, TOKENS = 4, 32


def job(*techniques: object, decoder: Decoder = SPEC) -> Job:
    return Job(
        sequence=TOKENS, global_batch=SAMPLES, micro_batch=SAMPLES, max_steps=4, decoder=decoder, techniques=techniques
    )


def composed(*techniques: object, decoder: Decoder = SPEC) -> Session:
    return compose(job(*techniques, decoder=decoder), vocabulary=256)


def recomputed_flops(session: Session) -> int:
    with Tracer(session.model, session.optimizer) as tracer:
        train_step(session, [session.example()])
    return tracer.trace().flops_by_phase[RECOMPUTE]


@pytest.mark.parametrize(
    ("technique", "line"),
    [
        (Recompute(strategy="none"), "every activation is kept"),
        (Recompute(strategy="full"), "3 of 3 blocks full"),
        (Recompute(strategy="every_k"), "2 of 3 blocks full, 1 of 3 blocks none"),
        (Recompute(strategy="every_k", k=3), "1 of 3 blocks full, 2 of 3 blocks none"),
        (Recompute(strategy="every_k", k=9), "1 of 3 blocks full, 2 of 3 blocks none"),
        (Recompute(strategy="boundary"), "3 of 3 blocks full"),
        (Recompute(strategy="attention_only"), "3 of 3 blocks attention_only"),
        (Recompute(strategy="selective"), "3 of 3 blocks selective"),
    ],
)
def test_what_each_strategy_drops(technique: Recompute, line: str) -> None:
    assert composed(technique).applied["recompute"] == line


def test_extra_flops_are_exact() -> None:
    """2 FLOPs per multiply-add; torch counts the whole attention matrix, masked half included.

    A recomputation ends once everything that backward needs is there: the output of a block's (or an
    attention's) last product is needed by nobody, so that product is not run again.
    """
    rows, width, kv_width, mlp = SAMPLES * TOKENS, SPEC.hidden, 16, 64
    qkv = 2 * rows * width * (width + 2 * kv_width)
    attention = 2 * 2 * SAMPLES * TOKENS * TOKENS * width
    out, gate_up = 2 * rows * width * width, 2 * 2 * rows * width * mlp
    expected = {
        "none": 0,
        "full": 3 * (qkv + attention + out + gate_up),
        "every_k": 2 * (qkv + attention + out + gate_up),
        "boundary": 3 * (qkv + attention + out + gate_up),
        "attention_only": 3 * (qkv + attention),
        "selective": 0,
    }
    found = {strategy: recomputed_flops(composed(Recompute(strategy=strategy))) for strategy in expected}
    assert found == expected


def test_dropout_after_the_last_product_makes_it_needed() -> None:
    """Its mask is drawn after the product, so the recomputation has to run through it."""
    dry = recomputed_flops(composed(Recompute(strategy="full")))
    decoder = Decoder(layers=3, hidden=32, heads=4, kv_heads=2, mlp_hidden=64, dropout=0.1)
    down = 2 * SAMPLES * TOKENS * 64 * 32
    assert recomputed_flops(composed(Recompute(strategy="full"), decoder=decoder)) == dry + 3 * down


def test_costs_are_what_the_step_then_pays() -> None:
    session = composed()
    for mode in MODES:
        measured = costs(session, mode)
        assert sum(cost.recomputed_flops for cost in measured) == recomputed_flops(composed(Recompute(strategy=mode)))
    held = {mode: costs(session, mode)[2].held_bytes for mode in MODES}
    assert held["none"] > held["attention_only"] > held["selective"] > held["full"]
    block_output = SAMPLES * TOKENS * 32 * 4
    random_state = torch.get_rng_state().numel()
    assert held["full"] == block_output + random_state, "the input of the next block, and what dropout is redrawn from"


def test_measuring_leaves_the_session_as_it_was() -> None:
    session = composed()
    state, before = torch.get_rng_state(), {n: p.clone() for n, p in session.model.named_parameters()}
    costs(session, "full")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[n], p) and p.grad is None for n, p in session.model.named_parameters())
    assert "forward" not in vars(session.model.blocks[0])


def held_bytes(session: Session) -> int:
    """What the blocks hold for backward after a real forward, by a tracer's count."""
    total = 0
    tracer = Tracer(session.model)

    def around(block: nn.Module) -> None:
        forward = block.forward

        def counted(*args: object, **kwargs: object) -> object:
            nonlocal total
            before = tracer.live_bytes()
            output = forward(*args, **kwargs)
            total += tracer.live_bytes() - before
            return output

        block.forward = counted

    for block in session.model.blocks:
        around(block)
    batch = session.example()
    with tracer, session.compute():
        session.loss(session.model(batch.inputs), batch.targets)
    return total


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_budget_is_kept_and_used(precision: str) -> None:
    numerics = Precision(mode=precision)
    whole = sum(cost.held_bytes for cost in costs(composed(numerics), "none"))
    least = sum(cost.held_bytes for cost in costs(composed(numerics), "full"))
    last_flops, last_held = -1, whole + 1
    for share in (1.0, 0.5, 0.0):
        budget_bytes = int(least + share * (whole - least))
        session = composed(numerics, Recompute(strategy="budget", budget_bytes=budget_bytes))
        held = held_bytes(session)
        flops = recomputed_flops(session)
        assert held <= budget_bytes
        assert held <= last_held
        assert flops >= last_flops, "a smaller budget never costs less"
        last_flops, last_held = flops, held
        if share == 1.0:
            assert session.applied["recompute"] == "3 of 3 blocks none", "nothing is recomputed where all fits"


def test_budget_reads_the_precision() -> None:
    """bfloat16 activations are smaller, so one budget keeps more of them."""
    selective = sum(cost.held_bytes for cost in costs(composed(Precision(mode="bf16")), "selective"))
    budget = Recompute(strategy="budget", budget_bytes=selective)
    assert recomputed_flops(composed(Precision(mode="bf16"), budget)) < recomputed_flops(composed(budget))


def test_budget_below_the_least_names_it() -> None:
    least = sum(cost.held_bytes for cost in costs(composed(), "full"))
    with pytest.raises(Infeasible, match=f"{least:,} bytes") as error:
        composed(Recompute(strategy="budget", budget_bytes=least - 1))
    assert f"budget_bytes = {least}" in str(error.value)
    composed(Recompute(strategy="budget", budget_bytes=least))


def test_choice_saves_the_most_bytes_per_flop() -> None:
    def options(*held_and_flops: tuple[int, int] | None) -> list[Cost | None]:
        return [None if pair is None else Cost(held_bytes=pair[0], recomputed_flops=pair[1]) for pair in held_and_flops]

    # one row per mode (none, selective, attention_only, full), one column per block
    by_mode = [
        options((100, 0), (100, 0), (100, 0)),
        options((90, 0), (90, 0), (90, 0)),
        options((70, 10), None, (70, 100)),
        options((10, 1000), (10, 10), (10, 1000)),
    ]
    assert choose(by_mode, 300) == ["none", "none", "none"]
    assert choose(by_mode, 290) == ["selective", "none", "none"], "free bytes first, from the first block on"
    assert choose(by_mode, 270) == ["selective", "selective", "selective"]
    assert choose(by_mode, 200) == ["selective", "full", "selective"], "80 bytes for 10 FLOPs before 20 for 10"
    assert choose(by_mode, 175) == ["attention_only", "full", "selective"]
    assert choose(by_mode, 30) == ["full", "full", "full"]
    with pytest.raises(Infeasible, match="30 bytes"):
        choose(by_mode, 29)


def test_peak_falls_with_what_is_dropped() -> None:
    large = Decoder(layers=4, hidden=64, heads=4)
    peaks = {
        strategy: rehearse(job(Recompute(strategy=strategy), decoder=large), 256).trace.peak_bytes
        for strategy in ("none", "every_k", "full", "selective", "attention_only")
    }
    assert peaks["full"] < peaks["every_k"] < peaks["none"]
    assert peaks["selective"] < peaks["attention_only"] < peaks["none"]


def test_evaluation_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    session = composed(Recompute(strategy="full"))
    monkeypatch.setattr(
        "thrice.techniques.recompute.checkpoint", lambda *_, **__: pytest.fail("nothing is kept, so nothing to drop")
    )
    with torch.no_grad():
        session.model(session.example().inputs)


@pytest.mark.parametrize(
    ("technique", "key", "why"),
    [
        (Recompute(strategy="full", k=2), "k", "every_k"),
        (Recompute(strategy="every_k", k=0), "k", "at least 1"),
        (Recompute(strategy="every_k", budget_bytes=5), "budget_bytes", "budget"),
        (Recompute(strategy="budget"), "budget_bytes", "no budget is given"),
        (Recompute(strategy="budget", budget_bytes=0), "budget_bytes", "at least 1"),
    ],
)
def test_settings_that_make_no_sense(technique: Recompute, key: str, why: str) -> None:
    [problem] = technique.check()
    assert problem.key == key
    assert why in problem.why


def test_a_model_without_attention_or_blocks_is_refused_in_words() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    stack = nn.Sequential(*(Layer() for _ in range(2)))
    with pytest.raises(ConfigError, match="no attention was found in block 0"):
        compose(job(Recompute(strategy="attention_only")), vocabulary=8, model=stack)
    with pytest.raises(ConfigError, match="no repeated blocks"):
        compose(job(Recompute(strategy="full")), vocabulary=8, model=nn.Linear(8, 8))
