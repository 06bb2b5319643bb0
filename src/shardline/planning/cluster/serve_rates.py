"""The section of a serving plan's page that shows how quickly requests are answered, by how many there are a second.

    serve_rates(found)

The curves belong to the best way, or to what comes nearest; each of their points is what `serve_search.replica` says
of that rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardline.planning.cluster.curves import Point, curve_chart
from shardline.planning.cluster.figures import scroll_table, seconds, share, three
from shardline.planning.cluster.sections import card
from shardline.planning.cluster.serve_search import replica
from shardline.planning.cluster.serve_sections import nearest

if TYPE_CHECKING:
    from shardline.planning.cluster.serve_search import Served, ServeFound

__all__ = ["Load", "loads", "most_within_limits", "serve_rates"]

_STEPS = 40  # of a curve
_SHOWN = (0, 4, 10, 20, 30, 36, 40)  # of those steps, which are told in numbers
_LEAST = 1e-3  # of what it can do: hardly any
_HALVINGS = 30


@dataclass(frozen=True, kw_only=True)
class Load:
    """What all replicas do at `rate` requests a second, `share` of what they can; times are means in seconds."""

    rate: float
    share: float
    ttft_s: float
    tpot_s: float
    alive: float  # requests at once on a replica
    tokens_per_s: float


def serve_rates(found: ServeFound) -> str:
    shown = nearest(found)
    if shown is None:
        return ""
    asked, count = found.asked, _count(found, shown)
    steps = loads(shown, count)
    if not steps:
        return ""
    rate, most = asked.request_rate, steps[-1].rate
    mark = None if rate is None or rate > most else _load(shown, count, rate)
    panels = _panel(steps, mark, "ttft_s", "Time to the first token (TTFT)", asked.ttft_limit_s)
    panels += _panel(steps, mark, "tpot_s", "Time of each further token (TPOT)", asked.tpot_limit_s)
    replicas = f"{count:,} replica{'s' * (count != 1)} of tp{shown.tensor}"
    return card(
        "How quickly it answers",
        f"Means by the requests a second that {replicas} get together. {_reach(shown, count, most)}",
        f'<div class="columns">{panels}</div>'
        f"<details><summary>The numbers behind the curves</summary>{_table(steps)}</details>",
    )


def _count(found: ServeFound, shown: Served) -> int:
    """Returns the replicas that the curves are of: the best's, or as many as there is room for."""
    return shown.replicas if found.best is not None else max(1, found.asked.num_devices // shown.tensor)


def loads(each: Served, count: int) -> list[Load]:
    """Returns what `count` replicas do from hardly any requests to as many as they keep up with."""
    most = each.serving.max_request_rate * count
    found = [_load(each, count, most * max(_LEAST, step / _STEPS)) for step in range(_STEPS + 1)]
    return [load for load in found if load is not None]


def _load(each: Served, count: int, rate: float) -> Load | None:
    """Returns None where they don't keep up with so many."""
    changed = dataclasses.replace(each.asked, request_rate=rate / count, ttft_limit_s=None, tpot_limit_s=None)
    serving = replica(changed, each.tensor)
    if serving.ttft_s is None or serving.tpot_s is None or serving.concurrency is None or serving.replicas > 1:
        return None
    return Load(
        rate=rate,
        share=rate / (each.serving.max_request_rate * count),
        ttft_s=serving.ttft_s,
        tpot_s=serving.tpot_s,
        alive=serving.concurrency,
        tokens_per_s=serving.tokens_per_s * count,
    )


def most_within_limits(each: Served, count: int) -> float:
    """Returns the most requests a second that `count` replicas answer within the limits; 0 where they answer none."""
    low, high = 0.0, each.serving.max_request_rate * count
    if _is_within(each, high / count):
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _is_within(each, middle / count) else (low, middle)
    return low if low > _LEAST * _LEAST * each.serving.max_request_rate else 0.0


def _is_within(each: Served, rate: float) -> bool:
    serving = replica(dataclasses.replace(each.asked, request_rate=rate), each.tensor)
    return serving.ttft_s is not None and serving.replicas == 1


def _reach(each: Served, count: int, most: float) -> str:
    able = f"{three(most)} requests/s are the most that it keeps up with"
    if each.asked.ttft_limit_s is None and each.asked.tpot_limit_s is None:
        return f"{able}."
    within = most_within_limits(each, count)
    if within == 0:
        return f"{able}; within the limits it answers none."
    if within >= most:
        return f"{able}, all within the limits."
    return f"{able}; up to {three(within)} it stays within the limits."


def _panel(steps: list[Load], mark: Load | None, field: str, title: str, limit: float | None) -> str:
    points = [
        Point(x=each.rate, y=getattr(each, field), words=_told(each, field) if index in _SHOWN[1:] else "")
        for index, each in enumerate(steps)
    ]
    said = f"{seconds(points[0].y)} when hardly anyone asks, {seconds(points[-1].y)} at the most."
    if mark is not None:
        said = f"{seconds(getattr(mark, field))} at the {mark.rate:,.6g} requests/s asked; {said}"
    chart = curve_chart(
        points,
        title=f"{title} by request rate",
        desc=said if limit is None else f"{said} The limit is {seconds(limit)}.",
        under="requests a second",
        limit=limit,
        mark=None if mark is None else Point(x=mark.rate, y=getattr(mark, field), words=_told(mark, field)),
    )
    return f'<div><h3>{title}</h3><p class="soft">{said}</p>{chart}</div>'


def _told(each: Load, field: str) -> str:
    return f"{three(each.rate)} requests/s: {seconds(getattr(each, field))}"


def _table(steps: list[Load]) -> str:
    names = ("requests/s", "of the most", "TTFT", "TPOT", "at once on a replica", "tokens/s")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join("".join(_cells(each)) for index, each in enumerate(steps) if index in _SHOWN)
    return scroll_table("Times by request rate", head, body)


def _cells(each: Load) -> Iterator[str]:
    yield f'<tr><th scope="row">{three(each.rate)}</th><td>{share(each.share)}</td>'
    yield f"<td>{seconds(each.ttft_s)}</td><td>{seconds(each.tpot_s)}</td>"
    yield f"<td>{three(each.alive)}</td><td>{each.tokens_per_s:,.0f}</td></tr>"
