"""A plan of serving as one self-contained HTML page, in the manner of `page`.

    write_serve_page("plan.html", search_serving(asked), command="shardline plan llama-3.1-8b --for serve ...")

Memory of each way to serve against the device's limit, how many requests fit by their length, time to the first token
and for each further one by request rate, the ranked table, the reasons, and why not the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.planning.cluster.bars import SERVING, Row, memory_chart, verdict
from shardline.planning.cluster.figures import gib, seconds, svg
from shardline.planning.cluster.job import Memory
from shardline.planning.cluster.page import count_words, fill, foot, listed, show_tiles, write_html
from shardline.planning.cluster.sections import card
from shardline.planning.cluster.serve_explain import served_reasons
from shardline.planning.cluster.serve_search import Served, replica
from shardline.planning.cluster.serving import MAX_SEQUENCES, MEMORY_SHARE

if TYPE_CHECKING:
    from shardline.planning.cluster.serve_search import ServeFound

__all__ = ["make_serve_page", "write_serve_page"]

_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_LOADS = (0.1, 0.25, 0.5, 0.75, 0.9)


def write_serve_page(path: str | Path, found: ServeFound, *, command: str | None = None) -> None:
    """Writes the page whole or not at all; raises `UsageError` where it can't be written."""
    write_html(path, make_serve_page(found, command=command))


def make_serve_page(found: ServeFound, *, command: str | None = None) -> str:
    """Returns the page's HTML."""
    return fill(
        f"Serving {found.asked.shape.name} - plan",
        [
            _header(found),
            _tiles(found),
            _memory(found),
            _lengths(found),
            _rates(found),
            _ranked(found),
            _words(found),
            _foot(found, command),
        ],
    )


def _name(each: Served) -> str:
    ranks = f"{each.tensor} tensor ranks" if each.tensor > 1 else "one device"
    return f"{each.replicas} x {ranks}"


def _as_memory(each: Served) -> Memory:
    serving = each.serving
    total = serving.expected_bytes
    return Memory(
        parts=serving.parts,
        low_bytes=total,
        high_bytes=total,
        capacity_bytes=serving.capacity_bytes,
        pipeline_rank=0,
    )


def _badge(each: Served) -> str:
    if each.works:
        return verdict(_as_memory(each))
    words = "does not fit" if not each.serving.fits else "too slow" if not each.is_in_time else "too few devices"
    return f'<span class="verdict bad"><span aria-hidden="true">&#10005;</span> {words}</span>'


def _header(found: ServeFound) -> str:
    asked, best = found.asked, found.best
    shown = best or found.ranked[0]
    facts = [
        f"{count_words(asked.shape.parameters)} parameters",
        f"weights in {asked.weights}, cache in {asked.cache}",
        f"{asked.prompt_tokens:,} tokens a prompt, {asked.output_tokens:,} a reply",
        f"served by {asked.runtime}",
    ]
    if asked.request_rate is not None:
        facts.append(f"{asked.request_rate:g} requests/s")
    facts += [f"TTFT within {seconds(limit)}" for limit in (asked.ttft_limit_s,) if limit is not None]
    facts += [f"TPOT within {seconds(limit)}" for limit in (asked.tpot_limit_s,) if limit is not None]
    if best is None:
        sentence = f"Nothing works. With {_name(shown)}: {shown.why_not}."
    else:
        serving = best.serving
        speed = f"{best.tokens_per_s:,.0f} tokens/s of all replicas"
        if serving.ttft_s is not None and serving.tpot_s is not None:
            speed = f"the first token after {seconds(serving.ttft_s)}, each further one after {seconds(serving.tpot_s)}"
        sentence = f"It works as {_name(best)}, {best.num_devices} of {asked.num_devices} devices: {speed}."
    title = f"{asked.shape.name} on {asked.num_devices} x {asked.device.name}"
    return (
        f'<header><p class="kicker">Shardline plan: serving</p><h1>{escape(title)}</h1>'
        f'<p class="lead">{_badge(shown)} {escape(sentence)}</p>'
        f'<ul class="facts">{"".join(f"<li>{escape(fact)}</li>" for fact in facts)}</ul></header>'
    )


def _tiles(found: ServeFound) -> str:
    shown = found.best or found.ranked[0]
    serving = shown.serving
    tiles = [("weights on a device", gib(serving.parts["weights"]), f"of {gib(serving.capacity_bytes)}")]
    if serving.fits:
        tiles += [
            ("requests at once", f"{serving.max_requests:,}", "on one replica"),
            ("a prompt", seconds(serving.prefill_s), f"of {found.asked.prompt_tokens:,} tokens"),
            ("a token", seconds(serving.decode_s), f"alone; {seconds(serving.decode_full_s)} when full"),
            ("tokens per second", f"{shown.tokens_per_s:,.0f}", f"{shown.replicas} replicas"),
        ]
    return show_tiles(tiles)


def _memory(found: ServeFound) -> str:
    rows = [
        Row(
            name=_name(each),
            settings=f"{each.serving.max_requests:,} requests at once" if each.serving.fits else each.why_not,
            memory=_as_memory(each),
            chosen=each is found.best,
            group="" if index else "What works" if found.best is not None else "What comes nearest",
        )
        for index, each in enumerate(found.ranked)
    ]
    return card(
        "Memory of one device",
        f"Weights, a step's activations and the runtime; what {MEMORY_SHARE:.0%} of the device leaves is the cache.",
        memory_chart(rows, SERVING),
    )


def _bars(head: tuple[str, str], rows: Sequence[tuple[str, float, str]]) -> str:
    """A table whose figures are drawn too: (name, how long its bar is, its figure)."""
    top = max((value for _, value, _ in rows), default=0.0) or 1.0
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="text">'
        + svg(
            f'<rect class="part cache" x="0%" y="3" width="{100 * value / top:.3f}%" height="14"/>',
            height=20,
            title=name,
            desc=text,
        )
        + f"</td><td>{escape(text)}</td></tr>"
        for name, value, text in rows
    )
    return (
        f'<table><thead><tr><th scope="col">{head[0]}</th><th scope="col" aria-hidden="true"></th>'
        f'<th scope="col">{head[1]}</th></tr></thead><tbody>{body}</tbody></table>'
    )


def _lengths(found: ServeFound) -> str:
    if found.best is None:
        return ""
    asked, rows = found.asked, []
    for length in _LENGTHS:
        prompt = max(1, length - asked.output_tokens)
        changed = dataclasses.replace(asked, prompt_tokens=prompt, request_rate=None)
        count = replica(changed, found.best.tensor).max_requests
        if length > asked.output_tokens:
            rows.append((f"{length:,} tokens", float(count), f"{count:,}"))
    return card(
        "How many requests fit at once",
        f"On one replica, by a request's length with its reply; at most {MAX_SEQUENCES} take part in a step.",
        _bars(("a request of", "at once"), rows),
    )


def _rates(found: ServeFound) -> str:
    if found.best is None:
        return ""
    best, asked = found.best, found.asked
    most = best.serving.max_request_rate
    body = ""
    for load in _LOADS:
        changed = dataclasses.replace(asked, request_rate=load * most, ttft_limit_s=None, tpot_limit_s=None)
        serving = replica(changed, best.tensor)
        if serving.ttft_s is None or serving.tpot_s is None or serving.replicas > 1:
            continue
        late = [
            limit is not None and value > limit
            for value, limit in ((serving.ttft_s, asked.ttft_limit_s), (serving.tpot_s, asked.tpot_limit_s))
        ]
        ttft, tpot = (
            f"{seconds(value)}{' (over the limit)' if is_late else ''}"
            for value, is_late in zip((serving.ttft_s, serving.tpot_s), late, strict=True)
        )
        body += (
            f'<tr><th scope="row">{load * most:.3g} requests/s ({load:.0%})</th><td>{ttft}</td><td>{tpot}</td>'
            f"<td>{serving.concurrency:,.3g}</td></tr>"
        )
    if not body:
        return ""
    head = "".join(f'<th scope="col">{name}</th>' for name in ("load of a replica", "TTFT", "TPOT", "at once"))
    return card(
        "How quickly it answers",
        "Mean times of one replica by its load, requests arriving at random.",
        '<div class="scroll" role="region" tabindex="0" aria-label="Times by load"><table><thead>'
        f"<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>",
    )


def _ranked(found: ServeFound) -> str:
    names = ("layout", "weights", "cache", "requests at once", "TTFT", "TPOT", "tokens/s", "devices", "verdict")
    head = "".join(
        f'<th scope="col"{" class=text" if name in ("layout", "verdict") else ""}>{name}</th>' for name in names
    )
    body = "".join(
        f"<tr{' class=chosen' if each is found.best else ''}>{''.join(_cells(each))}</tr>" for each in found.ranked
    )
    title = "The ways that work, ranked" if found.best is not None else "The ways that were tried"
    return card(
        title,
        "",
        f'<div class="scroll" role="region" tabindex="0" aria-label="{title}"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>",
    )


def _cells(each: Served) -> Iterator[str]:
    serving, rated = each.serving, each.asked.request_rate is not None
    ttft, tpot = (serving.ttft_s, serving.tpot_s) if rated else (serving.prefill_s, serving.decode_full_s)
    yield f'<th scope="row">{_name(each)}</th>'
    yield f"<td>{gib(serving.parts['weights'])}</td><td>{gib(serving.parts['cache'])}</td>"
    yield f"<td>{serving.max_requests:,}</td>"
    yield from (f"<td>{'-' if value is None or not serving.fits else seconds(value)}</td>" for value in (ttft, tpot))
    yield f"<td>{f'{each.tokens_per_s:,.0f}' if serving.fits else '-'}</td><td>{each.num_devices}</td>"
    yield f"<td class=text>{_badge(each)}</td>"


def _words(found: ServeFound) -> str:
    if found.best is None:
        nothing = "Nothing that was tried: fewer bits, shorter prompts, up to 64 times as many devices."
        left = card("What would make it work", "", listed(found.changes or [nothing]))
    else:
        left = card("Why this one", "", listed(served_reasons(found, found.best))) + _command(found.best)
    body = "".join(f"<dt>{escape(name)}</dt><dd>{escape(why)}</dd>" for name, _, why in found.alternatives)
    right = card("The others", "", f"<dl>{body}</dl>") if body else ""
    return f'<div class="columns"><div>{left}</div><div>{right}</div></div>'


def _command(best: Served) -> str:
    asked = best.asked
    if asked.runtime != "shardline":
        return ""
    words = ["shardline serve FOLDER"]
    if asked.weights in ("int8", "int4"):
        words.append(f"--quantization {asked.weights}")
    words.append(f"--dtype {'fp32' if asked.weights == 'fp32' else 'bf16'}")
    if asked.cache == "int8":
        words.append("--kv-cache-dtype int8")
    if best.tensor > 1:
        words.append(f"--tensor-parallel-size {best.tensor}")
    words.append(f"--max-model-len {asked.prompt_tokens + asked.output_tokens}")
    return card("To serve it", "One replica.", f"<pre>{escape(' '.join(words))}</pre>")


def _foot(found: ServeFound, command: str | None) -> str:
    device = found.asked.device
    notes = [
        "Calculated in closed form, not measured on these devices.",
        f"A replica is given {MEMORY_SHARE:.0%} of the device's memory. Times are means; requests arrive at random, "
        "and prefills take turns with decoding.",
        "Prefill is bound by matrix products, decoding by reading weights and cache; both also take the runtime's own "
        "time.",
        f"{device.name}: {device.source}. Product rate: {device.measured_source}.",
    ]
    return foot(notes, command)
