"""One model served by several processes: each holds a part of every layer, and they compute every step together.

    decoder = start_tensor_parallel("path/to/model", size=2, dtype=torch.float32)      # starts rank 1, is rank 0
    engine = Engine(decoder, tokenizer, EngineConfig(tensor_parallel_size=2))
    decoder.close()

The engine lives on rank 0 and knows nothing of this: it calls the decoder as it would any other. The decoder tells the
other ranks over pipes what is computed (they sleep while nothing is), and computes with them what training does under
tensor parallelism (`shardline.parallel.tensor`), with its keys and values split by heads: blocks have the same numbers
everywhere. A rank that fails or goes away makes the step fail, and the next ones; the server then calls itself ill.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardline.checkpoints.huggingface import iter_tensors, read_config
from shardline.config.errors import ShardlineError
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.parallel.division import check_tensor_parallel
from shardline.parallel.shards import Shard
from shardline.parallel.tensor import TensorParallel, make_kv_group
from shardline.serving.paged import KVCache, PagedAttention, StepInputs

__all__ = ["TensorParallelDecoder", "local_config", "start_tensor_parallel"]

_STEP_LIMIT = timedelta(minutes=10)  # of one collective within a step
_START_S = 600.0


def local_config(config: DecoderConfig, size: int) -> DecoderConfig:
    """Returns the config as the KV cache of one of `size` ranks sees it: its own heads alone."""
    if size == 1:
        return config
    return dataclasses.replace(
        config, num_heads=config.num_heads // size, num_kv_heads=max(1, config.num_kv_heads // size)
    )


class _Part:
    """What every rank holds and does."""

    def __init__(self, folder: Path, mesh: DeviceMesh, dtype: torch.dtype) -> None:
        self.config = read_config(folder)
        self._dtype = dtype
        with torch.device("meta"):
            self.decoder = Decoder(self.config)
        self.group = mesh["tensor"].get_group()
        kv_group = make_kv_group(mesh, self.config)
        self._tensor = TensorParallel(self.decoder, group=self.group, kv_group=kv_group, sequence_parallel=False)
        self.decoder.to_empty(device="cpu").to(dtype)
        self.load(folder)
        self.decoder.requires_grad_(False).eval()
        self.cache: KVCache | None = None

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Fills this rank's part of each tensor, one whole tensor at a time: on every rank, or on none.

        Raises `ShardlineError` on every rank where any of them can't read the folder.
        """
        parameters = dict(self.decoder.named_parameters())
        fresh: dict[str, Tensor] = {}
        failure: ShardlineError | None = None
        try:
            for name, whole in iter_tensors(folder):
                place = self._tensor.placements[name]
                shard = Shard.of(parameters[name], shape=place.shape, offsets=place.offsets)
                fresh[name] = shard.part_of(whole).to(self._dtype, copy=True)
        except ShardlineError as error:
            failure = error
        failed = torch.tensor(float(failure is not None))
        dist.all_reduce(failed, group=self.group)
        if failed:
            raise failure or ShardlineError(f"{folder} can't be read by every tensor-parallel rank.")
        for name, parameter in parameters.items():
            parameter.copy_(fresh.pop(name))

    def make_cache(self, **options: Any) -> None:
        self.cache = KVCache(local_config(self.config, self.group.size()), **options)

    def hidden(self, inputs: StepInputs) -> Tensor:
        """Returns what the head reads, [1, T, D], the same on every rank."""
        assert self.cache is not None
        return self.decoder.hidden_states(
            inputs.tokens_T.unsqueeze(0),
            positions_BT=inputs.positions_T.unsqueeze(0),
            lengths_BT=None if inputs.lengths_T is None else inputs.lengths_T.unsqueeze(0),
            attention=PagedAttention(self.cache, inputs),
        )

    def logits(self, x_RD: Tensor) -> Tensor:
        """Returns logits [R, V] on rank 0 and nothing of use elsewhere: each rank makes those of its own words."""
        mine = self.decoder.head(x_RD).contiguous()
        words, size = self.config.vocab_size, self.group.size()
        chunk = -(-words // size)
        padded = torch.zeros(chunk, len(x_RD), dtype=mine.dtype)
        padded[: mine.shape[1]] = mine.T
        parts = [torch.empty_like(padded) for _ in range(size)] if self.group.rank() == 0 else None
        dist.gather(padded, parts, group_dst=0, group=self.group)
        return torch.cat(parts)[:words].T.contiguous() if parts else mine

    def receive_rows(self, shape: tuple[int, int]) -> Tensor:
        x_RD = torch.empty(shape, dtype=self._dtype)
        dist.broadcast(x_RD, group_src=0, group=self.group)
        return x_RD


class _LeadCache(KVCache):
    """Rank 0's cache, which takes the others along where it is not a step that writes."""

    def __init__(self, tell: Callable[[str, Any], None], config: DecoderConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self._tell = tell

    def clear(self, blocks: list[int]) -> None:
        self._tell("clear", blocks)
        super().clear(blocks)


class TensorParallelDecoder(nn.Module):
    """Rank 0's decoder, which takes the other ranks along."""

    def __init__(self, part: _Part, pipes: list[Connection], processes: list[Any]) -> None:
        super().__init__()
        self.part = part.decoder  # its parameters are this module's
        self.config = part.config
        self._part, self._pipes, self._processes = part, pipes, processes

    def make_cache(self, **options: Any) -> KVCache:
        """Makes every rank's KV cache and returns this one's."""
        self._tell("make_cache", options)
        cache = self._part.cache = _LeadCache(self._tell, local_config(self.config, self._part.group.size()), **options)
        return cache

    def hidden_states(self, tokens_BT: Tensor, *, attention: PagedAttention, **_: Any) -> Tensor:
        """The step's tensors travel inside `attention`."""
        self._tell("hidden", attention.inputs)
        return self._part.hidden(attention.inputs)

    def head(self, x_RD: Tensor) -> Tensor:
        x_RD = x_RD.contiguous()
        self._tell("head", tuple(x_RD.shape))
        dist.broadcast(x_RD, group_src=0, group=self._part.group)
        return self._part.logits(x_RD)

    def load(self, folder: Path) -> None:
        """Takes the weights of another folder of the same config on every rank; all have them when it returns."""
        self._tell("load", folder)
        self._part.load(folder)

    def close(self) -> None:
        """Ends the other ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _tell(self, what: str, argument: Any) -> None:
        message = pickle.dumps((what, argument))  # not by `send`, which puts every tensor into shared memory
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True), start=1):
            try:
                pipe.send_bytes(message)
            except OSError:
                process.join(1)
                raise ShardlineError(
                    f"Tensor-parallel rank {rank} has ended (exit code {process.exitcode}); start the server again."
                ) from None


def start_tensor_parallel(folder: str | Path, *, size: int, dtype: torch.dtype) -> TensorParallelDecoder:
    """Starts `size - 1` processes beside this one and loads each one's part of the folder.

    Raises `InfeasibleError` with the equation where the model can't be shared by `size` ranks.
    """
    folder = Path(folder)
    check_tensor_parallel(read_config(folder), size=size)
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, torch.get_num_threads() // size)
    pipes, processes = [], []
    for rank in range(1, size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(theirs, folder, rank, size, port, dtype, threads), name=f"rank-{rank}", daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    torch.set_num_threads(threads)
    part = _Part(folder, _join(rank=0, size=size, port=port), dtype)
    for rank, pipe in enumerate(pipes, start=1):
        if not pipe.poll(_START_S) or pipe.recv() != "ready":
            raise ShardlineError(f"Tensor-parallel rank {rank} did not start; what it printed says why.")
    return TensorParallelDecoder(part, pipes, processes)


def _join(*, rank: int, size: int, port: int) -> DeviceMesh:
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, timeout=timedelta(seconds=_START_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_STEP_LIMIT)
    return init_device_mesh("cpu", (1, 1, size), mesh_dim_names=("pipeline", "data", "tensor"))


def _work(pipe: Connection, folder: Path, rank: int, size: int, port: int, dtype: torch.dtype, threads: int) -> None:
    """Another rank: does what it is told until the pipe closes."""
    torch.set_num_threads(threads)
    part = _Part(folder, _join(rank=rank, size=size, port=port), dtype)
    pipe.send("ready")
    while True:
        try:
            what, argument = pickle.loads(pipe.recv_bytes())
        except (EOFError, KeyboardInterrupt):
            os._exit(0)  # rank 0 has gone: no farewells
        with torch.inference_mode():
            if what == "hidden":
                part.hidden(argument)
            elif what == "head":
                part.logits(part.receive_rows(argument))
            elif what == "make_cache":
                part.make_cache(**argument)
            elif what == "clear":
                assert part.cache is not None
                part.cache.clear(argument)
            elif what == "load":
                with contextlib.suppress(ShardlineError):  # rank 0 says it
                    part.load(argument)
