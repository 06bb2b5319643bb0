"""The decoder against transformers: logits, padding, packed documents, gradients, long contexts."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from models.oracle import CONFIGS, SIZES, make_oracle, save_oracle
from shardline.checkpoints.huggingface import load_decoder, load_tensors
from shardline.models.attention import DenseAttention
from shardline.models.decoder import Decoder
from shardline.models.presets import preset
from shardline.training.loss import document_lengths

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    theirs = save_oracle(request.param, folder)
    return theirs, load_decoder(folder)


def rows(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(7))
    return tokens, torch.arange(length).expand(batch, length)


def test_logits_equal_transformers_beyond_window_and_original_context(pair):
    theirs, ours = pair
    tokens, positions = rows(2, 40)
    with torch.no_grad():
        expected = theirs(tokens).logits
        actual = ours(tokens, positions_BT=positions, attention=DenseAttention())
    assert (actual - expected).abs().max() <= TOLERANCE


def test_left_padded_batch(pair):
    theirs, ours = pair
    tokens, _ = rows(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    documents = torch.where(mask.bool(), 0, -1)
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=mask, position_ids=positions).logits
        actual = ours(tokens, positions_BT=positions, attention=DenseAttention(documents))
    assert (actual - expected)[mask.bool()].abs().max() <= TOLERANCE
    assert actual.isfinite().all()


def test_packed_documents_do_not_see_each_other(pair):
    theirs, ours = pair
    lengths = [9, 4, 12]
    tokens, _ = rows(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]).unsqueeze(0)
    with torch.no_grad():
        actual = ours(
            tokens, positions_BT=positions, attention=DenseAttention(documents), lengths_BT=document_lengths(documents)
        )
        expected = torch.cat([theirs(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
    assert (actual - expected).abs().max() <= TOLERANCE


def test_gradient_of_every_parameter(pair, tmp_path):
    """Their gradients are written as if they were weights, so that the family's own table names and splits them."""
    theirs, ours = pair
    tokens, positions = rows(2, 10)
    theirs.zero_grad()
    ours.zero_grad()
    theirs(tokens).logits.square().mean().backward()
    ours(tokens, positions_BT=positions, attention=DenseAttention()).square().mean().backward()
    copy = deepcopy(theirs)
    with torch.no_grad():
        for target, source in zip(copy.parameters(), theirs.parameters(), strict=True):
            target.copy_(torch.zeros_like(target) if source.grad is None else source.grad)
    copy.save_pretrained(tmp_path)
    expected = load_tensors(tmp_path)
    assert expected.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        reference = expected[name]
        assert (parameter.grad - reference).abs().max() <= 1e-4 * reference.abs().max().clamp(min=1e-3), name


def test_windows_matter():
    """Guards the window tests above: with and without the window the oracle itself must differ."""
    tokens, _ = rows(1, 40)
    with torch.no_grad():
        windowed = make_oracle("mistral-window")(tokens).logits
        full = make_oracle("mistral-window", sliding_window=None)(tokens).logits
    assert (windowed - full)[:, 6:].abs().max() > 1e-2


def test_initialization_depends_on_the_seed_only():
    first, second, other = (Decoder(preset("tiny")) for _ in range(3))
    first.initialize(seed=1)
    second.initialize(seed=1)
    other.initialize(seed=2)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.ndim == 1 or not torch.equal(a, c), name
