"""Opens a folder for serving, and says what that took and what was decided.

opened = open_engine("path/to/model", EngineConfig())
print("\\n".join(opened.lines()))
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardline.checkpoints.huggingface import read_generation_config
from shardline.checkpoints.native import find_model_folder
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.loading import open_decoder, open_draft
from shardline.serving.protocol import read_defaults
from shardline.serving.requests import Request, SamplingParams
from shardline.text.tokenizer import Tokenizer

__all__ = ["OpenedEngine", "open_engine"]


@dataclass(frozen=True, kw_only=True)
class OpenedEngine:
    """An engine that has run once. `defaults` are the sampling values that requests inherit."""

    engine: Engine
    defaults: dict[str, Any]
    defaults_reason: str
    phases_s: dict[str, float]

    def lines(self, *, imports_s: float = 0.0) -> list[str]:
        """Returns the start-up report for people."""
        phases = ", ".join(
            f"{name} {seconds:.1f} s" for name, seconds in {"imports": imports_s, **self.phases_s}.items()
        )
        return [f"phases     {phases}", *self.engine.budget.lines(), f"sampling   {self.defaults_reason}"]


def open_engine(
    folder: str | Path, config: EngineConfig, *, generation_config: Literal["auto", "none"] = "auto"
) -> OpenedEngine:
    """Loads a model (its folder, a checkpoint's or a run's newest) and runs one token through it.

    Raises `ShardlineError` with one sentence where it can't.
    """
    phases_s: dict[str, float] = {}
    mark_s = time.monotonic()

    def done(name: str) -> None:
        nonlocal mark_s
        now_s = time.monotonic()
        phases_s[name], mark_s = now_s - mark_s, now_s

    folder = find_model_folder(folder)
    tokenizer = Tokenizer.load(folder)
    done("tokenizer")
    decoder = open_decoder(folder, config)
    done("weights")
    engine = Engine(decoder, tokenizer, config, draft=open_draft(config))
    done("kv cache")
    engine.generate([Request(request_id="warm-up", prompt_token_ids=(0,), sampling=SamplingParams(max_tokens=1))])
    done("warm-up")
    defaults, reason = _choose_defaults(folder, generation_config)
    SamplingParams(**defaults)  # a folder with values that no request could use is refused now
    return OpenedEngine(engine=engine, defaults=defaults, defaults_reason=reason, phases_s=phases_s)


def _choose_defaults(folder: str | Path, generation_config: Literal["auto", "none"]) -> tuple[dict[str, Any], str]:
    found = read_defaults(read_generation_config(folder))
    values = ", ".join(f"{name} = {value}" for name, value in found.items())
    if not found:
        return {}, "requests that set nothing get temperature = 1 (generation_config.json sets no sampling values)"
    if generation_config == "none":
        return {}, f"requests that set nothing get temperature = 1 (--generation-config none leaves out {values})"
    return found, (
        f"GENERATION_CONFIG.JSON IS APPLIED: requests that set nothing get {values} (--generation-config none: not)"
    )
