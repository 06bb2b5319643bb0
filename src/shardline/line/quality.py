"""What smaller weights or a smaller KV cache cost: the served distribution against the full model's, on real text.

    config = EngineConfig(quantization="int4", kv_cache_dtype="int8")
    quality = measure_quality(folder, documents=documents, config=config)
    quality.kl_mean, quality.num_flips, quality.perplexity_full, quality.perplexity_served

The full model is the decoder in fp32 over whole documents. The served side is the real engine, which gets each document
as a prompt in small chunks, so its paged cache is written and read on the way; whole distributions are compared, at
every position.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardline.checkpoints.huggingface import load_decoder
from shardline.config.errors import ShardlineError, UsageError
from shardline.models.attention import DenseAttention
from shardline.models.decoder import Decoder
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.loading import open_decoder
from shardline.serving.quantize import quantization_of
from shardline.serving.requests import Request, SamplingParams
from shardline.text.tokenizer import Tokenizer

__all__ = ["Quality", "measure_quality"]

_CHUNK_TOKENS = 96


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Over all positions but each document's last.

    kl_mean, kl_max    KL divergence of the served distribution from the full one, in nats
    num_flips          positions where the likeliest token is another
    perplexity_*       exp of the mean -log p of the text's next token
    weights_bytes_*, kv_bytes_per_token_*
    """

    num_positions: int
    kl_mean: float
    kl_max: float
    num_flips: int
    perplexity_full: float
    perplexity_served: float
    weights_bytes_full: int
    weights_bytes_served: int
    kv_bytes_per_token_full: int
    kv_bytes_per_token_served: int

    def lines(self) -> list[str]:
        """Returns the measurement for people."""
        flips = f"{self.num_flips} of {self.num_positions} positions ({self.num_flips / self.num_positions:.2%})"
        weights = f"{self.weights_bytes_full / 2**20:.1f} -> {self.weights_bytes_served / 2**20:.1f} MiB"
        kv = f"{self.kv_bytes_per_token_full:,} -> {self.kv_bytes_per_token_served:,} bytes a token"
        change = self.perplexity_served / self.perplexity_full - 1
        return [
            f"quality     KL to the full model: mean {self.kl_mean:.5f}, largest {self.kl_max:.4f} nats",
            f"argmax      another token is the likeliest at {flips}",
            f"perplexity  {self.perplexity_full:.3f} full, {self.perplexity_served:.3f} served ({change:+.2%})",
            f"memory      weights {weights}, KV cache {kv}",
        ]


def measure_quality(
    folder: str | Path, *, documents: Sequence[Sequence[int]], config: EngineConfig, full: str | Path | None = None
) -> Quality:
    """Returns how far serving `folder` with `config` is from the full model: `full`, or the same folder in fp32."""
    if full is None and quantization_of(folder) is not None:
        raise UsageError(f"{folder} holds quantised weights; name the model it was made from with --against FOLDER.")
    longest = max(map(len, documents))
    config = dataclasses.replace(config, max_num_seqs=1, max_num_batched_tokens=_CHUNK_TOKENS, max_model_len=longest)
    tokenizer = Tokenizer.load(folder)
    reference = load_decoder(full or folder)
    plain = Engine(reference, tokenizer, EngineConfig(max_num_seqs=1, max_model_len=longest)).budget
    served = open_decoder(folder, config)
    assert isinstance(served, Decoder), "verify has no flag for tensor parallelism"
    engine = Engine(served, tokenizer, config)
    kl, flips, full_nll, served_nll = [], 0, 0.0, 0.0
    for index, document in enumerate(documents):
        targets_T1 = torch.tensor(document[1:]).unsqueeze(1)
        full_TV = _full_logprobs(reference, document)
        served_TV = _served_logprobs(engine, served, str(index), document)
        kl.append((full_TV.exp() * (full_TV - served_TV)).sum(-1))
        flips += int((full_TV.argmax(-1) != served_TV.argmax(-1)).sum())
        full_nll -= full_TV.gather(1, targets_T1).sum().item()
        served_nll -= served_TV.gather(1, targets_T1).sum().item()
    kl_T = torch.cat(kl)
    if not kl_T.isfinite().all():
        raise ShardlineError("The served distribution is not finite; these weights can't be served in this form.")
    count = len(kl_T)
    return Quality(
        num_positions=count,
        kl_mean=kl_T.mean().item(),
        kl_max=kl_T.max().item(),
        num_flips=flips,
        perplexity_full=math.exp(full_nll / count),
        perplexity_served=math.exp(served_nll / count),
        weights_bytes_full=plain.weights_bytes,
        weights_bytes_served=engine.budget.weights_bytes,
        kv_bytes_per_token_full=plain.bytes_per_token,
        kv_bytes_per_token_served=engine.budget.bytes_per_token,
    )


@torch.inference_mode()
def _full_logprobs(decoder: Decoder, document: Sequence[int]) -> Tensor:
    tokens_BT = torch.tensor([list(document)])
    positions_BT = torch.arange(len(document)).unsqueeze(0)
    return decoder(tokens_BT, positions_BT=positions_BT, attention=DenseAttention())[0, :-1].log_softmax(-1)


def _served_logprobs(engine: Engine, decoder: Decoder, name: str, document: Sequence[int]) -> Tensor:
    """Returns the logits that the engine's head gave while it scored the document, which go by in its order."""
    rows: list[Tensor] = []
    hook = _Heard(decoder, rows)
    try:
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=0)
        [answer] = engine.generate([Request(request_id=name, prompt_token_ids=tuple(document), sampling=sampling)])
    finally:
        hook.remove()
    if answer.error is not None:
        raise ShardlineError(f"The engine could not score document {name}: {answer.error}")
    logits_TV = torch.cat(rows)
    assert len(logits_TV) == len(document) - 1, (len(logits_TV), len(document))
    return logits_TV.float().log_softmax(-1)


class _Heard:
    """Keeps what a decoder's head returns while it is there."""

    def __init__(self, decoder: Decoder, rows: list[Tensor]) -> None:
        self._decoder = decoder
        head = decoder.head

        def listen(x: Tensor) -> Tensor:
            logits = head(x)
            rows.append(logits.clone())
            return logits

        decoder.head = listen  # type: ignore[method-assign]

    def remove(self) -> None:
        del self._decoder.head  # the class has it still
