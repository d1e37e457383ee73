"""Pieces of parameters: what of a state is theirs, and updates of pieces that are those of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thrice.optim.lamb import Lamb
from thrice.optim.lars import Lars
from thrice.optim.share import Piece, Share
from thrice.optim.stored import StoredAdamW, store, stored_format

SHAPE = torch.Size([70, 75])  # 5,250 elements: 20 blocks and a part of one


def piece(start: int, stop: int) -> Piece:
    return Piece(name="w", shape=SHAPE, start=start, stop=stop)


def test_the_parts_of_states_are_the_whole() -> None:
    value = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).abs()
    for states in (None, "bf16", "8bit"):
        whole = store("exp_avg_sq", value, states)
        cuts = [piece(0, 2_560), piece(2_560, 2_816), piece(2_816, 5_250)]
        for key, tensor in whole.items():
            assert torch.equal(torch.cat([cut.of(key, tensor) for cut in cuts]), tensor.flatten())
        for cut in cuts:  # and those that it would have stored itself, however short
            own = store("exp_avg_sq", value.flatten()[cut.start : cut.stop], states, cut)
            assert {key: kept.tolist() for key, kept in own.items()} == {
                key: cut.of(key, tensor).tolist() for key, tensor in whole.items()
            }
    assert piece(0, 256).of("step", torch.tensor(3.0)).item() == 3.0
    assert stored_format(torch.zeros(256), "8bit", piece(0, 256)) == "8bit"
    assert stored_format(torch.zeros(256), "8bit") is None


@pytest.mark.parametrize("kind", [StoredAdamW, Lamb, Lars])
@pytest.mark.parametrize("how", [{}, {"states": "bf16"}, {"rounding": "stochastic"}, {"rounding": "compensated"}])
def test_an_update_of_pieces_is_that_of_the_whole(kind, how: dict[str, str]) -> None:
    """Two shares beside each other; the first pass of each gives its part of the norms to the other."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if "rounding" in how else torch.float32
    start = torch.randn(SHAPE, generator=generator).to(dtype)
    whole = torch.nn.Parameter(start.clone())
    flat = start.clone().flatten()
    plain = kind([("w", whole)], lr=0.01, weight_decay=0.1, seed=3, **how)
    cuts = [piece(0, 1_024), piece(1_024, 5_250)]
    tensors = [torch.nn.Parameter(flat[cut.start : cut.stop]) for cut in cuts]
    parts: list[Tensor] = []

    def summed(squares: Tensor) -> Tensor:
        parts.append(squares)
        return parts[0] + parts[1] if len(parts) == 2 else squares

    shares = [
        Share(pieces={tensor: cut}, matrices=("w",), sum_=summed) for tensor, cut in zip(tensors, cuts, strict=True)
    ]
    optimizers = [
        kind([("w", tensor)], lr=0.01, weight_decay=0.1, seed=3, share=share, **how)
        for tensor, share in zip(tensors, shares, strict=True)
    ]
    for _ in range(3):
        gradient = torch.randn(SHAPE, generator=generator)
        for tensor, cut in zip([whole, *tensors], [None, *cuts], strict=True):
            tensor.grad_dtype = torch.float32
            tensor.grad = gradient if cut is None else gradient.flatten()[cut.start : cut.stop]
        plain.step()
        if kind is not StoredAdamW:  # the other rank's part, which a collective would bring at once
            parts.clear()
            optimizers[1]._norms_of_wholes(shares[1])
            optimizers[0].step()
            parts[:] = parts[1:]
            optimizers[1].step()
        else:
            for optimizer in optimizers:
                optimizer.step()
        # with stochastic rounding too: a piece draws what it would draw in the whole
        far = (flat.view(SHAPE).float() - whole.detach().float()).abs()
        assert float((far > 1e-5).float().mean()) < (2e-3 if dtype is torch.bfloat16 else 1e-12)
