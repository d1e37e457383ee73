"""The headline figures that are told of these techniques, each beside what it comes to here and the true formula.

Bytes of large models are rehearsed: the very step that trains, on fake tensors. Bytes of small ones are those of
real tensors. FLOPs are counted, not estimated. Times are ratios of two steps taken in turn (ABBA) in one process, so
that a machine whose speed drifts slows both alike; the least and the most of a few ratios stand beside the median.

    OMP_NUM_THREADS=1 python benchmarks/claims.py            # fifteen minutes; writes claims.json
    python benchmarks/claims.py accumulation                 # one part; nothing is written
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import attention
import stack
import torch
from machine import described
from rich.console import Console
from rich.table import Table
from torch import Tensor

from thrice.compose import compose
from thrice.observe.rehearse import Rehearsal, rehearse
from thrice.observe.trace import ACTIVATIONS, CATEGORIES, GRADIENTS, OPTIMIZER_STATES, PARAMETERS, Trace, Tracer
from thrice.runtime.technique import Technique
from thrice.spec.job import Decoder, Job, Optimizer
from thrice.step import train_step
from thrice.techniques.optimizer_in_backward import OptimizerInBackward
from thrice.techniques.optimizer_states import OptimizerStates
from thrice.techniques.precision import Precision
from thrice.techniques.recompute import Recompute

LARGE = Job(
    sequence=1024,
    micro_batch=32,
    max_steps=2,
    decoder=Decoder(layers=24, hidden=2560, heads=20, mlp_hidden=6848, vocabulary=50_304),
)
"""2.02B parameters: rehearsed only."""
MEDIUM = Job(
    sequence=512,
    micro_batch=1,
    max_steps=100,
    lr=1e-4,
    decoder=Decoder(layers=6, hidden=384, heads=6, mlp_hidden=1024, vocabulary=8192),
)
"""13.8M parameters: small enough to be timed, wide enough that matrix products decide."""
GROWING = Job(
    sequence=1024,
    micro_batch=8,
    max_steps=2,
    decoder=Decoder(layers=1, hidden=2048, heads=16, mlp_hidden=5504, vocabulary=32_000),
)
"""Its depth is what a budget leaves room for."""
CUT = Job(sequence=64, micro_batch=16, grad_accum_steps=4, max_steps=10, decoder=Decoder(layers=4, hidden=128, heads=4))
"""A window of 64 samples in four pieces."""
BUDGET_BYTES = 16 << 30
PAIRS = 3
LENGTHS = (3072, 12288)

FULL, BF16, PURE = Recompute(strategy="full"), Precision(mode="bf16"), Precision(mode="bf16-pure")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim, and what became of it."""

    claim: str
    formula: str
    basis: str
    """"rehearsed", "counted", "real tensors", "timed", or why there is no figure."""
    measured: dict[str, Any]
    verdict: str


def using(job: Job, *techniques: Technique, **changes: Any) -> Job:
    return replace(job, techniques=techniques, **changes)


def deep(job: Job, layers: int) -> Job:
    return replace(job, decoder=replace(job.decoder, layers=layers))


@cache
def rehearsed(job: Job) -> Rehearsal:
    return rehearse(job, 256)


def traced(job: Job) -> Trace:
    """A second step on real tensors."""
    session, window = compose(job, vocabulary=256), stack.windows(job)
    train_step(session, window())
    with Tracer(session.model, session.optimizer) as tracer:
        train_step(session, window())
    return tracer.trace()


def gb(size: float) -> float:
    return round(size / 1e9, 2)


def categories(rehearsal: Rehearsal) -> dict[str, float]:
    """GB at the peak."""
    found = {category: gb(rehearsal.at_peak[category]) for category in CATEGORIES if rehearsal.at_peak[category] > 1e7}
    return {**found, "peak": gb(rehearsal.peak_bytes)}


def activation_bytes(job: Job) -> int:
    """What a float32 micro-batch keeps for backward, as the decoder is written, with fused attention.

    A block: its input, what each norm makes before and after its weight, q, k, v, attention's output, the input of
    the second norm (10 × hidden); gate, its SiLU, up, their product (4 × mlp_hidden); a logarithm for each head and
    a root for each norm. After the blocks: 3 × hidden, and the log-probabilities of the vocabulary.
    """
    spec = job.decoder
    assert spec.kv_heads is None
    assert spec.mlp_hidden is not None
    assert spec.vocabulary is not None
    block = 10 * spec.hidden + 4 * spec.mlp_hidden + spec.heads + 2
    ledger = job.ledger()
    per_token = spec.layers * block + 3 * spec.hidden + spec.vocabulary
    return 4 * ledger.micro_batch * ledger.sequence * per_token


def two_billion(job: Job = LARGE) -> list[Finding]:
    samples = job.ledger().micro_batch
    one = replace(job, micro_batch=1, grad_accum_steps=samples)
    variants = {
        f"{samples} samples at once": job,
        f"{samples} at once, recompute full": using(job, FULL),
        f"1 × {samples}": one,
        f"1 × {samples}, recompute full": using(one, FULL),
    }
    found = {name: rehearsed(variant) for name, variant in variants.items()}
    whole, *_ = found.values()
    spec, tokens = job.decoder, samples * job.sequence
    told, formula = 4 * spec.layers * tokens * spec.hidden, activation_bytes(job)
    real = whole.at_peak[ACTIVATIONS]
    return [
        Finding(
            claim="2B parameters, fp32 + Adam, batch 32 × 1024: 8 + 16 + 8 + about 6 = 38 GB",
            formula="16 bytes × parameters; activations 4 bytes × tokens × (layers × (10 hidden + 4 mlp_hidden + heads "
            "+ 2) + 3 hidden + vocabulary), and twice the logits while the loss is differentiated",
            basis="rehearsed",
            measured={
                "parameters": whole.parameters,
                "one tensor a layer, GB": gb(told),
                "activations by formula, GB": gb(formula),
                **{f"{name}, GB": categories(rehearsal) for name, rehearsal in found.items()},
            },
            verdict=f"8 + 16 + 8 is right, the activations are not: {gb(real)} GB, {real / told:.0f} times one tensor "
            f"a layer, and a peak of {gb(whole.peak_bytes)} GB. "
            + "; ".join(f"{name}: {gb(rehearsal.peak_bytes)} GB" for name, rehearsal in list(found.items())[1:]),
        )
    ]


def rehearsal_against_real(job: Job = MEDIUM) -> list[Finding]:
    asked, real = rehearsed(job), traced(job)
    return [
        Finding(
            claim="(a rehearsal is the run it stands for)",
            formula="the rows marked rehearsed rest on it; kernels' scratch memory is what fake tensors do not show",
            basis="real tensors",
            measured={
                "rehearsed, MB": round(asked.peak_bytes / 1e6, 3),
                "real tensors, MB": round(real.peak_bytes / 1e6, 3),
                "FLOPs equal": asked.flops == real.flops,
            },
            verdict=f"The rehearsed peak of a model of {asked.parameters / 1e6:.1f}M parameters is "
            f"{asked.peak_bytes / real.peak_bytes - 1:+.3%} from that of real tensors",
        )
    ]


def time_ratio(job: Job, other: Job, pairs: int = PAIRS) -> dict[str, float]:
    """A step of `job` over a step of `other`, in turn."""
    steps = [(compose(each, vocabulary=256), stack.windows(each)) for each in (job, other)]
    spent: list[list[float]] = [[], []]
    ratios = []
    for round_ in range(-1, 2 * pairs):
        for side in (0, 1) if round_ % 2 == 0 else (1, 0):
            session, window = steps[side]
            batches = window()
            began = time.perf_counter()
            train_step(session, batches)
            spent[side].append(time.perf_counter() - began)
        if round_ > 0 and round_ % 2:  # the first round makes the optimizer's states, and counts for nothing
            ratios.append(sum(spent[0][-2:]) / sum(spent[1][-2:]))
    return {"median": round(median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3)}


def checkpointing(timed: Job = MEDIUM, large: Job = LARGE, pairs: int = PAIRS) -> list[Finding]:
    flops, times, saved, large_flops = {}, {}, {}, {}
    for strategy in ("full", "selective", "attention_only"):
        technique = Recompute(strategy=strategy)
        flops[strategy] = round(rehearsed(using(timed, technique)).flops / rehearsed(timed).flops, 4)
        kept = rehearsed(using(timed, technique)).at_peak[ACTIVATIONS]
        saved[strategy] = f"{1 - kept / rehearsed(timed).at_peak[ACTIVATIONS]:.0%}"
        times[strategy] = time_ratio(using(timed, technique), timed, pairs)
    # depth by depth the FLOPs are the same, so that one sample tells the ratio of a whole batch
    alone = replace(large, micro_batch=1)
    large_flops["full"] = round(rehearsed(using(alone, FULL)).flops / rehearsed(alone).flops, 4)
    return [
        Finding(
            claim="checkpointing costs about 30% more compute",
            formula="(blocks' forward − the last product of each) / (forward + backward): at most 1/3; head, loss and "
            "each block's down projection are not computed again",
            basis="counted, timed",
            measured={
                "FLOPs over none": flops,
                "FLOPs over none, 2B parameters": large_flops,
                "time over none": times,
                "activations at the peak saved": saved,
            },
            verdict=f"full costs {large_flops['full'] - 1:.1%} more FLOPs at 2B parameters, {flops['full'] - 1:.1%} "
            f"and {times['full']['median'] - 1:+.0%} of time here; selective {flops['selective'] - 1:.1%} and "
            f"{times['selective']['median'] - 1:+.0%}; attention_only {flops['attention_only'] - 1:.1%} and "
            f"{times['attention_only']['median'] - 1:+.0%}",
        )
    ]


def precision_speed(timed: Job = MEDIUM, pairs: int = PAIRS) -> list[Finding]:
    times = {part.mode: time_ratio(using(timed, part), timed, pairs) for part in (BF16, PURE)}
    fast = torch.cpu._is_avx512_bf16_supported()
    return [
        Finding(
            claim="mixed precision is 2–3 times faster",
            formula="at most the ratio of the device's rates, bf16 over fp32, for matrix products alone",
            basis="timed",
            measured={"bf16 instructions": fast, "time over fp32": times},
            verdict=f"A step takes {times['bf16']['median']} times as long in bf16 and {times['bf16-pure']['median']} "
            f"times in bf16-pure on a processor {'with' if fast else 'without'} bf16 instructions."
            + ("" if fast else " The claim is about devices with fast bf16 and cannot be shown here"),
        )
    ]


def precision_memory(large: Job = LARGE) -> list[Finding]:
    measured: dict[str, dict[str, float]] = {}
    less = {}
    for samples in (large.ledger().micro_batch, 1):
        job = replace(large, micro_batch=samples)
        for mode, parts in (("fp32", ()), ("bf16", (BF16,)), ("bf16-pure", (PURE,))):
            measured[f"{samples} samples, {mode}, GB"] = categories(rehearsed(using(job, *parts)))
            less[samples, mode] = 1 - rehearsed(using(job, *parts)).peak_bytes / rehearsed(job).peak_bytes
    many = large.ledger().micro_batch
    return [
        Finding(
            claim="mixed precision takes 40–50% less memory",
            formula="bf16 halves most activations, keeps 16 bytes × parameters and adds 2 × parameters for casts; "
            "bf16-pure: 2 + 4 (gradient) + 8 (states) bytes × parameters",
            basis="rehearsed",
            measured=measured,
            verdict=f"At 2B parameters and {many} samples bf16 takes {less[many, 'bf16']:.0%} less and bf16-pure "
            f"{less[many, 'bf16-pure']:.0%} less; with 1 sample, where activations are few, "
            f"{less[1, 'bf16']:.0%} and {less[1, 'bf16-pure']:.0%}",
        )
    ]


def deepest(job: Job, budget_bytes: int) -> int:
    """The most layers whose rehearsed peak fits, 0 if none.

    A bisection that divides where the straight line through both ends meets the budget: bytes grow with depth in a
    line, or in two where another moment of the step becomes the highest.
    """

    def peak(layers: int) -> int:
        return rehearsed(deep(job, layers)).peak_bytes

    fits, over = 1, 3
    if peak(fits) > budget_bytes:
        return 0
    while peak(over) <= budget_bytes:
        a_layer = (peak(over) - peak(fits)) / (over - fits)
        fits, over = over, over + 1 + int((budget_bytes - peak(over)) / a_layer)
    while over - fits > 1:
        share = (budget_bytes - peak(fits)) / (peak(over) - peak(fits))
        middle = min(fits + max(1, int(share * (over - fits))), over - 1)
        fits, over = (middle, over) if peak(middle) <= budget_bytes else (fits, middle)
    return fits


def largest_model(job: Job = GROWING, budget_bytes: int = BUDGET_BYTES) -> list[Finding]:
    states = OptimizerStates(format="8bit")
    variants = {
        "fp32": job,
        "fp32 + recompute full": using(job, FULL),
        "bf16": using(job, BF16),
        "bf16 + recompute full": using(job, BF16, FULL),
        "bf16-pure + recompute full + 8bit states": using(job, PURE, FULL, states),
    }
    layers = {name: deepest(variant, budget_bytes) for name, variant in variants.items()}
    parameters = {name: rehearsed(deep(variants[name], layers[name])).parameters for name in variants}
    ratios = {name: round(count / parameters["fp32"], 2) for name, count in parameters.items()}
    return [
        Finding(
            claim="mixed precision with checkpointing fits models 2.5 times larger",
            formula="(budget − what does not grow) / (bytes of a parameter + bytes of activations a parameter)",
            basis="rehearsed",
            measured={"budget, GB": gb(budget_bytes), "layers": layers, "parameters": parameters, "over fp32": ratios},
            verdict=f"In {gb(budget_bytes)} GB with {job.ledger().micro_batch} × {job.sequence} tokens: "
            + ", ".join(f"{name} {ratio} times" for name, ratio in list(ratios.items())[1:])
            + ". It is the checkpointing that makes room; the ratio is one of this batch, not a constant",
        )
    ]


def blockwise(lengths: tuple[int, int] = LENGTHS) -> list[Finding]:
    short, long = lengths
    sizes, grown = {}, {}
    for name, kernel in attention.KERNELS.items():
        found = {length: attention.measure(kernel, length)[0] for length in lengths}
        sizes[name] = {length: round(found[length]["own_peak_bytes"] / 1e6, 1) for length in lengths}
        grown[name] = {
            what: round(found[long][key] / found[short][key], 1)
            for what, key in (("bytes", "own_peak_bytes"), ("FLOPs", "flops"), ("time", "seconds"))
        }
    return [
        Finding(
            claim="blockwise attention: O(n²) → O(n), 10k+ tokens",
            formula="memory: a few × tokens × channels, and no tokens²; compute stays tokens²",
            basis="real tensors",
            measured={
                "peak beyond inputs and gradients, MB": sizes,
                f"{long} over {short} tokens": grown,
            },
            verdict=f"{long / short:.0f} times the tokens take {grown['flash']['bytes']} times the bytes blockwise "
            f"(sdpa {grown['sdpa']['bytes']}) and {grown['eager']['bytes']} times with the matrix; the FLOPs still "
            f"grow {grown['flash']['FLOPs']} times",
        )
    ]


def gradient(job: Job) -> Tensor:
    """Of one window, as the optimizer gets it, not clipped: one flat vector."""
    session = compose(replace(job, optimizer=Optimizer(clip=None)), vocabulary=256)
    taken: list[Tensor] = []

    def take(*_: object) -> None:
        taken.extend(p.grad.detach().clone().flatten() for p in session.model.parameters() if p.grad is not None)

    session.optimizer.register_step_pre_hook(take)
    train_step(session, stack.windows(job)())
    return torch.cat(taken)


def accumulation(job: Job = CUT) -> list[Finding]:
    ledger = job.ledger()
    micro, pieces = ledger.micro_batch, ledger.grad_accum_steps
    uncut = replace(job, micro_batch=micro * pieces, grad_accum_steps=1)
    variants = {f"{micro} × {pieces}": job, f"{micro} × 1": replace(job, grad_accum_steps=1), "uncut": uncut}
    real = {name: traced(variant).peak_bytes for name, variant in variants.items()}
    asked = {name: rehearsed(variant).peak_bytes for name, variant in variants.items()}
    cut, alone, whole = real.values()
    gradients = 4 * rehearsed(job).parameters
    expected = gradient(uncut)
    apart = float((gradient(job) - expected).norm() / expected.norm())
    return [
        Finding(
            claim="accumulation: 16 × 4 = 64, memory of 16",
            formula="memory of one micro-batch, and one whole gradient (4 bytes × parameters) kept in between",
            basis="real tensors",
            measured={
                "peak, MB": {name: round(size / 1e6, 2) for name, size in real.items()},
                "rehearsed, MB": {name: round(size / 1e6, 2) for name, size in asked.items()},
                "one gradient, MB": round(gradients / 1e6, 2),
                "gradient from the uncut batch's, relative": apart,
            },
            verdict=f"{micro} × {pieces} takes {cut / alone:.3f} times the peak of {micro} × 1, "
            f"{(cut - alone) / 1e6:.2f} MB more, and {cut / whole:.2f} of the uncut batch's; "
            f"its gradient is {apart:.1e} from the uncut one",
        )
    ]


def optimizer_memory(job: Job = MEDIUM, large: Job = LARGE) -> list[Finding]:
    steps = {form: traced(using(job, OptimizerStates(format=form))) for form in ("fp32", "bf16", "8bit")}
    bytes_each = {
        form: round(4 * trace.at_end[OPTIMIZER_STATES] / trace.at_end[PARAMETERS], 3) for form, trace in steps.items()
    }
    plain = replace(large, micro_batch=1, optimizer=Optimizer(clip=None))
    sides = {"after backward": plain, "in backward": using(plain, OptimizerInBackward(enabled=True))}
    found = {name: rehearsed(side) for name, side in sides.items()}
    most = {name: max(point.bytes[GRADIENTS] for point in each.trace.timeline) for name, each in found.items()}
    peaks = {name: each.peak_bytes for name, each in found.items()}
    return [
        Finding(
            claim="optimizer states in fewer bits take less memory",
            formula="AdamW: 8, 4 and 2 × (1 + 4 / 256) bytes × parameters; small tensors stay in float32",
            basis="real tensors",
            measured={"bytes a parameter": bytes_each},
            verdict=f"{bytes_each['fp32']} bytes a parameter in fp32, {bytes_each['bf16']} in bf16, "
            f"{bytes_each['8bit']} in 8bit",
        ),
        Finding(
            claim="an update within backward needs no whole gradient",
            formula="the largest parameter's gradient, in place of 4 bytes × parameters",
            basis="rehearsed",
            measured={
                "gradients at the most, GB": {name: gb(size) for name, size in most.items()},
                "at the peak, GB": {name: categories(each) for name, each in found.items()},
            },
            verdict=f"At 2B parameters and 1 sample gradients reach {gb(most['in backward'])} GB in place of "
            f"{gb(most['after backward'])}, and the peak {gb(peaks['in backward'])} GB in place of "
            f"{gb(peaks['after backward'])}",
        ),
    ]


def not_measured() -> list[Finding]:
    rows = {
        "ZeRO-1 −66%, ZeRO-2 −75–80%, ZeRO-3 ÷ N": "fp32 + Adam on N ranks, bytes × parameters: 8 + 8/N, 4 + 12/N, "
        "16/N, of 16; at most −50%, −75% and ÷ N, of the static part alone",
        "more devices pay less and less: there is a knee": "a curve of one machine's links",
    }
    why = "not measurable in one process"
    return [Finding(claim=claim, formula=rule, basis=why, measured={}, verdict=why) for claim, rule in rows.items()]


PARTS: dict[str, Callable[[], list[Finding]]] = {
    part.__name__: part
    for part in (
        two_billion,
        rehearsal_against_real,
        checkpointing,
        precision_speed,
        precision_memory,
        largest_model,
        blockwise,
        accumulation,
        optimizer_memory,
        not_measured,
    )
}


def table(findings: list[Finding]) -> Table:
    shown = Table(show_lines=True)
    for column in ("claimed", "true formula", "measured", "verdict"):
        shown.add_column(column, overflow="fold")
    for found in findings:
        lines = "\n".join(f"{key}: {value}" for key, value in found.measured.items())
        shown.add_row(found.claim, found.formula, f"{found.basis}\n{lines}", found.verdict)
    return shown


def main() -> None:
    findings = []
    for name in sys.argv[1:] or PARTS:
        began = time.perf_counter()
        findings += PARTS[name]()
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    Console(width=200).print(table(findings))
    if not sys.argv[1:]:
        result = {**described(), "findings": [asdict(found) for found in findings]}
        text = json.dumps(result, indent=1, ensure_ascii=False)
        Path(__file__).with_suffix(".json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
