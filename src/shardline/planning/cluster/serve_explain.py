"""What a search for a way to serve found, in words, as a table and as JSON.

for line in served_lines(found): print(line)
served_table(found)             # for rich
served_to_json(found)           # the keys of `shardline plan --for serve --json`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardline.planning.cluster.figures import seconds
from shardline.planning.cluster.serving import MAX_SEQUENCES

if TYPE_CHECKING:
    from rich.table import Table

    from shardline.planning.cluster.serve_search import Served, ServeFound

__all__ = ["served_lines", "served_reasons", "served_table", "served_to_json", "served_verdict"]

GIB = 1 << 30


def served_lines(found: ServeFound) -> Iterator[str]:
    """Yields the answer, its reasons, why not the others, and what would help where nothing works."""
    asked, best = found.asked, found.best
    size = f"{asked.shape.parameters / 1e9:.3g} billion parameters"
    what = f"Serving {asked.shape.name} ({size}, {asked.weights}) on {asked.num_devices} x {asked.device.name}"
    if best is None:
        least = found.ranked[0]
        yield f"{what}: nothing works. With {_layout_text(least)}: {least.why_not}."
        nothing = "nothing that was tried (fewer bits, shorter prompts, up to 64 times as many devices)"
        yield f"What would: {'; or '.join(found.changes) or nothing}."
    else:
        yield f"{what} with {asked.runtime}: {_layout_text(best)}: {'; '.join(served_reasons(found, best))}."
    for name, _, why in found.alternatives:
        yield f"{name[0].upper()}{name[1:]}: {why}." if name.startswith("with ") else f"Why not {name}: {why}."


def served_table(found: ServeFound) -> Table:
    """Returns the ranked ways; requests are those that fit at once on a replica, tokens/s those of all replicas."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("layout", "weights GiB", "cache GiB", "requests", "TTFT", "TPOT", "tokens/s", "devices"):
        table.add_column(name, justify="left" if name == "layout" else "right", overflow="fold")
    for each in found.ranked:
        serving = each.serving
        ttft, tpot = _pair(each) if serving.fits else (None, None)
        table.add_row(
            f"{each.replicas} x tp{each.tensor}",
            f"{serving.parts['weights'] / GIB:.1f}",
            f"{serving.parts['cache'] / GIB:.1f}",
            str(serving.max_requests),
            "" if ttft is None else seconds(ttft),
            "" if tpot is None else seconds(tpot),
            f"{each.tokens_per_s:,.0f}" if serving.fits else "",
            str(each.num_devices),
        )
    return table


def served_to_json(found: ServeFound) -> dict[str, Any]:
    """Returns the answer; where nothing works, the figures are those of what comes nearest."""
    best = found.best or found.ranked[0]
    serving = best.serving
    total = serving.expected_bytes / GIB
    return {
        "fits": found.best is not None,
        "verdict": served_verdict(best),
        "memory_gib": {
            "total": total,
            "low": total,
            "high": total,
            "capacity": serving.capacity_bytes / GIB,
            "parts": {name: count / GIB for name, count in serving.parts.items()},
        },
        "step_s": serving.decode_full_s,
        "tokens_per_s": best.tokens_per_s,
        "tokens_per_s_per_device": best.tokens_per_s / max(1, best.num_devices),
        "mfu": None,
        "layout": _layout(best),
        "serving": {name: value for name, value in serving.to_json().items() if name not in ("memory_gib", "reasons")},
        "reasons": served_reasons(found, best) if found.best is not None else [best.why_not, *found.changes],
        "alternatives": [
            {
                "name": name,
                "why_not": why,
                "fits": each.serving.fits,
                "layout": _layout(each),
                "tokens_per_s": each.tokens_per_s,
            }
            for name, each, why in found.alternatives
        ],
        "ranked": [
            {"layout": _layout(each), "tokens_per_s": each.tokens_per_s, "max_requests": each.serving.max_requests}
            for each in found.ranked
        ],
    }


def served_reasons(found: ServeFound, best: Served) -> list[str]:
    """Returns why the best one is, in figures."""
    asked, serving = found.asked, best.serving
    length = asked.prompt_tokens + asked.output_tokens
    reasons = [
        f"a replica keeps {serving.parts['weights'] / GIB:.1f} GiB of weights on each device and has "
        f"{serving.parts['cache'] / GIB:.1f} of {serving.capacity_bytes / GIB:.1f} GiB for the cache: "
        f"{serving.cache_tokens:,} tokens of {serving.kv_bytes_per_token / 1024:.0f} KiB, {serving.max_requests} "
        f"requests of {length:,} tokens at once",
        f"a prompt of {asked.prompt_tokens:,} tokens takes {seconds(serving.prefill_s)}, a token "
        f"{seconds(serving.decode_s)} alone and {seconds(serving.decode_full_s)} among {serving.max_requests}",
    ]
    if asked.request_rate is None:
        reasons.append(
            f"{best.tokens_per_s:,.0f} tokens/s of all replicas when full, "
            f"{serving.max_request_rate * best.replicas:.3g} requests/s"
        )
    elif serving.ttft_s is not None and serving.tpot_s is not None:
        reasons.append(
            f"{asked.request_rate:g} requests/s take {best.replicas} replica{'s' * (best.replicas > 1)}, "
            f"{best.num_devices} of the {asked.num_devices} devices: TTFT {seconds(serving.ttft_s)} and TPOT "
            f"{seconds(serving.tpot_s)} on average, {serving.concurrency:.2g} requests at once on each"
        )
    if serving.max_requests == MAX_SEQUENCES:
        reasons.append(f"more would fit, but a step takes {MAX_SEQUENCES} requests at most")
    return reasons


def _pair(each: Served) -> tuple[float | None, float | None]:
    serving = each.serving
    if each.asked.request_rate is None:
        return serving.prefill_s, serving.decode_full_s
    return serving.ttft_s, serving.tpot_s


def served_verdict(each: Served) -> str:
    if not each.serving.fits:
        return "does not fit"
    if not each.works:
        return "too slow" if not each.is_in_time else "too few devices"
    return "fits"


def _layout(each: Served) -> dict[str, Any]:
    asked = each.asked
    return {
        "replicas": each.replicas,
        "tensor": each.tensor,
        "pipeline": 1,
        "data": each.replicas,
        "zero": 0,
        "weights": asked.weights,
        "cache": asked.cache,
        "num_devices": each.num_devices,
    }


def _layout_text(each: Served) -> str:
    ranks = f" of {each.tensor} tensor ranks" if each.tensor > 1 else " of one device"
    return f"{each.replicas} replica{'s' * (each.replicas != 1)}{ranks}"
