"""The batch ledger: how one global batch is cut, in one object.

`global_batch = micro_batch × grad_accum_steps × data_parallel`, all in samples; a sample is one sequence.
`global_batch` is what the user chooses: another number of devices changes `grad_accum_steps`, never the
optimisation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from thrice.errors import Problem


@dataclass(frozen=True, kw_only=True)
class Ramp:
    """A global batch that grows, by the samples of the steps taken so far (as Megatron-LM's rampup-batch-size)."""

    start: int
    """Samples of the first step."""
    increment: int
    target: int
    samples: int
    """Samples after which the batch has its full size."""

    def at(self, samples: int) -> int:
        """The global batch of the step that follows `samples` samples."""
        grown = samples * ((self.target - self.start) // self.increment) // self.samples
        return min(self.target, self.start + self.increment * grown)


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """How a step's samples are divided. Samples unless a unit says otherwise."""

    micro_batch: int
    """Samples per device and backward."""
    grad_accum_steps: int
    """Backwards per optimizer step."""
    data_parallel: int
    """Replicas that see different data."""
    global_batch: int
    """Samples per optimizer step."""
    sequence: int
    """Tokens per sample."""
    lr: float
    """Peak learning rate, as used."""
    lr_from: str
    """What it was derived from."""
    ramp: Ramp | None = None

    def global_batch_at(self, samples: int) -> int:
        """The global batch of the step that follows `samples` samples."""
        return self.ramp.at(samples) if self.ramp is not None else self.global_batch

    def samples_after(self, steps: int) -> int:
        """Samples of the first `steps` steps, each window full."""
        samples = taken = 0
        while taken < steps and self.global_batch_at(samples) < self.global_batch:
            samples += self.global_batch_at(samples)
            taken += 1
        return samples + (steps - taken) * self.global_batch

    def steps_for(self, samples: int) -> int:
        """Steps that take at least `samples` samples, each window full."""
        done = steps = 0
        while done < samples and self.global_batch_at(done) < self.global_batch:
            done += self.global_batch_at(done)
            steps += 1
        return steps + -(-max(0, samples - done) // self.global_batch)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "tokens_per_step": self.tokens_per_step}

    def __str__(self) -> str:
        ramp = self.ramp
        grows = f" · from {ramp.start} by {ramp.increment} over {ramp.samples:,} samples" if ramp is not None else ""
        return (
            f"global_batch {self.global_batch} = micro_batch {self.micro_batch} "
            f"× grad_accum_steps {self.grad_accum_steps} × data_parallel {self.data_parallel}"
            f" · {self.tokens_per_step:,} tokens per step ({self.sequence} per sample)"
            f"{grows} · lr {self.lr:g} ({self.lr_from})"
        )


def divide(
    *, global_batch: int | None, micro_batch: int | None, grad_accum_steps: int | None, data_parallel: int
) -> tuple[int, int, int] | Problem:
    """(global_batch, micro_batch, grad_accum_steps) from whichever are given, or what contradicts.

    Any two of the three determine the third, given `data_parallel`; one alone leaves the rest at one
    micro-batch a step; none at all is a problem, because there is no batch that suits every model.
    """
    if global_batch is None:
        if micro_batch is None:
            return Problem(
                key="global_batch",
                why="no batch is given, and it is a choice of the optimisation that thrice does not make",
                fix="set global_batch (samples per optimizer step), for example global_batch = 32",
            )
        steps = grad_accum_steps or 1
        return micro_batch * steps * data_parallel, micro_batch, steps
    if micro_batch is None:
        steps = grad_accum_steps or 1
        share = steps * data_parallel
        if global_batch % share:
            return _indivisible(global_batch, share, f"grad_accum_steps {steps} × data_parallel {data_parallel}")
        return global_batch, global_batch // share, steps
    share = micro_batch * data_parallel
    if global_batch % share:
        return _indivisible(global_batch, share, f"micro_batch {micro_batch} × data_parallel {data_parallel}")
    steps = global_batch // share
    if grad_accum_steps is not None and grad_accum_steps != steps:
        return Problem(
            key="global_batch",
            value=global_batch,
            why=f"micro_batch {micro_batch} × grad_accum_steps {grad_accum_steps} × data_parallel "
            f"{data_parallel} = {share * grad_accum_steps}, not {global_batch}",
            fix=f"leave grad_accum_steps out (it becomes {steps}), or set global_batch = {share * grad_accum_steps}",
        )
    return global_batch, micro_batch, steps


def _indivisible(global_batch: int, share: int, what: str) -> Problem:
    below, above = global_batch // share * share, -(-global_batch // share) * share
    nearest = " or ".join(str(batch) for batch in (below, above) if batch)
    return Problem(
        key="global_batch",
        value=global_batch,
        why=f"it does not divide by {what} = {share}",
        fix=f"the nearest global_batch that does: {nearest}",
    )
