"""What several test files share: a small real corpus, cached in a folder of the test run's own."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import pytest
import torch

import thrice.train
from processes import Workers
from thrice.model.decoder import generate

torch.set_num_threads(1)  # the models are tiny, and two threads on a busy core wait for each other


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of about 9 kB of real text: 286 samples of 32 bytes."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(inspect.getsource(argparse)[:9_200], encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THRICE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def one_thread():
    """Sums in another order are other bits; and a forked child may not use more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def short_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text at the end of a run takes as long as the whole of a tiny one."""

    def shorter(model, prompt, *, new_tokens, **options):
        return generate(model, prompt, new_tokens=2, **options)

    monkeypatch.setattr(thrice.train, "generate", shorter)


@pytest.fixture(scope="session")
def workers():
    """size -> ranks that have joined, kept for all tests of one pytest process."""
    started: dict[int, Workers] = {}

    def of(size: int) -> Workers:
        if size not in started:
            started[size] = Workers(size)
        return started[size]

    yield of
    for each in started.values():
        each.close()
