"""Turns a schedule into tensors and runs the decoder once; samples from what came of it.

    computed = runner.run(schedule)
    sampled = runner.sample(computed.logits_RV[rows], sequences)

All rows of a step go through the decoder together. Python lists become one array each, an array becomes one tensor:
no tensor is made per token or per request. The head runs only on the rows whose logits someone needs.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from shardline.kernels import is_batch_invariant
from shardline.models.decoder import Decoder
from shardline.serving.decode_groups import arrange
from shardline.serving.lora import Adapters
from shardline.serving.paged import DecodeGroup, KVCache, PagedAttention, PrefillChunk, StepInputs
from shardline.serving.sampler import Sampled, Sampler, top_logprobs
from shardline.serving.scheduler import Chunk, Schedule
from shardline.serving.sequence import Sequence
from shardline.serving.tensor_parallel import TensorParallelDecoder

__all__ = ["Computed", "Runner"]

HEAD_ROWS = 256  # prompt positions scored at a time: logits of a whole prompt could be gigabytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """What a step computed.

    chunks      in the order of the rows
    first_row   chunk -> row of `logits_RV` of its last known token; those of its guesses follow. None: no logits
    logits_RV   fp32
    """

    chunks: list[Chunk]
    first_row: list[int | None] = field(default_factory=list)
    logits_RV: Tensor | None = None


class Runner:
    """Runs steps of one decoder over one KV cache."""

    def __init__(
        self,
        decoder: Decoder | TensorParallelDecoder,
        cache: KVCache,
        sampler: Sampler,
        *,
        adapters: Adapters | None = None,
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._sampler = sampler
        self._adapters = adapters
        # What is not plain softmax attention over everything before isn't computed in two parts.
        config = decoder.config
        special = config.position == "alibi" or config.attention_softcap is not None or any(config.sliding_windows)
        self._may_share = not special

    @torch.inference_mode()
    def run(self, schedule: Schedule) -> Computed:
        """Computes the schedule's chunks. Log-probabilities of prompt tokens and pooled states go to the sequences."""
        x_TD, chunks, last_rows = self._hidden(schedule.chunks)
        for chunk, last_row in zip(chunks, last_rows, strict=True):
            request = chunk.sequence.request
            if request.sampling.prompt_logprobs is not None:
                self._score_prompt(chunk, x_TD[last_row + 1 - chunk.num_tokens : last_row + 1])
            if request.pooling is not None:
                _pool(chunk, x_TD[last_row + 1 - chunk.num_tokens : last_row + 1])
        rows: list[int] = []
        first_row: list[int | None] = []
        for chunk, last_row in zip(chunks, last_rows, strict=True):
            wanted = chunk.samples and chunk.sequence.max_output_tokens > 0
            first_row.append(len(rows) if wanted else None)
            if wanted:
                rows.extend(range(last_row - chunk.num_drafts, last_row + 1))
        logits_RV = self._decoder.head(x_TD.index_select(0, torch.tensor(rows))).float() if rows else None
        return Computed(chunks=chunks, first_row=first_row, logits_RV=logits_RV)

    @torch.inference_mode()
    def sample(self, computed: Computed, rows: Items[int], sequences: list[Sequence]) -> list[Sampled]:
        """Returns one choice for each of these rows of logits; row and sequence belong together."""
        assert computed.logits_RV is not None
        logits_RV = computed.logits_RV
        if list(rows) != list(range(len(logits_RV))):  # copies them: a batch's are tens of megabytes
            logits_RV = logits_RV[list(rows)]
        if is_batch_invariant():  # how many candidates a row is drawn from depends on the others'
            alone = zip(logits_RV.split(1), sequences, strict=True)
            return [choice for row_1V, sequence in alone for choice in self._sampler.sample(row_1V, [sequence])]
        return self._sampler.sample(logits_RV, sequences)

    @torch.inference_mode()
    def greedy(self, chunks: Items[Chunk]) -> list[int]:
        """Computes chunks and returns the likeliest token after each."""
        x_TD, ordered, last_rows = self._hidden(chunks)
        tokens = self._decoder.head(x_TD[last_rows]).argmax(-1).tolist()
        by_request = {chunk.sequence.request_id: token for chunk, token in zip(ordered, tokens, strict=True)}
        return [by_request[chunk.sequence.request_id] for chunk in chunks]

    def _hidden(self, chunks: Items[Chunk]) -> tuple[Tensor, list[Chunk], list[int]]:
        """Returns what the head reads, [T, D], the chunks in the order of its rows, and the last row of each."""
        inputs, ordered, last_rows = self._prepare(chunks)
        with self._adapting(ordered):
            x_TD = self._decoder.hidden_states(
                inputs.tokens_T.unsqueeze(0),
                positions_BT=inputs.positions_T.unsqueeze(0),
                lengths_BT=None if inputs.lengths_T is None else inputs.lengths_T.unsqueeze(0),
                attention=PagedAttention(self._cache, inputs),
            )[0]
        return x_TD, ordered, last_rows

    def _adapting(self, chunks: list[Chunk]) -> AbstractContextManager[None]:
        if self._adapters is None or all(chunk.sequence.request.adapter is None for chunk in chunks):
            return nullcontext()
        names = [chunk.sequence.request.adapter for chunk in chunks for _ in range(chunk.num_tokens)]
        return self._adapters.active(names)

    def _prepare(self, scheduled: Items[Chunk]) -> tuple[StepInputs, list[Chunk], list[int]]:
        """Returns the step's tensors, the chunks in the order of the rows (single tokens, by group, then prompts as
        scheduled), and the last row of each chunk.
        """
        block_size = self._cache.block_size
        groups = arrange(
            [chunk for chunk in scheduled if chunk.num_tokens == 1],
            block_size=block_size,
            share=self._may_share and not is_batch_invariant(),
        )
        chunks = [chunk for group in groups for chunk in group.chunks]
        num_decodes = len(chunks)
        chunks += [chunk for chunk in scheduled if chunk.num_tokens > 1]
        tokens = list(chain.from_iterable(chunk.sequence.tokens(chunk.start, chunk.num_tokens) for chunk in chunks))
        positions = np.empty(len(tokens), dtype=np.int64)
        slots = np.empty(len(tokens), dtype=np.int64)
        for row, chunk in enumerate(chunks[:num_decodes]):
            block, offset = divmod(chunk.start, block_size)
            positions[row] = chunk.start
            slots[row] = chunk.sequence.block_table[block] * block_size + offset
        last_rows = list(range(num_decodes))
        prefills = []
        row = num_decodes
        for chunk in chunks[num_decodes:]:
            where = np.arange(chunk.start, chunk.start + chunk.num_tokens)
            table = np.array(chunk.sequence.block_table, dtype=np.int64)
            positions[row : row + chunk.num_tokens] = where
            slots[row : row + chunk.num_tokens] = table[where // block_size] * block_size + where % block_size
            num_blocks = -(-(chunk.start + chunk.num_tokens) // block_size)
            prefills.append(
                PrefillChunk(
                    first=row, size=chunk.num_tokens, start=chunk.start, table=torch.from_numpy(table[:num_blocks])
                )
            )
            row += chunk.num_tokens
            last_rows.append(row - 1)
        decodes = []
        first = 0
        for group in groups:
            decodes.append(
                DecodeGroup(
                    first=first,
                    size=len(group.chunks),
                    shared=torch.tensor(group.shared) if group.shared else None,
                    tables=torch.from_numpy(group.tables.reshape(-1)),
                    lengths=[chunk.start + 1 for chunk in group.chunks],
                )
            )
            first += len(group.chunks)
        inputs = StepInputs(
            tokens_T=torch.from_numpy(np.array(tokens, dtype=np.int64)),
            positions_T=torch.from_numpy(positions),
            lengths_T=self._lengths(chunks) if self._decoder.config.rope.depends_on_length else None,
            slots_T=torch.from_numpy(slots),
            decodes=decodes,
            prefills=prefills,
        )
        return inputs, chunks, last_rows

    def _lengths(self, chunks: list[Chunk]) -> Tensor:
        lengths = [chunk.sequence.num_tokens for chunk in chunks]
        return torch.from_numpy(np.repeat(lengths, [chunk.num_tokens for chunk in chunks]))

    def _score_prompt(self, chunk: Chunk, x_TD: Tensor) -> None:
        """Adds the log-probabilities of the prompt tokens that this chunk's rows predict."""
        sequence = chunk.sequence
        num_alternatives = sequence.request.sampling.prompt_logprobs or 0
        if not sequence.prompt_logprobs:
            sequence.prompt_logprobs.append(None)
            sequence.prompt_top_logprobs.append(())
        # Row r predicts token start + r + 1. After a preemption the first ones are already known.
        begin = len(sequence.prompt_logprobs) - 1 - chunk.start
        end = min(chunk.num_tokens, sequence.num_prompt_tokens - 1 - chunk.start)
        for first in range(begin, end, HEAD_ROWS):
            last = min(first + HEAD_ROWS, end)
            targets = sequence.token_ids[chunk.start + first + 1 : chunk.start + last + 1]
            logprobs_RV = self._decoder.head(x_TD[first:last]).float().log_softmax(-1)
            chosen = logprobs_RV.gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1)
            sequence.prompt_logprobs.extend(chosen.tolist())
            sequence.prompt_top_logprobs.extend(top_logprobs(logprobs_RV, num_alternatives))


def _pool(chunk: Chunk, x_TD: Tensor) -> None:
    """Takes a chunk's hidden states into the sequence's vector: their sum for the mean, or the last one."""
    sequence = chunk.sequence
    if sequence.request.pooling == "last":
        sequence.pooled = x_TD[-1].tolist()
        return
    total_D = x_TD.double().sum(0)
    if chunk.start > 0:  # a sequence that was preempted starts again
        total_D += torch.tensor(sequence.pooled, dtype=torch.float64)
    sequence.pooled = total_D.tolist()
