"""Batch files: OpenAI's format, errors by line, and going on where a run was cut short."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from serving.conftest import local_server
from serving.test_http import FailingRunner, call_json, wait_for, warm_engine
from serving.tiny_models import make_engine
from shardline.cli.main import main
from shardline.config import ShardlineError, UsageError
from shardline.serving.batch import BatchReport, run_batch
from shardline.serving.engine import Engine
from shardline.serving.http import ServerConfig, make_app

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0}
COMPLETION = {"prompt": "Once upon", "max_tokens": 6, "temperature": 0}


def request(name: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


GOOD = [
    request("chat", "/v1/chat/completions", CHAT),
    request("completion", "/v1/completions", COMPLETION),
    request("embedding", "/v1/embeddings", {"input": ["a", "b"]}),
]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines)
    return {line["custom_id"] or line["id"]: line for line in lines}


def run(source: Path, target: Path, engine: Engine | None = None, *, num_at_once: int = 8) -> BatchReport:
    app = make_app(engine or make_engine(), ServerConfig(model_name="tiny", max_num_waiting=10_000))
    return run_batch(app, source, target, num_at_once=num_at_once)


def test_every_line_gets_what_the_server_answers(tmp_path: Path):
    report = run(write(tmp_path / "in", GOOD), tmp_path / "out")
    assert (report.num_lines, report.num_succeeded, report.num_failed) == (3, 3, 0)
    answers = read(tmp_path / "out")
    with local_server(make_engine()) as server:
        for line in GOOD:
            answer = answers[line["custom_id"]]
            assert answer["error"] is None
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["request_id"]
            _, expected = call_json(server.url, line["url"], line["body"])
            for changing in ("id", "created"):
                expected.pop(changing, None)
                answer["response"]["body"].pop(changing, None)
            body = answer["response"]["body"]
            for entry, other in zip(body.get("data", []), expected.get("data", []), strict=True):
                assert entry.pop("embedding") == pytest.approx(other.pop("embedding"), abs=1e-5)
            assert body == expected


def test_a_line_that_fails_fails_alone(tmp_path: Path):
    lines = [
        GOOD[0],
        "not json",
        "[1]",
        {"url": "/v1/completions", "body": {}},
        request("no such url", "/v1/completion", COMPLETION),
        request("get", "/v1/completions", COMPLETION) | {"method": "GET"},
        request("streaming", "/v1/completions", {**COMPLETION, "stream": True}),
        request("bad value", "/v1/completions", {**COMPLETION, "temperature": -1}),
        request("too long", "/v1/completions", {**COMPLETION, "prompt": "x" * 1000}),
        request("other model", "/v1/completions", {**COMPLETION, "model": "gpt"}),
        GOOD[0],
        GOOD[1],
    ]
    report = run(write(tmp_path / "in", lines), tmp_path / "out")
    assert (report.num_succeeded, report.num_failed) == (2, 10)
    raw = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    by_id = {line["id"]: line for line in raw}
    assert len(raw) == len(lines)
    for number, words in [(2, "not valid JSON"), (3, "not a JSON object"), (4, "no custom_id"), (6, "'POST'")]:
        line = by_id[f"batch_req_{number}"]
        assert line["response"] is None
        assert words in line["error"]["message"]
    assert "did you mean '/v1/completions'" in by_id["batch_req_5"]["error"]["message"]
    assert "stream" in by_id["batch_req_7"]["error"]["message"]
    assert "earlier line" in by_id["batch_req_11"]["error"]["message"]
    for number, status in [(8, 400), (9, 400), (10, 404)]:
        line = by_id[f"batch_req_{number}"]
        assert line["error"] is None
        assert line["response"]["status_code"] == status
        assert line["response"]["body"]["error"]["message"]


def test_a_run_that_was_cut_short_goes_on(tmp_path: Path):
    source, target = write(tmp_path / "in", [*GOOD, "not json"]), tmp_path / "out"
    run(source, target)
    whole = target.read_bytes()
    lines = whole.splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:2]) + lines[2][:20])  # killed while it wrote the third
    report = run(source, target)
    assert report.num_skipped == 2
    assert sorted(json.loads(line)["id"] for line in target.read_bytes().splitlines()) == sorted(
        json.loads(line)["id"] for line in lines
    )
    again = run(source, target)
    assert (again.num_skipped, again.num_succeeded, again.num_failed) == (4, 0, 0)


def test_many_lines_run_together_and_leave_nothing(tmp_path: Path):
    lines = [request(str(i), "/v1/completions", {**COMPLETION, "prompt": f"{i} times", "n": 2}) for i in range(60)]
    engine = make_engine(max_num_seqs=8)
    sizes = []
    step = engine.step

    def watched() -> Any:
        outputs = step()
        sizes.append(len(engine.last_schedule.chunks))
        return outputs

    engine.step = watched  # type: ignore[method-assign]
    report = run(write(tmp_path / "in", lines), tmp_path / "out", engine, num_at_once=16)
    assert report.num_succeeded == 60
    assert max(sizes) == 8
    assert sum(sizes) / len(sizes) > 6
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_an_engine_that_stops_ends_the_run_and_keeps_what_was_answered(tmp_path: Path):
    engine = warm_engine()
    engine.runner = FailingRunner(engine.runner, range(10, 100))  # type: ignore[assignment]
    lines = [request(str(i), "/v1/completions", COMPLETION) for i in range(30)]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    with pytest.raises(ShardlineError, match=r"the matrix fell over.*run it again to go on"):
        run(source, target, engine, num_at_once=1)
    num_answered = len(target.read_text().splitlines())
    assert 0 < num_answered < 30
    assert run(source, target).num_skipped == num_answered
    assert len(read(target)) == 30


def test_ctrl_c_ends_the_run_cleanly_and_the_next_one_goes_on(tiny_folder: Path, tmp_path: Path):
    lines = [request(str(i), "/v1/completions", {**COMPLETION, "max_tokens": 60}) for i in range(4000)]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    words = ["batch", str(source), str(target), "--model", str(tiny_folder), "--max-model-len", "128", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "shardline", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: target.exists() and target.stat().st_size > 10_000, timeout_s=60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.strip() == "shardline batch: interrupted."
    num_answered = len(read(target))
    assert 0 < num_answered < 4000
    some = write(tmp_path / "in", lines[: num_answered + 150])  # of those beyond, 128 may have been running
    assert run(some, target, num_at_once=64).num_skipped == num_answered
    assert len(read(target)) == num_answered + 150


def test_files_that_can_not_be_used_are_one_sentence(tmp_path: Path):
    source = write(tmp_path / "in", GOOD)
    with pytest.raises(UsageError, match="input and output both"):
        run(source, source)
    with pytest.raises(UsageError, match="There is no file"):
        run(tmp_path / "absent", tmp_path / "out")
    with pytest.raises(UsageError, match="something else than a batch's answers"):
        run(source, write(tmp_path / "notes", ['{"a": 1}']))


def test_the_verb_counts_and_its_exit_code_tells(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--model", str(tiny_folder), "--max-model-len", "128", "--max-num-seqs", "4", "--json"]
    assert main(["batch", str(write(tmp_path / "in", GOOD)), str(tmp_path / "out"), *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_succeeded"], report["num_failed"]) == (3, 0)
    assert report["completion_tokens"] == 12
    bad = write(tmp_path / "bad", [*GOOD, "not json"])
    assert main(["batch", str(bad), str(tmp_path / "out2"), *words]) == 1
