"""The command line from outside: speed, help, exit codes, and one JSON object on standard output."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardline.cli.main import VERBS, main


def run(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "shardline", *words], capture_output=True, text=True, **options)


def test_help_is_fast_and_loads_no_torch():
    times = []
    for _ in range(5):
        started = time.perf_counter()
        done = run("--help")
        times.append(time.perf_counter() - started)
    assert done.returncode == 0
    assert all(verb in done.stdout for verb in VERBS)
    assert statistics.median(times) < 0.4
    code = "import shardline, shardline.cli.main as m, sys; m.main(['--help']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help_and_loads_no_torch_for_it(verb):
    code = (
        "import sys; from shardline.cli.main import main; code = main([sys.argv[1], '--help']);"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, verb], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"usage: shardline {verb}" in done.stdout
    assert "--json" in done.stdout
    assert importlib.import_module(f"shardline.cli.{verb}").__doc__.strip().splitlines()[0] in done.stdout


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 2, ""),
        (["--version"], 0, ""),
        (["trian"], 2, "did you mean 'train'?"),
        (["train", "--nonsense"], 2, "unrecognized arguments: --nonsense"),
        (["train", "absent.yaml"], 2, "Can't read the config absent.yaml"),
        (["train", "--train.stpes", "3"], 2, "did you mean 'steps'?"),
        (["train", "--nproc", "0"], 2, "--nproc 0 must be at least 1"),
        (["train", "--nproc", "3", "--parallel.data", "2"], 3, "= 2 processes, but 3 were started"),
        (["train", "--parallel.data", "2"], 3, "but 1 was started; start 2 (--nproc 2)"),
        (["train", "--nproc", "2", "--parallel.tensor", "3"], 3, "parallel.tensor x parallel.pipeline = 3 x 1"),
        (["train", "--nproc", "3"], 3, "train.global_batch = 8 is not a multiple of data ranks x train.micro_batch"),
        (["train", "--nproc", "3", "--parallel.tensor", "3"], 3, "nearest layout that works with 3 processes:"),
        (["train", "--nproc", "2", "--model.preset", "tinny"], 2, "did you mean 'tiny'?"),
        (["train", "--nproc", "2", "--run", "/dev/null/run"], 2, "Can't write to /dev/null/run/logs"),
        (["train", "--train.global_batch", "9"], 2, "set train.micro_batch to 1 or another divisor of 9"),
        (["train", "--optimizer.name", "muon", "--optimizer.lr", "0", "--optimizer.muon_lr", "0.1"], 2, "which is 0"),
        (["train", "--model.preset", "tinny"], 2, "did you mean 'tiny'?"),
        (["train", "--model.path", "absent"], 2, "no model folder at absent"),
        (["train", "--data.sequence_length", "4096"], 2, "exceeds the model's context of 2048 tokens"),
        (["train", "--data.source", "absent.txt"], 2, "absent.txt"),
        (["verify", "absent"], 2, "neither a model folder"),
        (["config", "show", "--train.steps", "x"], 2, "expected `int`"),
    ],
)
def test_bad_usage_is_one_sentence_and_an_exit_code(words, code, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDLINE_CACHE", str(tmp_path / "cache"))
    assert main(words) == code
    captured = capsys.readouterr()
    assert text in captured.err
    assert "Traceback" not in captured.err


def test_json_errors_are_one_object_on_standard_output():
    done = run("train", "--train.steps", "x", "--json")
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["exit_code"] == 2
    assert "train.steps = 'x'" in error["message"]


def test_config_show_and_schema(tmp_path, capsys):
    assert main(["config", "show", "--train.steps", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["steps"] == 5
    assert main(["config", "schema"]) == 0
    assert "$defs" in json.loads(capsys.readouterr().out)
    assert main(["config", "show"]) == 0
    path = tmp_path / "run.yaml"
    path.write_text(capsys.readouterr().out)
    assert main(["config", "show", str(path), "--json"]) == 0


@pytest.mark.parametrize("words", [["config", "schema"], ["plan", "--goal", "tpu", "--offline", "--json"]])
def test_a_closed_pipe_is_no_traceback(words):
    code = f"import sys; from shardline.cli.main import main; sys.exit(main({words}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    _, errors = process.communicate()
    assert b"Traceback" not in errors


def test_torchrun_and_our_launcher_do_the_same(tmp_path):
    environment = {**os.environ, "SHARDLINE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    (tmp_path / "text.txt").write_text("A line of text to learn from, number one.\n\n" * 400)
    words = ["train", "--data.source", str(tmp_path / "text.txt"), "--data.sequence_length", "64"]
    words += ["--data.heldout_fraction", "0", "--train.steps", "2", "--parallel.zero", "2", "--json"]
    ours = run(*words, "--run", str(tmp_path / "ours"), "--nproc", "2", env=environment)
    assert ours.returncode == 0, ours.stderr
    # `--` keeps torchrun from reading our flags: it takes `--run` for an abbreviation of its own `--run-path`.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    theirs = subprocess.run(
        [*torchrun, "shardline", *words, "--run", str(tmp_path / "theirs")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert theirs.returncode == 0, theirs.stderr
    first, second = json.loads(ours.stdout), json.loads(theirs.stdout)
    assert first["loss"] == second["loss"]
    assert first["heldout_loss_after"] is None
    for result in (first, second):
        assert Path(result["model"], "model.safetensors").exists()


def test_the_first_failing_rank_is_named_and_ends_the_others(tmp_path):
    """Rank 1 alone dies at start: its last words must reach the terminal, and rank 0 must not wait for ever."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if os.environ.get('RANK') == '1': print('rank one is ill', file=sys.stderr, flush=True); os._exit(7)\n"
        "if os.environ.get('RANK') == '0': time.sleep(60)\n"
    )
    code = (
        "import sys; from pathlib import Path; from shardline.parallel.launch import launch;"
        "sys.exit(launch(['--version'], num_processes=2, log_dir=Path(sys.argv[1])))"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "logs")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7
    assert "Rank 1 failed first (exit code 7)" in done.stderr
    assert "rank one is ill" in done.stderr
    assert time.monotonic() - started < 30


def test_a_crash_of_another_rank_is_shown_and_not_only_what_it_does_to_rank_0(tmp_path):
    """Rank 1 raises in the middle of training; rank 0 then loses its peer, which alone would tell nothing."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    from shardline.training import trainer\n"
        "    original = trainer.Trainer.train_step\n"
        "    def train_step(self, **options):\n"
        "        if self.step == 1: raise RuntimeError('rank one broke here')\n"
        "        return original(self, **options)\n"
        "    trainer.Trainer.train_step = train_step\n"
    )
    (tmp_path / "text.txt").write_text("A line of text to learn from, number one.\n\n" * 400)
    words = ["train", "--nproc", "2", "--data.source", str(tmp_path / "text.txt"), "--data.sequence_length", "64"]
    words += ["--data.heldout_fraction", "0", "--train.steps", "5", "--run", str(tmp_path / "run")]
    environment = {**os.environ, "SHARDLINE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    done = run(*words, env=environment, timeout=120)
    assert done.returncode == 1
    assert "Rank 1 failed first (exit code 1)" in done.stderr
    assert "RuntimeError: rank one broke here" in done.stderr


def test_a_loss_that_is_not_finite_ends_the_run_before_the_weights_change(tmp_path):
    (tmp_path / "text.txt").write_text("A line of text to learn from, number one.\n\n" * 400)
    words = ["train", "--nproc", "2", "--parallel.zero", "2", "--optimizer.lr", "1e38", "--checkpoint.every", "1"]
    words += ["--data.source", str(tmp_path / "text.txt"), "--data.sequence_length", "64", "--train.steps", "5"]
    words += ["--data.heldout_fraction", "0", "--run", str(tmp_path / "run"), "--json"]
    environment = {**os.environ, "SHARDLINE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = run(*words, env=environment)
    assert done.returncode == 1, done.stderr
    assert "Step 2: the loss is" in json.loads(done.stdout)["error"]["message"]
    assert "Traceback" not in done.stderr
    assert "Rank 1 failed first" not in done.stderr, "rank 0 has said it already"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]
