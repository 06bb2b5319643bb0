"""The moments of a step's peak against what a whole forward and backward pass allocates, for every family."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from planning.allocations import peak
from planning.small import FAMILY_MODELS
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.parallel.recompute import Recompute, recompute
from shardline.planning.activations import (
    Arithmetic,
    layer_backward_bytes,
    layer_bytes,
    layer_forward_bytes,
    outer_bytes,
)
from shardline.planning.kept import layer_memory
from shardline.planning.loss import loss_bytes
from shardline.planning.parameters import count_parameters
from shardline.training.loss import LanguageModelLoss

ROWS, LENGTH = 2, 384
NAMES = ("llama", "qwen3", "gemma2", "gemma3", "phi", "glm4", "chatglm", "gpt2", "opt", "bloom", "mixtral", "qwen3-moe")


def _wide(name: str) -> DecoderConfig:
    """The family's small model, wide enough that the tensors outweigh what is not counted."""
    model = FAMILY_MODELS[name]
    return dataclasses.replace(
        model,
        vocab_size=2000,
        hidden_size=192,
        num_heads=6,
        num_kv_heads=2 if model.num_kv_heads < model.num_heads else 6,
        head_dim=32,
        intermediate_size=512,
        expert_size=256,
        max_position_embeddings=LENGTH,
    )


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", NAMES)
def test_the_peak_of_a_pass(name: str, arithmetic: Arithmetic) -> None:
    model = _wide(name)
    dtype = torch.bfloat16 if arithmetic == "bf16" else torch.float32
    decoder = Decoder(model)
    decoder.initialize(seed=0)
    loss = LanguageModelLoss(decoder.to(dtype))
    tokens_BT = torch.randint(model.vocab_size, (ROWS, LENGTH))
    documents_BT = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    positions_BT = torch.arange(LENGTH).repeat(ROWS, 1)
    held: list[torch.Tensor] = []

    def forward() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arithmetic == "autocast"):
            held.append(loss(tokens_BT, tokens_BT, documents_BT, positions_BT, 1.0))

    in_forward, kept, _ = peak(forward)
    in_backward, _, _ = peak(lambda: held.pop().backward())
    shape = {"rows": ROWS, "sequence_length": LENGTH, "arithmetic": arithmetic}
    layers = range(model.num_layers)
    count = count_parameters(model)
    saved = outer_bytes(model, **shape) + sum(layer_bytes(model, layer=layer, **shape) for layer in layers)
    head_gradient = (count.head or count.embedding) * dtype.itemsize
    moments = {
        "forward": saved + layer_forward_bytes(model, layer=layers[-1], **shape),
        "loss": saved + head_gradient + loss_bytes(model, **shape),
        "backward": saved + head_gradient + layer_backward_bytes(model, layer=layers[-1], **shape),
    }
    assert max(in_forward, kept + in_backward) == pytest.approx(max(moments.values()), rel=0.05), moments


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bloom", "mixtral"])
def test_the_peak_of_a_pass_that_recomputes(name: str, kind: Recompute) -> None:
    """What is kept, to the percent; the peak, in backward, within 15 %: what a layer made again frees varies."""
    model = _wide(name)
    decoder = Decoder(model)
    decoder.initialize(seed=0)
    loss = LanguageModelLoss(decoder)
    recompute(decoder.model.layers, kind)
    tokens_BT = torch.randint(model.vocab_size, (ROWS, LENGTH))
    documents_BT = torch.zeros(ROWS, LENGTH, dtype=torch.int32)
    positions_BT = torch.arange(LENGTH).repeat(ROWS, 1)
    held: list[torch.Tensor] = []
    _, kept, _ = peak(lambda: held.append(loss(tokens_BT, tokens_BT, documents_BT, positions_BT, 1.0)))
    in_backward, _, _ = peak(lambda: held.pop().backward())
    layers = layer_memory(
        model,
        rows=ROWS,
        sequence_length=LENGTH,
        arithmetic="fp32",
        recompute=kind,
        sequence_ranks=1,
        block_bytes=1 << 40,
    )
    count = count_parameters(model)
    saved = outer_bytes(model, rows=ROWS, sequence_length=LENGTH, arithmetic="fp32")
    saved += sum(layer.kept for layer in layers) + 4 * (count.head or count.embedding)
    assert kept == pytest.approx(saved, rel=0.02)
    assert kept + in_backward == pytest.approx(saved + layers[-1].in_backward, rel=0.15)
