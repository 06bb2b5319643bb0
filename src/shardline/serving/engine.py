"""The engine: requests in, tokens out, one step at a time.

    engine = load_engine("path/to/model", EngineConfig(max_model_len=2048))
    engine.add_request(Request(request_id="a", prompt_token_ids=(1, 2, 3)))
    while engine.has_unfinished:
        for output in engine.step():
            print(output.text, end="")

    outputs = engine.generate([request, ...])      # whole answers, in the order of the requests

It belongs to one thread: `async_engine` wraps it for a server. A step is four lines: guess, schedule, run, take in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from shardline.config.errors import UsageError
from shardline.kernels import batch_invariant
from shardline.models.decoder import Decoder
from shardline.serving.blocks import BlockManager
from shardline.serving.budget import MemoryBudget, make_budget
from shardline.serving.drafts import Drafter, DraftModel, PromptLookup
from shardline.serving.engine_config import DTYPES, EngineConfig
from shardline.serving.errors import RequestError
from shardline.serving.loading import open_decoder, open_draft, replace_weights
from shardline.serving.lora import Adapters
from shardline.serving.paged import KVCache
from shardline.serving.reply import ReplyText
from shardline.serving.requests import FinishReason, Request, RequestOutput
from shardline.serving.runner import Computed, Runner
from shardline.serving.sampler import Sampled, Sampler
from shardline.serving.scheduler import Chunk, Schedule, Scheduler
from shardline.serving.sequence import Sequence as RunningSequence
from shardline.serving.tensor_parallel import TensorParallelDecoder
from shardline.text.tokenizer import Tokenizer

__all__ = ["DTYPES", "Engine", "EngineConfig", "load_engine"]

DEFAULTS = EngineConfig()


class Engine:
    """Continuous batching of one decoder over a paged KV cache."""

    def __init__(
        self,
        decoder: Decoder | TensorParallelDecoder,
        tokenizer: Tokenizer,
        config: EngineConfig = DEFAULTS,
        *,
        draft: Decoder | None = None,
    ) -> None:
        """`draft` guesses for `config.speculative = "draft"`; its vocabulary must be the decoder's."""
        self.decoder = decoder.requires_grad_(False).eval()
        self.tokenizer = tokenizer
        self.config = config
        self.budget: MemoryBudget = make_budget(decoder, config)
        self.max_model_len = self.budget.max_model_len
        self.eos_token_ids = frozenset(decoder.config.eos_token_ids) | frozenset(tokenizer.eos_token_ids)
        self.blocks = BlockManager(num_blocks=self.budget.num_blocks, block_size=config.block_size)
        # Where angles depend on how long the sequence is by now, what was computed earlier is no one else's.
        reusable = not decoder.config.rope.depends_on_length
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefix_caching=config.enable_prefix_caching and reusable,
        )
        self._cache = self._make_cache(decoder)
        in_vocabulary = [token for token in self.eos_token_ids if token < decoder.config.vocab_size]
        self._sampler = Sampler(
            eos_token_ids=in_vocabulary, encode=tokenizer.encode, logprobs_mode=config.logprobs_mode
        )
        self.adapters = self._open_adapters()
        self.runner = Runner(decoder, self._cache, self._sampler, adapters=self.adapters)
        self._draft_cache: KVCache | None = None
        self._drafter = self._make_drafter(draft) if reusable else None
        self._switch_length = decoder.config.rope.switch_length
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.last_schedule = Schedule()
        self._replies: dict[str, ReplyText] = {}

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def kv_cache(self) -> KVCache:
        return self._cache

    @property
    def kv_caches(self) -> list[KVCache]:
        """The model's, and that of a model that guesses."""
        return [self._cache] if self._draft_cache is None else [self._cache, self._draft_cache]

    def adapter_of(self, model: str | None) -> str | None:
        """Returns the LoRA adapter that a request for this model name means, or None."""
        return model if self.adapters is not None and model in self.adapters.names else None

    def check(self, request: Request) -> None:
        """Raises `RequestError` where this engine can't run the request. Reads constants only: any thread may call."""
        served = [] if self.adapters is None else self.adapters.names
        if request.adapter is not None and request.adapter not in served:
            raise RequestError(
                f"There is no adapter {request.adapter!r}; this engine has {', '.join(served) or 'none'}.",
                param="model",
            )
        _check_fits(request, max_model_len=self.max_model_len, vocab_size=self.decoder.config.vocab_size)

    def add_request(self, request: Request, *, arrived_s: float | None = None) -> None:
        """Queues a request; raises `RequestError` where it can't be run."""
        self.check(request)
        if request.request_id in self.scheduler:
            raise RequestError(f"request_id {request.request_id!r} is in use; give each request its own.")
        num_prompt_tokens = len(request.prompt_token_ids)
        max_tokens = request.sampling.max_tokens
        if request.pooling is not None:
            max_tokens = 0
        elif max_tokens is None:
            max_tokens = self.max_model_len - num_prompt_tokens
        sequence = RunningSequence(
            request,
            max_num_tokens=num_prompt_tokens + max_tokens,
            arrived_s=time.monotonic() if arrived_s is None else arrived_s,
        )
        self.scheduler.add(sequence)
        self._replies[request.request_id] = ReplyText(
            self.tokenizer, request.sampling, prompt_token_ids=request.prompt_token_ids
        )

    def abort(self, request_id: str) -> bool:
        """Drops a request in whatever state it is and frees its blocks; False if it is not here (any more)."""
        self._replies.pop(request_id, None)
        if self._drafter is not None:
            self._drafter.forget(request_id)
        return self.scheduler.remove(request_id) is not None

    def reset_prefix_cache(self) -> None:
        """Forgets what finished requests left behind; running ones go on."""
        self.blocks.forget_all()

    def reload(self, folder: str | Path) -> None:
        """Serves the weights of another folder of the same shape, in the memory of the present ones.

        Nothing may be running. Raises `ShardlineError` where the folder is another model's, and then nothing changed.
        """
        assert not self.scheduler.running, "requests are running"
        replace_weights(self.decoder, folder, self.config)
        self.reset_prefix_cache()

    def step(self) -> list[RequestOutput]:
        """Computes one batch and returns what it added to each request."""
        started_s = time.monotonic()
        with batch_invariant() if self.config.batch_invariant else nullcontext():
            self._guess()
            self.last_schedule = self.scheduler.schedule()
            computed = self.runner.run(self.last_schedule)
            return self._take_in(computed, started_s)

    def abandon_step(self) -> list[str]:
        """After a step that raised: drops the requests that were in it and returns their ids; the others go on."""
        chunks = self.last_schedule.chunks
        for chunk in chunks:  # what it may have written lies in blocks that no one shares
            written = chunk.sequence.block_table[chunk.start // self.config.block_size :]
            self.blocks.forget(written)
            self._cache.clear(written)
        return [chunk.sequence.request_id for chunk in chunks if self.abort(chunk.sequence.request_id)]

    def generate(
        self, requests: Sequence[Request], *, on_output: Callable[[RequestOutput], None] | None = None
    ) -> list[RequestOutput]:
        """Runs requests to their end and returns whole answers in their order; `on_output` sees every step's part."""
        answers = {r.request_id: RequestOutput(request_id=r.request_id, num_prompt_tokens=0) for r in requests}
        for request in requests:
            self.add_request(request)
            answers[request.request_id].num_prompt_tokens = len(request.prompt_token_ids)
        while any(not answer.finished for answer in answers.values()):
            for output in self.step():
                if output.request_id in answers:
                    answers[output.request_id].extend(output)
                if on_output is not None:
                    on_output(output)
        return list(answers.values())

    def _make_cache(self, decoder: Decoder | TensorParallelDecoder) -> KVCache:
        dtype = next(decoder.parameters()).dtype
        if isinstance(decoder, TensorParallelDecoder):
            make: Callable[..., KVCache] = decoder.make_cache
        else:
            make = partial(KVCache, decoder.config)
        return make(
            num_blocks=self.budget.num_blocks,
            block_size=self.config.block_size,
            dtype=self.config.kv_dtype(dtype),
            compute_dtype=dtype,
        )

    def _open_adapters(self) -> Adapters | None:
        if not self.config.adapters:
            return None
        if isinstance(self.decoder, TensorParallelDecoder):
            raise UsageError("LoRA adapters can't be shared by processes; use --tensor-parallel-size 1.")
        return Adapters(self.decoder, dict(self.config.adapters))

    def _make_drafter(self, draft: Decoder | None) -> Drafter | None:
        if self.config.speculative == "ngram":
            return PromptLookup(self.scheduler, longest=self.config.prompt_lookup_max)
        if self.config.speculative != "draft":
            return None
        if draft is None:
            raise UsageError("Speculation with a draft model needs one; pass --speculative-model FOLDER.")
        if draft.config.vocab_size != self.decoder.config.vocab_size:
            raise UsageError(
                f"The draft model has {draft.config.vocab_size} tokens and the model {self.decoder.config.vocab_size}; "
                "choose one with the same tokenizer."
            )
        self._draft_cache = self._make_cache(draft)
        runner = Runner(draft.requires_grad_(False).eval(), self._draft_cache, self._sampler)
        return DraftModel(runner, self.scheduler)

    def _guess(self) -> None:
        """Lets the drafter guess for the sequences whose next token is all that is left to compute."""
        if self._drafter is None:
            return
        running = self.scheduler.running
        ready = [each for each in running if each.num_tokens - each.num_computed_tokens == 1]
        self._drafter.propose(ready, self.config.num_speculative_tokens)

    def _take_in(self, computed: Computed, started_s: float) -> list[RequestOutput]:
        """Samples in waves, one place of every sequence at a time: a guess counts once the token before it is there."""
        now = time.monotonic()
        outputs: dict[str, RequestOutput] = {}
        wave: list[tuple[int, Chunk]] = []
        accepted = [0] * len(computed.chunks)
        for index, chunk in enumerate(computed.chunks):
            if chunk.sequence.timeline.scheduled_s is None:
                chunk.sequence.timeline.scheduled_s = started_s
            if chunk.samples:
                output = outputs[chunk.sequence.request_id] = self._new_output(chunk.sequence)
                if computed.first_row[index] is None:
                    self._finish_prompt(chunk.sequence, output)
                else:
                    wave.append((index, chunk))
        while wave:
            rows = [(computed.first_row[index] or 0) + accepted[index] for index, _ in wave]
            sampled = self.runner.sample(computed, rows, [chunk.sequence for _, chunk in wave])
            following = []
            for (index, chunk), choice in zip(wave, sampled, strict=True):
                sequence = chunk.sequence
                output = outputs[sequence.request_id]
                if choice.error is not None:
                    output.finish_reason = FinishReason.ERROR
                    output.error, output.error_param = str(choice.error), choice.error.param
                    continue
                if not choice.finite:
                    output.finish_reason = FinishReason.ERROR
                    output.error = "The model's logits are not finite here: its weights or this input are at fault."
                    continue
                self._take_token(sequence, choice, output, now)
                guesses = sequence.draft_token_ids
                place = accepted[index]
                if not output.finished and place < len(guesses) and guesses[place] == choice.token_id:
                    accepted[index] += 1
                    following.append((index, chunk))
            wave = following
        for chunk, num_accepted in zip(computed.chunks, accepted, strict=True):
            self._advance(chunk, num_accepted)
        return self._settle(outputs)

    def _advance(self, chunk: Chunk, num_accepted: int) -> None:
        sequence = chunk.sequence
        if chunk.num_drafts:
            self.num_drafts += 1
            self.num_draft_tokens += chunk.num_drafts
            self.num_accepted_tokens += num_accepted
        self.scheduler.advance(chunk, num_rejected=chunk.num_drafts - num_accepted)
        sequence.draft_token_ids = []
        if chunk.samples and sequence.num_tokens == self._switch_length:
            # From this length on every token turns by other angles, so what is cached is computed again, as the
            # trainer (and transformers) would.
            sequence.num_computed_tokens = 0

    def _settle(self, outputs: dict[str, RequestOutput]) -> list[RequestOutput]:
        """Lets go of what has finished, and of what shares blocks with a sequence whose values are not finite."""
        poisoned: set[int] = set()
        for output in outputs.values():
            if output.finish_reason is FinishReason.ERROR and output.error_param is None:
                [sequence] = [each for each in self.scheduler.running if each.request_id == output.request_id]
                poisoned.update(sequence.block_table)
        if poisoned:
            for request_id in self._drop(poisoned):
                if request_id not in outputs:
                    outputs[request_id] = RequestOutput(request_id=request_id, num_prompt_tokens=0)
                if not outputs[request_id].finished:
                    outputs[request_id].finish_reason = FinishReason.ERROR
                    outputs[request_id].error = "It began like a request whose values were not finite."
        for output in outputs.values():
            if output.finished:
                self.abort(output.request_id)
        return list(outputs.values())

    def _drop(self, blocks: set[int]) -> list[str]:
        """Ends every sequence that holds one of these blocks, and clears and forgets the blocks of all of them."""
        dropped = self.scheduler.sharing(blocks)
        for sequence in dropped:
            self.blocks.forget(sequence.block_table)
            self._cache.clear(sequence.block_table)
        return [sequence.request_id for sequence in dropped if self.abort(sequence.request_id)]

    def _finish_prompt(self, sequence: RunningSequence, output: RequestOutput) -> None:
        """Ends a request that wanted its prompt scored, or embedded as a vector of length 1."""
        output.finish_reason = FinishReason.LENGTH
        if sequence.request.pooling is not None:
            output.finish_reason = FinishReason.STOP
            norm = math.sqrt(sum(value * value for value in sequence.pooled))
            output.embedding = [value / norm if norm else 0.0 for value in sequence.pooled]
            if not math.isfinite(norm):
                output.finish_reason = FinishReason.ERROR
                output.error = "The model's hidden states are not finite: its weights or this input are at fault."

    def _take_token(self, sequence: RunningSequence, sampled: Sampled, output: RequestOutput, now: float) -> None:
        params = sequence.request.sampling
        token = sampled.token_id
        sequence.token_ids.append(token)
        if sequence.request.grammar is not None:
            sequence.request.grammar.accept(token)
        output.num_output_tokens = sequence.num_output_tokens
        timeline = sequence.timeline
        if timeline.last_token_s is not None:
            timeline.gap_s = now - timeline.last_token_s
        timeline.last_token_s = now
        if timeline.first_token_s is None:
            timeline.first_token_s = now
        output.token_ids.append(token)
        if sampled.logprob is not None:
            output.logprobs.append(sampled.logprob)
            output.top_logprobs.append(sampled.top_logprobs)
        reply = self._replies[sequence.request_id]
        may_stop = sequence.num_output_tokens >= params.min_tokens
        if may_stop and token in params.stop_token_ids:
            output.finish_reason, output.stop_reason = FinishReason.STOP, token
        elif may_stop and token in self.eos_token_ids and not params.ignore_eos:
            output.finish_reason = FinishReason.STOP
        else:
            output.text += reply.append(token, may_stop=may_stop)
            if reply.stop is not None:
                output.finish_reason, output.stop_reason = FinishReason.STOP, reply.stop
            elif sequence.num_output_tokens >= sequence.max_output_tokens:
                output.finish_reason = FinishReason.LENGTH
        if output.finished and reply.stop is None:
            output.text += reply.flush()

    def _new_output(self, sequence: RunningSequence) -> RequestOutput:
        output = RequestOutput(
            request_id=sequence.request_id,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            timeline=sequence.timeline,
        )
        if sequence.num_output_tokens == 0:
            output.prompt_logprobs = sequence.prompt_logprobs
            output.prompt_top_logprobs = sequence.prompt_top_logprobs
        return output


def load_engine(folder: str | Path, config: EngineConfig = DEFAULTS) -> Engine:
    """Opens a Hugging Face folder; raises `ShardlineError` with one sentence where it can't be served."""
    return Engine(open_decoder(folder, config), Tokenizer.load(folder), config, draft=open_draft(config))


def _check_fits(request: Request, *, max_model_len: int, vocab_size: int) -> None:
    prompt, params = request.prompt_token_ids, request.sampling
    if not prompt:
        raise RequestError("The prompt is empty; send at least one token.", param="prompt")
    outside = [token for token in prompt[:max_model_len] if not 0 <= token < vocab_size]  # longer ones are refused
    if outside:
        raise RequestError(
            f"The prompt has token id {outside[0]}, but the vocabulary has ids 0 to {vocab_size - 1}.", param="prompt"
        )
    if params.n != 1:
        raise RequestError(f"n = {params.n}: an engine's request is one sample; add one for each.", param="n")
    if params.structured_outputs is not None and request.grammar is None:
        raise RequestError(
            "structured_outputs must be compiled for the engine: GrammarCompiler makes Request.grammar of it.",
            param="structured_outputs",
        )
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        for token in getattr(params, name) or ():
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{name} has token id {token}, but the vocabulary has ids 0 to {vocab_size - 1}.", param=name
                )
    least = 1 if params.max_tokens is None else params.max_tokens
    if request.pooling is not None:
        least = 0
    if len(prompt) + least <= max_model_len:
        return
    if len(prompt) + min(least, 1) > max_model_len:
        raise RequestError(
            f"The prompt has {len(prompt)} tokens, but this model's context holds {max_model_len} tokens, prompt and "
            "reply together; shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    raise RequestError(
        f"The prompt has {len(prompt)} tokens and max_tokens = {params.max_tokens}, together "
        f"{len(prompt) + least}, but this model's context holds {max_model_len} tokens; "
        f"ask for at most {max_model_len - len(prompt)} tokens.",
        param="max_tokens",
        code="context_length_exceeded",
    )
