"""The training loop: windows, steps, evaluation, checkpoints and a record of what was asked and what came."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from thrice import checkpoint
from thrice.compose import claim, compose, mathematics
from thrice.data.batches import Batch, cut
from thrice.data.load import Data, load_data
from thrice.errors import DataError, Diverged, Interrupted, Spoilt
from thrice.model.decoder import generate
from thrice.observe.trace import Trace, Tracer
from thrice.run_folder import RunFolder
from thrice.runtime import memory
from thrice.runtime.dist import ALONE, World
from thrice.runtime.interrupt import noted_signals
from thrice.runtime.session import Session
from thrice.spec.dump import dump
from thrice.spec.job import Job, Schedule
from thrice.spec.seed import key
from thrice.step import StepResult, evaluate, train_step

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished run came to."""

    run_dir: str
    steps: int
    loss: float | None
    """Of the last step, in nats per token."""
    validation_loss: float | None
    tokens_per_s: float
    peak_bytes: int
    sample: str


def train(job: Job, *, resume: bool = False, trace: bool = False, say: Say = print, world: World = ALONE) -> Outcome:
    """Runs the job to its end in `job.run_dir`; progress goes to `say`, a line at a time.

    Every rank of `world` calls it; rank 0 alone writes and speaks, and the outcome is the same on all.

    `resume` goes on from the folder's latest valid checkpoint, or starts where there is none yet. `trace`
    follows one step's bytes and FLOPs into trace.json. Raises what the parts raise, with every step saved that
    was taken whole; Interrupted after SIGINT or SIGTERM.
    """
    world.must_be(job.processes)
    say = say if world.rank == 0 else _nothing
    folder = RunFolder(job.run_dir or "runs/run", resume=resume, writes=world.rank == 0)
    data = load_data_in_turn(job, world)
    session = compose(job, vocabulary=data.tokenizer.vocabulary, world=world)
    torch.manual_seed(dropout_seed(job, world.rank))
    with folder.held():  # before a checkpoint is read, which another process might be replacing
        world.barrier()  # now rank 0 holds it
        rows = None
        if resume:
            rows = checkpoint.resume(session, folder.checkpoints, corpus=data.store.fingerprint, say=say)
        is_done = session.progress.step >= job.steps()
        if is_done and (measured := world.broadcast(folder.measured())) is not None:
            say(
                f"resume     the run is finished: {session.progress.step} of {job.steps()} steps, nothing is left to do"
            )
            return Outcome(**measured)
        folder.begin(dump(session.job), rows or 0)
        if world.rank == 0:
            data.tokenizer.save(folder.path)
        for line in describe(session, data, folder):
            say(line)
        run = Run(session=session, data=data, folder=folder, say=say, total=job.steps())
        run.saved = run.reached() if rows is not None else None
        folder.write("record.json", run.record(None))
        return run.to_the_end(trace)


def load_data_in_turn(job: Job, world: World) -> Data:
    """`load_data`, rank 0's first: the others find its tokens in the cache."""
    data = load_data(job) if world.rank == 0 else None
    world.barrier()
    return data or load_data(job)


def dropout_seed(job: Job, rank: int) -> int:
    """Of a run's random state: each rank drops others, for its samples are others."""
    return key(job.seed, "dropout", rank) if rank else key(job.seed, "dropout")


def _nothing(line: str) -> None:
    pass


def describe(session: Session, data: Data, folder: RunFolder) -> Iterator[str]:
    """What is about to run, for a person."""
    job, model = session.job, session.model
    parameters = sum(parameter.numel() for parameter in model.parameters())
    where = f"{session.device}" + (f", in each of {session.world.size} processes" if session.world.size > 1 else "")
    yield f"model      {job.model} · {parameters:,} parameters on {where}"
    yield (
        f"data       {len(data.store):,} tokens of {data.store.documents:,} documents · "
        f"{len(data.train):,} samples to train on, {len(data.validation):,} held out"
    )
    for path in data.not_text[:5]:
        yield f"           left out, because it is not text: {path}"
    yield f"batch      {session.ledger}"
    for name, line in session.applied.items():
        yield f"{name:<10} {line}"
    yield f"claim      {claim(job).name}: what `thrice verify` holds this run to"
    yield from (f"           {line}" for line in mathematics(job))
    yield from remarks(job, len(data.train))
    yield f"run        {folder.path} · {job.steps():,} steps"


def remarks(job: Job, samples: int | None) -> Iterator[str]:
    """What is legal, and perhaps not meant. `samples` are those to train on, None where they are not counted yet."""
    ledger, schedule, steps = job.ledger(), job.schedule, job.steps()
    global_batch = ledger.global_batch
    if samples is not None and samples < global_batch:
        yield (
            f"           global_batch {global_batch:,} is more than the {samples:,} samples there are: every step is "
            "one whole epoch, with fewer tokens than the batch says"
        )
    whole = ledger.samples_after(steps)  # the schedule counts samples where the batch grows
    warmup = schedule.warmup_steps or ledger.steps_for(schedule.warmup_samples or 0)
    if warmup >= steps:
        given = f"warmup_steps {warmup:,}" if schedule.warmup_steps else f"warmup_samples {schedule.warmup_samples:,}"
        yield (
            f"           schedule.{given} is as long as the run of {steps:,} "
            "steps: the learning rate never falls from its peak, or never reaches it"
        )
    elif schedule.decay_steps is not None and schedule.decay_steps * whole > steps * (
        whole - ledger.samples_after(warmup)
    ):
        yield (
            f"           schedule.decay_steps {schedule.decay_steps:,} is longer than what the warm-up leaves of the "
            f"{steps:,} steps: the decay takes that, and there is no time at the peak"
        )
    if schedule.decay == "constant" and schedule.min_lr_ratio != Schedule.min_lr_ratio:
        yield (
            f"           schedule.min_lr_ratio {schedule.min_lr_ratio:g} does nothing: it is where a decay ends, and "
            "the schedule is constant"
        )
    if job.base_global_batch is not None and job.lr_scaling == "none":
        yield (
            f"           base_global_batch {job.base_global_batch:,} does nothing: lr_scaling is none, so lr "
            f"{job.lr:g} is used as given"
        )
    last = ledger.global_batch_at(ledger.samples_after(steps - 1))
    if last < global_batch:
        yield (
            f"           batch_ramp.samples {job.batch_ramp.samples:,} is more than the run trains on: its last step "
            f"has {last:,} samples, not {global_batch:,}"
        )


@dataclass(kw_only=True)
class Run:
    """The state of one call of `train` that no resume needs."""

    session: Session
    data: Data
    folder: RunFolder
    say: Say
    total: int
    saved: tuple[int, int] | None = None
    """What `reached` was at the last checkpoint."""
    busy_s: float = 0.0
    """Time in steps, without evaluation and checkpoints."""
    busy_tokens: int = 0
    last: StepResult | None = None
    validation_loss: float | None = None

    def reached(self) -> tuple[int, int]:
        """(steps taken, windows skipped): how much of the run is behind."""
        return self.session.progress.step, self.session.progress.skipped_steps

    def to_the_end(self, trace: bool) -> Outcome:
        try:
            with noted_signals() as received:
                self.loop(received, trace)
            return self.finish()
        except KeyboardInterrupt:
            kept = f"step {self.saved[0]} is saved: --resume goes on from it" if self.saved else "nothing was saved yet"
            raise Interrupted(f"stopped at once, {self.session.progress.step} steps were taken; {kept}") from None
        except BrokenPipeError:  # whoever read our lines has gone: between two steps, as when interrupted
            if self.session.world.size == 1:  # the other ranks, who read nothing, are in their next step
                self.save()
            raise

    def loop(self, received: list[int], trace: bool) -> None:
        session, job = self.session, self.session.job
        progress = session.progress
        if progress.step < self.total:
            self.say(f"{'step':>7} {'loss':>8} {'lr':>9} {'grad_norm':>9} {'tok/s':>9} {'mfu':>5} {'mem(%)':>6} eta")
        while progress.step < self.total:
            # the first step makes the optimizer's states; the second is like all that follow
            traced = trace and (self.last is not None or progress.step + 1 == self.total)
            result = self.advance(traced)
            trace = trace and not (traced and result.taken)
            if result.taken and progress.step < self.total:
                if _due(progress.step, job.evaluation.every_steps):
                    self._evaluate()
                if _due(progress.step, job.checkpoint.every_steps):
                    self.save()
            # a signal may have reached one rank, or each at another step: all stop after the same
            number = int(session.world.largest(received[0] if received else 0))
            if number or progress.step == self.total:
                self.save()
            if number:
                raise Interrupted(
                    f"{signal.Signals(number).name} after step {progress.step}: the step was finished and saved\n"
                    "  --resume goes on from it",
                    128 + number,
                )

    def advance(self, traced: bool = False) -> StepResult:
        """One window: fetched, stepped on (and `traced` into trace.json), logged."""
        progress = self.session.progress
        before = time.perf_counter()
        world = self.session.world
        world.arrived(progress.step + progress.skipped_steps)
        batch = self.session.ledger.global_batch_at(progress.samples)
        window, after = self.data.window(progress.position, batch, rank=world.rank, ranks=world.size)
        window = [batch.to(self.session.device) for batch in window]
        if traced:
            with Tracer(self.session.model, self.session.optimizer) as tracer:
                result = self.step(window)
            if world.rank == 0:
                self._write_trace(tracer.trace())
        else:
            result = self.step(window)
        progress.position = after
        self._log(result, time.perf_counter() - before)
        return result

    def step(self, window: list[Batch]) -> StepResult:
        try:
            return train_step(self.session, window)
        except Spoilt:
            raise
        except (Diverged, DataError) as error:  # nothing was updated
            self.save()
            raise type(error)(
                f"{error}\n  the state after step {self.session.progress.step} is saved: --resume goes on from it"
            ) from error

    def save(self) -> None:
        if self.saved != self.reached():
            checkpoint.save(
                self.session,
                self.folder.checkpoints,
                corpus=self.data.store.fingerprint,
                metrics_rows=self.folder.rows,
            )
            self.session.world.barrier()  # nobody leaves while rank 0 still writes
            self.saved = self.reached()

    def finish(self) -> Outcome:
        self._evaluate()
        world = self.session.world
        outcome = Outcome(
            run_dir=str(self.folder.path),
            steps=self.session.progress.step,
            loss=self.last.loss if self.last else None,
            validation_loss=self.validation_loss,
            tokens_per_s=self._rate(),
            peak_bytes=int(world.largest(memory.peak_bytes(self.session.device))),
            sample=self._sample() if world.rank == 0 else "",
        )
        outcome = world.broadcast(outcome)
        self.folder.write("record.json", self.record(outcome))
        return outcome

    def record(self, outcome: Outcome | None) -> dict[str, Any]:
        """Asked, applied and (at the end) measured."""
        session, store_ = self.session, self.data.store
        return {
            "asked": dump(session.job),
            "applied": {
                "claim": claim(session.job).name,
                "ledger": session.ledger.as_dict(),
                "techniques": session.applied,
                "optimizer": type(session.optimizer).__name__,
                "parameters": sum(p.numel() for p in session.model.parameters()),
                "corpus": {
                    "tokens": len(store_),
                    "documents": store_.documents,
                    "sha256": store_.fingerprint,
                },
                "device": str(session.device),
                "processes": session.world.size,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            },
            "measured": asdict(outcome) if outcome is not None else None,
        }

    def _log(self, result: StepResult, step_s: float) -> None:
        progress, job = self.session.progress, self.session.job
        first, self.last = self.last is None, result
        peak = memory.peak_bytes(self.session.device)
        row = {
            "step": progress.step if result.taken else progress.step + 1,
            "taken": result.taken,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm if result.grad_norm is None or math.isfinite(result.grad_norm) else None,
            "tokens": result.tokens,
            "tokens_per_s": result.tokens / step_s,
            "mfu": None,  # no peak rate is known without a measured machine
            "peak_bytes": peak,
            "epoch": progress.position.epoch,
        }
        if self.session.scaler is not None:
            row["loss_scale"] = self.session.scaler.scale
        self.folder.log(row)
        if not result.taken:
            why = "the gradient overflowed, the loss scale is halved" if result.tokens else "no target in it"
            self.say(f"{progress.step + 1:>7} step skipped: {why}")
            return
        if not first or progress.step == self.total:  # the first step warms up
            self.busy_s += step_s
            self.busy_tokens += result.tokens
        if _due(progress.step, job.log_every) or first or progress.step == self.total:
            self.say(self._line(result, peak, step_s))

    def _line(self, result: StepResult, peak: int, step_s: float) -> str:
        progress = self.session.progress
        rate = self._rate() or result.tokens / step_s
        left = self.session.ledger.samples_after(self.total) - progress.samples
        left_s = left * self.session.job.sequence / rate
        share = 100 * peak / memory.total_bytes(self.session.device)
        return (
            f"{progress.step:>7} {result.loss:>8.4f} {result.lr:>9.2e} {result.grad_norm:>9.3f} {rate:>9,.0f} "
            f"{'n/a':>5} {share:>6.1f} {int(left_s) // 60}:{int(left_s) % 60:02d}"
        )

    def _rate(self) -> float:
        return self.busy_tokens / self.busy_s if self.busy_s else 0.0

    def _evaluate(self) -> None:
        samples, session = self.data.validation, self.session
        count = min(len(samples), session.job.evaluation.max_samples or len(samples))
        if not count:
            return
        ids = np.arange(count) * len(samples) // count  # evenly spread: the first would be a document or two
        parts = cut(ids, session.ledger.micro_batch, session.world.rank, session.world.size)
        batches = (samples.batch(part).to(session.device) for part in parts)
        loss, targets = evaluate(session, batches)
        if not math.isfinite(loss):
            raise self._diverged(f"the validation loss is {loss}")
        self.validation_loss = loss
        self.folder.log({"step": session.progress.step, "validation_loss": loss, "validation_tokens": targets})
        self.say(f"{session.progress.step:>7} {loss:>8.4f} validation, over {targets:,} tokens")

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            f"{what} after step {self.session.progress.step}\n"
            f"  lower lr or warm up longer; earlier checkpoints are in {self.folder.checkpoints}"
        )

    def _write_trace(self, trace: Trace) -> None:
        self.folder.write("trace.json", {"step": self.session.progress.step, **trace.as_dict()})
        self.say(
            f"        traced: peak {memory.shown(trace.peak_bytes)} = "
            + ", ".join(f"{category} {memory.shown(count)}" for category, count in trace.at_peak.items() if count)
            + f" · {trace.flops / 1e9:,.2f} GFLOP · {self.folder.path / 'trace.json'}"
        )

    def _sample(self) -> str:
        """A glimpse of what the model writes, after the first tokens of the held-out text."""
        samples, session = self.data.validation, self.session
        source = samples if len(samples) else self.data.train
        prompt = source.batch([0]).inputs[0, :32].to(session.device)
        positions = session.job.decoder.max_positions or session.job.sequence
        with session.compute():
            if not bool(session.model(prompt[None]).isfinite().all()):
                raise self._diverged("what the model puts out is not finite")
            tokens = generate(
                session.model,
                prompt,
                new_tokens=160,
                positions=positions,
                seed=key(session.job.seed, "sample"),
            )
        return self.data.tokenizer.decode(tokens.tolist())


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
