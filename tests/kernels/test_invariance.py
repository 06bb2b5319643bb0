"""In the mode a row's bits do not depend on the other rows; outside it they do, so these comparisons can fail."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from shardline.kernels import (
    ACTIVATIONS,
    batch_invariant,
    fixed_attention,
    invariance,
    is_batch_invariant,
    linear,
    proven_sizes,
    rms_norm,
    rowwise,
)

COUNTS = (1, 2, 3, 4, 5, 7, 9, 16, 17, 33, 63, 64, 65, 130, 257, 300)


def same_for_any_count(function, x) -> bool:
    """Whether each row has the same bits alone and in every batch, wherever the row lies in it."""
    alone = torch.cat([function(x[row : row + 1].clone()) for row in range(len(x))])
    return all(
        torch.equal(function(x[start : start + count].clone()), alone[start : start + count])
        for count in COUNTS
        for start in (0, len(x) - count)
    )


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(300, 96, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("num_out", [64, 259])
def test_linear(rows: torch.Tensor, threads: int, num_out: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight, bias = torch.randn(num_out, 96), torch.randn(num_out)
        assert not same_for_any_count(lambda x: linear(x, weight, bias), rows), "nothing to test on this machine"
        with batch_invariant():
            assert same_for_any_count(lambda x: linear(x, weight, bias), rows)
            torch.testing.assert_close(linear(rows, weight, bias), F.linear(rows, weight, bias), atol=1e-5, rtol=1e-5)
            assert linear(rows[:0], weight).shape == (0, num_out)
    finally:
        torch.set_num_threads(before)


def test_a_product_that_depends_on_the_number_of_rows_is_caught():
    sample = torch.randn(256, 64)
    weight = torch.randn(64, 32)

    def halves_from_64_rows_on(x: torch.Tensor) -> torch.Tensor:
        if len(x) < 64:
            return x @ weight
        return x[:, :32] @ weight[:32] + x[:, 32:] @ weight[32:]

    def by_place(x: torch.Tensor) -> torch.Tensor:
        out = x @ weight
        out[3:4] = x[3:4, :32] @ weight[:32] + x[3:4, 32:] @ weight[32:]
        return out

    assert set(invariance._prove(sample, lambda x: x @ weight)) >= {16, 32, 64, 128, 256}
    assert max(invariance._prove(sample, halves_from_64_rows_on)) == 48
    assert invariance._prove(sample, by_place) == (1,)


def test_rows_go_one_by_one_where_nothing_larger_is_proven(rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch):
    weight = torch.randn(31, 96)
    monkeypatch.setattr(invariance, "_prove", lambda sample, product: (1,))
    with batch_invariant():
        assert proven_sizes(weight) == (1,)
        assert same_for_any_count(lambda x: linear(x, weight), rows)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
@pytest.mark.parametrize("length", [96, 259])
def test_activations(name: str, length: int):
    x = torch.randn(300, length) * 3
    with batch_invariant():
        assert same_for_any_count(ACTIVATIONS[name], x)
    torch.testing.assert_close(ACTIVATIONS[name](x[:5]), ACTIVATIONS[name](x)[:5])


def test_silu_is_place_dependent_without_the_mode():
    x = torch.randn(300, 259) * 3
    assert not same_for_any_count(F.silu, x), "nothing to test on this machine"


@pytest.mark.parametrize("function", [torch.exp, torch.tanh, torch.cos, torch.sin, torch.sigmoid])
@pytest.mark.parametrize("length", [5, 16, 259])
def test_elementwise(function, length: int):
    x = torch.randn(300, length) * 3
    with batch_invariant():
        assert same_for_any_count(lambda part: rowwise(function, part), x)
        torch.testing.assert_close(rowwise(function, x), function(x))


@pytest.mark.parametrize("length", [4, 64, 96, 576, 2049])
def test_norms_and_softmax_need_no_mode(length: int):
    x, weight = torch.randn(300, length), torch.randn(length)
    assert same_for_any_count(lambda part: rms_norm(part, weight, eps=1e-5), x)
    assert same_for_any_count(lambda part: rms_norm(part, weight, eps=1e-6, offset=1.0), x)
    assert same_for_any_count(lambda part: F.layer_norm(part, (length,), weight, weight), x)
    assert same_for_any_count(lambda part: part.softmax(-1), x)
    assert same_for_any_count(lambda part: part.log_softmax(-1), x)


def reference(q, k, v, *, first, scale, window, softcap, slopes):
    """Attention in fp64, one query and head at a time."""
    out = torch.zeros_like(q, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        position = first + t
        begin = 0 if window is None else max(0, position - window + 1)
        for n in range(q.shape[1]):
            keys, values = k[begin : position + 1, n // group].double(), v[begin : position + 1, n // group].double()
            scores = keys @ q[t, n].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores = scores - slopes[n].double() * (position - torch.arange(begin, position + 1))
            out[t, n] = scores.softmax(0) @ values
    return out.float()


@pytest.mark.parametrize(
    "kind",
    [
        {"window": None, "softcap": None, "slopes": None},
        {"window": 70, "softcap": None, "slopes": None},
        {"window": 5, "softcap": 20.0, "slopes": None},
        {"window": None, "softcap": None, "slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    ],
    ids=["full", "window", "softcap", "alibi"],
)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_is_right_and_the_same_for_any_chunk_and_padding(kind, num_kv_heads: int):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(200, 4, 16, generator=generator)
    k, v = (torch.randn(200, num_kv_heads, 16, generator=generator) for _ in range(2))
    arguments = {"scale": 0.25, "window": kind["window"], "softcap": kind["softcap"], "slopes_N": kind["slopes"]}

    def run(begin: int, end: int, num_keys: int) -> torch.Tensor:
        first = torch.tensor([begin])
        return fixed_attention(q[None, begin:end], k[None, :num_keys], v[None, :num_keys], first_B=first, **arguments)[
            0
        ]

    with batch_invariant():
        whole = run(0, 200, 200)
        torch.testing.assert_close(whole, reference(q, k, v, first=0, scale=0.25, **kind), atol=1e-5, rtol=1e-5)
        for begin, end in ((0, 1), (0, 3), (63, 65), (100, 101), (130, 199), (199, 200)):
            assert torch.equal(run(begin, end, end), whole[begin:end])
            assert torch.equal(run(begin, end, 200), whole[begin:end])  # keys that are not seen
        rows = torch.tensor([150, 3, 77])  # decode of three sequences, padded to one width
        together = fixed_attention(
            q[rows].unsqueeze(1), k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), first_B=rows, **arguments
        )
        assert torch.equal(together[:, 0], whole[rows])


def test_the_mode_is_the_threads_own_and_nests():
    seen = []
    with batch_invariant():
        with batch_invariant():
            pass
        thread = threading.Thread(target=lambda: seen.append(is_batch_invariant()))
        thread.start()
        thread.join()
        assert is_batch_invariant()
    assert not is_batch_invariant()
    assert seen == [False]


def test_compiled_modules_run_eagerly_in_the_mode(rows: torch.Tensor):
    """A trainer with train.compile evaluates through the same kernels."""
    weight = torch.randn(50, 96)
    seen = []

    def notes_the_mode(x: torch.Tensor) -> torch.Tensor:
        seen.append(is_batch_invariant())
        return linear(x, weight)

    compiled = torch.compile(notes_the_mode, backend="eager")
    with torch.no_grad():
        compiled(rows)
        seen.clear()
        with batch_invariant():
            assert same_for_any_count(compiled, rows[:270])
    assert seen
    assert all(seen)
