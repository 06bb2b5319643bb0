"""A model in this process, without a server: vLLM's call shape.

    from shardline import LLM, SamplingParams

    llm = LLM("path/to/model", max_model_len=2048)
    for output in llm.generate(["Hello", "Once upon"], SamplingParams(temperature=0.0, max_tokens=32)):
        print(output.prompt, output.outputs[0].text, output.outputs[0].finish_reason)
    llm.chat([{"role": "user", "content": "Hello"}])

All prompts of a call run together, as the memory allows, and come back in their order. Texts and chats become token ids
exactly as over HTTP: a BOS where the tokenizer adds one, never two. A prompt is a text, a list of token ids,
`{"prompt": ...}` or `{"prompt_token_ids": ...}`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from shardline.config.errors import UsageError, nearest
from shardline.serving import requests as engine_requests
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.grammar import CompiledGrammar, GrammarCompiler
from shardline.serving.protocol import Message, chat_messages
from shardline.serving.requests import Request, RequestError, SamplingParams, StructuredOutputs, TopLogprobs
from shardline.serving.startup import open_engine
from shardline.text.tokenizer import Tokenizer

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "Logprob",
    "Prompt",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]

Prompt: TypeAlias = str | list[int] | tuple[int, ...] | Mapping[str, Any]

DTYPES = {"auto": "fp32", "float32": "fp32", "float": "fp32", "bfloat16": "bf16"}  # vLLM's words for ours


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprob:
    """`rank` is 1 for the likeliest token; None for a chosen token beyond the alternatives that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(kw_only=True)
class CompletionOutput:
    """One sample of one prompt. `finish_reason`: stop, length or error; `stop_reason`: the stop string or token."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestOutput:
    """What came of one prompt; `prompt` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(kw_only=True)
class EmbeddingOutput:
    """One prompt's vector, of length 1."""

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]


class LLM:
    """One model folder, opened once. Keywords are the fields of `EngineConfig`."""

    def __init__(
        self, model: str | Path, *, generation_config: Literal["auto", "none"] = "auto", **limits: Any
    ) -> None:
        self._opened = open_engine(model, _engine_config(limits), generation_config=generation_config)
        self._ids = itertools.count()
        self._grammars: GrammarCompiler | None = None

    @property
    def engine(self) -> Engine:
        return self._opened.engine

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what calls without sampling parameters use: generation_config.json's values, or vLLM's defaults."""
        return SamplingParams(**self._opened.defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt, `sampling_params.n` times; sampling parameters are for all or one a prompt.

        `adapter` names one of the LoRA adapters that the model was opened with (`adapters=...`).
        """
        listed = _prompt_list(prompts)
        texts = [_text_of(prompt) for prompt in listed]
        ids = [self._encode(prompt) for prompt in listed]
        return self._run(texts, ids, sampling_params, use_tqdm=use_tqdm, priority=priority, adapter=adapter)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        add_generation_prompt: bool = True,
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, each a list of messages."""
        conversations = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        rendered = [_messages(conversation) for conversation in conversations]
        tokenizer = self.engine.tokenizer
        texts: list[str | None] = [
            tokenizer.render_chat(each, add_generation_prompt=add_generation_prompt) for each in rendered
        ]
        ids = [tokenizer.encode_chat(each, add_generation_prompt=add_generation_prompt) for each in rendered]
        return self._run(texts, ids, sampling_params, use_tqdm=use_tqdm, priority=None, adapter=adapter)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Literal["mean", "last"] = "mean",
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[EmbeddingOutput]:
        """Returns one vector a prompt, from the hidden states after the last norm."""
        ids = [self._encode(prompt) for prompt in _prompt_list(prompts)]
        requests = [
            Request(
                request_id=str(next(self._ids)),
                prompt_token_ids=tuple(each),
                sampling=SamplingParams(max_tokens=0),
                pooling=pooling,
            )
            for each in ids
        ]
        answers = self._answer(requests, use_tqdm=use_tqdm)
        return [
            EmbeddingOutput(request_id=answer.request_id, prompt_token_ids=list(each), embedding=answer.embedding)
            for answer, each in zip(answers, ids, strict=True)
        ]

    def reload(self, folder: str | Path) -> None:
        """Takes the weights of another folder of the same shape and drops the prefix cache."""
        self.engine.reload(folder)

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        return self.engine.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)

    def _run(
        self,
        texts: list[str | None],
        ids: list[list[int]],
        given: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None,
        adapter: str | None,
    ) -> list[RequestOutput]:
        params = self._params(given, len(ids))
        if priority is not None and len(priority) != len(ids):
            raise UsageError(f"There are {len(ids)} prompts but {len(priority)} priorities; give one for each.")
        names = [str(next(self._ids)) for _ in ids]
        grammars = [None if p.structured_outputs is None else self._compile(p.structured_outputs) for p in params]
        requests = [
            Request(
                request_id=f"{names[i]}-{j}",
                prompt_token_ids=tuple(ids[i]),
                sampling=sampling,
                priority=0 if priority is None else priority[i],
                adapter=adapter,
                grammar=None if (grammar := grammars[i]) is None else grammar.start(),
            )
            for i in range(len(ids))
            for j, sampling in enumerate(params[i].samples())
        ]
        answers = iter(self._answer(requests, use_tqdm=use_tqdm))
        outputs = []
        for i, name in enumerate(names):
            samples = list(itertools.islice(answers, params[i].n))
            outputs.append(
                RequestOutput(
                    request_id=name,
                    prompt=texts[i],
                    prompt_token_ids=ids[i],
                    prompt_logprobs=self._prompt_logprobs(ids[i], samples[0], params[i]),
                    outputs=[self._completion(j, sample, params[i]) for j, sample in enumerate(samples)],
                    num_cached_tokens=samples[0].num_cached_tokens,
                )
            )
        return outputs

    def _compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        if self._grammars is None:
            self._grammars = GrammarCompiler(
                self.engine.tokenizer,
                vocab_size=self.engine.decoder.config.vocab_size,
                eos_token_ids=self.engine.eos_token_ids,
            )
        return self._grammars.compile_now(wanted)

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * num_prompts
        if isinstance(given, SamplingParams):
            return [given] * num_prompts
        if len(given) != num_prompts:
            raise UsageError(
                f"There are {num_prompts} prompts but {len(given)} sampling parameters; give one for each."
            )
        return list(given)

    def _answer(
        self, requests: list[Request], *, use_tqdm: bool | Callable[..., Any]
    ) -> list[engine_requests.RequestOutput]:
        """Runs requests to their end, all or none: an invalid one raises before anything is computed."""
        for request in requests:
            self.engine.check(request)
        bar = _progress_bar(use_tqdm, len(requests))

        def count(output: engine_requests.RequestOutput) -> None:
            if output.finished and bar is not None:
                bar.update(1)

        try:
            return self.engine.generate(requests, on_output=count)
        finally:
            if bar is not None:
                bar.close()
            for request in requests:  # Ctrl-C in the middle leaves nothing behind
                self.engine.abort(request.request_id)

    def _completion(
        self, index: int, answer: engine_requests.RequestOutput, params: SamplingParams
    ) -> CompletionOutput:
        asked = params.logprobs is not None
        scored = zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True) if asked else ()
        return CompletionOutput(
            index=index,
            text=answer.text,
            token_ids=answer.token_ids,
            cumulative_logprob=sum(answer.logprobs) if asked else None,
            logprobs=[self._logprobs(*each) for each in scored] if asked else None,
            finish_reason=None if answer.finish_reason is None else str(answer.finish_reason),
            stop_reason=answer.stop_reason,
            error=answer.error,
        )

    def _prompt_logprobs(
        self, ids: list[int], answer: engine_requests.RequestOutput, params: SamplingParams
    ) -> list[dict[int, Logprob] | None] | None:
        if params.prompt_logprobs is None:
            return None
        return [
            None if logprob is None else self._logprobs(token, logprob, top)
            for token, logprob, top in zip(ids, answer.prompt_logprobs, answer.prompt_top_logprobs, strict=True)
        ]

    def _logprobs(self, token: int, logprob: float, top: TopLogprobs) -> dict[int, Logprob]:
        ranks = {other: rank for rank, (other, _) in enumerate(top, start=1)}
        return {
            other: Logprob(logprob=score, rank=ranks.get(other), decoded_token=self.engine.tokenizer.decode([other]))
            for other, score in {token: logprob, **dict(top)}.items()
        }


def _engine_config(limits: dict[str, Any]) -> EngineConfig:
    known = {item.name for item in dataclasses.fields(EngineConfig)}
    for name in limits:
        if name not in known:
            raise UsageError(f"LLM has no option {name!r}{nearest(name, known)}")
    if "dtype" in limits:
        limits = {**limits, "dtype": DTYPES.get(limits["dtype"], limits["dtype"])}
        if limits["dtype"] not in ("fp32", "bf16"):
            raise UsageError(f"dtype {limits['dtype']!r} is not served{nearest(limits['dtype'], ('fp32', 'bf16'))}")
    return EngineConfig(**limits)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(isinstance(item, int) for item in listed) else listed


def _text_of(prompt: Prompt) -> str | None:
    if isinstance(prompt, Mapping):
        if "prompt" not in prompt and "prompt_token_ids" not in prompt:
            raise UsageError("A prompt that is a dict needs 'prompt' or 'prompt_token_ids'.")
        return prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def _messages(conversation: Any) -> list[dict[str, Any]]:
    """Returns messages as the server would hand them to the template."""
    try:
        return chat_messages(msgspec.convert([dict(message) for message in conversation], list[Message]))
    except msgspec.ValidationError as error:
        raise RequestError(f"messages: {error}.", param="messages") from None


def _progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    if not use_tqdm:
        return None
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="Processed prompts")
    from tqdm import tqdm

    return tqdm(total=total, desc="Processed prompts", dynamic_ncols=True)
