"""Published runs as jobs: what the planner says of each, beside what was measured.

    rows = read_rows("tests/planning/plan_truth.csv")
    predictions = [predict_row(row) for row in rows]        # in the file's order
    predictions[0].memory_gib, predictions[0].tokens_per_s_per_device, predictions[0].fits, predictions[0].skipped

A table leaves out what was the same in all of its publisher's runs: sources.yaml has that. What is still missing is
chosen as its authors would have: the cheapest recomputation that fits, the micro-batch with the most tokens a second.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from shardline.config.errors import UsageError
from shardline.hardware.catalogue import Device, device, device_names
from shardline.planning.cluster.engines import engine
from shardline.planning.cluster.job import ClusterLayout, Job
from shardline.planning.cluster.memory import estimate_memory
from shardline.planning.cluster.serving import decode_s, kv_bytes, runtime_names, weight_bytes
from shardline.planning.cluster.shape import ModelShape
from shardline.planning.cluster.time import estimate_time

__all__ = ["COLUMNS", "Prediction", "known_settings", "number", "predict_row", "read_rows", "row_job"]

GIB = 1 << 30
COLUMNS = (
    "source", "url_or_repo_path", "year", "hardware", "n_gpus", "model", "params_b", "layers", "hidden", "heads",
    "kv_heads", "ffn", "vocab", "seq", "global_batch", "micro_batch", "precision", "tp", "pp", "dp", "cp", "zero_stage",
    "offload", "recompute", "measured_tokens_per_s_per_gpu", "measured_tflops_per_gpu", "measured_mfu",
    "measured_mem_gib", "fits", "notes",
)  # fmt: skip
_DEVICES = (
    "gb300", "gb200", "b200", "h200", "h100", "a100", "v100", "a6000", "3090", "4090", "5090", "mi300x", "mi250x",
    "l40s", "l4", "a10", "v6e", "v5p", "v5e", "v4",
)  # fmt: skip
_MOST_MICRO = 16
_REPLY = 256  # tokens in the cache of a row that says nothing of it


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the planner says of one row. `skipped` says why a figure that was measured is not predicted."""

    memory_gib: float | None = None
    tokens_per_s_per_device: float | None = None
    fits: bool | None = None
    skipped: str | None = None
    job: Job | None = None
    assumed: tuple[str, ...] = ()

    def to_json(self, row: int) -> dict[str, Any]:
        return {
            "row": row,
            "memory_gib": self.memory_gib,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "fits": self.fits,
            "skipped": self.skipped,
            "assumed": list(self.assumed),
        }


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Returns the rows of a CSV file with these columns; raises `UsageError` when one that is needed is missing."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in ("hardware", "model", "n_gpus") if name not in (reader.fieldnames or ())]
            if missing:
                raise UsageError(f"{path} has no column {missing[0]!r}; its columns must be {', '.join(COLUMNS)}.")
            return [{key: (value or "").strip() for key, value in row.items() if key} for row in reader]
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}; give a CSV file.") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is no CSV file in UTF-8: {error}.") from error


def known_settings(row: dict[str, str]) -> bool:
    """Returns whether a row states its recomputation, ZeRO stage (or has one data rank) and dtype."""
    zero = row.get("zero_stage") or (row.get("dp") in ("1", "") and row.get("n_gpus") == "1")
    return bool(row.get("recompute") and zero and row.get("precision"))


def predict_row(row: dict[str, str]) -> Prediction:
    """Returns what the planner says of a row: memory as its publisher counts it, tokens/s of one device, whether it
    fits."""
    try:
        return _predict(row, _source(row))
    except UsageError as error:
        return Prediction(skipped=str(error))


def _predict(row: dict[str, str], source: dict[str, Any]) -> Prediction:
    if "unpacked" in row.get("notes", ""):
        return Prediction(skipped="rows were not packed, and their real lengths are not given")
    named = _find_device(row.get("hardware", ""))
    found = named or device("a100-80gb")
    shape = _shape(row, source)
    if isinstance(shape, str):
        return Prediction(skipped=shape)
    if _is_inference(row):
        return _predict_serving(row, shape, found, source)
    jobs = [
        job for split in _splits(row, shape, source, found) for job in _jobs({**row, **split}, shape, found, source)
    ]
    if not jobs:
        return Prediction(skipped="its sizes make no layout of that number of devices")
    job = _choose(jobs)
    memory = estimate_memory(job, measure=source.get("measure", "device"))
    in_use = estimate_memory(job)
    return Prediction(
        memory_gib=memory.expected_bytes / GIB,
        tokens_per_s_per_device=estimate_time(job).tokens_per_s_per_device if named else None,
        fits=in_use.fits if named else None,
        job=job,
        assumed=(*_assumed(row), *(() if named else ("hardware",))),
    )


def row_job(row: dict[str, str]) -> Job | None:
    """Returns the job that a training row is read as; None where it is not one."""
    return predict_row(row).job


def _choose(jobs: list[Job]) -> Job:
    fitting = [job for job in jobs if estimate_memory(job).fits]
    if not fitting:
        return min(jobs, key=lambda job: estimate_memory(job).expected_bytes)
    return max(fitting, key=lambda job: estimate_time(job).tokens_per_s_per_device)


def _assumed(row: dict[str, str]) -> Iterator[str]:
    for name in ("seq", "micro_batch", "recompute", "zero_stage", "precision", "tp", "layers"):
        if not row.get(name):
            yield name


def _splits(row: dict[str, str], shape: ModelShape, source: dict[str, Any], found: Device) -> Iterable[dict[str, str]]:
    """Yields what a row leaves out of its layout: nothing, or the tensor and pipeline sizes that its authors may have
    chosen."""
    count = _int(row.get("n_gpus")) or 1
    kind = source["engine"]
    if row.get("tp") or row.get("pp") or count == 1 or not (kind.startswith("megatron") or kind == "jax"):
        yield {}
        return
    tensors = [size for size in (1, 2, 4, 8, 16) if shape.num_heads % size == 0]
    stages = [1] if kind == "jax" else [size for size in range(1, 65) if shape.num_layers % size == 0]
    for tensor in tensors:
        if tensor > found.devices_per_node:
            continue
        for pipeline in stages:
            data = count // (tensor * pipeline)
            batch = _int(row.get("global_batch"))
            if data * tensor * pipeline == count and (not batch or batch % data == 0):
                yield {"tp": str(tensor), "pp": str(pipeline), "dp": str(data)}


def _jobs(row: dict[str, str], shape: ModelShape, found: Device, source: dict[str, Any]) -> Iterable[Job]:
    """Yields the jobs that a row may mean: one, when it leaves nothing out."""
    notes = row.get("notes", "")
    count = _int(row.get("n_gpus")) or 1
    tensor, pipeline, context = (_int(row.get(name)) or 1 for name in ("tp", "pp", "cp"))
    data = _int(row.get("dp")) or max(1, count // (tensor * pipeline * context))
    count = max(count, data * tensor * pipeline * context) if row.get("dp") else data * tensor * pipeline * context
    kind = source["engine"]
    virtual = _int(_after(notes, r"VPP=(\d+)")) or (2 if "Interleaved" in notes else 1)
    sp = tensor > 1 and (bool(source.get("sp")) or "+SP" in row.get("recompute", "")) and "no SP" not in notes
    zero, shard = _zero(row, source, data * context, found)
    layout = ClusterLayout(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=_int(_after(notes, r"EP=(\d+)")) or 1,
        zero=zero,
        shard=shard,
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        sequence_parallel=sp,
        async_tensor=bool(re.search(r"async ?tp", notes, re.IGNORECASE)),
    )
    sequence = _sequence(row, source)
    precision, adapter = _precision(row, source)
    local = _int(_after(notes, r"local batch (\d+)"))
    global_batch = _int(row.get("global_batch")) or (local * data if local else 0)
    flags = _torchtune_flags(notes)
    base = Job(
        shape=shape,
        device=found,
        num_devices=count,
        sequence_length=sequence,
        global_batch=max(1, global_batch or data * pipeline),
        micro_batch=1,
        layout=layout,
        precision=precision,
        engine=kind,
        optimizer="adamw_8bit" if re.search("8-bit AdamW|low-memory recipe", notes) else "adamw",
        offload=_offload(row.get("offload", "")),
        loss="chunked" if flags >= 3 or (kind == "torchtune" and not flags) else "whole",
        flash=bool(source.get("flash", True)),
        compiled=flags >= 2 if flags else bool(source.get("compiled")) and "eager" not in notes,
        adapter=adapter,
        adapter_parameters=_adapter(shape, source) if adapter else None,
        adapter_products=source.get("adapter", (8, "qv"))[1],
        fused_backward=flags >= 5 or "low-memory recipe" in notes,
        link_within=3e9 if "slow PCIe" in row.get("hardware", "") else None,  # a riser of four lanes, generation 3
        link_between=_between(row.get("hardware", ""), source, found),
    )
    micros = [_int(row.get("micro_batch"))]
    if micros == [0]:
        most = max(1, (global_batch or _MOST_MICRO * data) // data)
        if pipeline > 1 and local:
            micros = [max(1, local // (pipeline * virtual))]
        else:
            micros = [size for size in (1, 2, 4, 8, _MOST_MICRO) if size <= most]
    for micro in micros:
        batch = base.global_batch if global_batch else data * micro * (4 * pipeline if pipeline > 1 else 1)
        for recompute in _recompute(row, source):
            yield dataclasses.replace(
                base, micro_batch=micro, global_batch=max(batch, data * micro), recompute=recompute
            )


def _zero(row: dict[str, str], source: dict[str, Any], ranks: int, found: Device) -> tuple[int, int | None]:
    text = row.get("zero_stage", "")
    shard = min(ranks, found.devices_per_node) if "hybrid" in text.lower() else None
    if match := re.match(r"\d", text):
        return int(match[0]), shard
    if text:
        return 2, None  # "shard opt+grads"
    if ranks == 1:
        return 0, None
    return source.get("zero", 0 if engine(source["engine"]).gradients_persist else 3), None


def _recompute(row: dict[str, str], source: dict[str, Any]) -> list[Any]:
    text = row.get("recompute", "")
    if not text:
        return ["none", "full"] if source["engine"] == "torchtune" else ["none", "selective", "half", "full"]
    if "layer" in text:
        return ["half"]
    if text == "selective" and "selective" in source:
        return source["selective"]
    if "sharded_recompute" in source and _int(row.get("dp")) > 1:
        return [source["sharded_recompute"]]
    if text.startswith("selective") or text == "minimal":
        return ["selective"]
    return [text if text in ("none", "full") else "full"]


def _precision(row: dict[str, str], source: dict[str, Any]) -> tuple[Any, Any]:
    text, notes = row.get("precision", "").lower(), row.get("notes", "")
    lora = "lora" in text or "lora" in notes.lower()
    adapter = ("qlora" if "nf4" in text else "lora") if lora else ""
    if re.search(r"fp4", text) and "nf4" not in text:
        return "fp4_mixed", adapter
    if re.search(r"fp8|float8", text):
        return "fp8_mixed", adapter
    half = "fp16" if "fp16" in text and "bf16" not in text else "bf16"
    if "fp32" in text:
        return "fp32", adapter
    is_pure = "true" in text or text.startswith("pure") or (bool(source.get("pure")) and "mixed" not in text)
    return f"{half}_{'pure' if is_pure or adapter else 'mixed'}", adapter


def _adapter(shape: ModelShape, source: dict[str, Any]) -> float:
    rank, products = source.get("adapter", (8, "qv"))
    hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    sides = 2 * hidden + width + kv
    if products == "all":
        sides = 2 * (hidden + width) + 2 * (hidden + kv) + (3 if shape.gated else 2) * (hidden + shape.ffn_size)
    return float(shape.num_layers * rank * sides)


def _torchtune_flags(notes: str) -> int:
    """Returns how many of its README's cumulative flags are on; 0 where the row is not of that table."""
    order = ("baseline", "packed", "compile", "chunked", "activation checkpointing", "backward", "offload", "8-bit")
    match = re.search(r"cumulative flags: \+?([^;]*)", notes)
    if not match:
        return 0
    return next((i for i, word in enumerate(order) if word in match[1]), 0)


def _offload(text: str) -> frozenset[str]:
    if text == "cpu":
        return frozenset({"optimizer", "parameters"})
    names = {"opt_cpu": "optimizer", "param_cpu": "parameters", "act_cpu": "activations"}
    found = {names[part] for part in text.split("+") if part in names}
    return frozenset(found | ({"optimizer"} if "parameters" in found else set()))


def _sequence(row: dict[str, str], source: dict[str, Any]) -> int:
    if row.get("seq"):
        return _int(row["seq"])
    model = row.get("model", "").lower()
    if source.get("sequence") and "llama" not in model:
        return source["sequence"]
    if re.search(r"llama-?3", model):
        return 8192
    if re.search(r"llama-?2", model) and source["engine"] == "jax":
        return 4096
    return source.get("sequence", 2048)


def _shape(row: dict[str, str], source: dict[str, Any]) -> ModelShape | str:
    """Returns the model, or why there is none."""
    count = 1e9 * number(row.get("params_b"))
    layers, hidden = _int(row.get("layers")), _int(row.get("hidden"))
    model = row.get("model") or "model"
    if not hidden and "hidden_size" in _experts(model):
        return ModelShape.filled(name=model, **_experts(model))
    if not hidden:
        if not count:
            return "neither the model's dimensions nor its number of parameters is given"
        return ModelShape.from_parameters(count, name=model)
    ffn, experts = _int(row.get("ffn")), _experts(model)
    gated = bool(re.search(r"llama|mistral|mixtral|qwen|yi-|gemma|smollm|deepseek", model, re.IGNORECASE))
    if _int(_after(row.get("notes", ""), r"vocab (\d+)k")) == 250:
        row = {**row, "vocab": "250880"}
    given: dict[str, Any] = {
        "name": model,
        "family": "llama" if gated else "gpt",
        "num_layers": layers or None,
        "hidden_size": hidden,
        "num_heads": _int(row.get("heads")) or None,
        "num_kv_heads": _int(row.get("kv_heads")) or None,
        "ffn_size": ffn or None,
        "vocab_size": _int(row.get("vocab")) or None,
        "gated": gated,
        "tied": bool(re.match(r"(GPT|MPT|OPT|BLOOM|Falcon|gemma)", model, re.IGNORECASE))
        or bool(re.search(r"llama-3\.2|smollm", model, re.IGNORECASE)),
        "biases": not gated and "mpt" not in model.lower(),
        "learned_positions": _int(row.get("seq")) if re.match(r"(GPT|MPT)", model) else 0,
        **experts,
    }
    if given["vocab_size"] is None:
        given["vocab_size"] = _vocabulary(given, count, source)
    if layers == 0:
        per_layer = 12 * hidden * hidden
        estimate = (count - given["vocab_size"] * hidden) / per_layer
        stages = _int(row.get("pp")) or 1
        given["num_layers"] = max(stages, stages * round(estimate / stages))
    return ModelShape.filled(**given)


def _experts(model: str) -> dict[str, Any]:
    """Returns what is known of mixtures whose table gives none of it."""
    known = {
        "gpt-oss-120b": {
            "num_layers": 36, "hidden_size": 2880, "num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "ffn_size": 2880,
            "vocab_size": 201088, "num_experts": 128, "experts_per_token": 4, "expert_size": 2880, "gated": True,
        },
        "mixtral-8x7b": {"num_experts": 8, "experts_per_token": 2, "expert_size": 14336},
        "qwen3-30b-a3b": {
            "num_experts": 128, "experts_per_token": 8, "expert_size": 768, "head_dim": 128, "ffn_size": 6144,
        },
        "deepseek-v3": {
            "num_experts": 256, "experts_per_token": 8, "expert_size": 2048, "shared_size": 2048, "dense_layers": 3,
            "ffn_size": 18432, "head_dim": 128, "kv_lora": 512, "q_lora": 1536, "rope_dim": 64,
        },
    }  # fmt: skip
    return known.get(model.lower(), {})


def _vocabulary(given: dict[str, Any], count: float, source: dict[str, Any]) -> int:
    """Returns the vocabulary that the number of parameters leaves room for, or the publisher's."""
    hidden, layers = given["hidden_size"], given["num_layers"]
    usual = source.get("vocab", 51200)
    if not layers or not count:
        return usual
    room = (count - layers * 12 * hidden * hidden) / hidden
    # The count is rounded; only a vocabulary far larger than usual shows through that.
    return 250880 if room > 2.5 * usual else usual


def _find_device(text: str) -> Device | None:
    words = text.lower().replace("_", " ")
    name = next((name for name in _DEVICES if re.search(rf"(?<![a-z0-9]){name}(?![0-9])", words)), None)
    if name is None:
        match = re.search(r"(\d+\.\d+) ?gib", words)  # as its driver reports it, which tells devices apart
        return _with_memory(float(match[1])) if match else None
    if name in ("h100", "a100", "v100") and (match := re.search(r"(\d+) ?gb", words)):
        name = f"{name}-{match[1]}gb"
    if "pcie" in words and name.startswith("h100"):
        name = "h100-pcie"
    return device(name)


def _with_memory(gib: float) -> Device | None:
    found = [device(name) for name in device_names()]
    return next((each for each in found if abs(each.memory_gib / gib - 1) < 2e-3), None)


def _between(text: str, source: dict[str, Any], found: Device) -> float | None:
    if source.get("between"):
        return 1e9 * source["between"]
    if match := re.search(r"(\d+) ?Gb(?:ps|/s)", text):
        rate = float(match[1]) * 1e9 / 8
        return rate if "per GPU" in text or "RDMA" in text else rate / min(8, found.devices_per_node)
    return None


def _is_inference(row: dict[str, str]) -> bool:
    return bool(re.search(r"inference|serving", row.get("notes", ""), re.IGNORECASE))


def _predict_serving(row: dict[str, str], shape: ModelShape, found: Device, source: dict[str, Any]) -> Prediction:
    tensor = _int(row.get("tp")) or 1
    quantised = "nf4" in row.get("precision", "")
    batch = _int(row.get("global_batch")) or _int(row.get("micro_batch")) or 1
    weights = "nf4" if quantised else "bf16"
    memory = (weight_bytes(shape, weights) / tensor + kv_bytes(shape, _REPLY, tensor=tensor)) / GIB
    runtime = source["engine"] if source["engine"] in runtime_names() else "shardline"
    rate = 1 / decode_s(shape, found, batch=1, context=_REPLY, tensor=tensor, weights=weights, runtime=runtime)
    if "SERVING" in row.get("notes", ""):
        return Prediction(
            skipped="a server's memory depends on its profile run, and the row does not say how it was set"
        )
    if batch > 1 or row.get("global_batch"):
        return Prediction(memory_gib=memory, fits=memory * GIB <= found.memory_bytes)
    return Prediction(memory_gib=memory, tokens_per_s_per_device=rate, fits=memory * GIB <= found.memory_bytes)


@cache
def _sources() -> tuple[dict[str, Any], ...]:
    text = resources.files("shardline.planning.cluster").joinpath("sources.yaml").read_text(encoding="utf-8")
    data = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["sources"]
    known = {
        "match", "engine", "measure", "between", "vocab", "sequence", "sp", "compiled", "flash", "adapter", "zero",
        "pure", "selective", "sharded_recompute", "why",
    }  # fmt: skip
    for facts in data:
        assert set(facts) <= known, f"{facts['match']}: unknown keys {sorted(set(facts) - known)}"
    return tuple(data)


def _source(row: dict[str, str]) -> dict[str, Any]:
    for name in ("source", "url_or_repo_path"):
        text = row.get(name, "").lower()
        for facts in _sources():
            if facts["match"] and facts["match"].lower() in text:
                return {**facts, "engine": row.get("engine") or facts["engine"]}
    return {**_sources()[-1], "engine": row.get("engine") or "fsdp2"}


def _int(text: str | None) -> int:
    """Returns the first number of a cell, 0 for an empty one."""
    return int(number(text))


def number(text: str | None) -> float:
    """Returns the first number of a cell, 0 for an empty one; raises `UsageError` where there is none."""
    if not text:
        return 0.0
    match = re.search(r"\d[\d,]*(\.\d+)?", text)
    if match is None:
        raise UsageError(f"{text!r} is no number.")
    return float(match[0].replace(",", ""))


def _after(text: str, pattern: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
