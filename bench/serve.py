"""Throughput of the serving engine against other engines on the same machine, in alternation.

    python bench/serve.py                                         # W1 against transformers
    python bench/serve.py --vllm-python ENV/bin/python            # and W2, W3 against vLLM's CPU build
    python bench/serve.py --model FOLDER --workload W2 --rounds 3 --json out.json
    python bench/serve.py --overhead                              # the engine's own time a step
    python bench/serve.py --profile                               # where the time of a decode step goes

Workloads, greedy, fp32, every length fixed, all requests there at once:

    W1  1 request, 128 tokens in, 128 out
    W2  64 requests, 16 to 384 tokens in, 16 to 192 out
    W3  32 requests that share their first 512 tokens, 32 more in, 32 out

Each side is a process of its own that holds its model, and they take turns; while one works the other waits without
using the processor. A ratio compares neighbouring runs only. The prefix caches of both sides are emptied before each
run, and each round's prompts begin with another token, so that nothing can be left of the round before. vLLM gets an
environment of its own; its settings are those of its manual for CPUs. Without --model it is SmolLM2-135M-Instruct, as
`shardline demo` fetches it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Workload = list[dict[str, Any]]  # {"prompt": [token ids], "new": number of tokens to generate}

RIVALS = {"transformers": ("W1",), "vllm": ("W1", "W2", "W3")}
TARGETS = {("transformers", "W1"): 1.5, ("vllm", "W2"): 1.0, ("vllm", "W3"): 1.0}
ANSWERS = 1  # file descriptor of a process's answers


def make_workloads(folder: str) -> dict[str, Workload]:
    """Returns the workloads over the English text of Python's own manual."""
    from pydoc_data.topics import topics

    from shardline.text.tokenizer import Tokenizer

    text = re.sub(r"\s+", " ", " ".join(topics[name] for name in sorted(topics)))
    ids = Tokenizer.load(folder).encode(text[:400_000])
    rng = random.Random(0)

    def piece(length: int) -> list[int]:
        start = rng.randrange(len(ids) - length)
        return ids[start : start + length]

    def between(low: int, high: int, middle: float) -> int:
        return min(high, max(low, round(math.exp(rng.gauss(math.log(middle), 0.8)))))

    shared = piece(512)
    return {
        "W1": [{"prompt": piece(128), "new": 128}],
        "W2": [{"prompt": piece(between(16, 384, 110)), "new": between(16, 192, 64)} for _ in range(64)],
        "W3": [{"prompt": [*shared, *piece(32)], "new": 32} for _ in range(32)],
    }


class Side:
    """The process of one side."""

    def __init__(self, name: str, *, python: str, model: str, workloads: dict[str, Workload], log: Any) -> None:
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [python, __file__, "--work", name, "--model", model],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        self.load_s = self.ask(json.dumps(workloads))["load_s"]

    def ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise SystemExit(f"{self.name} ended early (exit code {self._process.wait()}); see the log")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def compare(ours: Side, rival: Side, workload: str, *, rounds: int) -> dict[str, Any]:
    """Runs one workload on both sides in turn and returns the figures."""
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "rival": []}
    for number in range(rounds):
        order = [("rival", rival), ("ours", ours)]
        for name, side in order if number % 2 == 0 else reversed(order):
            runs[name].append(side.ask(f"{workload} {number}"))
    ratios = [theirs["wall_s"] / mine["wall_s"] for theirs, mine in zip(runs["rival"], runs["ours"], strict=True)]
    tokens = sum(map(len, runs["ours"][0]["outputs"]))
    pairs = list(zip(runs["ours"][0]["outputs"], runs["rival"][0]["outputs"], strict=True))
    return {
        "workload": workload,
        "rival": rival.name,
        "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "tokens_per_s": {name: tokens / statistics.median(run["wall_s"] for run in runs[name]) for name in runs},
        "first_token_s": {name: statistics.median(run["first_token_s"] for run in runs[name]) for name in runs},
        "peak_bytes": {name: runs[name][-1]["peak_bytes"] for name in runs},
        "load_s": {"ours": ours.load_s, "rival": rival.load_s},
        "same_outputs": sum(a == b for a, b in pairs) / len(pairs),
        "target": TARGETS.get((rival.name, workload)),
        "runs": {name: [run["wall_s"] for run in runs[name]] for name in runs},
    }


def work(name: str, model: str) -> None:
    """One side: answers the workloads, then each name of one."""
    global ANSWERS
    ANSWERS = os.dup(1)
    os.dup2(2, 1)  # libraries that print do not answer
    workloads: dict[str, Workload] = json.loads(sys.stdin.readline())
    started_s = time.perf_counter()
    run = {"shardline": _shardline, "transformers": _transformers, "vllm": _vllm}[name](model)
    run([{"prompt": list(range(1000, 1016)), "new": 4}])
    tell({"load_s": time.perf_counter() - started_s})
    for line in sys.stdin:
        workload, number = line.split()
        items = [{**item, "prompt": [1000 + int(number), *item["prompt"][1:]]} for item in workloads[workload]]
        begun_s = time.perf_counter()
        outputs, first_token_s = run(items)
        tell(
            {
                "wall_s": time.perf_counter() - begun_s,
                "first_token_s": first_token_s,
                "outputs": outputs,
                "peak_bytes": _peak_bytes(),
            }
        )
    os._exit(0)


def tell(answer: dict[str, Any]) -> None:
    os.write(ANSWERS, json.dumps(answer).encode() + b"\n")


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def _shardline(model: str) -> Any:
    from shardline.serving.engine import EngineConfig, load_engine

    engine = load_engine(model, EngineConfig(max_model_len=1024, max_num_seqs=64, kv_cache_bytes=2 * 2**30))
    engine.kv_cache.clear(list(range(engine.budget.num_blocks + 1)))  # vLLM takes that memory at its start too
    return lambda workload: run_engine(engine, workload)


def submit(engine: Any, workload: Workload) -> None:
    from shardline.serving.requests import Request, SamplingParams

    engine.reset_prefix_cache()
    for index, item in enumerate(workload):
        sampling = SamplingParams(temperature=0.0, max_tokens=item["new"], ignore_eos=True)
        engine.add_request(Request(request_id=str(index), prompt_token_ids=tuple(item["prompt"]), sampling=sampling))


def run_engine(engine: Any, workload: Workload) -> tuple[list[list[int]], float]:
    outputs: list[list[int]] = [[] for _ in workload]
    begun_s, first_s = time.perf_counter(), []
    submit(engine, workload)
    while engine.has_unfinished:
        for output in engine.step():
            if not outputs[int(output.request_id)]:
                first_s.append(time.perf_counter() - begun_s)
            outputs[int(output.request_id)].extend(output.token_ids)
    return outputs, statistics.median(first_s)


def _transformers(model: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor

    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    class Clock(LogitsProcessor):
        def __init__(self) -> None:
            self.first_s: float | None = None

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.first_s = self.first_s or time.perf_counter()
            return scores

    def run(workload: Workload) -> tuple[list[list[int]], float]:
        begun_s, firsts, outputs = time.perf_counter(), [], []
        for item in workload:
            clock, prompt = Clock(), torch.tensor([item["prompt"]])
            config = GenerationConfig(max_new_tokens=item["new"], do_sample=False, eos_token_id=None, pad_token_id=0)
            with torch.inference_mode():
                found = decoder.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    generation_config=config,
                    logits_processor=[clock],
                )
            outputs.append(found[0, prompt.shape[1] :].tolist())
            firsts.append((clock.first_s or begun_s) - begun_s)
        return outputs, statistics.median(firsts)

    return run


def _vllm(model: str) -> Any:
    for key, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }.items():
        os.environ.setdefault(key, value)
    from vllm import LLM, SamplingParams  # pyrefly: ignore  it has an environment of its own

    llm = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=64, seed=0)
    engine = llm.llm_engine

    def run(workload: Workload) -> tuple[list[list[int]], float]:
        llm.reset_prefix_cache()
        outputs: list[list[int]] = [[] for _ in workload]
        begun_s, first_s = time.perf_counter(), {}
        for index, item in enumerate(workload):
            sampling = SamplingParams(temperature=0.0, max_tokens=item["new"], ignore_eos=True, detokenize=False)
            engine.add_request(str(index), {"prompt_token_ids": item["prompt"]}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                index = int(output.request_id.split("-")[0])
                first_s.setdefault(index, time.perf_counter() - begun_s)
                if output.finished:
                    outputs[index] = list(output.outputs[0].token_ids)
        return outputs, statistics.median(first_s.values())

    return run


def overhead() -> dict[str, Any]:
    """Milliseconds of a decode step in which no model works: scheduling, tensors, sampling, text, outputs."""
    import torch

    from shardline.models.decoder import Decoder
    from shardline.models.presets import preset
    from shardline.serving.engine import Engine, EngineConfig
    from shardline.text.tokenizer import byte_tokenizer

    class Null(Decoder):
        def hidden_states(self, tokens_BT: Any, **_: Any) -> Any:
            return torch.zeros(1, tokens_BT.shape[1], 1)

        def head(self, x: Any) -> Any:
            return torch.zeros(*x.shape[:-1], self.config.vocab_size)

    found = {}
    for batch in (1, 32):
        engine = Engine(Null(preset("tiny")), byte_tokenizer(), EngineConfig(max_model_len=512, max_num_seqs=32))
        seconds = []
        run_engine(engine, [{"prompt": [65] * 8, "new": 16}] * batch)
        step = engine.step

        def timed(step: Any = step, seconds: list[float] = seconds) -> Any:
            begun_s = time.perf_counter()
            outputs = step()
            seconds.append(time.perf_counter() - begun_s)
            return outputs

        engine.step = timed  # type: ignore[method-assign]
        run_engine(engine, [{"prompt": [65] * 8, "new": 256}] * batch)
        found[f"batch {batch}"] = 1000 * statistics.median(seconds[4:])
    return found


def profile(model: str) -> str:
    """A table of where the time of decode steps goes, at batch 1 and 32."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    from shardline.serving.engine import EngineConfig, load_engine

    engine = load_engine(model, EngineConfig(max_model_len=1024, max_num_seqs=64, kv_cache_bytes=2 * 2**30))
    lines = [f"{torch.get_num_threads()} threads"]
    for batch in (1, 32):
        prompts: Workload = [{"prompt": list(range(500 + 7 * i, 628 + 7 * i)), "new": 40} for i in range(batch)]
        run_engine(engine, prompts)
        submit(engine, prompts)
        while engine.scheduler.waiting or engine.last_schedule.num_tokens != batch:
            engine.step()
        begun_s = time.perf_counter()
        for _ in range(10):
            engine.step()
        step_s = (time.perf_counter() - begun_s) / 10
        with record(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(10):
                engine.step()
        events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)[:14]
        total = sum(event.self_cpu_time_total for event in found.key_averages())
        lines.append(
            f"\nbatch {batch}: {1000 * step_s:.1f} ms a step\n\n| operator | calls a step | share |\n|---|---|---|"
        )
        lines += [f"| `{e.key}` | {e.count / 10:.0f} | {e.self_cpu_time_total / total:.1%} |" for e in events]
        while engine.has_unfinished:
            engine.step()
    return "\n".join(lines)


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| workload | rival | speed ratio (least - most) | tokens/s, ours / rival | first token s, ours / rival "
        "| peak MB, ours / rival | load s, ours / rival | same outputs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        ratio = each["ratio"]
        pairs = {
            key: " / ".join(f"{each[key][side] / scale:,.{digits}f}" for side in ("ours", "rival"))
            for key, scale, digits in (
                ("tokens_per_s", 1, 1),
                ("first_token_s", 1, 2),
                ("peak_bytes", 1e6, 0),
                ("load_s", 1, 1),
            )
        }
        lines.append(
            f"| {each['workload']} | {each['rival']} | **{ratio['median']:.2f}** ({ratio['least']:.2f} - "
            f"{ratio['most']:.2f}) | {pairs['tokens_per_s']} | {pairs['first_token_s']} | {pairs['peak_bytes']} "
            f"| {pairs['load_s']} | {each['same_outputs']:.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder to serve (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--workload", action="append", choices=["W1", "W2", "W3"], help="may be given more than once")
    parser.add_argument("--rival", action="append", choices=RIVALS, help="may be given more than once")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side that are compared (default 3)")
    parser.add_argument("--overhead", action="store_true", help="measure the engine's own time a step")
    parser.add_argument("--profile", action="store_true", help="show where the time of decode steps goes")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--log", default=os.devnull, help="file for what the processes print as errors")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.model)
        return
    if args.overhead:
        print(json.dumps(overhead()))
        return
    if not args.model:
        from shardline.config.cache import cache_dir
        from shardline.line.smollm2 import fetch

        args.model = str(fetch(cache_dir()))
    if args.profile:
        print(profile(args.model))
        return
    rivals = args.rival or ["transformers", *(["vllm"] if args.vllm_python else [])]
    workloads = make_workloads(args.model)
    results = []
    with open(args.log, "w", encoding="utf-8") as log:
        common = {"model": args.model, "workloads": workloads, "log": log}
        ours = Side("shardline", python=sys.executable, **common)
        for name in rivals:
            rival = Side(name, python=args.vllm_python if name == "vllm" else sys.executable, **common)
            for workload in args.workload or RIVALS[name]:
                results.append(compare(ours, rival, workload, rounds=args.rounds))
                print(table(results[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
            rival.close()
        ours.close()
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    loads = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    print(
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {loads}"
    )
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
