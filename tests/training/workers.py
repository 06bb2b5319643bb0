"""Worker processes that start once and serve every test: a job runs on the first n of them as ranks 0 to n - 1."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.multiprocessing as mp


class Workers:
    """`run(2, job, *args)` calls `job(world, *args)` in a world of 2 ranks and returns what rank 0 returned."""

    def __init__(self, num_workers: int) -> None:
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, size: int, job: Callable[..., Any], *args: Any) -> Any:
        return self.run_all(size, job, *args)[0]

    def run_all(self, size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self._pipes[:size]):
                pipe.send((os.path.join(folder, "store"), rank, size, job, args))
            answers = []
            waited_s = 120.0
            for rank, pipe in enumerate(self._pipes[:size]):
                if not pipe.poll(waited_s):
                    answers.append((False, f"rank {rank} of {size} did not answer in {waited_s:.0f} s"))
                    waited_s = 1.0
                    continue
                answers.append(pipe.recv())
            # A rank that failed leaves others waiting: its own words come first.
            answers.sort(key=lambda answer: not answer[0] and "did not answer" in str(answer[1]))
        for ok, answer in answers:
            if not ok:
                raise answer if isinstance(answer, Exception) else AssertionError(answer)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from shardline.config import ShardlineError
    from shardline.parallel.world import start_world

    torch.set_num_threads(1)
    while (message := pipe.recv()) is not None:
        store, rank, size, job, args = message
        try:
            with start_world(store=dist.FileStore(store, size), rank=rank, size=size) as world:
                answer = True, job(world, *args)
        except ShardlineError as error:
            answer = False, error
        except Exception:  # noqa: BLE001 - whatever a job raises belongs to the test that sent it
            answer = False, f"rank {rank}:\n{traceback.format_exc()}"
        pipe.send(answer)
