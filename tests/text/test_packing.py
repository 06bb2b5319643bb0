from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardline.text.packing import IGNORED, PADDING, PackedRows, TokenizedDocument, pack, positions_of


def document(ids: list[int], said: list[bool] | None = None, *, whole: bool = False) -> TokenizedDocument:
    marks = None if said is None else np.array(said, dtype=bool)
    return TokenizedDocument(ids=np.array(ids, dtype=np.int32), said=marks, whole=whole)


def rows_of(documents: list[TokenizedDocument], sequence_length: int) -> PackedRows:
    blocks = list(pack(documents, sequence_length=sequence_length))
    fields = ("tokens_RT", "targets_RT", "documents_RT")
    empty = np.zeros((0, sequence_length), dtype=np.int32)
    return PackedRows(**{f: np.concatenate([empty, *(getattr(block, f) for block in blocks)]) for f in fields})


def test_two_documents_in_rows_of_four():
    rows = rows_of([document([1, 2, 3]), document([4, 5, 6, 7])], 4)
    assert rows.tokens_RT.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert rows.targets_RT.tolist() == [[2, 3, IGNORED, 5], [6, 7, IGNORED, IGNORED]]
    assert rows.documents_RT.tolist() == [[0, 0, 0, 1], [0, 0, 0, PADDING]]
    assert positions_of(rows.documents_RT).tolist() == [[0, 1, 2, 0], [0, 1, 2, 0]]


def test_only_what_is_said_is_a_target():
    rows = rows_of([document([1, 2, 3, 4], [False, False, True, True])], 4)
    assert rows.targets_RT.tolist() == [[IGNORED, 3, 4, IGNORED]]


def test_a_whole_document_moves_to_the_next_row():
    rows = rows_of([document([1, 2]), document([3, 4, 5], whole=True)], 4)
    assert rows.tokens_RT.tolist() == [[1, 2, 0, 0], [3, 4, 5, 0]]
    assert rows.documents_RT.tolist() == [[0, 0, PADDING, PADDING], [0, 0, 0, PADDING]]
    too_long = rows_of([document([1]), document([2, 3, 4, 5, 6], whole=True)], 4)
    assert too_long.tokens_RT.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]], "what fits in no row is split at once"


def test_a_row_without_a_target_is_left_out():
    rows = rows_of([document([1, 2, 3, 4, 5])], 4)
    assert rows.tokens_RT.tolist() == [[1, 2, 3, 4]]
    assert rows.targets_RT.tolist() == [[2, 3, 4, 5]], "the target of the last token stands in the row left out"
    assert rows_of([document([1]), document([])], 4).tokens_RT.shape == (0, 4)


def test_more_rows_than_a_block():
    ids = np.arange(1, 1300 * 3 + 1)
    rows = rows_of([document(ids.tolist())], 3)
    assert rows.tokens_RT.ravel().tolist() == ids.tolist()
    assert rows.targets_RT.ravel()[:-1].tolist() == ids[1:].tolist()


DOCUMENTS = st.lists(st.tuples(st.lists(st.integers(1, 99), min_size=2, max_size=20), st.booleans()), max_size=12)


@given(drawn=DOCUMENTS, sequence_length=st.integers(1, 9))
def test_every_target_is_the_next_token_of_the_same_document(drawn: list, sequence_length: int):
    numbered = [[1000 * n + i for i in range(len(ids))] for n, (ids, _) in enumerate(drawn)]
    documents = [document(ids, whole=whole) for ids, (_, whole) in zip(numbered, drawn, strict=True)]
    rows = rows_of(documents, sequence_length)
    held = rows.documents_RT != PADDING
    learnt = rows.targets_RT != IGNORED
    assert not (learnt & ~held).any()
    assert (rows.targets_RT[learnt] == rows.tokens_RT[learnt] + 1).all(), "so none crosses into another document"
    every_pair = sorted(token for ids in numbered for token in ids[:-1])
    assert sorted(rows.tokens_RT[learnt].tolist()) == every_pair, "each token but a document's last is learnt from"
    flat = rows.tokens_RT[held].tolist()
    assert flat == sorted(flat), "in order"
    lost = {token for ids in numbered for token in ids} - set(flat)
    assert lost <= {ids[-1] for ids in numbered}, "only a last token alone in its row is left out"


@given(drawn=DOCUMENTS, sequence_length=st.integers(1, 9))
def test_documents_and_positions_count_from_zero_in_each_row(drawn: list, sequence_length: int):
    rows = rows_of([document(ids, whole=whole) for ids, whole in drawn], sequence_length)
    positions_RT = positions_of(rows.documents_RT)
    for documents, positions in zip(rows.documents_RT, positions_RT, strict=True):
        held = documents[documents != PADDING]
        assert held.tolist() == sorted(held.tolist())
        assert sorted(set(held.tolist())) == list(range(len(set(held.tolist()))))
        for number in set(documents.tolist()):
            inside = positions[documents == number]
            assert inside.tolist() == list(range(len(inside)))
