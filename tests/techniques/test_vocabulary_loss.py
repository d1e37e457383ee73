"""vocabulary_loss: the same training without the logits, refused where something follows the head."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from plain import CPU, SEQUENCE, VOCABULARY, job, session, window
from thrice.compose import compose
from thrice.errors import ConfigError
from thrice.model.loss import CHUNK_TOKENS
from thrice.observe.rehearse import rehearse
from thrice.observe.trace import Tracer
from thrice.spec.job import Decoder
from thrice.step import evaluate, train_step
from thrice.techniques import vocabulary_loss
from thrice.techniques.precision import Precision
from thrice.techniques.vocabulary_loss import VocabularyLoss

CHUNKED = VocabularyLoss(mode="chunked", chunk_tokens=7)
WIDTH = 32


class Small(nn.Module):
    """A model with a head, and something that may follow it."""

    def __init__(self, after=lambda logits: logits, bias=True, head=nn.Linear) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = head(WIDTH, VOCABULARY, bias=bias)
        self.after = after

    def forward(self, tokens):
        return self.after(self.head(self.inner(self.embedding(tokens)).tanh()))


def one_step(model, *techniques, frozen=()):
    """(session, result, gradients) of one step on a copy of the model."""
    model = copy.deepcopy(model)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    ours = session(job(techniques=techniques), model=model)
    gradients = {}
    ours.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in ours.model.named_parameters() if p.requires_grad})
    )
    return ours, train_step(ours, window(9, 16)), gradients


def assert_near(gradients, expected, tolerance=2e-6):
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).norm() / gradient.norm()) < tolerance, name


@pytest.mark.parametrize("frozen", [(), ("head",)], ids=["all trained", "head frozen"])
@pytest.mark.parametrize("bias", [True, False])
def test_it_trains_a_model_as_the_whole_loss_does(bias, frozen):
    torch.manual_seed(0)
    model = Small(bias=bias)
    _, result, gradients = one_step(model, frozen=frozen)
    _, got, ours = one_step(model, CHUNKED, frozen=frozen)
    assert got.loss == pytest.approx(result.loss, rel=1e-6)
    assert_near(ours, gradients)


@pytest.mark.parametrize("tied", [True, False])
def test_it_trains_the_decoder_as_the_whole_loss_does(tied):
    changes = {"decoder": Decoder(layers=1, hidden=32, heads=4, mlp_hidden=48, tied=tied)}
    taken = []
    for techniques in ((), (CHUNKED,)):
        made = session(job(techniques=techniques, **changes))
        gradients: dict[str, torch.Tensor] = {}
        made.optimizer.register_step_pre_hook(
            lambda *_, made=made, gradients=gradients: gradients.update(
                {n: p.grad.clone() for n, p in made.model.named_parameters()}
            )
        )
        train_step(made, window(9, 16))
        taken.append(gradients)
    assert_near(taken[1], taken[0])


def test_the_model_itself_still_gives_logits_and_evaluation_is_the_same():
    plain, ours = session(job()), session(job(techniques=(CHUNKED,)))
    batches = window(9, 16, 0)
    assert torch.equal(ours.model(batches[0].inputs), plain.model(batches[0].inputs))
    assert ours.output(batches[0].inputs).shape == (1, SEQUENCE, 32)
    assert "forward" not in vars(ours.model.head)
    got, expected = evaluate(ours, batches), evaluate(plain, batches)
    assert got == (pytest.approx(expected[0], rel=1e-6), expected[1])
    with pytest.raises(IndexError):
        ours.output(torch.full((1, 4), VOCABULARY))
    assert "forward" not in vars(ours.model.head), "also after an error"


def llama(**changes):
    transformers = pytest.importorskip("transformers", reason="a real model to refuse; extra `test`")
    config = transformers.CohereConfig if "logit_scale" in changes else transformers.LlamaConfig
    build = transformers.CohereForCausalLM if "logit_scale" in changes else transformers.LlamaForCausalLM

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = build(
                config(
                    vocab_size=VOCABULARY,
                    hidden_size=WIDTH,
                    intermediate_size=48,
                    num_hidden_layers=1,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    use_cache=False,
                    pad_token_id=0,
                    bos_token_id=1,
                    eos_token_id=2,
                    **changes,
                )
            )

        def forward(self, tokens):
            return self.model(tokens).logits

    return Logits()


def test_hugging_face_names_its_head():
    torch.manual_seed(0)
    model = llama()
    _, _, gradients = one_step(model)
    _, _, ours = one_step(model, CHUNKED)
    assert_near(ours, gradients)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Small(after=lambda logits: 30 * (logits / 30).tanh()), "something follows the head"),
        (lambda: Small(after=lambda logits: logits.mul_(0.5)), "something follows the head"),
        (lambda: Small(after=nn.Dropout(0.1)), "something follows the head"),
        (lambda: Small(after=lambda logits: {"logits": logits}), "no plain tensor"),
        (lambda: Small(head=Doubled), "a Doubled with a forward of its own"),
        (lambda: llama(logit_scale=0.5), "something follows the head"),
        (lambda: nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY)), "no output layers were found"),
    ],
    ids=["cap", "scale in place", "dropout", "dictionary", "own forward", "Cohere", "no head"],
)
def test_a_loss_that_would_be_another_one_is_refused(model, why):
    with pytest.raises(ConfigError, match=why) as error:
        session(job(techniques=(CHUNKED,)), model=model())
    assert 'vocabulary_loss = "whole"' in str(error.value)


def test_settings():
    assert not list(CHUNKED.check())
    assert [p.key for p in VocabularyLoss(mode="chunked", chunk_tokens=0).check()] == ["chunk_tokens"]
    assert [p.key for p in VocabularyLoss(chunk_tokens=7).check()] == ["chunk_tokens"]
    lines = [session(job(techniques=(t,))).applied["vocabulary_loss"] for t in (VocabularyLoss(), CHUNKED)]
    assert lines == ["the whole matrix of logits", "logits of 7 tokens at a time"]


@pytest.mark.parametrize("precision", [(), (Precision(mode="bf16"),), (Precision(mode="bf16-pure"),)])
@pytest.mark.parametrize(("seconds", "whole"), [((0.21, 0.26), True), ((0.26, 0.265), False), ((0.26, 0.2), False)])
def test_auto_takes_what_is_not_slower_and_says_both(monkeypatch, seconds, whole, precision):
    monkeypatch.setattr(vocabulary_loss, "_fastest_s", lambda *_: list(seconds))
    wanted = job(techniques=(VocabularyLoss(mode="auto", chunk_tokens=4), *precision), micro_batch=4)
    made = compose(wanted, vocabulary=4096, device=CPU)
    line = made.applied["vocabulary_loss"]
    assert ("tokens at a time" in line) is not whole
    for number in seconds:
        assert f"{number:.2g} s" in line
    assert line.endswith("iB less")
    assert (made.output is made.model) is whole
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_auto_measures():
    made = session(job(techniques=(VocabularyLoss(mode="auto"),)))
    assert " s against " in made.applied["vocabulary_loss"]
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert train_step(made, window(9, 16)).taken


def test_auto_does_not_time_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(vocabulary_loss, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(vocabulary_loss, "_fastest_s", None)
    line = session(job(techniques=(VocabularyLoss(mode="auto"),))).applied["vocabulary_loss"]
    assert line.startswith(f"logits of {CHUNK_TOKENS} tokens at a time; the whole loss needs ")
    assert line.endswith("of 1000 B free, so it was not timed")


def test_auto_says_what_a_rehearsal_assumes():
    wanted = job(techniques=(VocabularyLoss(mode="auto", chunk_tokens=4),))
    made = rehearse(wanted, 4096)
    line = made.applied["vocabulary_loss"]
    assert line.startswith("whole is assumed: which is faster is measured on real tensors only; chunked would need ")
    assert made.peak_bytes == rehearse(job(techniques=(VocabularyLoss(),)), 4096).peak_bytes


def test_the_peak_falls_by_the_logits():
    peaks = []
    for technique in (VocabularyLoss(), VocabularyLoss(mode="chunked", chunk_tokens=16)):
        made = compose(job(techniques=(technique,), micro_batch=4), vocabulary=8192, device=CPU)
        with Tracer(made.model, made.optimizer) as tracer:
            train_step(made, [made.example()])
        peaks.append(tracer.trace().peak_bytes)
    logits_bytes = 4 * SEQUENCE * 8192 * 4
    assert peaks[0] - peaks[1] > logits_bytes
