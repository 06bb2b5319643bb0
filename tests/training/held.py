"""Jobs that look at what ranks hold: bytes of tensors that are really there, and what autograd saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardline.config import RunConfig
from shardline.models.config import DecoderConfig
from shardline.parallel.data import local_tensor, owned_state
from shardline.parallel.world import World
from shardline.text.dataset import prepare_dataset
from shardline.text.tokenizer import byte_tokenizer
from shardline.training.trainer import Trainer


def _trainer(world: World, config: RunConfig, cache: Path, model: DecoderConfig) -> Trainer:
    rows, heldout = prepare_dataset(config.data, byte_tokenizer(), cache_dir=cache)
    return Trainer(config=config, world=world, architecture=model, rows=rows, heldout=heldout)


def held_bytes(world: World, config: RunConfig, cache: Path, model: DecoderConfig) -> dict[str, int]:
    """Returns this rank's bytes of weights and optimizer state after a step, and of gradients at its end."""
    trainer = _trainer(world, config, cache, model)
    held: dict[str, int] = {"pipeline_rank": trainer.layout.coordinates(world.rank)[0]}
    optimizer = trainer._optimizer
    forget = optimizer.zero_grad

    def count_gradients(*args: Any, **options: Any) -> None:
        gradients = [local_tensor(each.grad) for each in trainer.model.parameters() if each.grad is not None]
        held["gradients"] = sum(gradient.nbytes for gradient in gradients)
        forget(*args, **options)

    optimizer.zero_grad = count_gradients  # type: ignore[method-assign]
    trainer.train_step()
    held["weights"] = sum(local_tensor(each).nbytes for each in trainer.model.parameters())
    states = owned_state(optimizer).values()
    held["optimizer"] = sum(
        local_tensor(value).nbytes
        for state in states
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    )
    return held


def saved_bytes(world: World, config: RunConfig, cache: Path, model: DecoderConfig) -> int:
    """Returns the bytes that autograd saves in one forward pass on this rank, each storage once, without the loss."""
    trainer = _trainer(world, config, cache, model)
    weights = {local_tensor(each).untyped_storage().data_ptr() for each in trainer.model.parameters()}
    batch = next(iter(trainer._micro_batches()))
    tokens_BT, _, _, positions_BT = trainer._to_device(batch)
    documents_BT = torch.from_numpy(batch.documents_BT)
    (decoder,) = trainer.model._decoders.values()
    (tensor,) = trainer.model._tensors
    saved: dict[int, torch.Tensor] = {}

    def keep(found: torch.Tensor) -> torch.Tensor:
        address = found.untyped_storage().data_ptr()
        if address not in weights:
            saved[address] = found
        return found

    from shardline.models.attention import DenseAttention

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda found: found):
        x_BTD = tensor.enter(decoder.embed(tokens_BT, positions_BT=positions_BT))
        x_BTD = decoder.run_layers(x_BTD, positions_BT=positions_BT, attention=DenseAttention(documents_BT))
        x_BTD = tensor.leave(decoder.finish(x_BTD))
    keep(x_BTD)
    return sum(found.untyped_storage().nbytes() for found in saved.values())
