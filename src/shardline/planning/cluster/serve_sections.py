"""The sections of a serving plan's page that show sizes: memory, requests by length, the ranked table.

    serve_memory(found), serve_lengths(found), serve_ranked(found)

Each returns HTML, or "" where it has nothing to show. What is drawn is computed as the plan itself is, by
`serve_search.replica`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardline.planning.cluster.bars import SERVING, Limit, Row, badge, memory_chart, memory_table
from shardline.planning.cluster.curves import Column, column_chart
from shardline.planning.cluster.figures import GIB, scroll_table, seconds
from shardline.planning.cluster.job import Memory
from shardline.planning.cluster.sections import card
from shardline.planning.cluster.serve_explain import served_verdict
from shardline.planning.cluster.serve_search import replica
from shardline.planning.cluster.serving import MAX_SEQUENCES, MEMORY_SHARE, cache_bytes_of, kv_bytes

if TYPE_CHECKING:
    from shardline.planning.cluster.serve_search import Served, ServeFound

__all__ = [
    "OPTION", "layout_words", "memory_of", "nearest", "num_replicas", "serve_lengths", "serve_memory", "serve_ranked",
    "tokens",
]  # fmt: skip

OPTION = "with "  # begins the name of an alternative that is a choice, and not refused
_LENGTHS = tuple(1024 << doubled for doubled in range(8))  # 1k to 128k tokens


def num_replicas(each: Served) -> int:
    """Replicas of a way to serve; of one that is too slow whatever their number, those there is room for."""
    return each.replicas if each.is_in_time else max(1, each.asked.num_devices // each.tensor)


def layout_words(each: Served) -> str:
    """Returns "2 replicas of 4 tensor ranks"."""
    count = num_replicas(each)
    ranks = f"{each.tensor} tensor ranks" if each.tensor > 1 else "one device"
    return f"{count:,} replica{'s' * (count != 1)} of {ranks}"


def nearest(found: ServeFound) -> Served | None:
    """Returns the best, or the first of what fits; None where nothing does."""
    return found.best or next((each for each in found.ranked if each.serving.fits), None)


def tokens(count: int) -> str:
    return f"{count:,} token{'s' * (count != 1)}"


def memory_of(each: Served) -> Memory:
    """Returns what one device holds against what a replica may use of it; what does not fit holds one request."""
    serving, asked = each.serving, each.asked
    parts = dict(serving.parts)
    if not serving.fits:
        length = asked.prompt_tokens + asked.output_tokens
        one = kv_bytes(asked.shape, length, tensor=each.tensor, size=cache_bytes_of(asked.cache))
        parts["cache"] = max(one, parts["cache"])
    total = sum(parts.values())
    return Memory(
        parts=parts,
        low_bytes=total,
        high_bytes=total,
        capacity_bytes=MEMORY_SHARE * serving.capacity_bytes,
        pipeline_rank=0,
    )


def serve_memory(found: ServeFound) -> str:
    rows, device = list(_rows(found)), found.asked.device
    line = Limit(
        more=f", {MEMORY_SHARE:.0%} of the device's {device.memory_gib:,.1f}", what="what a replica may use of a device"
    )
    return card(
        "Memory of one device",
        "What weights, a step's activations and the runtime leave below the line holds the keys and values of "
        "requests. What ends beyond the line has no room for a single one.",
        memory_chart(rows, SERVING, line=line)
        + f"<details><summary>The numbers behind the bars</summary>{memory_table(rows, SERVING)}</details>",
    )


def _rows(found: ServeFound) -> Iterator[Row]:
    """Yields what is ranked, then the alternatives that are not among it, then the options."""
    for index, each in enumerate(found.ranked):
        group = "" if index else "What works" if found.best is not None else "What comes nearest"
        yield _row(each, found, name=_short(each), group=group)
    others = [(name, each) for name, each, _ in found.alternatives if all(each is not one for one in found.ranked)]
    layouts = [each for name, each in others if not name.startswith(OPTION)]
    for index, each in enumerate(layouts):
        yield _row(each, found, name=_short(each), group="" if index else "The others")
    options = [(name.removeprefix(OPTION), each) for name, each in others if name.startswith(OPTION)]
    for index, (name, each) in enumerate(options):
        yield _row(each, found, name=name[0].upper() + name[1:], group="" if index else "With fewer bits")


def _row(each: Served, found: ServeFound, *, name: str, group: str) -> Row:
    length = tokens(each.asked.prompt_tokens + each.asked.output_tokens)
    room = f"{each.serving.max_requests:,} requests at once" if each.serving.fits else f"no room for {length}"
    return Row(
        name=name,
        settings=room if name == _short(each) else f"{_short(each)}, {room}",
        memory=memory_of(each),
        chosen=each is found.best,
        group=group,
        words=served_verdict(each),
    )


def _short(each: Served) -> str:
    return f"{num_replicas(each):,} x tp{each.tensor}"


def serve_lengths(found: ServeFound) -> str:
    shown = nearest(found)
    if shown is None:
        return ""
    asked = shown.asked
    wanted, decoder = asked.prompt_tokens + asked.output_tokens, asked.shape.decoder
    longest = max(_LENGTHS) if decoder is None else decoder.max_position_embeddings
    columns = []
    for length in sorted({*(length for length in _LENGTHS if length <= longest), wanted}):
        changed = dataclasses.replace(asked, prompt_tokens=length - 1, output_tokens=1, request_rate=None)
        count = shown.serving.max_requests if length == wanted else replica(changed, shown.tensor).max_requests
        name = f"{length / 1024:.3g}k" if length >= 1000 else str(length)
        columns.append(Column(name=name, value=count, text=f"{count:,}", chosen=length == wanted))
        if count == 0:  # so are all that are longer
            break
    replicas = num_replicas(shown) if found.best is not None else 1
    times = f" Each of the {replicas:,} replicas takes as many." if replicas > 1 else ""
    said = ", ".join(f"{column.text} of {column.name}" for column in columns)
    return card(
        "How many requests fit at once",
        f"On one replica, by the tokens of a request, prompt and reply together (1k is 1,024).{times}",
        '<ul class="legend"><li><span class="swatch asked"></span>'
        f"the requests of {tokens(wanted)} that are asked for</li>"
        '<li><span class="swatch cache"></span>other lengths</li></ul>'
        + column_chart(
            columns,
            title="Requests at once by length",
            desc=f"{said}.",
            limit=MAX_SEQUENCES,
            limit_words=f"{MAX_SEQUENCES}: no more take part in a step",
        ),
    )


def serve_ranked(found: ServeFound) -> str:
    rated = found.asked.request_rate is not None
    times = ("TTFT", "TPOT") if rated else ("a prompt", "a token, full")
    names = ("no.", "layout", "weights GiB", "cache GiB", "at once", *times, "tokens/s", "devices", "verdict")
    head = "".join(
        f'<th scope="col"{" class=text" if name in ("layout", "verdict") else ""}>{name}</th>' for name in names
    )
    body = "".join(
        f"<tr{' class=chosen' if each is found.best else ''}>{''.join(_cells(index, each))}</tr>"
        for index, each in enumerate(found.ranked, start=1)
    )
    if found.best is None:
        title, lead = "What comes nearest", "Nothing works; these ways need the least memory of a device."
    elif rated:
        title, lead = "The ways that work, ranked", "The fewest devices first."
    else:
        title, lead = (
            "The ways that work, ranked",
            "The most tokens a second of all replicas together first.",
        )
    note = "2 x tp4: two replicas of four tensor ranks each. At once: requests that fit on a replica. " + (
        "TTFT, TPOT: mean time to the first token and for each further one."
        if rated
        else "A prompt: alone on a replica. A token, full: when as many requests as fit are answered at once."
    )
    return card(title, lead, f'{scroll_table(title, head, body)}<p class="soft">{note}</p>')


def _cells(index: int, each: Served) -> Iterator[str]:
    serving, rated = each.serving, each.asked.request_rate is not None
    ttft, tpot = (serving.ttft_s, serving.tpot_s) if rated else (serving.prefill_s, serving.decode_full_s)
    known = serving.fits and each.is_in_time
    yield f'<td>{index}</td><th scope="row">{_short(each)}</th>'
    yield from (f"<td>{serving.parts[name] / GIB:,.1f}</td>" for name in ("weights", "cache"))
    yield f"<td>{serving.max_requests:,}</td>"
    yield from (f"<td>{'-' if value is None or not serving.fits else seconds(value)}</td>" for value in (ttft, tpot))
    yield f"<td>{f'{each.tokens_per_s:,.0f}' if known else '-'}</td><td>{num_replicas(each) * each.tensor:,}</td>"
    yield f"<td class=text>{badge(served_verdict(each))}</td>"
