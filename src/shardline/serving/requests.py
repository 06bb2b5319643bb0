"""What the engine is asked, and what it answers. Pure data, no torch.

    params = SamplingParams(temperature=0.0, max_tokens=64, stop=("\\n\\n",))
    request = Request(request_id="a", prompt_token_ids=(1, 2, 3), sampling=params)

Names, defaults and limits are vLLM's where vLLM has them. A value that can't be used raises `RequestError`, which
names the field and is one sentence; over HTTP it becomes a 400 with that sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from shardline.serving.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MAX_LOGPROBS",
    "FinishReason",
    "Grammar",
    "Pooling",
    "Request",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "Timeline",
    "TopLogprobs",
]

MAX_LOGPROBS = 20  # alternatives a token; OpenAI's limit for chat, vLLM's default
ALL_LOGPROBS = -1  # every token of the vocabulary; offline only
MAX_STOPS = 64
MAX_BAD_WORDS = 1024
GREEDY_TEMPERATURE = 1e-5
MIN_TEMPERATURE = 1e-2  # below it logits / temperature overflows; vLLM clamps at the same value

TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability), the likeliest first


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-text token, a stop token or a stop string
    LENGTH = "length"  # max_tokens
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the step that computed it failed


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What a reply must follow: exactly one of the first five. `grammar.GrammarCompiler` makes a `Grammar` of it.

    json         a JSON schema, as an object or as its text
    regex        of the whole reply; Rust's syntax, without look-around
    choice       one of these texts
    grammar      in Lark's or GBNF's notation, from the rule `start` or `root`
    json_object  any JSON object
    disable_any_whitespace  JSON without spaces and line breaks between its parts
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar")
        given = [name for name in kinds if getattr(self, name) is not None] + ["json_object"] * self.json_object
        if len(given) != 1:
            said = f"it has {' and '.join(given)}" if given else "it has none"
            raise RequestError(
                f"structured_outputs takes exactly one of {', '.join(kinds)} and json_object; {said}.",
                param="structured_outputs",
            )


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    n                   samples of the prompt; the engine runs one a request, so its callers ask with `samples()`
    allowed_token_ids   no other token is ever chosen
    bad_words           texts that never come, neither at the start of a word nor within one
    logprobs            None: none; k: the chosen token's and the k likeliest; -1: the whole vocabulary (not over HTTP)
    structured_outputs  what the reply must follow; the engine itself reads `Request.grammar`, made from this

    Whether log-probabilities are the model's own or those of what was sampled from is the engine's `logprobs_mode`;
    those of the prompt are always the model's own.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16  # None: the rest of the context; 0: only score the prompt
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # one stop string, as vLLM takes it: not each of its letters
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.n < 1:
            raise RequestError(f"n = {self.n} must be at least 1.", param="n")
        _check_range("temperature", self.temperature, low=0.0, high=100.0)
        _check_range("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _check_range("min_p", self.min_p, low=0.0, high=1.0)
        _check_range("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_range("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_range("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        if self.top_k < -1:
            raise RequestError(f"top_k = {self.top_k} must be at least 1, or 0 for all tokens.", param="top_k")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise RequestError(f"max_tokens = {self.max_tokens} must not be negative.", param="max_tokens")
        if self.min_tokens < 0:
            raise RequestError(f"min_tokens = {self.min_tokens} must not be negative.", param="min_tokens")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens = {self.min_tokens} is greater than max_tokens = {self.max_tokens}.", param="min_tokens"
            )
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed = {self.seed} must fit in 64 bits.", param="seed")
        if any(not stop for stop in self.stop):
            raise RequestError("stop holds an empty string, which would match everywhere; leave it out.", param="stop")
        if len(self.stop) > MAX_STOPS:
            raise RequestError(f"stop has {len(self.stop)} strings; at most {MAX_STOPS} are allowed.", param="stop")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value != ALL_LOGPROBS and not 0 <= value <= MAX_LOGPROBS:
                raise RequestError(
                    f"{name} = {value} must be between 0 and {MAX_LOGPROBS}, or {ALL_LOGPROBS} for the whole "
                    "vocabulary.",
                    param=name,
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty; name at least one token.", param="allowed_token_ids")
        if any(not word.strip() for word in self.bad_words):
            raise RequestError("bad_words holds an empty word; leave it out.", param="bad_words")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words has {len(self.bad_words)} words; at most {MAX_BAD_WORDS} are allowed.", param="bad_words"
            )
        for token, bias in self.logit_bias.items():
            _check_range(f"logit_bias[{token}]", bias, low=-100.0, high=100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def samples(self) -> list[SamplingParams]:
        """Returns the parameters of each of `n` samples: they must differ, and be the same again for the same seed."""
        if self.n == 1:
            return [self]
        one = replace(self, n=1)
        if self.seed is None:
            return [one] * self.n
        return [replace(one, seed=_wrapped(self.seed + index)) for index in range(self.n)]


def _wrapped(seed: int) -> int:
    return seed if seed < 2**63 else seed - 2**64


def _check_range(name: str, value: float, *, low: float, high: float, open_low: bool = False) -> None:
    too_low = value <= low if open_low else value < low
    if math.isfinite(value) and not too_low and value <= high:
        return
    at_least = f"greater than {low:g}" if open_low else f"at least {low:g}"
    raise RequestError(f"{name} = {value:g} must be {at_least} and at most {high:g}.", param=name.partition("[")[0])


Pooling = Literal["mean", "last"]


class Grammar(Protocol):
    """What a reply must follow, and where in it the reply is: the state of one request. Nothing here raises."""

    @property
    def finished(self) -> bool:
        """Whether only the end of the text may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why it can't go on: its request fails with this sentence."""
        ...

    def fill(self, mask_W: Tensor) -> None:
        """Writes which tokens may come next into `mask_W`, int32 [ceil(V / 32)]: bit t % 32 of word t // 32."""
        ...

    def accept(self, token_id: int) -> None:
        """Notes the token that came."""
        ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it. Several samples of one prompt are several requests.

    priority   the lower the earlier; of equals the first to arrive
    adapter    name of the LoRA adapter to run with
    pooling    return one vector of the prompt's hidden states instead of a reply
    grammar    compiled before: never on the engine's thread
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    adapter: str | None = None
    pooling: Pooling | None = None
    grammar: Grammar | None = None


@dataclass(kw_only=True)
class Timeline:
    """When things happened to a request, in seconds of `time.monotonic()`; None: not yet."""

    arrived_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    gap_s: float | None = None  # between the last two tokens


_JOINED = {"text", "token_ids", "logprobs", "top_logprobs", "prompt_logprobs", "prompt_top_logprobs", "embedding"}


@dataclass(kw_only=True)
class RequestOutput:
    """What one step added to one request; `extend` joins the steps to the whole answer.

    `logprobs[i]` belongs to `token_ids[i]`, and `top_logprobs[i]` to its alternatives; both stay empty unless asked
    for. `prompt_logprobs` has one entry a prompt token, None for the first, and comes once, with the first output.
    `text` is what may be shown: whole characters only, and nothing that may still become a stop string.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int = 0  # so far
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    embedding: list[float] = field(default_factory=list)  # of a request with pooling
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or the stop token that ended it
    error: str | None = None
    error_param: str | None = None  # the field at fault, where the request can be mended
    timeline: Timeline | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def extend(self, later: RequestOutput) -> None:
        """Adds a later step's output of the same request to this one."""
        assert later.request_id == self.request_id, (later.request_id, self.request_id)
        for item in fields(self):
            if item.name in _JOINED:
                setattr(self, item.name, getattr(self, item.name) + getattr(later, item.name))
        self.num_output_tokens = later.num_output_tokens
        self.num_cached_tokens = later.num_cached_tokens
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.error = later.error
        self.error_param = later.error_param
        self.timeline = later.timeline
