"""The terminal's conversation: history, interruption, and what the command prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serving.tiny_models import make_engine
from shardline.serving.conversation import Conversation
from shardline.serving.errors import RequestError

SAMPLING = {"temperature": 0.0, "max_tokens": 12}


def test_the_history_is_part_of_the_next_prompt():
    conversation = Conversation(make_engine(), sampling=SAMPLING, system="Be brief.")
    first = conversation.ask("one")
    second = conversation.ask("two")
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert second.num_prompt_tokens > first.num_prompt_tokens + len("two")
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert conversation.ask("one").reply == first.reply


def test_ctrl_c_stops_the_reply_and_keeps_the_conversation():
    engine = make_engine()
    conversation = Conversation(engine, sampling={**SAMPLING, "max_tokens": 100})
    pieces: list[str] = []

    def press_ctrl_c_at_the_third(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    turn = conversation.ask("go on", on_text=press_ctrl_c_at_the_third)
    assert turn.finish_reason == "interrupted"
    assert turn.reply == "".join(pieces)
    assert conversation.messages[-1] == {"role": "assistant", "content": turn.reply}
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert conversation.ask("again").num_tokens > 0


def test_a_conversation_that_outgrows_the_context_says_so_and_stays_usable():
    conversation = Conversation(make_engine(max_model_len=64), sampling=SAMPLING)
    with pytest.raises(RequestError, match="context holds 64 tokens"):
        conversation.ask("x" * 100)
    assert conversation.messages == []
    assert conversation.ask("x").num_tokens > 0


def test_the_command_talks_until_exit(tiny_folder: Path):
    command = [sys.executable, "-m", "shardline", "chat", str(tiny_folder), "--temperature", "0", "--max-tokens", "5"]
    typed = "\n".join(["Hello", "/nonsense", "x" * 600, "/reset", "Hello", "/exit", ""])
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("5 tokens, first after") == 2
    assert "/nonsense is not a command" in done.stdout
    assert "context holds 512 tokens" in done.stdout
