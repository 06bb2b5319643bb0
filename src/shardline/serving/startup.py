"""Opens a folder for serving, and says what that took and what was decided.

opened = open_engine("path/to/model", EngineConfig())
print("\\n".join(opened.lines()))
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from shardline.checkpoints.huggingface import read_generation_config
from shardline.checkpoints.native import find_model_folder
from shardline.kernels import Linear, proven_sizes
from shardline.models.decoder import Decoder
from shardline.serving.engine import Engine, EngineConfig
from shardline.serving.loading import open_decoder, open_draft
from shardline.serving.protocol import read_defaults
from shardline.serving.requests import Request, SamplingParams
from shardline.text.tokenizer import Tokenizer

__all__ = ["OpenedEngine", "open_engine"]


@dataclass(frozen=True, kw_only=True)
class OpenedEngine:
    """An engine that has run once. `defaults` are the sampling values that requests inherit.

    proof    which tiles batch-invariant products run in, where they do
    """

    engine: Engine
    defaults: dict[str, Any]
    defaults_reason: str
    phases_s: dict[str, float]
    proof: str | None = None

    def lines(self, *, imports_s: float = 0.0) -> list[str]:
        """Returns the start-up report for people."""
        phases = ", ".join(
            f"{name} {seconds:.1f} s" for name, seconds in {"imports": imports_s, **self.phases_s}.items()
        )
        lines = [f"phases     {phases}", *self.engine.budget.lines(), f"sampling   {self.defaults_reason}"]
        if self.proof is not None:
            lines.append(f"invariant  {self.proof}")
        if self.engine.adapters is not None:
            size = self.engine.adapters.num_bytes / 2**20
            lines.append(f"adapters   {', '.join(self.engine.adapters.names)} ({size:.1f} MiB)")
        return lines


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
    proof = None
    if config.batch_invariant:
        assert isinstance(decoder, Decoder), "open_decoder refuses tensor parallelism in this mode"
        proof = _prove(decoder)
        done("proof")
    engine.generate([Request(request_id="warm-up", prompt_token_ids=(0,), sampling=SamplingParams(max_tokens=1))])
    done("warm-up")
    defaults, reason = _choose_defaults(folder, generation_config)
    SamplingParams(**defaults)  # a folder with values that no request could use is refused now
    return OpenedEngine(engine=engine, defaults=defaults, defaults_reason=reason, phases_s=phases_s, proof=proof)


def _prove(decoder: Decoder) -> str:
    """Finds out, for every shape of the model's weights, which numbers of rows give a row the same bits."""
    weights = [module.weight for module in decoder.modules() if isinstance(module, Linear)]
    plain = [weight for weight in (*weights, decoder.head_weight) if isinstance(weight, Tensor)]
    sizes = {tuple(weight.shape): proven_sizes(weight) for weight in plain}
    least = min((found[-1] for found in sizes.values()), default=None)
    if least is None:
        return "all products are those of quantised weights"
    if least == 1:
        slow = [shape for shape, found in sizes.items() if found == (1,)]
        return f"SLOW: rows go one by one for weights of the shapes {slow}, whose library orders sums by the batch"
    return f"products run in tiles of up to {least} rows, which give the same bits here for all {len(sizes)} shapes"


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
