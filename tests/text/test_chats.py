from __future__ import annotations

from pathlib import Path

import pytest

from shardline.config import UsageError
from shardline.text.chats import encode_chat_for_training
from shardline.text.tokenizer import Tokenizer

from .conftest import save_bpe

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does the fox do?"},
    {"role": "assistant", "content": "It jumps over the dog."},
    {"role": "user", "content": "And the dog?"},
    {"role": "assistant", "content": "It sleeps \U0001f600"},
]
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
NO_END_TOKEN = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
REWRITES = "{{ messages | length }}" + NO_END_TOKEN


def said_text(tokenizer: Tokenizer, messages: list[dict]) -> str:
    ids, said = encode_chat_for_training(tokenizer, messages)
    assert ids.tolist() == tokenizer.encode_chat(messages, add_generation_prompt=False)
    return tokenizer.decode(ids[said].tolist(), skip_special_tokens=False)


def test_chatml_says_the_replies_and_their_end_tokens(bpe: Tokenizer, byte: Tokenizer):
    for tokenizer in (bpe, byte):
        expected = "It jumps over the dog.<|im_end|>It sleeps \U0001f600<|im_end|>"
        assert said_text(tokenizer, CHAT) == expected


def test_what_serving_is_asked_comes_right_before_what_is_said(bpe: Tokenizer):
    ids, said = encode_chat_for_training(bpe, CHAT)
    prompt = bpe.encode_chat(CHAT[:4], add_generation_prompt=True)
    assert ids[: len(prompt)].tolist() == prompt
    assert said[len(prompt)]
    assert not said[len(prompt) - 1]


def test_a_reply_that_begins_with_a_newline(bpe: Tokenizer, byte: Tokenizer):
    chat = [CHAT[1], {"role": "assistant", "content": "\n\nx"}]
    assert said_text(byte, chat) == "\n\nx<|im_end|>"
    assert said_text(bpe, chat).endswith("x<|im_end|>"), "a token shared with the template is nobody's"
    assert "assistant" not in said_text(bpe, chat)


def test_templates_with_other_ends(tmp_path: Path):
    tokenizer = Tokenizer.load(save_bpe(tmp_path / "a", chat_template=LLAMA2))
    assert said_text(tokenizer, CHAT[1:]) == " It jumps over the dog. <|im_end|> It sleeps \U0001f600 <|im_end|>"
    tokenizer = Tokenizer.load(save_bpe(tmp_path / "b", chat_template=NO_END_TOKEN))
    assert said_text(tokenizer, CHAT[1:3]).strip() == "It jumps over the dog."


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path: Path):
    tokenizer = Tokenizer.load(save_bpe(tmp_path, chat_template=REWRITES))
    with pytest.raises(UsageError, match=r"renders message 2 differently from the prompt it would answer"):
        encode_chat_for_training(tokenizer, CHAT)


def test_a_chat_without_a_reply_is_refused(bpe: Tokenizer):
    with pytest.raises(UsageError, match="no message of the role 'assistant'"):
        encode_chat_for_training(bpe, CHAT[:2])
