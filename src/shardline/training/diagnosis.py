"""What is wrong with a run, from its directory alone: which rank is slow, silent or broken, and how fast it goes.

    found = examine_run("runs/today")
    for rank in found.ranks: print(rank.rank, rank.state, rank.operation)
    for check in found.checks: print(check.verdict, check.reason, check.fix)

Reads what the ranks leave behind: RUN/logs/rank-K.heartbeat, rank-K.log, failure-ID.json and RUN/metrics.jsonl.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardline.config import UsageError
from shardline.hardware.checks import Check
from shardline.parallel.failure import Failure, find_failures, read_failure
from shardline.parallel.heartbeat import EVERY_S
from shardline.training.rank_states import SILENT_S, WATCH_S, RankState, read_ranks

__all__ = ["RunDiagnosis", "examine_run"]

_OFTEN = 0.75  # of the looks in which the others wait: then it is no chance
_DATA_SHARE, _SLOWDOWN = 0.2, 1.5


@dataclass(frozen=True, kw_only=True)
class RunDiagnosis:
    ranks: tuple[RankState, ...]
    checks: tuple[Check, ...]
    odd_ranks: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return {"odd_ranks": list(self.odd_ranks), "ranks": [asdict(rank) for rank in self.ranks]}


def examine_run(path: str | Path, *, watch_s: float = WATCH_S) -> RunDiagnosis:
    """Returns what the run's files tell; `UsageError` where `path` holds no run that has begun."""
    run = Path(path)
    logs = run / "logs"
    ranks = read_ranks(logs, watch_s=watch_s)
    if not ranks:
        raise UsageError(f"{run} holds no heartbeats and no logs ({logs}/rank-K.*); pass the directory of a run.")
    failure = _failure(logs, ranks)
    accused = list(_accusations(ranks, failure))
    checks = (*_run_line(run, ranks, failure), *(accused or _no_odd_rank(ranks)), *_pace(run))
    odd = tuple(dict.fromkeys(int(check.facts.removeprefix("rank ")) for check in accused))
    return RunDiagnosis(ranks=ranks, checks=checks, odd_ranks=odd)


def _accusations(ranks: Sequence[RankState], failure: Failure | None) -> Iterator[Check]:
    """Yields a check for each odd rank, with the plainest evidence that there is of it."""
    if failure is not None and (blamed := _blamed(failure)):
        for rank, words in blamed.items():
            fix = f"Read RUN/logs/rank-{rank}.log and that machine's dmesg (OOM killer); then continue with --resume."
            yield _accuse(rank, "fail", words, fix, rule="others-waited-in-vain")
        return
    if failure is not None:
        words = failure.message.partition("\n")[0].rstrip(".")
        fix = f"Read RUN/logs/rank-{failure.rank}.log, mend that, and continue with --resume."
        yield _accuse(failure.rank, "fail", f"failed first: {words}", fix, rule="failed-first")
        return
    plain = {
        "gone": (
            "is gone, killed or out of memory",
            "Look into dmesg for the OOM killer; then continue with --resume.",
        ),
        "stopped": ("is stopped by a signal or a debugger", "Run: kill -CONT {pid}"),
    }
    found = False
    for rank in (rank for rank in ranks if rank.state in plain):
        words, fix = plain[rank.state]
        found = True
        yield _accuse(rank.rank, "fail", f"{words} {_was(rank)}", fix.format(pid=rank.pid), rule=f"rank-{rank.state}")
    if found:
        return
    for rank in (rank for rank in ranks if rank.error):
        found = True
        fix = f"Read RUN/logs/rank-{rank.rank}.log; --resume continues from the last checkpoint."
        yield _accuse(rank.rank, "fail", f"ended with an error: {rank.error}", fix, rule="ended-with-error")
    if found:
        return
    yield from _silent_or_slow(ranks)


def _blamed(failure: Failure) -> dict[int, str]:
    """Returns {rank: what is known of it} of those that a failure's teller waited for in vain; {} if none."""
    head = re.match(r"Rank \d+ (?:waited [\d.]+ s for|lost its connection to) ranks? ([\d, ]+) in ", failure.message)
    if head is None:
        return {}
    ranks = [int(rank) for rank in head[1].split(",")]
    first = failure.message.partition(". ")[0]
    found = {}
    for rank in ranks:
        own = re.search(rf"Rank {rank} \((process [^)]*)\) (.*?)\.(?= Rank \d+ \(| --resume|$)", failure.message)
        found[rank] = f"{own[2]} ({own[1]}; {first[:1].lower()}{first[1:]})" if own else first
    return found


def _silent_or_slow(ranks: Sequence[RankState]) -> Iterator[Check]:
    silent = [rank for rank in ranks if rank.state == "silent"]
    going = [rank for rank in ranks if rank.state in ("waiting", "working")]
    for rank in (rank for rank in ranks if rank.state == "missing" and (going or silent)):
        fix = "See whether its machine has started, and what its launcher says there."
        yield _accuse(rank.rank, "fail", "never wrote a heartbeat", fix, rule="rank-missing")
    if silent:
        # Where all are silent the run is over; the one that fell silent first, or came least far, is the odd one.
        oldest = max(rank.age_s for rank in silent)
        first = [rank for rank in silent if going or rank.age_s > oldest - EVERY_S]
        fewest = min(rank.count for rank in first)
        if not going:
            first = [rank for rank in first if rank.count == fewest]
        for rank in first:
            fix = f"Look at the machine {rank.host} (is it up, is its disk full?), then continue with --resume."
            since = f"has been silent for {_time(rank.age_s)}" if rank.age_s > SILENT_S else "writes no heartbeats"
            reason = f"{since} {_was(rank)}"
            yield _accuse(rank.rank, "fail", reason, fix, rule="rank-silent")
        return
    for rank in going:
        others = [other for other in going if other is not rank]
        stuck = others and all(_is_waiting(other) and other.since_s > SILENT_S for other in others)
        if rank.state == "working" and stuck:
            longest = max(other.since_s for other in others)
            reason = f"is alive, but the others have waited {_time(longest)} for it {_was(rank)}"
            fix = f"See what it does: py-spy dump --pid {rank.pid} (on {rank.host})."
            yield _accuse(rank.rank, "fail", reason, fix, rule="rank-late")
        elif rank.looks >= 4 and rank.behind >= _OFTEN * rank.looks:
            reason = f"is the one that the others wait for, in {rank.behind} of {rank.looks} looks {_was(rank)}"
            fix = f"Compare its machine with the others' (shardline doctor on {rank.host}): clocks, power, neighbours."
            yield _accuse(rank.rank, "warn", reason, fix, rule="rank-slow")


def _accuse(rank: int, verdict: Any, reason: str, fix: str, *, rule: str) -> Check:
    return Check(name="odd rank", verdict=verdict, facts=f"rank {rank}", reason=reason, fix=fix, rule=rule)


def _no_odd_rank(ranks: Sequence[RankState]) -> Iterator[Check]:
    counts: dict[str, int] = {}
    for rank in ranks:
        counts[rank.state] = counts.get(rank.state, 0) + 1
    yield Check(
        name="odd rank", verdict="ok", facts=f"none ({', '.join(f'{n} {state}' for state, n in counts.items())})"
    )


def _run_line(run: Path, ranks: Sequence[RankState], failure: Failure | None) -> Iterator[Check]:
    states = {rank.state for rank in ranks}
    over = "finished" if states == {"finished"} else "failed" if failure or "failed" in states else ""
    going = "" if over else "goes on" if states & {"waiting", "working"} else "stands still"
    step = max((rank.step for rank in ranks), default=0)
    hosts = sorted({rank.host for rank in ranks if rank.host})
    where = f" on {', '.join(hosts[:4])}{' and more' if len(hosts) > 4 else ''}" if hosts else ""
    yield Check(name="run", verdict="ok", facts=f"{over or going}, {len(ranks)} ranks{where}, at step {step}")


def _pace(run: Path) -> Iterator[Check]:
    if not (run / "metrics.jsonl").exists():
        return
    rows = [row for row in _rows(run / "metrics.jsonl") if _number(row, "step_s")]
    if len(rows) < 3:
        return
    times = [row["step_s"] for row in rows[1:]]  # the first step compiles and fills caches
    last, usual = statistics.median(times[-5:]), statistics.median(times)
    waits = [row["data_wait_s"] / row["step_s"] for row in rows[-20:] if row.get("data_wait_s") is not None]
    share = statistics.median(waits) if waits else 0.0
    facts = f"{usual:.3g} s a step, of which data {share:.0%}; the last five {last:.3g} s"
    if len(times) >= 10 and last > _SLOWDOWN * usual:
        yield Check(
            name="pace",
            verdict="warn",
            facts=facts,
            reason=f"the last steps take {last / usual:.1f} times as long as usual",
            fix="Look for another program on its machines (top, nvidia-smi), for heat, or a slow disk.",
            rule="slowed-down",
        )
    elif share > _DATA_SHARE:
        yield Check(
            name="pace",
            verdict="warn",
            facts=facts,
            reason=f"{share:.0%} of a step is waiting for data",
            fix="Put the data cache on a faster disk (SHARDLINE_CACHE), or give the process another core.",
            rule="data-bound",
        )
    else:
        yield Check(name="pace", verdict="ok", facts=facts)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The whole rows of metrics.jsonl. `run_directory.read_metrics` would load torch, for a second and a half."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut short by a kill
        if isinstance(row, dict):
            yield row


def _failure(logs: Path, ranks: Sequence[RankState]) -> Failure | None:
    """Returns what the first failing rank of this start left."""
    names = {f"failure-{rank.run}.json" for rank in ranks if rank.run}
    return next((read_failure(path) for path in find_failures(logs) if path.name in names), None)


def _is_waiting(rank: RankState) -> bool:
    return rank.state == "waiting"


def _was(rank: RankState) -> str:
    step = f" of step {rank.step}" if rank.step else ""
    where = f" at {rank.where}" if rank.where else ""
    return f"(process {rank.pid} on {rank.host}; in {rank.operation}{step}, since {_time(rank.since_s)}{where})"


def _number(row: Mapping[str, Any], key: str) -> bool:
    return isinstance(row.get(key), int | float) and row[key] > 0


def _time(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )
