"""Two processes serve one model: what they answer is what one would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.tiny_models import dense_logprobs, save_tiny_folder
from shardline.checkpoints.huggingface import load_decoder, save_folder
from shardline.config.errors import InfeasibleError
from shardline.serving.engine import EngineConfig, load_engine
from shardline.serving.launch import start_server

# In a process of its own: tensor-parallel ranks are a process group, and a test process has others.
SCRIPT = """
import dataclasses, json, sys
from serving.tiny_models import make_request
from shardline.config.errors import ShardlineError
from shardline.serving.engine import EngineConfig, load_engine

def main():
    folder, size, other = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    config = EngineConfig(max_model_len=96, max_num_seqs=4, max_num_batched_tokens=24, tensor_parallel_size=size)
    engine = load_engine(folder, config)
    prompts = ["the first prompt is the longest of all of them, by far", "short", "of middling length", "the first"]
    requests = [
        make_request(str(i), text, max_tokens=12, ignore_eos=True, logprobs=2, temperature=i % 2 * 0.7, seed=i,
                     prompt_logprobs=1 if i == 2 else None)
        for i, text in enumerate(prompts)
    ]
    found = [dataclasses.asdict(answer) for answer in engine.generate(requests)]
    try:
        engine.reload(sys.argv[4])
        raise SystemExit("a damaged folder was taken")
    except ShardlineError:
        pass
    assert [a.token_ids for a in engine.generate(requests[:1])] == [found[0]["token_ids"]]
    engine.reload(other)
    found += [dataclasses.asdict(answer) for answer in engine.generate(requests[:1])]
    weights = engine.budget.weights_bytes
    print(json.dumps({"answers": found, "weights": weights, "kv": engine.budget.bytes_per_token}))
    if size > 1:
        engine.decoder.close()

if __name__ == "__main__":
    main()
"""


def damaged(folder: Path) -> Path:
    """A copy in two files, of which the second ends too early."""
    copy = folder.parent / "damaged"
    if not copy.exists():
        decoder = load_decoder(folder)
        save_folder(copy, config=decoder.config, tensors=decoder.state_dict(), max_shard_bytes=100_000)
        last = max(copy.glob("model-*.safetensors"))
        last.write_bytes(last.read_bytes()[:-100])
    return copy


def run(folder: Path, size: int, other: Path) -> dict[str, Any]:
    script = folder.parent / "run.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), str(folder), str(size), str(other), str(damaged(other))],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="llama"),
        pytest.param({"num_heads": 4, "num_kv_heads": 1, "vocab_size": 263}, id="one-kv-head-odd-vocabulary"),
        pytest.param(
            {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "expert_size": 48, "qk_norm": True},
            id="experts",
        ),
    ],
)
def test_two_ranks_answer_as_one(tmp_path: Path, changes: dict[str, Any]):
    folder = save_tiny_folder(tmp_path / "model", **changes)
    other = save_tiny_folder(tmp_path / "other", **changes, seed=9)
    alone, together = run(folder, 1, other), run(folder, 2, other)
    assert together["weights"] < 0.6 * alone["weights"]
    for one, two in zip(alone["answers"], together["answers"], strict=True):
        assert two["token_ids"] == one["token_ids"]
        assert two["text"] == one["text"]
        assert two["logprobs"] == pytest.approx(one["logprobs"], abs=1e-5)
        assert two["prompt_logprobs"] == pytest.approx(one["prompt_logprobs"], abs=1e-5)
    assert alone["answers"][0]["token_ids"] != alone["answers"][-1]["token_ids"]
    if changes.get("num_kv_heads") != 1:
        assert together["kv"] * 2 == alone["kv"]
    decoder = load_decoder(folder)
    first = together["answers"][0]
    ids = [*b"the first prompt is the longest of all of them, by far", *first["token_ids"]]
    torch.testing.assert_close(torch.tensor(first["logprobs"]), dense_logprobs(decoder, ids)[-12:], atol=1e-5, rtol=0)


def test_a_model_that_can_not_be_shared_is_refused_with_the_equation(tmp_path: Path):
    folder = save_tiny_folder(tmp_path / "model")
    with pytest.raises(InfeasibleError, match=r"heads are not a multiple of parallel\.tensor = 3"):
        load_engine(folder, EngineConfig(max_model_len=64, tensor_parallel_size=3))


def test_a_server_of_two_ranks_serves_and_says_when_one_is_lost(tmp_path: Path):
    folder = save_tiny_folder(tmp_path / "model")
    arguments = ["--max-model-len", "64", "--max-num-seqs", "2", "--tensor-parallel-size", "2"]
    with start_server(folder, arguments=arguments) as server:
        assert call(server.url, "abc")["usage"]["completion_tokens"] == 4
        [worker] = children(server.process.pid)
        os.kill(worker, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while status(server.url, "abc") != 503:
            assert time.monotonic() < deadline
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(server.url + "/health", timeout=10)
        caught.value.close()
        assert caught.value.code == 503


def status(url: str, prompt: str) -> int:
    try:
        call(url, prompt)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    return 200


def call(url: str, prompt: str) -> dict[str, Any]:
    body = json.dumps({"prompt": prompt, "max_tokens": 4, "ignore_eos": True}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def children(parent: int) -> list[int]:
    """Processes of the server that run ranks; multiprocessing's resource tracker is not one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            ppid = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            line = (path / "cmdline").read_bytes().decode()
        except OSError:
            continue
        if ppid == parent and "spawn_main" in line:
            found.append(int(path.name))
    return found
