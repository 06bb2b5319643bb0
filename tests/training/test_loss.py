"""The loss: chunks, ignored targets and documents change nothing that they should not change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardline.models.attention import DenseAttention
from shardline.models.decoder import Decoder
from shardline.parallel.vocabulary import chunked_cross_entropy
from shardline.training.loss import IGNORED, LanguageModelLoss
from training.jobs import small_model


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def decoder(request):
    decoder = Decoder(small_model(tied=request.param))
    decoder.initialize(seed=0)
    return decoder


def make_batch(rows: int, length: int):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 320, (rows, length), generator=generator)
    targets = torch.randint(0, 320, (rows, length), generator=generator)
    targets[torch.rand(rows, length, generator=generator) < 0.3] = IGNORED
    documents = (torch.arange(length) // 17).expand(rows, length).int()
    positions = (torch.arange(length) % 17).expand(rows, length)
    return tokens, targets, documents, positions


@pytest.mark.parametrize(("rows", "length"), [(1, 5), (3, 85), (5, 128)], ids=["under a chunk", "one chunk", "three"])
def test_it_is_the_plain_cross_entropy_in_value_and_gradients(decoder, rows, length):
    tokens, targets, documents, positions = make_batch(rows, length)
    decoder.zero_grad()
    loss = LanguageModelLoss(decoder)(tokens, targets, documents, positions)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in decoder.named_parameters()}
    decoder.zero_grad()
    logits = decoder(tokens, positions_BT=positions, attention=DenseAttention(documents))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, parameter in decoder.named_parameters():
        difference = (gradients[name] - parameter.grad).abs().max()
        assert difference <= 1e-5 * parameter.grad.abs().max(), name


def test_rows_without_targets_cost_nothing(decoder):
    tokens, targets, documents, positions = make_batch(2, 40)
    loss = LanguageModelLoss(decoder)
    with torch.no_grad():
        first = loss(tokens[:1], targets[:1], documents[:1], positions[:1])
        targets[1] = IGNORED
        assert loss(tokens, targets, documents, positions) == pytest.approx(first.item(), rel=1e-6)
        assert loss(tokens[1:], targets[1:], documents[1:], positions[1:]).item() == 0.0


def test_the_sum_does_not_depend_on_how_rows_are_batched(decoder):
    batch = make_batch(4, 64)
    loss = LanguageModelLoss(decoder)
    with torch.no_grad():
        whole = loss(*batch).item()
        parts = sum(loss(*(part[row : row + 1] for part in batch)).item() for row in range(4))
    assert whole == pytest.approx(parts, rel=1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "capped"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("rows", [7, 256, 700])
def test_our_chunks_are_the_plain_cross_entropy(softcap, bias, rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 24, generator=generator, requires_grad=True)
    weight = torch.randn(50, 24, generator=generator, requires_grad=True)
    head_bias = torch.randn(50, generator=generator, requires_grad=True) if bias else None
    targets = torch.randint(0, 50, (rows,), generator=generator)
    targets[::3] = IGNORED
    inputs = [x, weight, *([head_bias] if head_bias is not None else [])]
    options = {"first": 0, "group": None, "ignored": IGNORED, "chunk_rows": 256}
    loss = chunked_cross_entropy(x, weight, targets, bias_V=head_bias, softcap=softcap, **options)
    actual = torch.autograd.grad(loss * 0.25, inputs)
    logits = F.linear(x, weight, head_bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(actual, torch.autograd.grad(expected * 0.25, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_is_not_rounded_to_half_precision(decoder, dtype):
    """A sum in bf16 has 8 bits, and one in fp16 ends at 65,504: 160 rows of 128 tokens are beyond it."""
    batch = make_batch(160, 128)
    with torch.no_grad():
        expected = LanguageModelLoss(decoder)(*batch)
        with torch.autocast("cpu", dtype=dtype):
            actual = LanguageModelLoss(decoder)(*batch)
        halved = Decoder(decoder.config).to(dtype)
        halved.load_state_dict(decoder.state_dict())
        pure = LanguageModelLoss(halved)(*batch)
    for loss in (actual, pure):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    assert expected / (batch[1] != IGNORED).sum() == pytest.approx(5.77, abs=0.02)
