"""Our decoder-only transformer, Llama-like: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Shapes: B samples, T tokens, D hidden, H query heads, K key/value heads, C channels of a head, F mlp_hidden,
V vocabulary. Linear weights are (out, in).
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from thrice.model.attention import Kernel, causal_attention, rotary_tables, rotate
from thrice.model.initialise import initialise, materialise
from thrice.model.mode import evaluating
from thrice.spec.job import Decoder as DecoderSpec


class RMSNorm(nn.Module):
    """x / rms(x) × weight, in float32 at least (arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed: Tensor = F.rms_norm(wide, self.weight.shape, eps=self.eps).to(x.dtype)
        return normed * self.weight


class Attention(nn.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.channels = spec.hidden // spec.heads
        kv_hidden = (spec.kv_heads or spec.heads) * self.channels
        self.q = nn.Linear(spec.hidden, spec.hidden, bias=False)
        self.k = nn.Linear(spec.hidden, kv_hidden, bias=False)
        self.v = nn.Linear(spec.hidden, kv_hidden, bias=False)
        self.out = nn.Linear(spec.hidden, spec.hidden, bias=False)
        self.kernel: Kernel = F.scaled_dot_product_attention

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        q, k, v = (project(x_BTD).unflatten(-1, (-1, self.channels)) for project in (self.q, self.k, self.v))
        heads_BTHC = causal_attention(self.kernel, rotate(q, cos_TC, sin_TC), rotate(k, cos_TC, sin_TC), v)
        out: Tensor = self.out(heads_BTHC.flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, hidden: int, mlp_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, mlp_hidden, bias=False)
        self.up = nn.Linear(hidden, mlp_hidden, bias=False)
        self.down = nn.Linear(mlp_hidden, hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out


class Block(nn.Module):
    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        mlp_hidden = spec.mlp_hidden or -(-8 * spec.hidden // (3 * 64)) * 64
        self.attention_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.attention = Attention(spec)
        self.mlp_norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.mlp = MLP(spec.hidden, mlp_hidden)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BTD: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), cos_TC, sin_TC))
        out: Tensor = x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))
        return out


class Decoder(nn.Module):
    """Tokens (B, T), int64, to logits (B, T, V) in the compute dtype."""

    def __init__(self, spec: DecoderSpec, *, vocabulary: int, positions: int) -> None:
        super().__init__()
        self.spec = spec
        self.positions = positions
        self.embedding = nn.Embedding(vocabulary, spec.hidden)
        self.dropout = nn.Dropout(spec.dropout)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, spec.norm_eps)
        self.head = nn.Linear(spec.hidden, vocabulary, bias=False)
        if spec.tied:
            self.head.weight = self.embedding.weight
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", None, persistent=False)
        self.register_buffer("sin", None, persistent=False)

    def reset_buffers(self, device: torch.device) -> None:
        """Computes the rotary tables, which a model built on `meta` lacks."""
        tables = rotary_tables(self.positions, self.spec.hidden // self.spec.heads, self.spec.rope_theta)
        self.cos, self.sin = (table.to(device) for table in tables)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        cos_TC, sin_TC = self.cos[:length], self.sin[:length]
        x_BTD = self.dropout(self.embedding(tokens_BT))
        for block in self.blocks:
            x_BTD = block(x_BTD, cos_TC, sin_TC)
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV


def build_decoder(spec: DecoderSpec, *, vocabulary: int, positions: int, device: torch.device, seed: int) -> Decoder:
    """The model on `device`, float32, its weights a function of (seed, parameter name) alone."""
    with torch.device("meta"):
        model = Decoder(spec, vocabulary=vocabulary, positions=positions)
    materialise(model, device)
    model.reset_buffers(device)
    into_residual = 0.02 / math.sqrt(2 * spec.layers)  # GPT-2's scaling: the residual's variance stays put

    def rule(name: str, parameter: Tensor, generator: Generator) -> None:
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            std = into_residual if name.endswith(("out.weight", "down.weight")) else 0.02
            parameter.normal_(0.0, std, generator=generator)

    initialise(model, seed, rule)
    return model


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, *, new_tokens: int, positions: int, seed: int) -> Tensor:
    """Samples `new_tokens` after `prompt` (T,) int64 at temperature 0.8; returns (T + new_tokens,).

    The whole window is run again for every token: plain, and fast enough for a glimpse. The global random
    state is not touched.
    """
    generator = Generator(device=prompt.device).manual_seed(seed)
    tokens = prompt
    with evaluating(model):
        for _ in range(new_tokens):
            logits = model(tokens[None, -positions:])[0, -1].float()
            choice = torch.multinomial((logits / 0.8).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, choice))
    return tokens
