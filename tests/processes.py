"""Worker processes that stay between tests, so that a test over processes costs what it computes and no more.

A test hands `Workers.call` a module-level function; every rank runs it with its World, and what each returns comes
back by rank. Functions and arguments are pickled: tensors, jobs and paths will do.
"""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from thrice.runtime.dist import Place, joined

TIMEOUT_S = 60.0
"""A collective that some rank does not reach ends a test after so long."""


class Workers:
    """`size` ranks that have joined on gloo."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def _start(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        context = get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(world, *arguments)` returns on each rank. Raises what the first rank that failed raised."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        outcomes = [_received(pipe) for pipe in self._pipes]
        failed = [(rank, error, text) for rank, (error, text) in enumerate(outcomes) if error is not None]
        if failed:  # a group that was left in the midst of a collective is of no more use
            self.restart()
            rank, error, text = min(failed, key=lambda one: (type(one[1]).__name__ in ("LostPeer", "Stalled"), one[0]))
            error.add_note(f"on rank {rank}:\n{text}")
            raise error
        return [value for _, value in outcomes]

    def restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _received(pipe: Connection) -> tuple[BaseException | None, Any]:
    try:
        return pipe.recv()
    except EOFError:
        return RuntimeError("the worker died"), ""


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["THRICE_CACHE"] = tempfile.mkdtemp(prefix="thrice-tests-")
    here = Place(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
    while True:
        try:
            with joined(size, timeout_s=TIMEOUT_S, here=here) as world:
                while True:
                    function, arguments = pipe.recv()
                    pipe.send((None, function(world, *arguments)))
        except EOFError:
            return
        except Exception as error:
            pipe.send((error, traceback.format_exc()))
            return
