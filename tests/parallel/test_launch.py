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


def test_of_ranks_that_end_together_the_killed_one_is_the_cause(tmp_path, monkeypatch, capfd):
    """Both are gone before the launcher looks, as on a busy machine: the exit code is the killed rank's."""
    package = tmp_path / "shardline"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, signal, sys\nos.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)\nsys.exit(1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardline.parallel.launch._POLL_S", 3.0)
    assert launch(["train"], num_processes=2, log_dir=tmp_path / "logs") == 128 + 9
    assert "Rank 1" in capfd.readouterr().err
