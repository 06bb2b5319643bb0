"""The demo as a user runs it, without a network: every stage, in order, and one JSON object on the last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

STAGES = ["doctor", "model", "plan", "train", "verify", "serve", "report"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    environment = {**os.environ, "SHARDLINE_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "shardline", "demo", "--offline", "--steps", "3", "--runs", str(folder / "runs")]
    return folder, subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_the_last_line_is_the_summary(demo):
    folder, done = demo
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert list(summary) == [
        "heldout_loss_before",
        "heldout_loss_after",
        "hf_max_abs_logit",
        "train_serve_max_abs_logprob",
        "predicted_memory_gib",
        "measured_memory_gib",
        "reply",
        "ttft_s",
        "tokens_per_s",
        "wall_s",
    ]
    assert summary["heldout_loss_after"] < 0.97 * summary["heldout_loss_before"]
    assert summary["hf_max_abs_logit"] <= 1e-3
    assert summary["train_serve_max_abs_logprob"] <= 1e-4
    assert summary["ttft_s"] > 0
    (run,) = (folder / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text()) == summary
    report = (run / "report.html").read_text()
    assert "http://" not in report.replace("http://www.w3.org", "")
    assert f"{summary['heldout_loss_after']:.3f}" in report


def test_the_stages_come_in_order(demo):
    _, done = demo
    places = [done.stdout.index(f"\n{stage} " if index else f"{stage} ") for index, stage in enumerate(STAGES)]
    assert places == sorted(places)
    assert "trains the `tiny` preset from scratch" in done.stdout
    assert done.stdout.count("ETA") >= 3
