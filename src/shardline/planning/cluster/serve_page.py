"""A plan of serving as one self-contained HTML page, in the manner of `page`.

    write_serve_page("plan.html", search_serving(asked), command="shardline plan llama-3.1-8b --for serve ...")

Memory of each way to serve against what a replica may use, how many requests fit by their length, time to the first
token and for each further one by request rate, the ranked table, the reasons, why not the others, and the command that
serves it so.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from shardline.planning.cluster.bars import badge
from shardline.planning.cluster.figures import gib, seconds, three
from shardline.planning.cluster.page import count_words, defined, fill, foot, header, listed, show_tiles, write_html
from shardline.planning.cluster.sections import card
from shardline.planning.cluster.serve_explain import served_reasons, served_verdict
from shardline.planning.cluster.serve_rates import serve_rates
from shardline.planning.cluster.serve_sections import (
    OPTION,
    layout_words,
    memory_of,
    num_replicas,
    serve_lengths,
    serve_memory,
    serve_ranked,
    tokens,
)  # fmt: skip
from shardline.planning.cluster.serving import MAX_SEQUENCES, MEMORY_SHARE

if TYPE_CHECKING:
    from shardline.planning.cluster.serve_search import Served, ServeFound

__all__ = ["make_serve_page", "serve_flags", "write_serve_page"]

Tile = tuple[str, str, str]
_BATCHED_TOKENS = 8192  # of a step, whose activations the plan counts


def write_serve_page(path: str | Path, found: ServeFound, *, command: str | None = None) -> None:
    """Writes the page whole or not at all; raises `UsageError` where it can't be written."""
    write_html(path, make_serve_page(found, command=command))


def make_serve_page(found: ServeFound, *, command: str | None = None) -> str:
    """Returns the page's HTML."""
    sections = [
        _header(found),
        show_tiles(list(_tiles(found))),
        serve_memory(found),
        serve_lengths(found),
        serve_rates(found),
        serve_ranked(found),
        _words(found),
        _foot(found, command),
    ]
    return fill(f"{_what(found)} - serving plan", sections)


def _what(found: ServeFound) -> str:
    return f"{found.asked.shape.name} on {found.asked.num_devices} x {found.asked.device.name}"


def _header(found: ServeFound) -> str:
    asked, best = found.asked, found.best
    shown = best or found.ranked[0]
    facts = [
        f"{count_words(asked.shape.parameters)} parameters",
        f"weights in {asked.weights}",
        f"cache in {asked.cache}",
        f"prompts of {tokens(asked.prompt_tokens)}",
        f"replies of {tokens(asked.output_tokens)}",
    ]
    if asked.request_rate is not None:
        facts.append(f"{asked.request_rate:,.6g} requests/s")
    limits = {"TTFT": asked.ttft_limit_s, "TPOT": asked.tpot_limit_s}
    facts += [f"{name} within {seconds(limit)}" for name, limit in limits.items() if limit is not None]
    facts.append(f"served by {asked.runtime}")
    sentence = f"Nothing works. With {layout_words(shown)}: {shown.why_not}."
    if best is not None:
        sentence = (
            f"It works as {layout_words(best)}, {best.num_devices} of {asked.num_devices} devices: {_speed(best)}."
        )
    elif found.changes:
        sentence += f" The cheapest change that would do: {found.changes[0]}."
    title, verdict = _what(found), badge(served_verdict(shown))
    return header("serving", title=title, badge=verdict, sentence=sentence, facts=facts)


def _speed(best: Served) -> str:
    serving, rate = best.serving, best.asked.request_rate
    if rate is None or serving.ttft_s is None or serving.tpot_s is None:
        return (
            f"{best.tokens_per_s:,.0f} tokens/s when full, {three(serving.max_request_rate * best.replicas)} requests/s"
        )
    return (
        f"at {rate:,.6g} requests/s the first token comes after {seconds(serving.ttft_s)}, each further one after "
        f"{seconds(serving.tpot_s)}"
    )


def _tiles(found: ServeFound) -> Iterator[Tile]:
    asked, best = found.asked, found.best
    shown = best or found.ranked[0]
    serving, count = shown.serving, num_replicas(shown)
    memory = memory_of(shown)
    if not serving.fits:
        over = memory.expected_bytes - memory.capacity_bytes
        times = memory.expected_bytes / memory.capacity_bytes
        yield "memory for one request", gib(memory.expected_bytes), f"on each of {shown.tensor} devices"
        yield "a replica may use", gib(memory.capacity_bytes), f"{MEMORY_SHARE:.0%} of a device"
        yield "too much by", gib(over), f"{times:.3g} times what it may use"
        yield "weights on a device", gib(serving.parts["weights"]), f"in {asked.weights}, shared by {shown.tensor}"
        return
    if best is not None and serving.ttft_s is not None and serving.tpot_s is not None:
        yield "first token (TTFT)", seconds(serving.ttft_s), _within(asked.ttft_limit_s)
        yield "further token (TPOT)", seconds(serving.tpot_s), _within(asked.tpot_limit_s)
        yield "requests at once", three(serving.concurrency or 0), f"of {serving.max_requests:,} that fit on a replica"
    else:
        yield "a prompt", seconds(serving.prefill_s), f"of {tokens(asked.prompt_tokens)}, alone"
        yield "a token", seconds(serving.decode_s), f"alone; {seconds(serving.decode_full_s)} when full"
        yield "requests at once", f"{serving.max_requests:,}", "on a replica, as many as fit"
    if best is not None:
        yield "tokens per second", f"{best.tokens_per_s:,.0f}", f"{best.tokens_per_s / best.num_devices:,.0f} a device"
    most = serving.max_request_rate * (count if shown.works else max(1, asked.num_devices // shown.tensor))
    yield "requests a second", three(most), "the most it keeps up with"
    if shown.is_in_time:
        yield "devices", f"{shown.num_devices:,}", f"of {asked.num_devices:,} that there are"


def _within(limit: float | None) -> str:
    return "on average" if limit is None else f"on average, limit {seconds(limit)}"


def _words(found: ServeFound) -> str:
    """Reasons and the command on one side, the alternatives and the options on the other."""
    if found.best is None:
        nothing = "Nothing that was tried: fewer bits, shorter prompts, up to 64 times as many devices."
        lead = "Each of these alone would, the cheapest first." if len(found.changes) > 1 else ""
        left = card("What would make it work", lead, listed(found.changes or [nothing]))
    else:
        left = card("Why this one", "", listed(served_reasons(found, found.best))) + _command(found.best)
    refused = [(name, why) for name, _, why in found.alternatives if not name.startswith(OPTION)]
    options = [(name[0].upper() + name[1:], why) for name, _, why in found.alternatives if name.startswith(OPTION)]
    title = "Why not" if found.best is None else "Why not the others"
    right = card(title, "", defined(refused)) if refused else ""
    if options:
        right += card("What else could be chosen", "The same layout with fewer bits.", defined(options))
    return f'<div class="columns"><div>{left}</div><div>{right}</div></div>'


def _command(best: Served) -> str:
    asked = best.asked
    if asked.runtime != "shardline":
        length = tokens(asked.prompt_tokens + asked.output_tokens)
        text = (
            f"{asked.runtime} is started by its own command: {layout_words(best)}, requests of up to {length}, weights "
            f"in {asked.weights}, cache in {asked.cache}, {MEMORY_SHARE:.0%} of each device's memory."
        )
        return card("To serve it", text, "")
    lines = [" ".join(pair) for pair in serve_flags(best)]
    text = " \\\n  ".join(["shardline serve FOLDER", *lines])
    lead = "FOLDER holds the model, or is hf://ORG/NAME."
    if best.replicas > 1:
        lead += f" One command starts all {best.replicas} replicas behind one address."
    return card("To serve it", lead, f"<pre>{escape(text)}</pre>")


def serve_flags(best: Served) -> Iterator[tuple[str, str]]:
    """Yields the flags of `shardline serve` that make what is planned."""
    asked = best.asked
    dtype = asked.weights if asked.weights in ("fp32", "bf16") else "bf16"
    yield "--dtype", dtype
    if asked.weights != dtype:
        yield "--quantization", asked.weights
    if asked.cache != dtype:
        yield "--kv-cache-dtype", asked.cache
    if best.tensor > 1:
        yield "--tensor-parallel-size", str(best.tensor)
    if best.replicas > 1:
        yield "--data-parallel-size", str(best.replicas)
    yield "--max-model-len", str(asked.prompt_tokens + asked.output_tokens)
    yield "--max-num-seqs", str(best.serving.max_requests)
    yield "--max-num-batched-tokens", str(_BATCHED_TOKENS)


def _foot(found: ServeFound, command: str | None) -> str:
    device = found.asked.device
    notes = [
        "Calculated in closed form, not measured on these devices. docs/planning.md of Shardline holds such times "
        "against those that others measured.",
        f"A replica may use {MEMORY_SHARE:.0%} of a device's memory, in GiB of 2^30 bytes. What is needed is said in "
        "words as the memory of a whole device, of which that share would be enough.",
        f"At most {MAX_SEQUENCES} requests take part in a step. All have the same length, and prompts that begin alike "
        "share nothing.",
        "Times are means, not those of the slowest requests. Requests arrive at random (Poisson), and prompts take "
        "turns with the steps that answer.",
        "A prompt is bound by matrix products, a token by reading weights and cache; both also take the runtime's own "
        "time.",
        f"{device.name}: {device.source}. Product rate: {device.measured_source}.",
    ]
    return foot(notes, command)
