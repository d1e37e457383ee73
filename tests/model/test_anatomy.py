"""Blocks and attentions found in models that were never written for it, and recomputed there to the last bit."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from plain import CPU, SEQUENCE, VOCABULARY, job, session, window
from thrice.errors import ConfigError
from thrice.model.anatomy import blocks, head
from thrice.model.decoder import build_decoder
from thrice.model.loss import cross_entropy_sum
from thrice.step import train_step
from thrice.techniques.recompute import Recompute

transformers = pytest.importorskip("transformers", reason="real models to read; extra `test`")

WIDTH = 32


def llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def qwen2():
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=WIDTH, n_layer=3, n_head=4
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def decoder():
    return build_decoder(job().decoder, vocabulary=VOCABULARY, positions=SEQUENCE, device=CPU, seed=0)


class Encoder(nn.Module):
    """torch's own layers, between an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=48, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


class Mixer(nn.Module):
    """A composite module with no attention."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, WIDTH))

    def forward(self, x):
        return x + self.inner(self.norm(x))


def sequential():
    blocks_ = nn.Sequential(*(Mixer() for _ in range(4)))
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), blocks_, nn.Linear(WIDTH, VOCABULARY))


MODELS = {
    "decoder": (decoder, "blocks.{}", "attention", 2),
    "llama": (llama, "model.layers.{}", "self_attn", 3),
    "qwen2": (qwen2, "model.layers.{}", "self_attn", 3),
    "gpt2": (gpt2, "transformer.h.{}", "attn", 3),
    "TransformerEncoder": (Encoder, "encoder.layers.{}", "self_attn", 3),
    "Sequential": (sequential, "1.{}", None, 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_and_attentions_are_found(name):
    build, block_name, attention_name, count = MODELS[name]
    model = build()
    found = blocks(model)
    assert [block.name for block in found] == [block_name.format(index) for index in range(count)]
    for block in found:
        assert block.module is model.get_submodule(block.name)
        expected = block.module.get_submodule(attention_name) if attention_name else None
        assert block.attention is expected


def test_the_list_that_holds_the_most_parameters_is_taken():
    model = nn.Module()
    model.small = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(8))
    model.large = nn.ModuleList(nn.Sequential(nn.Linear(9, 9)) for _ in range(2))
    assert [block.name for block in blocks(model)] == ["large.0", "large.1"]


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)),
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),  # layers, but nothing that a block would save
        nn.ModuleList(nn.ReLU() for _ in range(3)),
    ],
    ids=["one layer", "a plain MLP", "plain layers", "no parameters"],
)
def test_a_model_without_blocks_is_refused_with_a_way_out(model):
    with pytest.raises(ConfigError) as error:
        blocks(model)
    message = str(error.value)
    assert type(model).__name__ in message
    assert "no repeated blocks" in message
    assert "ModuleList" in message
    assert "whichever of recompute, compile and the optimizer muon is asked for" in message


HEADS = {"decoder": "head", "llama": "lm_head", "qwen2": "lm_head", "gpt2": "lm_head", "TransformerEncoder": "head"}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_found(name):
    model = MODELS[name][0]()
    assert head(model) is model.get_submodule(HEADS[name])
    assert head(nn.Sequential(model)) is model.get_submodule(HEADS[name]), "also inside another module"


def test_a_model_without_a_head_or_with_two_is_refused_with_a_way_out():
    two = nn.Module()
    two.a, two.b = Encoder(), Encoder()
    for model, count in ((sequential(), "no"), (two, "2"), (transformers.LlamaModel(llama().config), "no")):
        with pytest.raises(ConfigError, match=rf"{count} output layers were found") as error:
            head(model)
        assert 'vocabulary_loss = "whole"' in str(error.value)


def hf_loss(output, targets):
    return cross_entropy_sum(output if isinstance(output, torch.Tensor) else output.logits, targets)


def one_step(build, techniques, freeze=()):
    """(result, gradients, names) of one step, dropout and weights drawn the same."""
    torch.manual_seed(0)
    model = build().train()
    for name in freeze:
        model.get_submodule(name).requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    ours = session(job(techniques=techniques), model=model, loss=hf_loss)
    gradients = {}
    ours.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: copy.deepcopy(p.grad) for n, p in ours.model.named_parameters()})
    )
    torch.manual_seed(1)
    result = train_step(ours, window(9, 16))
    assert [name for name, _ in ours.model.named_parameters()] == names
    assert list(ours.model.state_dict()) == list(build().state_dict())
    return result, gradients


@pytest.mark.parametrize("strategy", ["full", "attention_only", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputation_is_bitwise_and_renames_nothing(name, strategy):
    build, _, attention_name, _ = MODELS[name]
    run = partial(one_step, build)
    if strategy == "attention_only" and attention_name is None:
        with pytest.raises(ConfigError, match=r"no attention was found in block 1\.0 \(Mixer\)"):
            run((Recompute(strategy=strategy),))
        return
    plain, gradients = run(())
    recomputed, others = run((Recompute(strategy=strategy),))
    assert plain.taken
    assert plain == recomputed
    assert all(gradient is not None for gradient in gradients.values())
    assert all(torch.equal(gradient, others[name]) for name, gradient in gradients.items())


FROZEN = {"decoder": "embedding", "llama": "model.embed_tokens", "gpt2": "transformer.wte", "Sequential": "0"}


@pytest.mark.parametrize("name", FROZEN)
def test_what_trains_behind_frozen_inputs_gets_its_gradients(name):
    """The first block's input needs no gradient; its weights do (reentrant checkpointing loses them)."""
    run = partial(one_step, MODELS[name][0], freeze=(FROZEN[name],))
    _, gradients = run(())
    _, others = run((Recompute(strategy="full"),))
    missing = {parameter for parameter, gradient in others.items() if gradient is None}
    assert missing == {parameter for parameter, gradient in gradients.items() if gradient is None}
    assert all(parameter.startswith(FROZEN[name]) for parameter in missing)
    assert missing
    assert all(torch.equal(gradients[n], others[n]) for n in gradients.keys() - missing)
