"""Structured output: what a grammar allows and refuses, and that it holds in any company, at any temperature."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.tiny_models import make_engine
from shardline.serving.engine import Engine
from shardline.serving.errors import OverloadedError
from shardline.serving.grammar import MAX_SOURCE_CHARACTERS, CompiledGrammar, GrammarCompiler, TokenGrammar
from shardline.serving.requests import FinishReason, Request, RequestError, SamplingParams, StructuredOutputs
from shardline.text.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCAB_SIZE = TOKENIZER.vocab_size
EOS = 258
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return make_compiler()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    return make_engine(max_num_seqs=8)


def make_compiler(**settings: Any) -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], **settings)


def allowed(grammar: TokenGrammar) -> set[int]:
    mask_W = torch.zeros(-(-VOCAB_SIZE // 32), dtype=torch.int32)
    grammar.fill(mask_W)
    return {token for token in range(VOCAB_SIZE) if mask_W[token // 32] >> (token % 32) & 1}


def read(compiled: CompiledGrammar, text: str) -> TokenGrammar:
    """Returns the state after `text`, every byte of which must have been allowed."""
    grammar = compiled.start()
    for place, token in enumerate(TOKENIZER.encode(text)):
        assert token in allowed(grammar), (text, place)
        grammar.accept(token)
    assert grammar.error is None
    return grammar


def accepts(compiled: CompiledGrammar, text: str) -> bool:
    grammar = compiled.start()
    for token in TOKENIZER.encode(text):
        if token not in allowed(grammar):
            return False
        grammar.accept(token)
    return EOS in allowed(grammar)


def run(engine: Engine, compiled: CompiledGrammar | None, *, count: int = 1, **sampling: Any) -> list[Any]:
    params = {"temperature": 1.0, "max_tokens": 120, **sampling}
    requests = [
        Request(
            request_id=str(seed),
            prompt_token_ids=tuple(b"Tell me: "),
            sampling=SamplingParams(**{"seed": seed, **params}),
            grammar=None if compiled is None else compiled.start(),
        )
        for seed in range(count)
    ]
    return engine.generate(requests)


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (StructuredOutputs(json=PERSON), ['{"name":"Ada","age":36}', '{ "name": "", "age": 0 }'], ['{"age":36}', "[]"]),
        (StructuredOutputs(json=json.dumps(PERSON)), ['{"name":"Ada","age":36}'], ['{"name":"Ada","age":100}', ""]),
        (StructuredOutputs(json_object=True), ["{}", '{"a":[1,{"b":null}]}'], ["[]", "1", '{"a"}']),
        (StructuredOutputs(regex=r"\d{3}-[a-c]+"), ["123-abc", "000-a"], ["12-abc", "123-", "x123-a", "123-ad"]),
        (StructuredOutputs(choice=("yes", "no", 'a"b\n\u65e5')), ["yes", "no", 'a"b\n\u65e5'], ["y", "maybe", ""]),
        (StructuredOutputs(grammar='start: "a" b\nb: /[0-9]+/'), ["a1", "a42"], ["a", "b1"]),
        (StructuredOutputs(grammar='root ::= "a" [0-9]+'), ["a1", "a42"], ["a", "b1"]),
        (
            StructuredOutputs(json=PERSON, disable_any_whitespace=True),
            ['{"name":"Ada","age":36}'],
            ['{"name": "Ada","age":36}', '{\n"name":"Ada","age":36}'],
        ),
    ],
)
def test_each_kind_allows_what_it_says(
    compiler: GrammarCompiler, wanted: StructuredOutputs, good: list[str], bad: list[str]
):
    compiled = compiler.compile_now(wanted)
    for text in good:
        assert accepts(compiled, text), text
    for text in bad:
        assert not accepts(compiled, text), text


def test_the_end_is_allowed_only_where_the_grammar_can_end(compiler: GrammarCompiler):
    compiled = compiler.compile_now(StructuredOutputs(regex="ab?"))
    grammar = compiled.start()
    assert allowed(grammar) == {ord("a")}
    grammar.accept(ord("a"))
    assert allowed(grammar) == {ord("b"), EOS}
    assert not grammar.finished
    grammar.accept(ord("b"))
    assert allowed(grammar) == {EOS}
    assert grammar.finished
    grammar.accept(EOS)
    assert allowed(grammar) == {EOS}  # with ignore_eos the end comes again and again, and nothing else
    assert grammar.error is None


@pytest.mark.parametrize("opening", ["{", '{"a":', '{"a":1', '{"a":[1,'])
@pytest.mark.parametrize("space", [" ", "\n", "\t", "\n ", "\n\t", "\r\n"])
def test_white_space_in_json_comes_to_an_end(compiler: GrammarCompiler, opening: str, space: str):
    grammar = read(compiler.compile_now(StructuredOutputs(json_object=True)), opening)
    for _ in range(60):
        for token in space.encode():
            if token not in allowed(grammar):
                assert allowed(grammar) & set(b'"}],[0123456789')
                return
            grammar.accept(token)
    raise AssertionError("white space goes on for ever")


def test_json_may_be_laid_out(compiler: GrammarCompiler):
    value = {"a": [1, {"b": [[], {}, "x y"]}], "c": None}
    for layout in ({"indent": 2}, {"indent": 4}, {"indent": "\t"}, {}, {"separators": (",", ":")}):
        read(compiler.compile_now(StructuredOutputs(json_object=True)), json.dumps(value, **layout))


def test_special_tokens_are_no_text(compiler: GrammarCompiler):
    grammar = read(compiler.compile_now(StructuredOutputs(json_object=True)), '{"a":"')
    assert not allowed(grammar) & {256, 257, 258}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (StructuredOutputs(regex="("), "unclosed group"),
        (StructuredOutputs(regex="(?=a)b"), "look-around"),
        (StructuredOutputs(grammar="start: nope"), "unknown name"),
        (StructuredOutputs(grammar="nothing here"), "grammar"),
        (StructuredOutputs(json={"type": "nonsense"}), "nonsense"),
        (StructuredOutputs(json={"$ref": "#/$defs/nope"}), "nope"),
        (StructuredOutputs(json={"$ref": "https://example.com/x.json"}), "example.com"),
        (StructuredOutputs(json={"type": "object", "not": {}}), "Unimplemented keys"),
        (StructuredOutputs(json={"not": {}, "x-guidance": {"lenient": True}}), "Unimplemented keys"),
        (StructuredOutputs(json="{"), "not valid JSON"),
        (StructuredOutputs(json="[1]"), "must be an object"),
        (StructuredOutputs(json={"enum": []}), "Unsatisfiable"),
        (StructuredOutputs(choice=()), "between 1 and"),
        (StructuredOutputs(regex="a" * (MAX_SOURCE_CHARACTERS + 1)), "at most"),
        (StructuredOutputs(json='{"items":' * 5000 + "{}" + "}" * 5000), "deeply|recursion|not valid"),
    ],
)
def test_what_can_not_be_compiled_says_why(compiler: GrammarCompiler, wanted: StructuredOutputs, words: str):
    with pytest.raises(RequestError, match=words) as caught:
        compiler.compile_now(wanted)
    assert caught.value.param == "structured_outputs"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_deep_rules_do_not_end_the_process(compiler: GrammarCompiler):
    deep = 15_000
    lark = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(deep)), f'r{deep}: "a"'])
    assert len(lark) < MAX_SOURCE_CHARACTERS
    assert accepts(compiler.compile_now(StructuredOutputs(grammar=lark)), "a")


@pytest.mark.parametrize(
    "grammar", ["start: /a+/ /a+/", 'start: "b" x\nx: /a+/ "a"', "start: %lark {\nstart: /a+/ /a+/\n}"]
)
def test_a_grammar_that_forces_the_same_token_for_ever_does_not_hang(compiler: GrammarCompiler, grammar: str):
    state = compiler.compile_now(StructuredOutputs(grammar=grammar)).start()
    started_s = time.monotonic()
    for _ in range(30):
        choice = min(allowed(state))
        assert choice != EOS
        state.accept(choice)
    assert time.monotonic() - started_s < 2.0


def test_a_complement_does_not_match_the_end(compiler: GrammarCompiler):
    state = compiler.compile_now(StructuredOutputs(grammar='start: ~"x" "y"')).start()
    state.accept(0)
    assert EOS not in allowed(state)
    assert accepts(compiler.compile_now(StructuredOutputs(grammar='start: ~"x"')), "abc")


def test_options_of_the_grammar_library_are_not_the_clients(compiler: GrammarCompiler):
    assert accepts(compiler.compile_now(StructuredOutputs(grammar='%llguidance {}\nstart: "a"')), "a")
    with pytest.raises(RequestError, match="options of %llguidance"):
        compiler.compile_now(StructuredOutputs(grammar='%llguidance {"no_forcing": false}\nstart: "a"'))


def test_exactly_one_kind():
    for kinds in ({}, {"regex": "a", "choice": ("b",)}, {"json": {}, "json_object": True}):
        with pytest.raises(RequestError, match="exactly one"):
            StructuredOutputs(**kinds)


def test_each_start_is_a_state_of_its_own_and_compiling_is_cached():
    compiler = make_compiler()
    first = compiler.compile_now(StructuredOutputs(choice=("ab", "cd")))
    one, two = first.start(), first.start()
    one.accept(ord("a"))
    assert allowed(one) == {ord("b")}
    assert allowed(two) == {ord("a"), ord("c")}
    assert compiler.compile_now(StructuredOutputs(choice=("ab", "cd"))) is first
    assert compiler.compile_now(StructuredOutputs(choice=("ab", "ce"))) is not first


def test_the_time_to_compile_is_limited_and_the_event_loop_goes_on():
    compiler = make_compiler(timeout_s=0.04)
    compiler.compile_now(StructuredOutputs(regex="a"))  # its threads are there
    many = StructuredOutputs(grammar="start: " + " | ".join(f'"{n}"' for n in range(18_000)))

    async def try_it() -> int:
        compiling = [asyncio.ensure_future(compiler.compile(many)) for _ in range(6)]
        ticks = 0
        while not all(each.done() for each in compiling):
            await asyncio.sleep(0.005)
            ticks += 1
        kinds = {type(each.exception()) for each in compiling}
        assert kinds == {RequestError, OverloadedError}, kinds
        return ticks

    started_s = time.monotonic()
    ticks = asyncio.run(try_it())
    assert time.monotonic() - started_s < 2.0
    assert ticks >= 2


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_replies_follow_the_schema_whatever_is_sampled(engine: Engine, compiler: GrammarCompiler, temperature: float):
    compiled = compiler.compile_now(StructuredOutputs(json=PERSON, disable_any_whitespace=True))
    for answer in run(engine, compiled, count=8, temperature=temperature, logprobs=2):
        assert answer.finish_reason is FinishReason.STOP
        value = json.loads(answer.text)
        assert set(value) == {"name", "age"}
        assert 0 <= value["age"] <= 99
        assert len(answer.logprobs) == len(answer.token_ids)
        assert all(score > -1000 for score in answer.logprobs)


def test_a_free_reply_is_the_same_beside_constrained_ones(engine: Engine, compiler: GrammarCompiler):
    compiled = compiler.compile_now(StructuredOutputs(regex="[a-z]{10}"))
    requests = [
        Request(
            request_id=f"{kind}{seed}",
            prompt_token_ids=tuple(b"xyz"),
            sampling=SamplingParams(seed=seed, max_tokens=15, ignore_eos=True),
            grammar=compiled.start() if kind == "bound" else None,
        )
        for seed in range(3)
        for kind in ("free", "bound")
    ]
    together = {answer.request_id: answer for answer in engine.generate(requests)}
    for seed in range(3):
        [alone] = engine.generate(
            [
                Request(
                    request_id="alone",
                    prompt_token_ids=tuple(b"xyz"),
                    sampling=SamplingParams(seed=seed, max_tokens=15, ignore_eos=True),
                )
            ]
        )
        assert together[f"free{seed}"].token_ids == alone.token_ids
        assert re.fullmatch("[a-z]{10}", together[f"bound{seed}"].text)
        assert together[f"bound{seed}"].token_ids[10:] == [EOS] * 5


def test_max_tokens_inside_the_grammar_is_length(engine: Engine, compiler: GrammarCompiler):
    [answer] = run(engine, compiler.compile_now(StructuredOutputs(regex="a{50}")), max_tokens=10)
    assert (answer.text, answer.finish_reason) == ("a" * 10, FinishReason.LENGTH)


def test_min_tokens_does_not_fight_a_grammar_that_has_ended(engine: Engine, compiler: GrammarCompiler):
    [answer] = run(engine, compiler.compile_now(StructuredOutputs(choice=("ab",))), min_tokens=5)
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("ab", FinishReason.STOP, 5)


def test_speculation_and_a_small_cache_change_nothing(compiler: GrammarCompiler):
    compiled = compiler.compile_now(StructuredOutputs(json=PERSON, disable_any_whitespace=True))
    plain = [answer.token_ids for answer in run(make_engine(), compiled, count=4, temperature=0.8)]
    guessing = make_engine(speculative="ngram")
    assert [answer.token_ids for answer in run(guessing, compiled, count=4, temperature=0.8)] == plain
    crowded = make_engine(num_blocks=17, max_model_len=64, block_size=4)
    short = run(crowded, compiled, count=4, temperature=0.8, max_tokens=50)
    assert [answer.token_ids for answer in short] == [ids[:50] for ids in plain]
    assert crowded.scheduler.num_preemptions > 0


def test_a_request_whose_settings_leave_nothing_fails_alone(engine: Engine, compiler: GrammarCompiler):
    compiled = compiler.compile_now(StructuredOutputs(regex="ab"))
    shared = tuple(b"a shared beginning that fills a block or two")
    stuck = Request(
        request_id="stuck",
        prompt_token_ids=shared,
        sampling=SamplingParams(max_tokens=9, allowed_token_ids=(97, EOS)),
        grammar=compiled.start(),
    )
    fine = Request(request_id="fine", prompt_token_ids=shared, sampling=SamplingParams(max_tokens=9, ignore_eos=True))
    failed, ended = engine.generate([stuck, fine])
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error_param == "structured_outputs"
    assert "allowed_token_ids" in (failed.error or "")
    assert failed.text == "a"
    assert ended.finish_reason is FinishReason.LENGTH


def test_a_grammar_that_gets_too_complex_in_mid_reply_fails_alone(engine: Engine, compiler: GrammarCompiler):
    compiled = compiler.compile_now(StructuredOutputs(regex="((a{1,100}){1,100}){1,100}"))
    bad = Request(
        request_id="bad",
        prompt_token_ids=tuple(b"xyz"),
        sampling=SamplingParams(max_tokens=200, allowed_token_ids=(97,)),
        grammar=compiled.start(),
    )
    fine = Request(request_id="fine", prompt_token_ids=tuple(b"xyz"), sampling=SamplingParams(max_tokens=60))
    failed, ended = engine.generate([bad, fine])
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error_param == "structured_outputs"
    assert "grammar can't go on" in (failed.error or "")
    assert ended.error is None


def test_the_engine_refuses_a_constraint_that_no_one_compiled(engine: Engine):
    sampling = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    with pytest.raises(RequestError, match="must be compiled"):
        engine.add_request(Request(request_id="a", prompt_token_ids=(1,), sampling=sampling))


PIECES = [
    "start:",
    "a",
    '"x"',
    "/a+/",
    "|",
    "(",
    ")",
    "*",
    "+",
    "?",
    "\n",
    "%json {}",
    "~2",
    "..",
    "&",
    "[lazy]",
    "~",
    '"y"i',
]
REGEXES = st.text("ab()[]{}*+?|\\.^$d1,2-&~", max_size=12)
LARKS = st.lists(st.sampled_from(PIECES), max_size=10).map(lambda words: "start: " + " ".join(words))
KEYWORDS = [
    "type",
    "properties",
    "required",
    "items",
    "enum",
    "anyOf",
    "allOf",
    "pattern",
    "maxLength",
    "minimum",
    "$ref",
]
SCHEMAS = st.dictionaries(
    st.sampled_from(KEYWORDS),
    st.recursive(
        st.none() | st.integers(-3, 99) | st.sampled_from(["string", "object", "array", "integer", "^a", "#", "a"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(
    wanted=st.builds(lambda regex: StructuredOutputs(regex=regex), REGEXES)
    | st.builds(lambda grammar: StructuredOutputs(grammar=grammar), LARKS)
    | st.builds(lambda schema: StructuredOutputs(json=schema), SCHEMAS),
    data=st.data(),
)
def test_any_grammar_either_says_why_not_or_leads_on(
    compiler: GrammarCompiler, wanted: StructuredOutputs, data: st.DataObject
):
    try:
        state = compiler.compile_now(wanted).start()
    except RequestError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert "\n" not in refusal
        return
    for _ in range(12):
        choices = sorted(allowed(state))
        if state.error is not None:
            return
        assert choices
        token = data.draw(st.sampled_from(choices))
        state.accept(token)
        assert state.error is None, token
        if token == EOS:
            return
