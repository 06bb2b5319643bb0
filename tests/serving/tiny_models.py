"""Tiny random models and engines over them, for the serving tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from shardline.checkpoints.huggingface import save_folder
from shardline.models.attention import DenseAttention
from shardline.models.config import DecoderConfig
from shardline.models.decoder import Decoder
from shardline.models.presets import preset
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.requests import Request, SamplingParams
from shardline.text.tokenizer import Tokenizer, byte_tokenizer

SCRIPTS = {
    "japanese": "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002",
    "korean": "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4",
    "emoji": "a \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 b \U0001f3f3\ufe0f\u200d\U0001f308!",
    "accents": "na\u00efve caf\u00e9",
}
"""Texts whose characters are several bytes, and so several tokens of the byte tokenizer."""


def tiny_config(tokenizer: Tokenizer, **changes: Any) -> DecoderConfig:
    """The `tiny` preset, made smaller still, over the byte tokenizer's vocabulary."""
    base = dataclasses.replace(
        preset("tiny"),
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_layers=3,
        head_dim=16,
        sliding_windows=(),
        eos_token_ids=tokenizer.eos_token_ids,
        max_position_embeddings=512,
    )
    return dataclasses.replace(base, **changes)


def make_decoder(config: DecoderConfig, *, seed: int = 0) -> Decoder:
    """Random weights, far enough from zero that a wrong term shows in the logits."""
    decoder = Decoder(config)
    decoder.initialize(seed=seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
    return decoder.eval()


def make_engine(decoder: Decoder | None = None, **limits: Any) -> Engine:
    tokenizer = byte_tokenizer()
    if decoder is None:
        decoder = make_decoder(tiny_config(tokenizer))
    return Engine(decoder, tokenizer, EngineConfig(**{"max_model_len": 256, "max_num_seqs": 8, **limits}))


def make_request(name: str, prompt: str | tuple[int, ...], **sampling: Any) -> Request:
    """A greedy request unless told otherwise; a text prompt is its bytes."""
    ids = tuple(prompt.encode()) if isinstance(prompt, str) else prompt
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling})
    return Request(request_id=name, prompt_token_ids=ids, sampling=params)


def save_tiny_folder(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    tokenizer = byte_tokenizer()
    config = tiny_config(tokenizer, **changes)
    save_folder(folder, config=config, tensors=make_decoder(config, seed=seed).state_dict(), tokenizer=tokenizer)
    return folder


@torch.no_grad()
def dense_logprobs(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """The trainer's log-probability of each token of `ids` but the first: shape [len(ids) - 1]."""
    tokens_BT = torch.tensor([ids])
    positions_BT = torch.arange(len(ids)).unsqueeze(0)
    logits_BTV = decoder(tokens_BT, positions_BT=positions_BT, attention=DenseAttention())
    return logits_BTV[0, :-1].log_softmax(-1).gather(1, tokens_BT[0, 1:, None]).squeeze(1)


class ScriptedTokens:
    """Stands in for a sampler: each request gets the tokens of its script, then zeros."""

    def __init__(self, scripts: dict[str, list[int]]) -> None:
        self.scripts = scripts

    def sample(self, logits_RV: torch.Tensor, sequences: list[Any]) -> list[Any]:
        from shardline.serving.sampler import Sampled

        def next_token(sequence: Any) -> int:
            script = self.scripts[sequence.request_id]
            return script[sequence.num_output_tokens] if sequence.num_output_tokens < len(script) else 0

        return [Sampled(next_token(sequence), True) for sequence in sequences]


class OneText(dict[str, list[int]]):
    """A script for every request, whatever its name: the same text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def __getitem__(self, name: str) -> list[int]:
        return list(self._text.encode())


def bos_tokenizer(*, chat_template: str | None) -> Tokenizer:
    """The byte tokenizer in Llama's manner: a BOS before every plain text, and one that the template writes itself."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = byte_tokenizer()._backend
    bos = "<|endoftext|>"
    backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="<|im_end|>")
    fast.chat_template = chat_template
    return Tokenizer(fast, name="the test's tokenizer")
