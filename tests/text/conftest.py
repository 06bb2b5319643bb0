"""Small vocabularies of the kinds that real models have, built in code and saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardline.text.tokenizer import CHATML_TEMPLATE, Tokenizer, byte_tokenizer

CORPUS = [
    "def main():\n    for index in range(10):\n        print(index)\n",
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.\n",
    "caf\u00e9 na\u00efve \u4f60\u597d\u4e16\u754c \uc548\ub155\ud558\uc138\uc694 \U0001f600\U0001f680",
] * 4


def save_bpe(folder: Path, *, adds_bos: bool = False, chat_template: str | None = CHATML_TEMPLATE) -> Path:
    """Byte-level BPE: <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2 (the EOS), <s> 3 (the BOS)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def metaspace_backend(*, decoder: Any = None) -> Any:
    """The SentencePiece kind, as Llama 2 has it: byte fallback, a space before the first word, <s> added."""
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Backend

    words = ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,", "th", "the", "\u2581the", "\u2581a", "\u2581\u2581", "\u00e9"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "a"), ("\u2581", "\u2581")]
    backend = Backend(
        models.BPE(
            vocab={token: id for id, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoder or decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def fast_metaspace(**kind: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=metaspace_backend(**kind),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def byte() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_bpe(tmp_path_factory.mktemp("bpe")))


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    return Tokenizer(fast_metaspace(), name="metaspace")
