"""Our decoder against transformers' Llama, and what must hold for any causal model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from thrice.model.decoder import Decoder as Model
from thrice.model.decoder import build_decoder, generate
from thrice.spec.job import Decoder

transformers = pytest.importorskip("transformers", reason="the reference; extra `test`")

CPU = torch.device("cpu")
VOCABULARY, POSITIONS = 67, 24
SPEC = Decoder(layers=2, hidden=32, heads=4, kv_heads=2, mlp_hidden=48, rope_theta=500.0, norm_eps=1e-4)
VARIANTS = {
    "grouped, tied": SPEC,
    "grouped, untied": replace(SPEC, tied=False),
    "one key head": replace(SPEC, kv_heads=1),
    "as many key heads": replace(SPEC, kv_heads=None, tied=False),
}


def decoder(spec=SPEC, seed=0):
    return build_decoder(spec, vocabulary=VOCABULARY, positions=POSITIONS, device=CPU, seed=seed)


def tokens(samples=2, length=POSITIONS, seed=0):
    return torch.randint(0, VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))


NAMES = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "mlp",
}


def llama(ours):
    """Transformers' Llama with our weights."""
    spec = ours.spec
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=spec.hidden,
        intermediate_size=spec.mlp_hidden,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads or spec.heads,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tied,
    )
    theirs = transformers.LlamaForCausalLM(config)
    weights = {"model.embed_tokens.weight": ours.embedding.weight, "model.norm.weight": ours.norm.weight}
    weights["lm_head.weight"] = ours.head.weight
    for index, block in enumerate(ours.blocks):
        for name, parameter in block.named_parameters():
            stem, _, last = name.removesuffix(".weight").rpartition(".")
            part = f"mlp.{last}_proj" if stem == "mlp" else NAMES[name.removesuffix(".weight")]
            weights[f"model.layers.{index}.{part}.weight"] = parameter
    theirs.load_state_dict({name: tensor.detach().clone() for name, tensor in weights.items()})
    return theirs.eval()


def shaken(model):
    """With weights far from their small beginnings, so that every part shows in the logits."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.2 * noise)
    return model


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_gradients_equal_llamas(spec):
    ours = shaken(decoder(spec))
    theirs = llama(ours)
    x = tokens()
    got, expected = ours(x), theirs(x).logits
    # logits of about ±10 in float32: a relative 2⁻²⁴ for each of some dozen operations
    assert float((got - expected).detach().abs().max()) < 1e-5
    assert float(expected.detach().abs().max()) > 1
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    (got * weight).mean().backward()
    (expected * weight).mean().backward()
    q, theirs_q = ours.blocks[0].attention.q.weight.grad, theirs.model.layers[0].self_attn.q_proj.weight.grad
    assert torch.allclose(q, theirs_q, rtol=1e-4, atol=1e-6 * float(theirs_q.abs().max()))
    embedding, theirs_embedding = ours.embedding.weight.grad, theirs.model.embed_tokens.weight.grad
    assert torch.allclose(embedding, theirs_embedding, rtol=1e-4, atol=1e-5 * float(embedding.abs().max()))


def test_interleaved_rotary_pairs_are_another_model():
    """Pairs (0, 1), (2, 3)… in place of halves: the weights of such a checkpoint must be permuted first."""
    ours = shaken(decoder())
    expected = llama(ours)(tokens()).logits
    channels = SPEC.hidden // SPEC.heads
    interleave = torch.arange(channels).view(2, -1).t().flatten()
    with torch.no_grad():
        for block in ours.blocks:
            for project in (block.attention.q, block.attention.k):
                heads = project.weight.view(-1, channels, SPEC.hidden)
                heads.copy_(heads[:, interleave].clone())
    assert float((ours(tokens()) - expected).detach().abs().max()) > 0.1


def test_positions_matter_relative_to_each_other_alone():
    """Rotary attention sees differences of positions: at an offset, the same scores."""
    attention = shaken(decoder()).blocks[0].attention
    model = decoder()
    x = torch.randn(1, 8, SPEC.hidden, generator=torch.Generator().manual_seed(0))
    at_0 = attention(x, model.cos[:8], model.sin[:8])
    at_9 = attention(x, model.cos[9:17], model.sin[9:17])
    assert torch.allclose(at_0, at_9, atol=1e-5)
    assert not torch.allclose(at_0, attention(x, model.cos[:1], model.sin[:1]), atol=1e-2)  # no positions at all


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_a_later_token_changes_no_earlier_logit(spec):
    model = shaken(decoder(spec))
    x = tokens(1)
    before = model(x)
    for place in (1, 10, POSITIONS - 1):
        changed = x.clone()
        changed[0, place] = (x[0, place] + 1) % VOCABULARY
        after = model(changed)
        assert torch.equal(after[0, :place], before[0, :place])
        assert bool((after[0, place:] != before[0, place:]).any(-1).all())


def test_a_sample_does_not_see_the_others():
    model = shaken(decoder())
    x = tokens(3)
    # another batch size may take another order of sums
    assert torch.allclose(model(x)[1], model(x[1:2])[0], atol=1e-5)


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS)
def test_parameter_count(spec):
    hidden, kv = spec.hidden, (spec.kv_heads or spec.heads) * spec.hidden // spec.heads
    block = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * spec.mlp_hidden + 2 * hidden
    expected = (1 if spec.tied else 2) * VOCABULARY * hidden + spec.layers * block + hidden
    model = decoder(spec)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert (model.head.weight is model.embedding.weight) == spec.tied


@pytest.mark.parametrize(("hidden", "expected"), [(32, 128), (96, 256), (128, 384), (192, 512), (768, 2048)])
def test_the_default_mlp_is_8_thirds_rounded_up_to_64(hidden, expected):
    with torch.device("meta"):
        model = Model(Decoder(layers=1, hidden=hidden, heads=2), vocabulary=8, positions=4)
    assert model.blocks[0].mlp.gate.out_features == expected
    assert 0 <= expected - 8 * hidden / 3 < 64


def test_initial_weights_are_as_stated():
    spec = Decoder(layers=3, hidden=128, heads=4, mlp_hidden=256, tied=False)
    model = decoder(spec)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert bool((parameter == 1).all()), name
            continue
        std = 0.02 / math.sqrt(2 * 3) if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02
        # of n draws: the mean lies within 5 std/√n, the deviation within 5 std/√2n
        n, values = parameter.numel(), parameter.detach().double()
        assert abs(float(values.mean())) < 5 * std / n**0.5, name
        assert abs(float(values.std()) - std) < 5 * std / (2 * n) ** 0.5, name


def test_initial_weights_depend_on_seed_and_name_alone():
    torch.manual_seed(1)
    small = dict(decoder().named_parameters())
    before = torch.get_rng_state()
    torch.rand(3)
    deep = dict(decoder(replace(SPEC, layers=5, dropout=0.1)).named_parameters())
    other = dict(decoder(seed=1).named_parameters())
    for name, parameter in small.items():
        scaled = name.endswith(("out.weight", "down.weight"))  # their std is the depth's
        wanted = parameter * math.sqrt(2 / 5) if scaled else parameter
        assert torch.allclose(deep[name], wanted, rtol=1e-6, atol=0), name
        if not scaled:
            assert torch.equal(deep[name], parameter), name
        if parameter.ndim > 1:
            assert not torch.equal(other[name], parameter), name
    q = [parameter for name, parameter in deep.items() if name.endswith("q.weight")]
    assert not any(torch.equal(q[i], q[j]) for i in range(5) for j in range(i))
    torch.set_rng_state(before)
    decoder()
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_on_the_embedding_and_on_what_each_part_adds():
    model = decoder(replace(SPEC, dropout=0.5))
    assert sum(isinstance(module, nn.Dropout) and module.p == 0.5 for module in model.modules()) == SPEC.layers + 1
    calls = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda *_: calls.append(1))
    x = tokens()
    assert not torch.equal(model(x), model(x))
    assert len(calls) == 2 * (1 + 2 * SPEC.layers)
    plain = decoder()
    assert torch.equal(model.eval()(x), plain(x))


def test_generation_leaves_mode_and_random_state():
    model = decoder(replace(SPEC, dropout=0.5)).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    prompt, before = tokens(1)[0, :5], torch.get_rng_state()
    first = generate(model, prompt, new_tokens=30, positions=POSITIONS, seed=1)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)
    assert first.shape == (35,)  # past the model's positions too
    assert torch.equal(first[:5], prompt)
    assert torch.equal(first, generate(model, prompt, new_tokens=30, positions=POSITIONS, seed=1))
    assert not torch.equal(first, generate(model, prompt, new_tokens=30, positions=POSITIONS, seed=2))
    assert int(first.max()) < VOCABULARY
    assert all(parameter.grad is None for parameter in model.parameters())


def test_generation_samples_from_the_model():
    """At temperature 0.8: the share of each next token is its probability."""

    class Fixed(nn.Module):
        def forward(self, x):
            return torch.log(torch.tensor([0.5, 0.3, 0.2])).expand(*x.shape, 3)

    drawn = generate(Fixed(), torch.tensor([0]), new_tokens=4000, positions=1, seed=0)[1:]
    expected = torch.tensor([0.5, 0.3, 0.2]) ** (1 / 0.8)
    expected /= expected.sum()
    # 4,000 draws: a standard deviation of at most 0.008
    assert torch.allclose(drawn.bincount(minlength=3) / 4000, expected, atol=4 * 0.008)
