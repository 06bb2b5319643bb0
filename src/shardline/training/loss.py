"""The loss, with one meaning in every layout: sum over tokens / valid tokens of the *global* batch.

`LanguageModelLoss` returns the sum; whoever knows the global count divides. It wraps the decoder so that hidden
states, head and loss lie in one forward pass, which sharded data parallelism needs.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import LinearCrossEntropyOptions

from shardline.kernels import is_batch_invariant
from shardline.models.attention import DenseAttention
from shardline.models.decoder import Decoder, DecoderLayer
from shardline.models.feedforward import BalanceLoss
from shardline.parallel.tensor import TensorParallel
from shardline.parallel.vocabulary import chunked_cross_entropy

__all__ = ["IGNORED", "LanguageModelLoss", "document_lengths"]

IGNORED = -100
"""The target of a position that has none: padding, the last token of a document, a user's turn in a chat."""

# Rows of logits at a time. Of the unchunked time and memory 256 takes 0.67 and 0.4 (49,152 words, one AVX2 core);
# PyTorch's own choice ("auto") 1.6 times the time (docs/decisions/0003).
_CHUNK_ROWS = 256


class LanguageModelLoss(nn.Module):
    """Cross-entropy of the next token, summed. Logits exist only a chunk at a time, never for the whole batch.

    tensor             how the decoder is cut over tensor-parallel ranks, if it is
    is_first, is_last  of the pipeline's stages; one alone is both
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        tensor: TensorParallel | None = None,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        super().__init__()
        self.decoder = decoder
        self._tensor = tensor if tensor is not None and tensor.size > 1 else None
        self._is_first, self._is_last = is_first, is_last

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        documents_BT: Tensor | None,
        positions_BT: Tensor,
        scale: float | None = None,
        x_BTD: Tensor | None = None,
    ) -> Tensor:
        """Returns the scalar sum of -log p(target) over targets that are not `IGNORED`: fp32, or fp64 in the mode.

        Without `documents_BT` each row is one document, all of it real, and attention is plainly causal.
        A stage that is not the first takes `x_BTD` from the one before; one that is not the last returns it.

        With `scale`, what the caller multiplies the sum by, the gradients of mixtures of experts get their
        load-balancing loss too; the sum that is returned never contains it.
        """
        config, tensor = self.decoder.config, self._tensor
        if self._is_first:
            x_BTD = self.decoder.embed(tokens_BT, positions_BT=positions_BT)
            x_BTD = tensor.enter(x_BTD) if tensor else x_BTD
        assert x_BTD is not None
        attention = DenseAttention(documents_BT)
        for layer in self.decoder.model.layers:  # now, since a compiled layer can't build its mask
            spec = cast(DecoderLayer, layer).self_attn.spec
            attention.mask(spec, length=targets_BT.shape[1], device=targets_BT.device)
        x_BTD = self.decoder.run_layers(
            x_BTD,
            positions_BT=positions_BT,
            attention=attention,
            lengths_BT=self._lengths(positions_BT, documents_BT) if config.rope.depends_on_length else None,
            balance=self._balance(targets_BT, documents_BT, scale) if config.num_experts and scale else None,
        )
        if not self._is_last:
            return x_BTD
        x_BTD = self.decoder.finish(x_BTD)
        if tensor is not None:
            return tensor.cross_entropy(
                tensor.leave(x_BTD).flatten(0, 1), targets_BT.flatten(), ignored=IGNORED, chunk_rows=_CHUNK_ROWS
            )
        x_RD, targets_R = x_BTD.flatten(0, 1), targets_BT.flatten()
        if is_batch_invariant():
            return self._fixed_order_sum(x_RD, targets_R)
        if config.final_softcap is None and _is_fp32(x_RD):
            return F.linear_cross_entropy(
                x_RD,
                self.decoder.head_weight,
                targets_R,
                linear_bias=self.decoder.head_bias,
                reduction="sum",
                ignore_index=IGNORED,
                options=LinearCrossEntropyOptions(batch_chunk_size=_CHUNK_ROWS),
            )
        return chunked_cross_entropy(  # PyTorch's has no cap, and returns its sum in half precision
            x_RD,
            self.decoder.head_weight,
            targets_R,
            bias_V=self.decoder.head_bias,
            softcap=config.final_softcap,
            first=0,
            group=None,
            ignored=IGNORED,
            chunk_rows=_CHUNK_ROWS,
        )

    def _fixed_order_sum(self, x_RD: Tensor, targets_R: Tensor) -> Tensor:
        """The sum, in fp64, over the log-probabilities that serving in the same mode gives, bit for bit."""
        total = torch.zeros((), dtype=torch.float64, device=x_RD.device)
        for x, targets in zip(x_RD.split(_CHUNK_ROWS), targets_R.split(_CHUNK_ROWS), strict=True):
            valid = targets != IGNORED
            logprobs = self.decoder.head(x[valid]).float().log_softmax(-1)
            total = total - logprobs.gather(1, targets[valid].unsqueeze(1)).double().sum()
        return total

    def _lengths(self, positions_BT: Tensor, documents_BT: Tensor | None) -> Tensor:
        if documents_BT is None:
            return torch.full_like(positions_BT, positions_BT.shape[1])
        return document_lengths(documents_BT)

    def _balance(self, targets_BT: Tensor, documents_BT: Tensor | None, scale: float) -> BalanceLoss:
        """Each row counts by its targets, and each routed layer alike, so that the total is a mean over tokens."""
        config = self.decoder.config
        num_routed = sum(config.routes(layer) for layer in range(config.num_layers))
        weight_B = (targets_BT != IGNORED).sum(1) * (config.router_loss_coefficient * scale / num_routed)
        real_BT = torch.ones_like(targets_BT, dtype=torch.bool) if documents_BT is None else documents_BT >= 0
        return BalanceLoss(real_BT=real_BT, weight_B=weight_B)


def _is_fp32(x: Tensor) -> bool:
    return x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)


def document_lengths(documents_BT: Tensor) -> Tensor:
    """Returns lengths_BT: how many tokens of its row each token's document has (padding counts as a document)."""
    same_BTT = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
    return same_BTT.sum(-1)
