"""What is asked: one Job, in plain frozen dataclasses, with no torch.

A field here is a key of the config file and a flag of the command line, under the same name. A table's first
field is its short form: `optimizer = "sgd"` means `[optimizer] name = "sgd"`. What a type cannot express is
checked in `check`, each class by itself; the loader collects all problems before it speaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from thrice.errors import ConfigError, Problem
from thrice.spec.mesh import AXES, Mesh, mesh_of
from thrice.spec.workload import Ledger, Ramp, divide


def at_least(least: float, **values: float | None) -> Iterator[Problem]:
    """A problem for each given value below `least`."""
    for key, value in values.items():
        if value is not None and not value >= least:
            yield Problem(key=key, value=value, why=f"it must be at least {least:g}", fix="")


def within(low: float, high: float, **values: float | None) -> Iterator[Problem]:
    """A problem for each given value outside [low, high)."""
    for key, value in values.items():
        if value is not None and not low <= value < high:
            yield Problem(key=key, value=value, why=f"it must be at least {low:g} and below {high:g}")


FLOAT32_MAX = 3.4028234663852886e38


def positive(**values: float | None) -> Iterator[Problem]:
    for key, value in values.items():
        if value is not None and not (0 < value < float("inf")):
            yield Problem(key=key, value=value, why="it must be above 0 and finite")


def no_ramp(job: Job, technique: str, what: str) -> Iterator[Problem]:
    """A problem where the job's batch grows: then some step is more than one micro-batch, and `what` needs one."""
    ramp = job.ledger().ramp
    if ramp is not None:
        yield Problem(
            key="batch_ramp.start",
            value=ramp.start,
            why=f"a batch that grows in whole micro-batches is two of them at least in the end, and {what} needs every "
            "step to be one",
            fix=f"keep one of batch_ramp and {technique}",
        )


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Our own decoder-only transformer (RMSNorm, rotary positions, grouped-query attention, SwiGLU)."""

    layers: int = 4
    """Transformer blocks."""
    hidden: int = 128
    """Width of the residual stream."""
    heads: int = 4
    """Query heads."""
    kv_heads: int | None = None
    """Key/value heads; as many as query heads where not given."""
    mlp_hidden: int | None = None
    """Width of the SwiGLU; 8/3 × hidden, rounded up to a multiple of 64, where not given."""
    max_positions: int | None = None
    """Longest sequence the model accepts; the job's `sequence` where not given."""
    vocabulary: int | None = None
    """Rows of the embedding; the tokenizer's own size where not given."""
    tied: bool = True
    """One matrix for embedding and head."""
    dropout: float = 0.0
    """On the embedding and on what attention and MLP add to the residual stream."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5

    def check(self) -> Iterator[Problem]:
        yield from at_least(1, layers=self.layers, hidden=self.hidden, heads=self.heads)
        yield from at_least(1, kv_heads=self.kv_heads, mlp_hidden=self.mlp_hidden)
        yield from at_least(1, max_positions=self.max_positions, vocabulary=self.vocabulary)
        yield from within(0, 1, dropout=self.dropout)
        yield from positive(rope_theta=self.rope_theta, norm_eps=self.norm_eps)
        if self.heads > 0 and self.hidden % (2 * self.heads):
            yield Problem(
                key="hidden",
                value=self.hidden,
                why=f"{self.heads} heads with rotary pairs need a multiple of {2 * self.heads}",
                fix=f"hidden = {max(1, round(self.hidden / (2 * self.heads))) * 2 * self.heads}",
            )
        if self.kv_heads is not None and self.kv_heads > 0 and self.heads % self.kv_heads:
            divisors = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            yield Problem(
                key="kv_heads",
                value=self.kv_heads,
                why=f"it does not divide heads = {self.heads}",
                fix=f"one of {', '.join(map(str, divisors))}",
            )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What turns gradients into an update."""

    name: Literal["adamw", "sgd", "lamb", "lars", "muon"] = "adamw"
    """`lamb` and `lars` keep AdamW and SGD stable in very large batches. `muon` orthogonalises the momentum of the
    blocks' matrices and leaves everything else to AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW and LAMB, and of the AdamW beside Muon."""
    eps: float = 1e-8
    """Of the same; added to the root of the second moment."""
    momentum: float | None = None
    """SGD's and LARS's, 0.9 where not given; Muon's, 0.95 where not given."""
    trust_coefficient: float | None = None
    """LARS: the share of a tensor's norm that one update may move at lr = 1; 0.001 where not given."""
    weight_decay: float = 0.1
    """Decoupled (AdamW, LAMB, Muon) or added to the gradient (SGD, LARS); biases and norms are left out."""
    clip: float | None = 1.0
    """Largest norm of the whole gradient; "none" leaves it as it is."""
    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """"auto" is torch's fused kernel where the device has one."""

    def check(self) -> Iterator[Problem]:
        for beta in self.betas:
            yield from within(0, 1, betas=beta)
        if self.momentum is not None:
            yield from within(0, 1, momentum=self.momentum)
        yield from positive(eps=self.eps, clip=self.clip, trust_coefficient=self.trust_coefficient)
        yield from at_least(0, weight_decay=self.weight_decay)
        if self.momentum is not None and self.name in ("adamw", "lamb"):
            yield Problem(
                key="momentum",
                value=self.momentum,
                why=f"{self.name} has none; its decay rates are betas",
                fix=f"leave it out, or betas = [{self.momentum:g}, {self.betas[1]:g}]",
            )
        if self.name in ("sgd", "lars"):
            # a value that is the default cannot be told from none, and a run's job.toml says every field
            for key, value, default, instead in (
                ("betas", self.betas, Optimizer.betas, f", or momentum = {self.betas[0]:g}"),
                ("eps", self.eps, Optimizer.eps, ""),
            ):
                if value != default:
                    yield Problem(
                        key=key,
                        value=value,
                        why=f"it belongs to adamw, lamb and muon, and the optimizer is {self.name}",
                        fix=f"leave it out{instead}",
                    )
        if self.trust_coefficient is not None and self.name != "lars":
            yield Problem(
                key="trust_coefficient",
                value=self.trust_coefficient,
                why=f"it belongs to lars, and the optimizer is {self.name}",
                fix='leave it out, or name = "lars"',
            )
        if self.implementation in ("fused", "foreach") and self.name in ("lamb", "lars", "muon"):
            yield Problem(
                key="implementation",
                value=self.implementation,
                why=f"torch has no {self.implementation} kernel for {self.name}",
                fix='implementation = "auto"',
            )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate over optimizer steps: warm-up, then decay."""

    decay: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """`wsd` (warm-up, stable, decay) stays at the peak and falls linearly over the last `decay_steps`."""
    warmup_steps: int = 0
    """Steps from peak/warmup_steps up to the peak; the first step is never lost to a rate of 0."""
    warmup_samples: int | None = None
    """The same in samples, in place of warmup_steps: as long whatever the batch."""
    decay_steps: int | None = None
    """wsd: how long the decay is; a tenth of the run where not given."""
    min_lr_ratio: float = 0.1
    """Where the decay ends, as a share of the peak."""

    def check(self) -> Iterator[Problem]:
        yield from at_least(0, warmup_steps=self.warmup_steps)
        yield from at_least(1, warmup_samples=self.warmup_samples, decay_steps=self.decay_steps)
        if self.warmup_steps and self.warmup_samples is not None:
            yield Problem(
                key="warmup_samples",
                value=self.warmup_samples,
                why=f"warmup_steps = {self.warmup_steps} is given too, and both say how long to warm up",
                fix="keep one of the two",
            )
        if self.decay_steps is not None and self.decay != "wsd":
            yield Problem(
                key="decay_steps",
                value=self.decay_steps,
                why=f'it belongs to decay = "wsd"; {self.decay} takes up the whole run',
                fix='leave it out, or set decay = "wsd"',
            )
        if not 0 <= self.min_lr_ratio <= 1:
            yield Problem(key="min_lr_ratio", value=self.min_lr_ratio, why="it must be from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """A global batch that grows from `start` to global_batch; another training than at a fixed batch, knowingly."""

    start: int | None = None
    """Samples of the first step; no ramp where not given."""
    samples: int | None = None
    """Samples of training over which it grows."""
    increment: int | None = None
    """Samples by which it grows each time; `start` where not given."""

    def check(self) -> Iterator[Problem]:
        yield from at_least(1, start=self.start, samples=self.samples, increment=self.increment)
        if self.start is None:
            for key, value in (("samples", self.samples), ("increment", self.increment)):
                if value is not None:
                    yield Problem(key=key, value=value, why="there is no ramp without its start", fix="start = 8")
        elif self.samples is None:
            yield Problem(key="samples", why="nothing says how long the batch grows", fix="samples = 10000")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state of a run is written, and how much of it is kept."""

    every_steps: int | None = None
    """Steps between checkpoints; one is always written at the end and when interrupted."""
    keep_last: int = 2
    """Checkpoints kept; older ones are removed after a newer one is whole."""

    def check(self) -> Iterator[Problem]:
        yield from at_least(1, every_steps=self.every_steps, keep_last=self.keep_last)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Loss on the held-out part of the data; each sample is counted once."""

    every_steps: int | None = None
    """Steps between evaluations; one is always made at the end."""
    fraction: float = 0.02
    """Share of the tokens that is held out; 0 holds nothing out."""
    max_samples: int | None = None
    """At most this many held-out samples, evenly spread over them; all where not given."""

    def check(self) -> Iterator[Problem]:
        yield from at_least(1, every_steps=self.every_steps, max_samples=self.max_samples)
        yield from within(0, 1, fraction=self.fraction)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How processes are started, and how long they wait for one another."""

    timeout_s: float = 600.0
    """A process that waits for the others longer than this ends the run, and names who did not come."""
    restarts: int = 0
    """Times that a run whose process died is started again, from its last checkpoint."""

    def check(self) -> Iterator[Problem]:
        yield from positive(timeout_s=self.timeout_s)
        yield from at_least(0, restarts=self.restarts)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that is asked of one training run.

    `techniques` maps a technique's name to its settings; in a file each is a key or table of its own.
    """

    model: str = "decoder"
    """"decoder" is the built-in one, described by [decoder]."""
    data: tuple[str, ...] = ("stdlib",)
    """Text files, folders and patterns, or "stdlib": the Python standard library's own source."""
    tokenizer: str = "byte"
    """"byte", "bpe:SIZE" (trained on the data, extra `hf`), or the path of a tokenizer.json."""
    sequence: int = 256
    """Tokens per sample."""
    global_batch: int | None = None
    """Samples per optimizer step."""
    micro_batch: int | Literal["auto"] | None = None
    """Samples per device and backward; "auto" takes the largest that fits and pays, by rehearsal and measurement."""
    grad_accum_steps: int | None = None
    """Backwards per optimizer step."""
    last_window: Literal["step", "drop"] = "step"
    """What becomes of an epoch's last, shorter window: a step normalised by its own count, or nothing."""
    max_steps: int | None = None
    """Optimizer steps."""
    max_tokens: int | None = None
    """Tokens to train on, in place of max_steps; rounded up to whole steps of global_batch × sequence tokens."""
    lr: float = 3e-4
    """Peak learning rate."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How `lr`, right for base_global_batch, follows global_batch; applied once, whatever the number of devices."""
    base_global_batch: int | None = None
    """The global batch that `lr` was found for."""
    seed: int = 0
    """Of the initial weights, the order of the data and dropout."""
    processes: int = 1
    """Of the whole run, on all machines; one for each device."""
    tensor_parallel: int = 1
    """Processes that share each matrix of the model."""
    pipeline_parallel: int = 1
    """Processes that share the model's depth."""
    context_parallel: int = 1
    """Processes that share each sequence."""
    run_dir: str | None = None
    """Where the run is kept; runs/NAME with the file's name where not given."""
    log_every: int = 10
    """Steps between lines on the terminal; metrics.jsonl has every step."""
    decoder: Decoder = field(default_factory=Decoder)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    batch_ramp: BatchRamp = field(default_factory=BatchRamp)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    evaluation: Evaluation = field(default_factory=Evaluation)
    launch: Launch = field(default_factory=Launch)
    techniques: tuple[Any, ...] = ()
    """The settings of each technique that is asked for: instances of the registry's classes."""

    def check(self) -> Iterator[Problem]:
        yield from at_least(1, sequence=self.sequence, processes=self.processes, log_every=self.log_every)
        micro_batch = None if self.micro_batch == "auto" else self.micro_batch
        yield from at_least(1, global_batch=self.global_batch, micro_batch=micro_batch)
        yield from at_least(1, grad_accum_steps=self.grad_accum_steps, base_global_batch=self.base_global_batch)
        yield from at_least(1, max_steps=self.max_steps, max_tokens=self.max_tokens)
        yield from within(0, 2**63, seed=self.seed)
        yield from positive(lr=self.lr)
        if self.model != "decoder":
            yield Problem(
                key="model",
                value=self.model,
                why="this version trains its own decoder only",
                fix='model = "decoder"',
            )
        degrees = self._degrees()
        yield from at_least(1, **degrees)
        for axis, degree in degrees.items():
            if degree > 1:
                yield Problem(
                    key=axis,
                    value=degree,
                    why="this version divides the data among processes, and nothing else",
                    fix=f"{axis} = 1; all processes are data_parallel then",
                )
        if not self.data:
            yield Problem(key="data", value=self.data, why="no file, folder or pattern is named")
        if self.max_steps is not None and self.max_tokens is not None:
            yield Problem(
                key="max_tokens",
                value=self.max_tokens,
                why=f"max_steps = {self.max_steps} is given too, and both say when to stop",
                fix="keep one of the two",
            )
        if self.max_steps is None and self.max_tokens is None:
            yield Problem(key="max_steps", why="nothing says when to stop", fix="set max_steps or max_tokens")
        positions = self.decoder.max_positions
        if positions is not None and self.sequence > positions:
            yield Problem(
                key="sequence",
                value=self.sequence,
                why=f"the model has {positions} positions (decoder.max_positions)",
                fix=f"sequence = {positions}, or leave decoder.max_positions out",
            )
        if self.lr_scaling != "none" and self.base_global_batch is None:
            yield Problem(
                key="base_global_batch",
                why=f'lr_scaling = "{self.lr_scaling}" has to know the batch that lr = {self.lr:g} was found for',
                fix=f"base_global_batch = {self.global_batch or 32}",
            )
        given = (self.global_batch, micro_batch, self.grad_accum_steps, self.processes, *degrees.values())
        if all(value is None or value >= 1 for value in given):
            mesh = self._mesh()
            divided = self._divide() if isinstance(mesh, Mesh) else mesh
            if isinstance(divided, Problem):
                yield divided
            else:
                yield from self._check_peak(divided[0])
                yield from self._check_ramp(divided[0], divided[1])

    def _check_peak(self, global_batch: int) -> Iterator[Problem]:
        if not 0 < self.lr < math.inf or (self.base_global_batch is not None and self.base_global_batch < 1):
            return
        peak = self.peak_lr(global_batch)
        if not 0 < peak <= FLOAT32_MAX:
            scaled = self.lr_scaling != "none" and self.base_global_batch is not None
            by = f" by {self.lr_scaling} lr_scaling from base_global_batch {self.base_global_batch}" if scaled else ""
            yield Problem(
                key="lr",
                value=self.lr,
                why=f"the peak at global_batch {global_batch} is {peak:g}{by}, and no float32 weight moves by that",
                fix=f"lr = {Job.lr:g} is usual",
            )

    def _check_ramp(self, global_batch: int, micro_batch: int) -> Iterator[Problem]:
        start, increment = self.batch_ramp.start, self.batch_ramp.increment or self.batch_ramp.start
        if start is None or increment is None or min(start, increment) < 1:
            return
        replicas = self.mesh().data_parallel
        unit = replicas * (1 if self.micro_batch == "auto" else micro_batch)
        uneven = False
        for key, value in (("batch_ramp.start", start), ("batch_ramp.increment", self.batch_ramp.increment)):
            if value is not None and value % unit:
                uneven = True
                above = -(-value // unit) * unit
                whole = f"{key} = {above}, or " if above < global_batch else ""  # no ramp begins at its end
                smaller = math.gcd(global_batch, start, increment) // replicas
                yield Problem(
                    key=key,
                    value=value,
                    why=f"the batch grows in whole micro-batches, of micro_batch {micro_batch} × data_parallel "
                    f"{replicas} = {unit} samples",
                    fix=f"{whole}micro_batch = {smaller} (global_batch = {global_batch}, no grad_accum_steps)",
                )
        if not uneven and (start >= global_batch or (global_batch - start) % increment):
            yield Problem(
                key="batch_ramp.start",
                value=start,
                why=f"steps of {increment} samples do not lead from it up to global_batch = {global_batch}",
                fix=f"global_batch = {start + max(1, round((global_batch - start) / increment)) * increment}",
            )

    def _divide(self) -> tuple[int, int, int] | Problem:
        if self.micro_batch == "auto" and (self.global_batch is None or self.grad_accum_steps is not None):
            return Problem(
                key="micro_batch",
                value="auto",
                why="it is chosen so that global_batch stays what it is, and grad_accum_steps follows from it",
                fix="set global_batch and leave grad_accum_steps out",
            )
        return divide(
            global_batch=self.global_batch,
            micro_batch=None if self.micro_batch == "auto" else self.micro_batch,
            grad_accum_steps=self.grad_accum_steps,
            data_parallel=self.mesh().data_parallel,
        )

    def _degrees(self) -> dict[str, int]:
        """Axis -> its degree, but for data_parallel's, which is a technique's."""
        return {axis: getattr(self, axis) for axis in AXES if axis != "data_parallel"}

    def _mesh(self) -> Mesh | Problem:
        asked: int | Literal["auto"] = next(
            (part.degree for part in self.techniques if getattr(part, "name", "") == "data_parallel"), "auto"
        )
        return mesh_of(
            self.processes,
            data_parallel=asked,
            **self._degrees(),
        )

    def mesh(self) -> Mesh:
        """How the processes are arranged. Raises ConfigError where they cannot be."""
        mesh = self._mesh()
        if isinstance(mesh, Problem):
            raise ConfigError([mesh])
        return mesh

    def ledger(self) -> Ledger:
        """How the global batch is cut. The job has passed `check`. Raises ConfigError while micro_batch is open."""
        if self.micro_batch == "auto":
            why = "it is still open, and nothing can be built before it is chosen"
            raise ConfigError(
                [Problem(key="micro_batch", value="auto", why=why, fix="thrice.settled(job), or a number")]
            )
        divided = self._divide()
        assert not isinstance(divided, Problem), divided
        global_batch, micro_batch, grad_accum_steps = divided
        return Ledger(
            micro_batch=micro_batch,
            grad_accum_steps=grad_accum_steps,
            data_parallel=self.mesh().data_parallel,
            global_batch=global_batch,
            sequence=self.sequence,
            lr=self.peak_lr(global_batch),
            lr_from="as given"
            if self.lr_scaling == "none"
            else f"{self.lr_scaling}: {self.lr:g} at base_global_batch {self.base_global_batch}",
            ramp=self._ramp(global_batch),
        )

    def peak_lr(self, global_batch: int) -> float:
        """`lr` as it follows the batch: the linear rule of arXiv:1706.02677, or the square root's (arXiv:1404.5997)."""
        if self.lr_scaling == "none" or self.base_global_batch is None:
            return self.lr
        larger = global_batch / self.base_global_batch
        return self.lr * (larger if self.lr_scaling == "linear" else math.sqrt(larger))

    def _ramp(self, global_batch: int) -> Ramp | None:
        ramp = self.batch_ramp
        if ramp.start is None or ramp.samples is None:
            return None
        increment = ramp.increment or ramp.start
        return Ramp(start=ramp.start, increment=increment, target=global_batch, samples=ramp.samples)

    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.max_steps is not None:
            return self.max_steps
        assert self.max_tokens is not None
        return self.ledger().steps_for(-(-self.max_tokens // self.sequence))
