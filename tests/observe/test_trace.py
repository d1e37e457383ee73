"""The tracer against PyTorch's profiler, closed forms of FLOPs and bytes, and the step without it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from thrice.observe.trace import CATEGORIES, Tracer

VOCABULARY, WIDTH, HEADS, KV_HEADS, MLP, LAYERS, SEQUENCE, BATCH = 96, 64, 4, 2, 96, 2, 32, 2
HEAD = WIDTH // HEADS
TOKENS = BATCH * SEQUENCE
SCORES = 2 * BATCH * HEADS * SEQUENCE**2 * HEAD  # FLOPs of one product with the score matrix


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.norm_1, self.norm_2 = RMSNorm(), RMSNorm()
        self.query, self.output = linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)
        self.key, self.value = linear(WIDTH, KV_HEADS * HEAD), linear(WIDTH, KV_HEADS * HEAD)
        self.gate, self.up, self.down = linear(WIDTH, MLP), linear(WIDTH, MLP), linear(MLP, WIDTH)

    def forward(self, x, cos, sin):
        def heads(y):
            return y.view(*x.shape[:2], -1, HEAD).transpose(1, 2)

        def rotate(y):
            first, second = y.chunk(2, -1)
            return (y * cos + torch.cat((-second, first), -1) * sin).type_as(y)

        y = self.norm_1(x)
        q, k, v = rotate(heads(self.query(y))), rotate(heads(self.key(y))), heads(self.value(y))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(y.transpose(1, 2).reshape(x.shape))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def save_products(_, operator, *args, **kwargs):
    saved = operator is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class Decoder(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = RMSNorm()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        angles = torch.outer(torch.arange(SEQUENCE), 1e4 ** (-torch.arange(0, HEAD, 2) / HEAD)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.run = {
            "none": lambda block, *args: block(*args),
            "full": partial(checkpoint, use_reentrant=False),
            "selective": partial(
                checkpoint,
                use_reentrant=False,
                context_fn=partial(create_selective_checkpoint_contexts, save_products),
            ),
        }[recompute]

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.run(block, x, self.cos, self.sin)
        return self.head(self.norm(x)).float().flatten(0, 1)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10),
    )  # fmt: skip


def perceptron():
    return nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 10))


adamw = partial(torch.optim.AdamW, fused=True)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Step:
    """A model, its optimizer, and one training step on a fixed batch."""

    def __init__(self, build, data, optimizer=adamw, *, bf16=False, micro_batches=1, warm=True):
        torch.manual_seed(0)
        self.model = build()
        self.optimizer = optimizer(self.model.parameters())
        self.batches = [data() for _ in range(micro_batches)]
        self.bf16 = bf16
        if warm:
            self()

    def backward(self):
        for inputs, targets in self.batches:
            with torch.autocast("cpu", torch.bfloat16) if self.bf16 else contextlib.nullcontext():
                loss = F.cross_entropy(self.model(inputs), targets) / len(self.batches)
            loss.backward()

    def __call__(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def trace(self, **kwargs):
        tracer = Tracer(self.model, self.optimizer, **kwargs)
        with tracer:
            self()
        return tracer


def tokens():
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE)), torch.randint(VOCABULARY, (TOKENS,))


def frozen():
    model = Decoder("full")
    for parameter in [*model.embedding.parameters(), *model.blocks[0].parameters()]:
        parameter.requires_grad_(False)
    return model


def half_with_wide_gradients():
    model = Decoder("none").to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model


def images():
    return torch.randn(4, 3, 16, 16), torch.randint(10, (4,))


def rows():
    return torch.randn(32, 48), torch.randint(10, (32,))


def nbytes(tensors):
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def state_tensors(optimizer):
    return [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]


def profiled_changes(run):
    """Bytes taken (+) and given back (-), in order, as PyTorch's own profiler sees them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def profiled_step_peak(step):
    batches = [tensor for batch in step.batches for tensor in batch]
    static = [*step.model.parameters(), *step.model.buffers(), *state_tensors(step.optimizer), *batches]
    return nbytes(static) + max(itertools.accumulate(profiled_changes(step)))


DECODERS = {
    f"{recompute}-{'bf16' if bf16 else 'fp32'}-{micro_batches}-{optimizer.func.__name__}": partial(
        Step, partial(Decoder, recompute), tokens, optimizer, bf16=bf16, micro_batches=micro_batches
    )
    for recompute in ("none", "full", "selective")
    for bf16 in (False, True)
    for micro_batches, optimizer in ((1, sgd), (2, adamw))
}
OTHERS = {
    "first-step": partial(Step, partial(Decoder, "none"), tokens, warm=False),
    "loop-optimizer": partial(Step, partial(Decoder, "full"), tokens, partial(torch.optim.AdamW, foreach=False)),
    "foreach-optimizer": partial(Step, perceptron, rows, partial(torch.optim.AdamW, foreach=True)),
    "perceptron": partial(Step, perceptron, rows),
    "frozen": partial(Step, frozen, tokens),
    "wide-gradients": partial(Step, half_with_wide_gradients, tokens, sgd, micro_batches=2),
    "convolutional": partial(Step, convolutional, images),
}


@pytest.mark.parametrize("build", [*DECODERS.values(), *OTHERS.values()], ids=[*DECODERS, *OTHERS])
def test_peak_on_real_tensors_is_the_profilers(build):
    assert build().trace().trace().peak_bytes == profiled_step_peak(build())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_fake_tensors_give_what_real_ones_give(recompute, bf16):
    build = partial(Step, partial(Decoder, recompute), tokens, bf16=bf16)
    tracer = build().trace()
    real = tracer.trace()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = build().trace(workspaces=tracer.workspaces).trace()
    assert fake.peak_bytes == real.peak_bytes
    assert fake.at_peak == real.at_peak
    assert fake.at_end == real.at_end
    assert fake.flops_by_phase == real.flops_by_phase
    assert fake.flops_by_operator == real.flops_by_operator


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient + gradient


KEPT = []


def kept_gradient(x):
    y = x + x.sin()
    y.register_hook(KEPT.append)
    return y.exp().sum()


# What is made last is run backward first: its gradient is the one that the other is added to.
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(lambda x: (x.sin() + x.cos() + x.exp()).sum(), id="twice"),
        pytest.param(lambda x: (x + x.sin()).exp().sum(), id="residual"),
        pytest.param(kept_gradient, id="kept"),
        pytest.param(lambda x: x.exp().sum() + x.sum(), id="expanded"),
        pytest.param(lambda x: x.exp().sum() + torch.cat([x, x.sin()], 1).exp().sum(), id="gaps"),
        pytest.param(lambda x: x.exp().sum() + x.exp().t().sin().sum(), id="transposed"),
        pytest.param(lambda x: (x.t() @ x + (x @ x).t()).sin().sum(), id="products"),
        pytest.param(lambda x: x[:32].exp().sum() + x[32:].sin().sum() + x.sin().sum(), id="slices"),
        pytest.param(lambda x: x.exp().sum() + Double.apply(x.exp()).sin().sum(), id="custom"),
    ],
)
def test_sums_of_gradients_are_counted_as_autograd_does_them_untraced(loss):
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(64, 64))

    def run():
        loss(module.weight.clone()).backward()
        KEPT.clear()
        module.weight.grad = None

    def large(changes):  # not the scalars: the losses, and numbers that are tensors only to autograd
        return [change for change in changes if abs(change) > 64]

    tracer = Tracer(module)
    with tracer:
        run()
    changes = large(change for _, _, change in tracer._events)
    assert large(change for _, _, change in tracer._given)[0] == module.weight.nbytes
    assert changes == large(profiled_changes(run))


def block_flops():
    linear = 2 * TOKENS * WIDTH * (2 * WIDTH + 2 * KV_HEADS * HEAD + 3 * MLP)
    return linear, 2 * SCORES


@pytest.mark.parametrize(
    ("recompute", "recomputed"),
    [
        ("none", 0),
        # Non-reentrant checkpointing stops when the last tensor is saved: before the last product of a block.
        ("full", LAYERS * (sum(block_flops()) - 2 * TOKENS * WIDTH * MLP)),
        ("selective", LAYERS * 2 * SCORES),
    ],
)
def test_flops_are_the_closed_form(recompute, recomputed):
    linear, attention = block_flops()
    products = LAYERS * linear + 2 * TOKENS * WIDTH * VOCABULARY
    trace = Step(partial(Decoder, recompute), tokens, micro_batches=2).trace().trace()
    assert trace.flops_by_phase == {
        "forward": 2 * (products + LAYERS * attention),
        "backward": 2 * (2 * products + LAYERS * 5 * SCORES),  # its attention computes the scores once more
        "recompute": 2 * recomputed,
        "optimizer": 0,
    }
    assert sum(trace.flops_by_operator.values()) == trace.flops


def test_categories_are_the_known_bytes_and_nothing_is_left_over():
    step = Step(partial(Decoder, "none"), tokens, micro_batches=2)
    weights = nbytes(step.model.parameters())
    trace = step.trace().trace()
    assert set(trace.at_peak) == set(CATEGORIES)
    assert sum(trace.at_peak.values()) == trace.peak_bytes
    count = len(list(step.model.parameters()))
    assert trace.at_peak["parameters"] == weights
    assert trace.at_peak["buffers"] == nbytes(step.model.buffers())
    assert trace.at_peak["gradients"] == weights  # in the second micro-batch
    assert trace.at_peak["optimizer_states"] == 2 * weights + 4 * count
    inputs = nbytes(tensor for batch in step.batches for tensor in batch)
    assert all(point.bytes["inputs"] == inputs for point in trace.timeline if point.phase != "forward")
    assert trace.at_end == {
        **dict.fromkeys(CATEGORIES, 0),
        "parameters": weights,
        "buffers": trace.at_peak["buffers"],
        "optimizer_states": trace.at_peak["optimizer_states"],
        "inputs": inputs,
    }


def test_states_made_in_the_step_and_gradients_from_before_it_are_known():
    step = Step(partial(Decoder, "none"), tokens, warm=False)
    step.backward()
    weights = nbytes(step.model.parameters())
    trace = step.trace().trace()
    assert trace.timeline[0].bytes["optimizer_states"] == 0
    assert max(point.bytes["gradients"] for point in trace.timeline) == weights
    assert trace.at_end["optimizer_states"] == 2 * weights + 4 * len(list(step.model.parameters()))


def test_an_optimizer_in_the_backward_still_has_gradients():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    optimizers = {parameter: sgd([parameter]) for parameter in model.parameters()}

    def update(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    tracer = Tracer(model, *optimizers.values())
    with tracer:
        model(torch.randn(4, 64)).sum().backward()
    trace = tracer.trace()
    assert max(point.bytes["gradients"] for point in trace.timeline) == 64 * 64 * 4
    assert trace.at_end["optimizer_states"] == nbytes(model.parameters())


def test_live_bytes_between_blocks_are_what_each_block_keeps():
    step = Step(partial(Decoder, "full"), tokens)
    seen = []
    tracer = Tracer(step.model, step.optimizer)

    def read(*_):
        if torch._C._current_graph_task_id() == -1:  # the forward, not a recomputation
            seen.append((tracer.live_bytes(), tracer.flops))

    for block in step.model.blocks:
        block.register_forward_hook(read)
    with tracer:
        step()
    (first, flops_first), (second, flops_second) = seen
    # A checkpointed block keeps its output and the random state to run again with.
    kept = TOKENS * WIDTH * 4 + torch.get_rng_state().nbytes
    assert second - first == kept
    assert flops_second - flops_first == sum(block_flops())


def test_storages_resized_outside_an_operator_are_followed():
    model = nn.Linear(64, 64, bias=False)
    tracer = Tracer(model)
    with tracer:
        model.weight.untyped_storage().resize_(0)
        freed = tracer.live_bytes()
        model.weight.untyped_storage().resize_(64 * 64 * 4)
    assert freed == 0
    assert tracer.live_bytes() == 64 * 64 * 4
    assert "followed" not in torch.UntypedStorage.resize_.__qualname__


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_step_is_bitwise_the_same_with_a_tracer(recompute, bf16):
    plain = Step(partial(Decoder, recompute), tokens, bf16=bf16, micro_batches=2)
    traced = copy.deepcopy(plain)
    for run in (plain, traced):
        with Tracer(run.model, run.optimizer) if run is traced else contextlib.nullcontext():
            run.backward()
    for ours, theirs in zip(traced.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    plain()
    traced.trace()
    for ours, theirs in zip(traced.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_trace_is_json_with_a_short_timeline():
    trace = Step(partial(Decoder, "full"), tokens, micro_batches=4).trace().trace()
    assert len(trace.timeline) < 1100
    assert max(sum(point.bytes.values()) for point in trace.timeline) == trace.peak_bytes
    assert trace.timeline[-1].bytes == trace.at_end
    read = json.loads(json.dumps(trace.as_dict()))
    assert read["at_peak"] == trace.at_peak
    assert read["operators"]["aten.mm"]["flops"] == trace.flops_by_operator["aten.mm"]
    assert {point["phase"] for point in read["timeline"]} == {"forward", "backward", "recompute", "optimizer"}
