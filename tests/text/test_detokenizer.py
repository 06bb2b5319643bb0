from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardline.text.detokenizer import Detokenizer
from shardline.text.tokenizer import Tokenizer

from .conftest import fast_metaspace

TEXTS = st.text(
    alphabet=st.one_of(
        st.characters(codec="utf-8"), st.sampled_from(" ab\u00e9\u4e16\uc548\U0001f468\u200d\U0001f469")
    ),
    max_size=30,
)


def stream(tokenizer: Tokenizer, ids: list[int], **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.append(id) for id in ids), detokenizer.flush()]


@settings(max_examples=80, deadline=None)
@given(text=TEXTS, skip=st.booleans())
def test_pieces_join_to_the_text(bpe: Tokenizer, byte: Tokenizer, metaspace: Tokenizer, text: str, skip: bool):
    for tokenizer in (bpe, byte, metaspace):
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
        if not skip:
            assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


@settings(max_examples=120, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_to_what_decode_gives(
    bpe: Tokenizer, byte: Tokenizer, metaspace: Tokenizer, data: st.DataObject, skip: bool
):
    for tokenizer in (bpe, byte, metaspace):
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=20))
        pieces = stream(tokenizer, ids, skip_special_tokens=skip)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
        assert len(pieces[-1]) <= 1, "at most one U+FFFD at the end"


@pytest.mark.parametrize("text", ["\U0001f600", "\u4e16\u754c", "\uc548\ub155", "e\u0301"])
def test_a_character_is_never_split(byte: Tokenizer, text: str):
    pieces = stream(byte, byte.encode(text))
    assert [piece for piece in pieces if piece] == list(text)


def test_an_incomplete_character_is_flushed_once(byte: Tokenizer):
    detokenizer = Detokenizer(byte)
    assert [detokenizer.append(id) for id in (0x61, 0xF0, 0x9F, 0x98)] == ["a", "", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.append(0x62) == "b"


def test_an_invalid_byte_does_not_hold_up_what_follows(byte: Tokenizer):
    assert stream(byte, [0xE4, 0x61, 0xFF, 0x62]) == ["", "\ufffda", "\ufffd", "b", ""]


def test_a_skipped_special_token_between_the_bytes_of_a_character(byte: Tokenizer):
    ids = [0xC3, 258, 0xA9]
    assert stream(byte, ids) == ["", "", "\u00e9", ""]
    assert "".join(stream(byte, ids, skip_special_tokens=False)) == "\ufffd<|im_end|>\ufffd"


def test_the_space_before_the_first_word(metaspace: Tokenizer):
    ids = metaspace.encode("the the")
    assert stream(metaspace, ids) == ["the", " the", ""]
    assert stream(metaspace, [1, *ids]) == ["", "the", " the", ""]
    prompt = metaspace.encode_prompt("a")
    assert "".join(stream(metaspace, ids, after=prompt)) == " the the"
    whole = metaspace.decode(prompt + ids)
    assert whole == metaspace.decode(prompt) + "".join(stream(metaspace, ids, after=prompt))
    assert stream(metaspace, ids, after=[1]) == ["the", " the", ""], "after BOS alone the text still begins here"


def test_the_metaspace_decoder_drops_the_first_tokens_spaces(metaspace: Tokenizer):
    from tokenizers import decoders

    tokenizer = Tokenizer(fast_metaspace(decoder=decoders.Metaspace()))
    for text in ("the a", "  a b", " the"):
        ids = metaspace.encode(text)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
