"""Structured output: grammars over tokens, compiled by llguidance off the engine's thread.

    compiler = GrammarCompiler(tokenizer, vocab_size=V, eos_token_ids=[2])
    compiled = await compiler.compile(StructuredOutputs(json={"type": "object"}))      # or compile_now, without asyncio
    request = Request(..., grammar=compiled.start())                                   # one state for each sample

A grammar that can't be compiled is a `RequestError` which says why; so is one that takes too long or is too large. One
that becomes too complex in the middle of a reply fails its request alone. The end of the text is allowed exactly where
the grammar can end. JSON may be laid out with one space, or one line break and an indentation, between its parts, so
that a model can't go on writing white space for ever. Schema keywords that llguidance can't enforce are refused.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from torch import Tensor

from shardline.serving.errors import OverloadedError, RequestError
from shardline.serving.requests import StructuredOutputs
from shardline.text.tokenizer import Tokenizer

__all__ = ["WHITESPACE", "CompiledGrammar", "GrammarCompiler", "TokenGrammar", "json_options"]

MAX_SOURCE_CHARACTERS = 256 * 1024
MAX_CHOICES = 10_000
MAX_CACHED = 64
NUM_THREADS = 2
STACK_BYTES = 256 * 2**20  # rules may refer to rules as deep as the longest source allows; only touched pages are real
WHITESPACE = r" |\n[ ]{0,40}|\n\t{0,20}"
# Tokens that follow by force are sampled like any others: to look ahead for them can go on for ever (start: /a+/ /a+/).
OPTIONS = '%llguidance {"no_forcing": true}'
PARAM = "structured_outputs"


class TokenGrammar:
    """One reply's place in a grammar: the engine's `Grammar`."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: list[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._error: str | None = None

    @property
    def finished(self) -> bool:
        return self._error is None and self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        return self._error

    def fill(self, mask_W: Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask_W.data_ptr(), mask_W.numel() * mask_W.element_size())
        self._note_error()
        if self._error is None and not self._matcher.is_accepting():
            # A complement (~"x") matches the bytes that stand for the end token, too; that is not the end.
            words = mask_W.numpy().view(np.uint32)
            for token in self._eos_token_ids:
                words[token // 32] &= ~np.uint32(1 << token % 32)
            if not words.any():
                self._error = "The grammar leaves no token that may follow here."

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._note_error()

    def _note_error(self) -> None:
        if self._error is None and self._matcher.is_error():
            self._error = f"The grammar can't go on here: {_first_line(self._matcher.get_error())}."


class CompiledGrammar:
    """A grammar to start replies with, each with a state of its own."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: list[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def start(self) -> TokenGrammar:
        return TokenGrammar(self._matcher.deep_copy(), self._eos_token_ids)


class GrammarCompiler:
    """Compiles grammars for one vocabulary, on threads of its own, and keeps the last ones."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        timeout_s: float = 10.0,
    ) -> None:
        """`vocab_size` is the model's; a grammar that takes longer than `timeout_s` to compile is refused."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._limits = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

    async def compile(self, wanted: StructuredOutputs | str, *, param: str = PARAM) -> CompiledGrammar:
        """Returns a compiled grammar; a string is Lark's notation. `RequestError` (with `param`) says why it can't."""
        running = self._threads().submit(self._compile, wanted, param)
        waiter = asyncio.wrap_future(running)
        await asyncio.wait([waiter], timeout=self._timeout_s)
        if waiter.done():
            return waiter.result()
        waiter.add_done_callback(_forget)
        if running.cancel():
            raise OverloadedError(f"No thread had time for this grammar within {self._timeout_s:g} s; try again later.")
        raise RequestError(
            f"{param}: the grammar took longer than {self._timeout_s:g} s to compile; make it simpler.", param=param
        )

    def compile_now(self, wanted: StructuredOutputs | str, *, param: str = PARAM) -> CompiledGrammar:
        """Does what `compile` does, and waits for it."""
        return self._threads().submit(self._compile, wanted, param).result()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
                barrier = threading.Barrier(NUM_THREADS)
                before = threading.stack_size(STACK_BYTES)
                try:  # all of the pool's threads start here, while the larger stack is in force
                    for _ in range(NUM_THREADS):
                        self._pool.submit(barrier.wait)
                finally:
                    threading.stack_size(before)
            return self._pool

    def _compile(self, wanted: StructuredOutputs | str, param: str) -> CompiledGrammar:
        try:
            source = wanted if isinstance(wanted, str) else _lark(wanted)
        except ValueError as error:
            raise RequestError(f"{param} can't be used: {_first_line(str(error))}.", param=param) from None
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise RequestError(
                f"{param} has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS} are compiled.", param=param
            )
        with self._lock:
            if source in self._compiled:
                self._compiled.move_to_end(source)
                return self._compiled[source]
        with self._vocabulary_lock:  # one of its own: reading takes too long for `_threads` to wait
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        whole = LLMatcher.grammar_from_lark(f"{OPTIONS}\n{source}")
        matcher = LLMatcher(self._vocabulary, whole, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise RequestError(f"{param} can't be used: {_first_line(matcher.get_error())}.", param=param)
        compiled = CompiledGrammar(matcher, self._eos_token_ids)
        with self._lock:
            self._compiled[source] = compiled
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return compiled

    def _read_vocabulary(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise RequestError("This model has no end-of-text token, so a grammar could never end.", param=PARAM)
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._eos_token_ids)


class _Vocabulary:
    """What llguidance reads of a tokenizer: the bytes of each token, and which of them are no text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        special = {token for token in range(vocab_size) if tokenizer.is_special(token)}
        self.special_token_ids = sorted(special | set(eos_token_ids))
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def json_options(*, whitespace: bool) -> dict[str, Any]:
    """Returns llguidance's settings for JSON, a schema's `x-guidance`."""
    pattern = WHITESPACE if whitespace else ""
    return {"whitespace_flexible": whitespace, "whitespace_pattern": pattern, "lenient": False}


def _lark(wanted: StructuredOutputs) -> str:
    """Returns the grammar in Lark's notation; raises ValueError."""
    if wanted.json_object:
        return _json_lark({"type": "object"}, whitespace=not wanted.disable_any_whitespace)
    if wanted.json is not None:
        return _json_lark(wanted.json, whitespace=not wanted.disable_any_whitespace)
    if wanted.regex is not None:
        return msgspec.json.decode(LLMatcher.grammar_from_regex(wanted.regex))["grammars"][0]["lark_grammar"]
    if wanted.grammar is not None:
        if len(wanted.grammar) > MAX_SOURCE_CHARACTERS:  # before it is translated
            raise ValueError(f"it has {len(wanted.grammar)} characters, more than {MAX_SOURCE_CHARACTERS}")
        grammar = re.sub(r"%llguidance\s*\{\s*\}", "", wanted.grammar)
        if "%llguidance" in grammar:
            raise ValueError("options of %llguidance are the server's; leave them out")
        return grammar_from("grammar", grammar)
    choices = wanted.choice or ()
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise ValueError(f"choice has {len(choices)} texts; it needs between 1 and {MAX_CHOICES}")
    return "start: " + " | ".join(msgspec.json.encode(text).decode() for text in dict.fromkeys(choices))


def _json_lark(schema: Mapping[str, Any] | str, *, whitespace: bool) -> str:
    try:
        read = msgspec.json.decode(schema) if isinstance(schema, str) else schema
        if not isinstance(read, Mapping):
            raise ValueError("a JSON schema must be an object")
        text = msgspec.json.encode({**read, "x-guidance": json_options(whitespace=whitespace)}).decode()
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ValueError(f"the schema is not valid JSON: {error}") from None
    return f"start: %json {text}"


def _first_line(text: str) -> str:
    """Returns the gist of one of llguidance's messages, which may go on with its state for lines."""
    lines = [line.strip() for line in re.split("<state>|<non-verbose", text)[0].splitlines() if line.strip()]
    gist = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "it is not valid")
    return gist.removeprefix("error:").strip().rstrip(".:")[:300]


def _forget(waiter: asyncio.Future[CompiledGrammar]) -> None:
    """Reads the outcome that no one waits for any more, so that asyncio does not complain."""
    if not waiter.cancelled():
        waiter.exception()
