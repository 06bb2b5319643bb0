"""Requests that begin alike read those blocks once, and answer as if each were alone."""

from __future__ import annotations

from typing import Any

import pytest

from serving.tiny_models import dense_logprobs, make_decoder, make_engine, make_request, tiny_config
from shardline.serving.decode_groups import MIN_SAVED_BLOCKS, arrange
from shardline.serving.requests import Request
from shardline.serving.scheduler import Chunk
from shardline.serving.sequence import Sequence
from shardline.text.tokenizer import byte_tokenizer

SYSTEM = "You are a careful assistant who answers in one short line, and who never makes anything up, whatever. "


def chunk(name: str, table: list[int], length: int) -> Chunk:
    """The next single token of a sequence with `length` known ones, the last of them not computed."""
    request = make_request(name, tuple(range(length)))
    sequence = Sequence(request, max_num_tokens=length + 9, arrived_s=0.0)
    sequence.block_table = table
    return Chunk(sequence=sequence, start=length - 1, num_tokens=1, samples=True)


def test_groups_read_common_blocks_once_and_the_rest_by_length():
    common = list(range(1, 41))
    alike = [chunk(f"a{i}", [*common, 100 + i, 200 + i], 4 * 41 + i) for i in range(3)]
    other = [chunk("b", [300, *common[1:]], 160), chunk("c", [301], 3), chunk("d", [302], 4)]
    groups = arrange([other[0], alike[0], other[1], *alike[1:], other[2]], block_size=4, share=True)
    assert [[each.sequence.request_id for each in group.chunks] for group in groups] == [
        ["a0", "a1", "a2"],
        ["b"],
        ["d", "c"],
    ]
    assert [group.shared for group in groups] == [common, [], []]
    assert groups[0].tables.tolist() == [[100, 0], [101, 201], [102, 202]]
    everything = arrange([*other, *alike], block_size=4, share=False)
    assert all(not group.shared for group in everything)
    assert sorted(len(group.chunks) for group in everything) == [2, 4]


def test_the_block_being_written_is_never_shared():
    """A sequence of exactly n blocks writes into the last of them."""
    common = list(range(1, 41))
    rows = [chunk("a", common, 160), chunk("b", [*common, 50], 161)]
    (group,) = arrange(rows, block_size=4, share=True)
    assert group.shared == common[:39]
    assert group.tables.tolist() == [[40, 0], [40, 50]]


def test_a_little_in_common_is_not_worth_two_calls():
    rows = [chunk(name, [1, 2, 3], 12) for name in "abcd"]
    assert MIN_SAVED_BLOCKS > 3 * 2
    assert [group.shared for group in arrange(rows, block_size=4, share=True)] == [[]]


@pytest.mark.parametrize("limits", [{}, {"kv_cache_dtype": "int8"}, {"speculative": "ngram"}], ids=str)
def test_many_after_one_system_prompt_answer_as_if_alone(limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []

    def spy(*args: Any, **options: Any) -> Any:
        groups = arrange(*args, **options)
        seen.append(max((len(group.shared) for group in groups), default=0))
        return groups

    monkeypatch.setattr("shardline.serving.runner.arrange", spy)
    decoder = make_decoder(tiny_config(byte_tokenizer()))
    requests: list[Request] = [
        make_request(str(i), SYSTEM + "word " * i, max_tokens=8 + i, ignore_eos=True, logprobs=1) for i in range(8)
    ]
    requests.append(make_request("another", "nothing in common", max_tokens=20, ignore_eos=True, logprobs=1))
    options = {"block_size": 4, "max_num_seqs": 16, **limits}
    together = make_engine(decoder, **options).generate(requests)
    assert max(seen) >= len(SYSTEM) // 4 - 1
    for request, answer in zip(requests, together, strict=True):
        (alone,) = make_engine(decoder, **options).generate([request])
        assert answer.token_ids == alone.token_ids
        if "kv_cache_dtype" not in limits:  # rounded to 8 bits, a difference of one bit of fp32 may become one of eight
            assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
            ids = [*request.prompt_token_ids, *answer.token_ids]
            expected = dense_logprobs(decoder, ids)[-len(answer.token_ids) :].tolist()
            assert answer.logprobs == pytest.approx(expected, abs=1e-5)


def test_what_is_not_plain_attention_is_not_shared(monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def spy(*args: Any, share: bool, **options: Any) -> Any:
        asked.append(share)
        return arrange(*args, share=share, **options)

    monkeypatch.setattr("shardline.serving.runner.arrange", spy)
    for changes in ({"sliding_windows": (8, None, None)}, {"attention_softcap": 20.0}, {"position": "alibi"}):
        engine = make_engine(make_decoder(tiny_config(byte_tokenizer(), **changes)))
        engine.generate([make_request("a", "some words", max_tokens=3)])
    assert asked
    assert not any(asked)
