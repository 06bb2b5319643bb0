from __future__ import annotations

import pytest

from shardline.convert.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer

from .gguf_files import vocabulary_fields


def fields(**other) -> dict:
    plain = {key.removeprefix("tokenizer."): value for key, value in vocabulary_fields(320).items()}
    return {**plain, **{f"ggml.{key}": value for key, value in other.items()}}


def words(pre: str, text: str) -> list[str]:
    tokenizer = build_tokenizer(fields(pre=pre), eos_token_ids=[], name="a file")
    from transformers import PreTrainedTokenizerFast

    assert isinstance(tokenizer._fast, PreTrainedTokenizerFast)
    return [word for word, _ in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["a", "\u012012345", "'s", "\u0120b", "!\u010a\u010a"]),
        ("smollm", ["a", "\u0120", "1", "2", "3", "4", "5", "'s", "\u0120b", "!\u010a\u010a"]),
        ("llama-bpe", ["a", "\u0120", "123", "45", "'s", "\u0120b", "!\u010a\u010a"]),
        ("qwen2", ["a", "\u0120", "1", "2", "3", "4", "5", "'s", "\u0120b", "!\u010a\u010a"]),
    ],
)
def test_text_is_cut_where_each_family_cuts_it(pre: str, expected: list[str]):
    found = words(pre, "a 12345's b!\n\n")
    assert found == (expected if pre not in ("gpt-2", "smollm") else [*expected[:-1], "!", "\u010a\u010a"])


def test_upper_case_contractions_are_cut_by_the_newer_families_only():
    assert words("llama-bpe", "IT'S") == words("qwen2", "IT'S") == ["IT", "'S"]
    assert words("gpt-2", "IT'S") == ["IT", "'", "S"]


def test_every_known_pre_tokenizer_builds_and_keeps_text():
    text = "Hello  w\u00f6rld 123!\n\t\u4e16\u754c \U0001f600 it's\n\n\nx"
    for pre in PRE_TOKENIZERS:
        tokenizer = build_tokenizer(fields(pre=pre), eos_token_ids=[], name="a file")
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_qwen2_composes_characters():
    qwen = build_tokenizer(fields(pre="qwen2"), eos_token_ids=[], name="a file")
    gpt2 = build_tokenizer(fields(), eos_token_ids=[], name="a file")
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9") == gpt2.encode("\u00e9") != gpt2.encode("e\u0301")


@pytest.mark.parametrize(
    ("other", "expected"),
    [({"add_bos_token": True}, [257]), ({"add_bos_token": False}, []), ({"add_bos_token": False, "pre": "qwen2"}, [])],
)
def test_a_bos_is_added_when_the_file_says_so(other: dict, expected: list[int]):
    tokenizer = build_tokenizer(fields(**other), eos_token_ids=[], name="a file")
    assert tokenizer.encode_prompt("x") == [*expected, ord("x")]


def test_llama3_adds_a_bos_where_the_file_does_not_say():
    silent = fields(pre="llama-bpe")
    del silent["ggml.add_bos_token"]
    assert build_tokenizer(silent, eos_token_ids=[], name="a file").encode_prompt("x") == [257, ord("x")]


def test_kinds_of_tokens():
    own = fields()
    own["ggml.token_type"][256] = 4
    tokenizer = build_tokenizer(own, eos_token_ids=[258, 7], name="a file")
    assert tokenizer.eos_token_ids == (258, 7)
    assert [tokenizer.is_special(id) for id in (255, 256, 257, 258)] == [False, False, True, True]
    assert tokenizer.encode("xab<|im_end|>") == [ord("x"), 256, 258]
