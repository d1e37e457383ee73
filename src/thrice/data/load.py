"""A job's data, ready to take windows from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from thrice.data.batches import Batch, Position, Samples, Windows, cut, split
from thrice.data.cache import cache_folder
from thrice.data.corpus import corpus_of
from thrice.data.tokenizer import Tokenizer, tokenizer_for
from thrice.data.tokens import TokenStore, token_store
from thrice.spec.job import Job


@dataclass(frozen=True, kw_only=True)
class Data:
    train: Samples
    validation: Samples
    windows: Windows
    tokenizer: Tokenizer
    store: TokenStore
    not_text: tuple[Path, ...]
    """Files of the job's folders that are left out."""
    micro_batch: int

    def window(
        self, position: Position, global_batch: int | None = None, *, rank: int = 0, ranks: int = 1
    ) -> tuple[list[Batch], Position]:
        """A rank's micro-batches of the window at `position`, on the host, and the position after it.

        `global_batch` is the number of its samples where that is not yet the job's (batch ramp). Every rank has as many
        micro-batches: where a shorter window does not go round, the last ranks get one of no sample.
        """
        ids, after = self.windows.at(position, global_batch)
        batches = [self.train.batch(part) for part in cut(ids, self.micro_batch, rank, ranks)]
        rounds = -(-len(ids) // (self.micro_batch * ranks))
        return batches + [self.train.nothing()] * (rounds - len(batches)), after


def load_data(job: Job) -> Data:
    """Reads, tokenises (once: the result is cached) and splits what `job.data` names.

    Raises DataError for what cannot be read or does not suffice, ConfigError for a tokenizer there is not.
    """
    corpus = corpus_of(job.data)
    documents = corpus.documents
    cache = cache_folder()
    tokenizer = tokenizer_for(job.tokenizer, documents, cache)
    store = token_store(documents, tokenizer, cache)
    train, validation = split(store, job.sequence, job.evaluation.fraction)
    ledger = job.ledger()
    windows = Windows(count=len(train), global_batch=ledger.global_batch, seed=job.seed, last_window=job.last_window)
    return Data(
        train=train,
        validation=validation,
        windows=windows,
        tokenizer=tokenizer,
        store=store,
        not_text=corpus.not_text,
        micro_batch=ledger.micro_batch,
    )
