"""What the tests of the training step share: a tiny job, windows of distinct data, and a loop in torch alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from thrice.compose import compose
from thrice.data.batches import Batch
from thrice.runtime.dist import World
from thrice.spec.job import Decoder, Job, Optimizer, Schedule

VOCABULARY, SEQUENCE = 61, 16
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
"""Two orders of a float32 sum of some hundred terms."""
CPU = torch.device("cpu")


def job(**changes) -> Job:
    """Plain SGD at a constant rate, so that a parameter's change shows its gradient."""
    tiny = Job(
        sequence=SEQUENCE,
        global_batch=4,
        micro_batch=1,
        max_steps=20,
        lr=0.1,
        seed=3,
        decoder=Decoder(layers=2, hidden=32, heads=4, kv_heads=2, mlp_hidden=48),
        optimizer=Optimizer(name="sgd", weight_decay=0.1, clip=None),
        schedule=Schedule(decay="constant"),
    )
    return replace(tiny, **changes)


def session(job_: Job, model: nn.Module | None = None, loss=None):
    made = compose(job_, vocabulary=VOCABULARY, device=CPU, model=model)
    if loss is not None:
        made.loss = loss
    return made


def window(*valid: int, seed: int = 0, samples: int = 1) -> list[Batch]:
    """One micro-batch for each number of valid targets in it; no two share their data."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for index, count in enumerate(valid):
        inputs, targets = torch.randint(0, VOCABULARY, (2, samples, SEQUENCE), generator=generator)
        ignored = torch.randperm(targets.numel(), generator=generator)[count:]
        targets.view(-1)[ignored] = -100
        ids = tuple(range(index * samples, (index + 1) * samples))
        batches.append(Batch.of(inputs=inputs, targets=targets, sample_ids=ids))
    return batches


def dealt(batches: list[Batch], world: World) -> list[Batch]:
    """The micro-batches of one rank, as the data's own loader deals them."""
    return batches[world.rank :: world.size]


def gradients_taken(session_) -> dict[str, torch.Tensor]:
    """Filled, at each step, with the whole gradients that the optimizer is about to use; on rank 0 at least."""
    taken: dict[str, torch.Tensor] = {}

    def take(*_):
        own = {n: p.grad for n, p in session_.trained() if p.grad is not None}
        taken.update({n: gradient.clone() for n, gradient in session_.whole(own).items()})

    session_.optimizer.register_step_pre_hook(take)
    return taken


class Plain:
    """The window's samples in one piece, with torch's own mean over the targets that count."""

    def __init__(self, model: nn.Module, **sgd):
        self.model = copy.deepcopy(model)
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False, **sgd)

    def backward(self, window_: list[Batch]) -> float:
        inputs = torch.cat([batch.inputs for batch in window_])
        targets = torch.cat([batch.targets for batch in window_])
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.item()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}

    def step(self, window_: list[Batch], clip: float = float("inf")) -> tuple[float, float, dict[str, torch.Tensor]]:
        """(loss, norm of the gradient before clipping, gradients as used)."""
        loss = self.backward(window_)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip).item()
        gradients = self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm, gradients


def distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest ‖got − expected‖ / ‖expected‖ over the tensors; both hold the same names."""
    assert got.keys() == expected.keys()
    pairs = [(got[name].detach().double(), expected[name].detach().double()) for name in expected]
    return max(float((g - e).norm() / e.norm()) for g, e in pairs)


def state(session_) -> dict[str, torch.Tensor]:
    """Copies of every parameter, buffer and optimizer state."""
    names = {parameter: name for name, parameter in session_.model.named_parameters()}
    tensors = {name: tensor.clone() for name, tensor in session_.model.state_dict().items()}
    for parameter, states in session_.optimizer.state.items():
        tensors |= {f"{names[parameter]}:{key}": v.clone() for key, v in states.items() if torch.is_tensor(v)}
    return tensors


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit by bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
