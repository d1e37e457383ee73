"""attention: chosen on our decoder, and on models that were not written for it; memory against length."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from plain import CPU, SEQUENCE, VOCABULARY, job, session, window
from thrice.compose import compose
from thrice.errors import ConfigError
from thrice.observe.rehearse import rehearse
from thrice.observe.trace import RECOMPUTE, Tracer
from thrice.spec.job import Decoder
from thrice.step import train_step
from thrice.techniques.attention import Attention
from thrice.techniques.recompute import Recompute

transformers = pytest.importorskip("transformers", reason="real models to exchange it in; extra `test`")

WIDTH = 32
FLASH, EAGER = Attention(kernel="flash", block=12), Attention(kernel="eager")


class Causal(nn.Module):
    """Tokens whose last id is padding, through a Hugging Face model, to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens, attention_mask=(tokens != VOCABULARY - 1).long(), use_cache=False).logits


class SequenceToSequence(nn.Module):
    """The decoder of each block attends to itself and to the encoder: two attentions, one of them not causal."""

    def __init__(self) -> None:
        super().__init__()
        self.model = transformers.BartForConditionalGeneration(
            transformers.BartConfig(
                vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0,
                max_position_embeddings=SEQUENCE,
            )
        )  # fmt: skip

    def forward(self, tokens):
        return self.model(input_ids=tokens, decoder_input_ids=tokens.flip(1), use_cache=False).logits


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)))


def llama(**changes):
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, **changes,
    )  # fmt: skip
    return Causal(transformers.LlamaForCausalLM(config))


def gpt2(attn_pdrop=0.0):
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=WIDTH, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=attn_pdrop,
    )  # fmt: skip
    return Causal(transformers.GPT2LMHeadModel(config))


MODELS = {
    "llama": (llama, 2),
    "gpt2": (gpt2, 2),
    "sequence to sequence": (SequenceToSequence, 6),
    "TransformerEncoder": (Encoder, 2),
}


def one_step(model, *techniques):
    """(session, loss, gradients) of one step on a copy of the model."""
    ours = session(job(techniques=techniques), model=copy.deepcopy(model))
    gradients = {}
    ours.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in ours.model.named_parameters()})
    )
    result = train_step(ours, window(9, 16))
    return ours, result.loss, gradients


def padded_window():
    batches = window(9, 16)
    batches[0].inputs[:, -3:] = VOCABULARY - 1
    return batches


def assert_near(gradients, expected):
    for name, gradient in expected.items():
        # a key's bias shifts all scores of a row alike: its gradient is 0 but for rounding
        norm = max(float(gradient.norm()), 1e-3)
        assert float((gradients[name] - gradient).norm()) / norm < 2e-5, name


@pytest.fixture
def counted(monkeypatch):
    """How often torch's attention is called."""
    calls = {"torch": 0}
    original = F.scaled_dot_product_attention

    def torchs(*args, **kwargs):
        calls["torch"] += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", torchs)
    return calls


@pytest.mark.parametrize("technique", [FLASH, EAGER], ids=["flash", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_exchanged_in_models_of_others(name, technique, counted):
    build, attentions = MODELS[name]
    torch.manual_seed(0)
    model = build()
    _, loss, gradients = one_step(model)
    assert counted["torch"] == 2 * attentions
    ours, got_loss, got = one_step(model, technique)
    assert counted["torch"] == 2 * attentions, "torch's attention is called no more"
    assert ours.applied["attention"].endswith(f"in {attentions} attentions")
    assert [n for n, _ in ours.model.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert got_loss == pytest.approx(loss, rel=1e-6)
    assert_near(got, gradients)


@pytest.mark.parametrize("strategy", ["full", "attention_only", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_it_holds_when_a_forward_is_recomputed(name, strategy, counted):
    torch.manual_seed(0)
    model = MODELS[name][0]()
    _, loss, gradients = one_step(model, FLASH)
    _, got_loss, got = one_step(model, FLASH, Recompute(strategy=strategy))
    assert counted["torch"] == 0
    assert got_loss == loss
    assert all(torch.equal(got[n], gradients[n]) for n in gradients)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("technique", [FLASH, EAGER], ids=["flash", "eager"])
def test_padding_is_masked_as_by_torch(name, technique):
    torch.manual_seed(0)
    model = MODELS[name][0]().train()
    ours = session(job(techniques=(technique,)), model=copy.deepcopy(model))
    tokens, targets = padded_window()[0].inputs, padded_window()[0].targets
    for net in (model, ours.model):
        ours.loss(net(tokens), targets).backward()
    assert_near(*({n: p.grad for n, p in net.named_parameters()} for net in (ours.model, model)))


def test_no_other_model_is_touched(counted):
    torch.manual_seed(0)
    other = llama()
    original = F.scaled_dot_product_attention
    ours, _, _ = one_step(other, FLASH)
    assert F.scaled_dot_product_attention is original
    other(window(9)[0].inputs)
    assert counted["torch"] == 2
    with pytest.raises(IndexError):
        ours.model(torch.full((1, 4), VOCABULARY))
    assert F.scaled_dot_product_attention is original, "also after an error"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: llama(attn_implementation="eager"), r'Causal never calls .*\n.*attn_implementation="sdpa"'),
        (lambda: nn.Sequential(nn.Embedding(VOCABULARY, 4), nn.Linear(4, VOCABULARY)), "Sequential never calls"),
        (lambda: gpt2(attn_pdrop=0.1), r"dropout_p = 0\.1"),
    ],
    ids=["eager", "no attention", "dropout"],
)
def test_what_cannot_be_exchanged_is_refused_before_training(model, message):
    with pytest.raises(ConfigError, match=message):
        session(job(techniques=(FLASH,)), model=model())


def test_settings():
    assert not list(FLASH.check())
    assert [p.key for p in Attention(kernel="flash", block=0).check()] == ["block"]
    assert "belongs to" in str(next(Attention(block=12).check()))
    lines = [session(job(techniques=(t,))).applied["attention"] for t in Attention.examples()]
    assert lines[0] == "torch's fused kernels"
    assert lines[1:] == ["ours in blocks of 20, in 2 attentions", "the whole score matrix, in 2 attentions"]


def test_selective_recomputation_keeps_the_output_and_full_computes_it_again():
    def traced(strategy):
        made = session(job(techniques=(FLASH, Recompute(strategy=strategy))))
        with Tracer(made.model, made.optimizer) as tracer:
            train_step(made, window(16))
        trace = tracer.trace()
        return trace.operators["thrice.flash_attention"].count, trace.flops_by_phase[RECOMPUTE]

    assert traced("selective") == (2, 0)
    assert traced("full")[0] == 4


def test_scratch_memory_is_in_the_measured_peak_and_rehearsed():
    """What the blocks take is no tensor that a dispatch sees: the profiler measures it, and the peak has it."""
    wanted = job(
        techniques=(Attention(kernel="flash", block=48),), sequence=64, micro_batch=4, global_batch=4,
        decoder=Decoder(layers=1, hidden=16, heads=2, mlp_hidden=8),
    )  # fmt: skip
    made = compose(wanted, vocabulary=8, device=CPU)
    window_ = [made.example()]
    train_step(made, window_)
    with Tracer(made.model, made.optimizer) as tracer:
        train_step(made, window_)
    scratch = {s[0]: nbytes for s, nbytes in tracer.workspaces.items() if "thrice" in s[0]}
    block_bytes = 4 * 2 * 48 * 48 * 4  # one block of scores: samples, heads, queries, keys, float32
    assert scratch["thrice.flash_attention.default"] >= block_bytes
    assert scratch["thrice.flash_attention_backward.default"] >= 2 * block_bytes
    measured = tracer.trace()
    assert rehearse(wanted, 8, tracer.workspaces).trace.peak_bytes == measured.peak_bytes
    assert rehearse(wanted, 8).trace.peak_bytes < measured.peak_bytes


def attention_bytes(technique: Attention, tokens: int) -> int:
    """The most that one attention of 1 head × 8 channels takes beyond its inputs, forward and backward."""
    layer = OneAttention(technique)
    with Tracer(layer) as tracer:
        q, k, v = (torch.zeros(1, 1, tokens, 8, requires_grad=True) for _ in range(3))
        layer(q, k, v).sum().backward()
    return tracer.trace().peak_bytes


class OneAttention(nn.Module):
    def __init__(self, technique: Attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = session(job(techniques=(technique,)))
        self.kernel = made.model.blocks[0].attention.kernel

    def forward(self, q, k, v):
        return self.kernel(q, k, v, is_causal=True)


@pytest.mark.parametrize("kernel", ["sdpa", "flash", "eager"])
def test_memory_against_length(kernel):
    """Linear without the matrix, quadratic with it; 1k to 16k is in benchmarks/attention.py."""
    technique = Attention(kernel=kernel, block=32 if kernel == "flash" else None)
    short, long = (attention_bytes(technique, tokens) for tokens in (512, 2048))
    exponent = math.log(long / short) / math.log(4)
    assert exponent >= 1.8 if kernel == "eager" else exponent <= 1.1
