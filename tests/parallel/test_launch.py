"""The local launcher's own words: what a rank has said is not said again."""

from __future__ import annotations

import pytest

from shardline.parallel.launch import launch

SENTENCE = "shardline train: it can't be so.\nThe nearest layout that works:\nparallel:\n  data: 1\n  tensor: 1"
TRACEBACK = "shardline train: an earlier run.\nTraceback (most recent call last):\nZeroDivisionError: division by zero"
PROGRAM = """
import os, sys, time
time.sleep(0.5 if os.environ["RANK"] == "0" else 0.0)
print({text!r}, file=sys.stderr, flush=True)
sys.exit(3)
"""


@pytest.mark.parametrize(("text", "said_by_rank_0"), [(SENTENCE, True), (TRACEBACK, False)])
def test_a_sentence_of_all_ranks_is_told_once_however_long(text, said_by_rank_0, tmp_path, monkeypatch, capfd):
    """Rank 1 is the first to fail; rank 0, which has the terminal, follows with the same words."""
    package = tmp_path / "shardline"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROGRAM.format(text=text))
    monkeypatch.chdir(tmp_path)  # `python -m shardline` finds this one
    assert launch(["train"], num_processes=2, log_dir=tmp_path / "logs") == 3
    told = capfd.readouterr().err
    assert ("Rank 1 failed first" in told) != said_by_rank_0
    assert not said_by_rank_0 or told == f"{text}\n"
