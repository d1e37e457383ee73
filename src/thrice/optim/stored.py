"""Optimizers whose parameters or states are kept in fewer bits than they are updated in.

One parameter after the other is widened to float32, updated by an optimizer's own rule, and written back; its
states are loaded before and stored after. The float32 copies live one parameter at a time.

Parameters in bfloat16: a weight at 1.0 has neighbours 2⁻⁸ below and 2⁻⁷ above, so an update of 6e-4 rounds to
nothing, every time. It is written back with *stochastic* rounding (right on average; no memory) or *compensated*
(Kahan: what was lost is kept in a second bfloat16 and added the next time). See arXiv:2010.06192 for both.

States in bfloat16, or in 8 bits by block (blockwise.py). In 8 bits the second moment is kept as its square root:
that is what divides the update, and it spans half the decades, so the code is nowhere coarser for it and reaches
elements 10¹³ times below the largest of their block instead of 10⁷.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Generator, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT
from torch.optim.sgd import sgd

from thrice.optim.blockwise import BLOCK, dequantise, quantise
from thrice.optim.share import Piece, Share
from thrice.optim.trust import norm
from thrice.spec.seed import key

Rounding = Literal["stochastic", "compensated"]
StateFormat = Literal["bf16", "8bit"]

BELOW = {
    "lr": math.inf, "eps": math.inf, "weight_decay": math.inf, "trust_coefficient": math.inf,
    "momentum": 1.0, "betas": 1.0,
}  # fmt: skip
"""What a setting, or each of its values, has to be below; none may be negative."""

SIGNED = {"exp_avg": True, "exp_avg_sq": False, "momentum_buffer": True}
"""Every state that can be stored in fewer bits, by torch's names, and whether it has a sign."""

LEAST_ELEMENTS = 4096
"""Of a tensor whose states are kept in 8 bits: below, nothing is gained (the paper's own limit)."""


def stored_format(tensor: Tensor, states: StateFormat | None, piece: Piece | None = None) -> StateFormat | None:
    """How the states of a parameter are stored; a state has its parameter's shape and may stand for it.

    A piece's are stored as its parameter's. 8 bits are for matrices of at least 4,096 elements: norms and biases are
    small, and sensitive. None is float32.
    """
    shape = tensor.shape if piece is None else piece.shape
    if states == "8bit" and (len(shape) < 2 or shape.numel() < LEAST_ELEMENTS):
        return None
    return states


def stored_bytes(tensor: Tensor, states: StateFormat | None) -> int:
    """Bytes of one stored state of the parameter."""
    elements = tensor.numel()
    kept = stored_format(tensor, states)
    if kept == "8bit":
        return elements + 4 * -(-elements // BLOCK)
    return elements * (2 if kept == "bf16" else 4)


def store(name: str, value: Tensor, states: StateFormat | None, piece: Piece | None = None) -> dict[str, Tensor]:
    """The tensors, by key, that a state becomes; `value` is float32 of its parameter's shape, or of the `piece`'s."""
    kept = stored_format(value, states, piece)
    if kept is None:
        return {name: value}
    if kept == "bf16":
        return {name: value.to(torch.bfloat16)}
    signed = SIGNED[name]
    codes, scales = quantise(value if signed else value.sqrt(), signed=signed)
    return {f"{name}_codes": codes, f"{name}_scales": scales}


def load(name: str, stored: dict[str, Tensor], like: Tensor) -> Tensor:
    """A state as it is updated: of the shape, strides and dtype of `like`; zeros where it is not there yet."""
    if f"{name}_codes" in stored:
        signed = SIGNED[name]
        value = dequantise(stored[f"{name}_codes"], stored[f"{name}_scales"], signed=signed)
        return _laid_out(value if signed else value.square_(), like)
    return _laid_out(stored[name], like) if name in stored else torch.zeros_like(like)


def round_trip(name: str, value: Tensor, states: StateFormat | None) -> Tensor:
    """What a state, a float32 tensor of its parameter's shape, is worth once it was stored."""
    return load(name, store(name, value, states), value)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """With the dtype and the strides of `like`, by which torch's fused kernels read every operand."""
    if tensor.stride() == like.stride():
        return tensor.to(like.dtype)
    return torch.empty_like(like).copy_(tensor)


def round_stochastically(x: Tensor, generator: Generator, piece: Piece | None = None) -> Tensor:
    """float32 to bfloat16, up with the probability of the part that is cut off: the expectation is `x`.

    A piece gets the noise that it would have in its parameter, so that the result is the same however that is cut; the
    noise of the rest is drawn and thrown away.
    """
    shape = x.shape if piece is None else piece.shape
    noise = torch.randint(0, 1 << 16, shape, dtype=torch.int32, device=x.device, generator=generator)
    if piece is not None:
        noise = noise.flatten()[piece.start : piece.stop]
    bits = x.contiguous().view(torch.int32) + noise  # carries into the kept bits with that probability
    return bits.bitwise_and_(-1 << 16).view(torch.float32).to(torch.bfloat16)


Norms = tuple[Tensor, Tensor]


class Stored(Optimizer):
    """Widens, updates and stores one parameter after the other; a subclass says how one is updated.

    `states` is how states are stored between updates (None: as they are updated), `rounding` how a bfloat16
    parameter is written back (None: to the nearest). `seed` is stochastic rounding's, whose noise depends on it,
    the parameter's name and its step alone. Parameters given as (name, parameter) have names; others are numbered.
    `share` says what pieces they are where they are pieces of parameters.

    Raises ValueError for a setting out of its range, as torch's optimizers do.
    """

    by_norms: ClassVar[bool] = False
    """Whether the update of a matrix is scaled by norms of whole tensors (`measured`)."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        states: StateFormat | None = None,
        rounding: Rounding | None = None,
        seed: int = 0,
        share: Share | None = None,
    ) -> None:
        for name, value, known in (("states", states, StateFormat), ("rounding", rounding, Rounding)):
            if value is not None and value not in get_args(known):
                default = "float32" if name == "states" else "to the nearest"
                allowed = " or ".join(map(repr, get_args(known)))
                raise ValueError(f"{name} = {value!r} is unknown: it is {allowed}, or None ({default})")
        super().__init__(params, defaults)
        self.states = states
        self.rounding = rounding
        self.seed = seed
        self.share = share

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, with settings in their ranges: its own and what it takes from the defaults."""
        settings = {**self.defaults, **param_group}
        for name in BELOW.keys() & settings.keys():
            value, below = settings[name], BELOW[name]
            # a NaN is not within, though neither below nor above
            if not all(0 <= one < below for one in (value if name == "betas" else [value])):
                limit = "finite" if below == math.inf else f"below {below:g}"
                raise ValueError(f"{name} = {value!r} is out of range: it has to be at least 0 and {limit}")
        super().add_param_group(param_group)

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The names of the states that an update reads and writes."""
        raise NotImplementedError

    def update(
        self,
        wide: Tensor,
        gradient: Tensor,
        moments: dict[str, Tensor],
        step: Tensor,
        group: dict[str, Any],
        norms: Norms | None = None,
    ) -> None:
        """Updates `wide` and `moments` in place; `step` counts from 1 and may not be changed.

        `norms` are those of the two whole tensors that are `measured`, for a piece of a matrix.
        """
        raise NotImplementedError

    def measured(
        self, wide: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: Tensor, group: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The two tensors by whose norms an update is scaled; `moments` may be changed."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient (any float dtype)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        norms = {} if self.share is None or not self.by_norms else self._norms_of_wholes(self.share)
        for name, parameter, gradient, group in self._with_gradients():
            self._step_one(name, parameter, gradient, group, norms.get(name))
        return loss

    def _with_gradients(self) -> Iterator[tuple[str, Tensor, Tensor, dict[str, Any]]]:
        """(name, parameter, gradient, group)."""
        number = 0
        for group in self.param_groups:
            names = group.get("param_names", range(number, number + len(group["params"])))
            number += len(group["params"])
            for name, parameter in zip(names, group["params"], strict=True):
                if parameter.grad is not None:
                    yield str(name), parameter, parameter.grad, group

    def _norms_of_wholes(self, share: Share) -> dict[str, Norms]:
        """Matrix -> the norms of what is measured, of which other ranks have the rest; collective.

        All are added up in one message. So the first half of an update is computed twice rather than kept.
        """
        places = {name: place for place, name in enumerate(share.matrices)}
        device = self.param_groups[0]["params"][0].device
        squares = torch.zeros(len(places), 2, dtype=torch.float64, device=device)
        for name, parameter, gradient, group in self._with_gradients():
            if name not in places:
                continue
            state = self.state.get(parameter, {})
            wide = self._widened(parameter, state)
            moments = {moment: load(moment, state, wide).clone() for moment in self.moments(group)}
            step = state["step"] + 1 if "step" in state else torch.ones((), device=device)
            tensors = self.measured(wide, _laid_out(gradient, wide), moments, step, group)
            squares[places[name]] = torch.stack([norm(tensor) for tensor in tensors]).double().square()
        norms = share.sum_(squares).sqrt().float()
        return {name: (norms[place, 0], norms[place, 1]) for name, place in places.items()}

    def _widened(self, parameter: Tensor, state: dict[str, Tensor]) -> Tensor:
        # a float32 parameter is updated where it is, and so are its float32 states; float64 stays float64
        wide = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
        if "compensation" in state:
            wide += state["compensation"]
        return wide

    def _piece(self, parameter: Tensor) -> Piece | None:
        return None if self.share is None else self.share.pieces[parameter]

    def _step_one(
        self, name: str, parameter: Tensor, gradient: Tensor, group: dict[str, Any], norms: Norms | None
    ) -> None:
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
            if self.rounding == "compensated":
                state["compensation"] = torch.zeros_like(parameter)
        state["step"] += 1
        wide = self._widened(parameter, state)
        moments = {moment: load(moment, state, wide) for moment in self.moments(group)}
        self.update(wide, _laid_out(gradient, wide), moments, state["step"], group, norms)
        for moment, value in moments.items():
            for part, kept in store(moment, value, self.states, self._piece(parameter)).items():
                # in place, which is nothing to do for a float32 state: a state stays the tensor it is
                state.setdefault(part, kept).copy_(kept)
        if wide.dtype != parameter.dtype:
            self._write_back(name, parameter, wide, state)

    def _write_back(self, name: str, parameter: Tensor, wide: Tensor, state: dict[str, Tensor]) -> None:
        if self.rounding == "stochastic":
            step = 0 if isinstance(state["step"], FakeTensor) else int(state["step"])
            # keyed by name and step: resumable with no state, however parameters are grouped, and the global
            # generator is left alone
            generator = Generator(device=wide.device).manual_seed(key(self.seed, name, step))
            parameter.copy_(round_stochastically(wide, generator, self._piece(parameter)))
            return
        parameter.copy_(wide)
        if self.rounding == "compensated":
            state["compensation"].copy_(wide.sub_(parameter))

    def _dtypes(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, torch.dtype]:
        """What a state of the parameter consists of, its step aside."""
        wide = torch.promote_types(parameter.dtype, torch.float32)
        like = torch.empty_like(parameter, dtype=wide, device="meta")
        piece = self._piece(parameter)
        parts = {
            key: kept for moment in self.moments(group) for key, kept in store(moment, like, self.states, piece).items()
        }
        if self.rounding == "compensated":
            parts["compensation"] = parameter
        return {key: part.dtype for key, part in parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but that each state keeps its own dtype: torch casts it to the parameter's.

        Raises ValueError where a state was stored in another way than this optimizer stores it: its moments would
        begin again at 0, or stay in the old dtype.
        """
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=False):  # torch counts them
            for index, parameter in zip(saved["params"], group["params"], strict=False):
                if index not in state_dict["state"]:
                    continue
                found = {key: value.dtype for key, value in state_dict["state"][index].items() if key != "step"}
                expected = self._dtypes(parameter, saved)
                if found != expected:
                    raise ValueError(
                        f"the saved state of parameter {index} is {_shown(found)}; this optimizer, with states = "
                        f"{self.states!r} and rounding = {self.rounding!r}, keeps {_shown(expected)}: build it as the "
                        "one that was saved"
                    )
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for index, state in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] = {name: value.to(parameter.device, copy=True) for name, value in state.items()}


def _shown(dtypes: dict[str, torch.dtype]) -> str:
    return (
        ", ".join(f"{key} in {str(dtype).removeprefix('torch.')}" for key, dtype in sorted(dtypes.items())) or "empty"
    )


class StoredAdamW(Stored):
    """torch.optim.AdamW (arXiv:1711.05101) on parameters or states kept in fewer bits."""

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        states: StateFormat | None = None,
        rounding: Rounding | None = None,
        seed: int = 0,
        share: Share | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, states=states, rounding=rounding, seed=seed, share=share)

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return "exp_avg", "exp_avg_sq"

    def update(
        self,
        wide: Tensor,
        gradient: Tensor,
        moments: dict[str, Tensor],
        step: Tensor,
        group: dict[str, Any],
        norms: Norms | None = None,
    ) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            [wide], [gradient], [moments["exp_avg"]], [moments["exp_avg_sq"]], [], [step - 1],
            foreach=False, fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip


class StoredSGD(Stored):
    """torch.optim.SGD on parameters or states kept in fewer bits."""

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        states: StateFormat | None = None,
        rounding: Rounding | None = None,
        seed: int = 0,
        share: Share | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, states=states, rounding=rounding, seed=seed, share=share)

    def moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def update(
        self,
        wide: Tensor,
        gradient: Tensor,
        moments: dict[str, Tensor],
        step: Tensor,
        group: dict[str, Any],
        norms: Norms | None = None,
    ) -> None:
        sgd(
            [wide], [gradient], [moments.get("momentum_buffer")], foreach=False, weight_decay=group["weight_decay"],
            momentum=group["momentum"], lr=group["lr"], dampening=0.0, nesterov=False, maximize=False,
        )  # fmt: skip
