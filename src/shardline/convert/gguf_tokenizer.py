"""The byte-level BPE vocabulary of a GGUF file as a tokenizer.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) and does not hold it. The table below has the ones that are
known; a file with another one is refused, since text would be cut, and so tokenised, in other places.
"""

from __future__ import annotations

from typing import Any

from shardline.config.errors import ShardlineError, UsageError, nearest
from shardline.text.tokenizer import Tokenizer

__all__ = ["PRE_TOKENIZERS", "build_tokenizer"]

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = "gpt-2"
_DIGITS = "single digits"
_LLAMA3 = _WORDS.format(digits=r"\p{N}{1,3}") + _REST
_QWEN2 = _WORDS.format(digits=r"\p{N}") + _REST
# How text is cut into words: GPT-2's way, GPT-2's way with each digit alone, or by a pattern.
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
}
_CONTROL, _USER_DEFINED = 3, 4


def build_tokenizer(fields: dict[str, Any], *, eos_token_ids: list[int], name: str) -> Tokenizer:
    """Returns the tokenizer that the keys `ggml.*` and `chat_template` of a GGUF file describe."""
    from transformers import PreTrainedTokenizerFast

    model = fields.get("ggml.model")
    if model != "gpt2":
        raise UsageError(
            f"{name}: the vocabulary is of the kind {model!r}; Shardline reads byte-level BPE ('gpt2') from GGUF. "
            "Convert from the model's Hugging Face folder instead."
        )
    tokens, merges = _strings(fields, "ggml.tokens", name), _strings(fields, "ggml.merges", name)
    special = {
        "bos_token": fields.get("ggml.bos_token_id"),
        "eos_token": fields.get("ggml.eos_token_id"),
        "unk_token": fields.get("ggml.unknown_token_id"),
        "pad_token": fields.get("ggml.padding_token_id"),
    }
    for key, id in special.items():
        if id is not None and not 0 <= id < len(tokens):
            raise ShardlineError(f"{name}: the {key} has the id {id}, but the vocabulary ends at {len(tokens) - 1}.")
    backend = _build_backend(fields, tokens, merges, name)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{key: tokens[id] for key, id in special.items() if id is not None},
    )
    fast.chat_template = fields.get("chat_template")
    return Tokenizer(fast, extra_eos_token_ids=eos_token_ids, name=name)


def _build_backend(fields: dict[str, Any], tokens: list[str], merges: list[str], name: str) -> Any:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    pre = fields.get("ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        raise UsageError(f"{name}: the pre-tokenizer {pre!r} is not known{nearest(str(pre), PRE_TOKENIZERS)}")
    rule = PRE_TOKENIZERS[pre]
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or any(not right or " " in right for _, right in pairs):
        raise ShardlineError(f"{name}: the vocabulary holds a token twice, or a merge of other than two tokens.")
    backend = Backend(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rule == _LLAMA3))
    if rule in (_GPT2, _DIGITS):
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        cut = [pre_tokenizers.Digits(individual_digits=True)] if rule == _DIGITS else []
    else:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        cut = [pre_tokenizers.Split(Regex(rule), behavior="isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cut, words])
    if rule == _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()

    kinds = fields.get("ggml.token_type") or []
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_tokens(added)
    bos = fields.get("ggml.bos_token_id")
    if bos is not None and fields.get("ggml.add_bos_token", rule == _LLAMA3):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]} $B",
            special_tokens=[(tokens[bos], bos)],
        )
    return backend


def _strings(fields: dict[str, Any], key: str, name: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ShardlineError(f"{name} has no list of strings under tokenizer.{key}, so text can't be tokenised.")
    return value
