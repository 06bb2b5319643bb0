"""The page of a plan of serving: self-contained, its numbers those of the JSON, its pictures in proportion."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from planning.cluster.page_reader import Node, read_page
from shardline.cli import serve
from shardline.config import UsageError
from shardline.hardware.catalogue import device
from shardline.planning.cluster.curves import Point, curve_chart
from shardline.planning.cluster.figures import GIB, gib, seconds, three
from shardline.planning.cluster.known_shapes import known_shape
from shardline.planning.cluster.serve_explain import served_to_json, served_verdict
from shardline.planning.cluster.serve_page import make_serve_page, serve_flags, write_serve_page
from shardline.planning.cluster.serve_rates import loads, most_within_limits
from shardline.planning.cluster.serve_search import ServeAsked, Served, ServeFound, search_serving
from shardline.planning.cluster.serving import MAX_SEQUENCES, MEMORY_SHARE, estimate_serving

SMALLEST = 0.001  # percent: what the drawing rounds to


def found(model: str = "llama-3.1-8b", **changes: Any) -> ServeFound:
    given = {"device": device("l4"), "num_devices": 8, **changes}
    return search_serving(ServeAsked(shape=known_shape(model), **given))


FITS = found()
RATED = found(request_rate=4.0, ttft_limit_s=2.0, tpot_limit_s=0.2)
LARGE = found("llama-3.1-70b", device=device("h100"))
NOT = found("deepseek-v3", device=device("h100"))
SLOW = found(request_rate=4.0, ttft_limit_s=0.01)
FEW = found(request_rate=4000.0)
PLANS = {"fits": FITS, "rated": RATED, "large": LARGE, "not": NOT, "slow": SLOW, "few": FEW}
ALL = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def page_of(plan: ServeFound, **options: Any) -> Node:
    return read_page(make_serve_page(plan, **options))


def tiles_of(page: Node) -> dict[str, str]:
    return {tile.children[0].text: tile.text for tile in page.all("div", "tile")}  # type: ignore[union-attr]


def card_of(page: Node, title: str) -> Node:
    (card,) = [each for each in page.all("section", "card") if each.one("h2").text == title]
    return card


def drawn(plan: ServeFound) -> list[tuple[Node, Served]]:
    """Every bar of memory with its way of serving, in the page's order."""
    others = [(name, each) for name, each, _ in plan.alternatives if all(each is not one for one in plan.ranked)]
    others.sort(key=lambda other: other[0].startswith("with "))
    ways = [*plan.ranked, *(each for _, each in others)]
    return list(zip(page_of(plan).all("svg", "memory"), ways, strict=True))


def best_of(plan: ServeFound) -> Served:
    assert plan.best is not None
    return plan.best


@ALL
def test_it_is_one_document_that_needs_nothing_else(plan: ServeFound) -> None:
    text = make_serve_page(plan, command="shardline plan")
    page = read_page(text)
    for node in page.walk():
        assert node.tag not in ("script", "link", "img", "iframe", "object", "base"), node.tag
        assert not {"src", "href", "srcset", "onload", "onclick"} & set(node.attributes)
    assert not re.search(r"@import|url\((?!#)|https?://", text)
    assert len(text) < 100_000
    assert page.one("h1").text == f"{plan.asked.shape.name} on 8 x {plan.asked.device.name}"
    for picture in page.all("svg"):
        if picture.attributes.get("role") == "img":
            title, desc = picture.children[:2]
            assert isinstance(title, Node)
            assert isinstance(desc, Node)
            assert title.text
            assert desc.text
    assert all(each.attributes["scope"] in ("col", "row") for each in page.all("th"))


@ALL
def test_the_numbers_are_those_of_the_json(plan: ServeFound) -> None:
    page, answer = page_of(plan), served_to_json(plan)
    assert page.one("p", "lead").one("span", "verdict").text.endswith(answer["verdict"])
    for reason in answer["reasons"]:
        assert reason in page.one("main").text
    for each in answer["alternatives"]:
        assert each["why_not"] in [said.text for said in page.all("dd")]
        assert each["name"].lower() in [name.text.lower() for name in page.all("dt")]
    (table,) = [each for each in page.all("table") if "weights GiB" in each.text]
    heads, *rows = [[cell.text for cell in row.children if isinstance(cell, Node)] for row in table.all("tr")]
    for cells, way, said in zip(rows, plan.ranked, answer["ranked"], strict=True):
        row = dict(zip(heads, cells, strict=True))
        assert row["weights GiB"] == f"{way.serving.parts['weights'] / GIB:,.1f}"
        assert row["cache GiB"] == f"{way.serving.parts['cache'] / GIB:,.1f}"
        assert row["at once"] == f"{said['max_requests']:,}"
        assert row["verdict"].endswith(served_verdict(way))
        if way.serving.fits and way.is_in_time:
            assert row["layout"] == f"{said['layout']['replicas']:,} x tp{said['layout']['tensor']}"
            assert row["tokens/s"] == f"{said['tokens_per_s']:,.0f}"
            assert row["devices"] == f"{said['layout']['num_devices']:,}"
        else:
            assert row["tokens/s"] == "-"
            assert int(row["devices"]) <= 8


def test_the_tiles_are_the_answer_s_figures() -> None:
    answer, tiles = served_to_json(RATED), tiles_of(page_of(RATED))
    serving = answer["serving"]
    assert tiles["first token (TTFT)"].endswith(f"{seconds(serving['ttft_s'])} on average, limit 2.00 s")
    assert tiles["further token (TPOT)"].endswith(f"{seconds(serving['tpot_s'])} on average, limit 200 ms")
    said = f"{three(serving['concurrency'])} of {serving['max_requests']} that fit on a replica"
    assert tiles["requests at once"].endswith(said)
    assert (
        f"{answer['tokens_per_s']:,.0f} {answer['tokens_per_s_per_device']:,.0f} a device" in tiles["tokens per second"]
    )
    assert tiles["devices"] == f"devices {answer['layout']['num_devices']} of 8 that there are"
    lead = page_of(RATED).one("p", "lead").text
    for words in (
        "2 replicas of 2 tensor ranks",
        "4 requests/s",
        seconds(serving["ttft_s"]),
        seconds(serving["tpot_s"]),
    ):
        assert words in lead
    answer, tiles = served_to_json(FITS), tiles_of(page_of(FITS))
    assert f"{answer['tokens_per_s']:,.0f} tokens/s" in page_of(FITS).one("p", "lead").text
    assert seconds(answer["serving"]["prefill_s"]) in tiles["a prompt"]
    assert seconds(answer["serving"]["decode_full_s"]) in tiles["a token"]
    replicas = answer["layout"]["replicas"]
    assert three(answer["serving"]["max_request_rate"] * replicas) in tiles["requests a second"]


@ALL
def test_bars_are_as_long_as_their_bytes_and_cross_the_limit_where_nothing_fits(plan: ServeFound) -> None:
    pictures = drawn(plan)
    scales = set()
    for picture, each in pictures:
        bars = {(bar.classes - {"part"}).pop(): bar for bar in picture.all("rect", "part")}
        parts = {name: count for name, count in each.serving.parts.items() if count}
        limit = picture.all("line", "limit")[0].percent("x1")
        scale = limit / (MEMORY_SHARE * each.serving.capacity_bytes)
        scales.add(round(scale * GIB, 4))
        end = max(bar.percent("x") + bar.percent("width") for bar in bars.values())
        if each.serving.fits:
            assert set(bars) == set(parts)
            assert end == pytest.approx(limit, abs=4 * SMALLEST)  # the cache takes what is left
            assert not picture.all("rect", "over")
        else:
            assert set(bars) == {*parts, "cache"}  # that of one request
            assert end > limit
            beyond = picture.one("rect", "over").percent("width")
            assert beyond == pytest.approx(end - limit, rel=1e-4, abs=4 * SMALLEST)
        for name in set(parts) - {"cache"}:
            assert bars[name].percent("width") == pytest.approx(scale * parts[name], rel=1e-4, abs=SMALLEST)
    assert len(scales) == 1
    said = [row.one("div", "much").text for row in page_of(plan).all("li", "row") if row.all("div", "much")]
    assert [text.split("GiB")[1][3:] for text in said] == [served_verdict(each) for _, each in pictures]


def test_a_way_whose_cache_has_no_room_for_a_request_crosses_the_limit_too() -> None:
    plan = found(num_devices=1, prompt_tokens=30000)
    (least,) = plan.ranked
    assert not least.serving.fits
    assert least.serving.expected_bytes <= MEMORY_SHARE * least.serving.capacity_bytes * 1.0001
    ((picture, _),) = drawn(plan)
    assert picture.one("rect", "over").percent("width") > 1
    assert "no room for 30,256 tokens" in page_of(plan).one("ul", "rows").text


def test_all_that_was_tried_is_drawn_and_the_options_are_told_apart() -> None:
    page = page_of(LARGE)
    groups = [each.all("div")[0].text for each in page.all("li", "group")]
    assert groups == ["What works", "The others", "With fewer bits"]
    refused = card_of(page, "Why not the others")
    assert [each.text for each in refused.all("dt")] == ["one device a replica", "tensor 2", "tensor 8"]
    options = card_of(page, "What else could be chosen")
    assert [each.text for each in options.all("dt")] == [
        "With weights in int8",
        "With weights in int4",
        "With a cache of int8",
    ]


@pytest.mark.parametrize("plan", [FITS, RATED, LARGE, SLOW], ids=["fits", "rated", "large", "slow"])
def test_columns_are_the_requests_that_fit(plan: ServeFound) -> None:
    picture = page_of(plan).one("svg", "sizes")
    shown, asked = plan.best or plan.ranked[0], plan.asked
    names = [each.text for each in picture.all("text", "tick")]
    counts = [int(each.text.replace(",", "")) for each in picture.all("text", "count")]
    assert names == ["1k", "1.25k", "2k", "4k", "8k", "16k", "32k", "64k", "128k"]
    for name, count in zip(names, counts, strict=True):
        length = round(float(name[:-1]) * 1024)
        assert count == serving(asked, shown.tensor, prompt_tokens=length - 256).max_requests
    heights = [float(bar.attributes["height"]) for bar in picture.all("rect", "part")]
    for height, count in zip(heights, counts, strict=True):
        assert height == pytest.approx(heights[0] * count / counts[0], abs=0.02)
    (chosen,) = picture.all("rect", "asked")
    assert float(chosen.attributes["height"]) == heights[1]
    limited = [float(line.attributes["y1"]) for line in picture.all("line", "limit")]
    if counts[0] == MAX_SEQUENCES:
        assert limited == [float(picture.all("rect", "part")[0].attributes["y"])]
    else:
        assert not limited


def serving(asked: ServeAsked, tensor: int, **changes: Any) -> Any:
    given = {"prompt_tokens": asked.prompt_tokens, "output_tokens": asked.output_tokens, **changes}
    return estimate_serving(
        asked.shape,
        asked.device,
        tensor=tensor,
        weights=asked.weights,
        cache=asked.cache,
        runtime=asked.runtime,
        **given,
    )


def test_lengths_end_where_nothing_fits_or_the_model_does() -> None:
    short = found("llama-3.1-8b", num_devices=1, weights="bf16")
    ticks = [each.text for each in page_of(short).one("svg", "sizes").all("text", "tick")]
    counts = [each.text for each in page_of(short).one("svg", "sizes").all("text", "count")]
    assert ticks[-1] == "32k"
    assert counts[-1] == "0"
    assert counts[-2] != "0"
    limited = found("smollm2-135m")  # of 8192 positions
    assert page_of(limited).one("svg", "sizes").all("text", "tick")[-1].text == "8k"


@pytest.mark.parametrize("plan", [FITS, RATED, LARGE, FEW, SLOW], ids=["fits", "rated", "large", "few", "slow"])
def test_curves_are_the_estimate_at_each_rate(plan: ServeFound) -> None:
    shown, asked = plan.best or plan.ranked[0], plan.asked
    replicas = shown.replicas if plan.best else asked.num_devices // shown.tensor
    pictures = page_of(plan).all("svg", "curves")
    for picture, field in zip(pictures, ("ttft_s", "tpot_s"), strict=True):
        points = [
            tuple(map(float, pair.split(",")))
            for path in picture.all("path", "curve")
            for pair in path.attributes["d"][1:].split(" ")
        ]
        xs, ys = zip(*points, strict=True)
        assert max(xs) == 1000
        top = shown.serving.max_request_rate
        known = [serving(asked, shown.tensor, request_rate=x / 1000 * top) for x in xs]
        heights = [150 - y for y in ys]
        scale = heights[-1] / getattr(known[-1], field)
        for each, height in zip(known, heights, strict=True):
            assert each.replicas == 1
            # The point where a curve meets its limit lies on the line between two estimates.
            assert height == pytest.approx(getattr(each, field) * scale, rel=0.02, abs=0.02)
        assert f"{seconds(getattr(known[-1], field))} at the most" in picture.all("desc")[0].text
    assert f"{three(shown.serving.max_request_rate * replicas)} requests/s are the most" in page_of(plan).text


def test_limits_and_the_rate_asked_are_lines_where_they_belong() -> None:
    ttft, tpot = page_of(RATED).all("svg", "curves")
    best = best_of(RATED)
    for picture, limit, value in ((ttft, 2.0, best.serving.ttft_s), (tpot, 0.2, best.serving.tpot_s)):
        assert value is not None
        line, dot = picture.one("line", "limit"), picture.one("circle", "chosen")
        above, asked = (170 - float(each) for each in (line.attributes["y1"], dot.attributes["cy"]))
        assert asked / above == pytest.approx(value / limit, abs=0.002)
        mark = picture.one("line", "mark").percent("x1")
        assert mark == pytest.approx(100 * 4.0 / (best.serving.max_request_rate * best.replicas), abs=SMALLEST)
        assert dot.percent("cx") == pytest.approx(mark, abs=SMALLEST)
        assert picture.one("text", "mark").text == "4 asked"
        assert f"limit {seconds(limit)}" in picture.text
    assert not ttft.all("path", "beyond")
    assert tpot.one("path", "beyond")
    assert "up to 4.20 it stays within the limits" in page_of(RATED).text
    for picture in page_of(FITS).all("svg", "curves"):
        assert not picture.all("line", "limit")
        assert not picture.all("line", "mark")
    assert "within the limits it answers none" in page_of(SLOW).text
    assert not page_of(FEW).all("line", "mark")  # 4000 requests a second are far outside


def test_the_most_within_the_limits_is_where_they_are_met() -> None:
    best = best_of(RATED)
    most = most_within_limits(best, best.replicas)
    within, beyond = (
        serving(RATED.asked, best.tensor, request_rate=most * part / best.replicas) for part in (0.999, 1.001)
    )
    assert within.tpot_s < 0.2 < beyond.tpot_s
    last = loads(best, best.replicas)[-1]
    assert last.rate == pytest.approx(best.serving.max_request_rate * best.replicas)
    assert last.share == pytest.approx(1)
    assert last.tokens_per_s == pytest.approx(last.rate * 256)


def test_a_limit_far_above_is_said_and_does_not_flatten_the_curve() -> None:
    points = [Point(x=0.1, y=0.1), Point(x=1.0, y=0.2)]
    picture = read_page(curve_chart(points, title="t", desc="d", under="rate", limit=60.0)).one("svg", "curves")
    assert not picture.all("line", "limit")
    assert picture.one("text", "limit").text == "limit 60.0 s, far above"
    near = read_page(curve_chart(points, title="t", desc="d", under="rate", limit=0.15)).one("svg", "curves")
    crossing = [path.attributes["d"] for path in near.all("path", "curve")]
    assert crossing[0].split(" ")[-1] == crossing[1][1:].split(" ")[0]
    assert crossing[1].startswith("M550.00,")


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, {"dtype": "bf16", "tensor_parallel_size": 2, "data_parallel_size": 4, "quantization": "none"}),
        ({"weights": "int8"}, {"dtype": "bf16", "quantization": "int8", "kv_cache_dtype": "auto"}),
        ({"cache": "int8"}, {"dtype": "bf16", "quantization": "none", "kv_cache_dtype": "int8"}),
        ({"weights": "fp32", "cache": "fp32"}, {"dtype": "fp32", "kv_cache_dtype": "auto"}),
        ({"weights": "int4", "cache": "fp32"}, {"dtype": "bf16", "kv_cache_dtype": "fp32", "quantization": "int4"}),
    ],
    ids=["bf16", "int8", "cache", "fp32", "int4"],
)
def test_the_command_is_one_that_shardline_serve_takes(changes: dict[str, Any], flags: dict[str, Any]) -> None:
    plan = found(**changes)
    best = best_of(plan)
    (pre,) = page_of(plan).all("pre")
    words = pre.text.replace("\\", " ").split()
    assert words[:3] == ["shardline", "serve", "FOLDER"]
    assert words[3:] == [word for pair in serve_flags(best) for word in pair]
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(words[2:])
    assert {name: getattr(args, name) for name in flags} == flags
    assert args.max_model_len == 1280
    assert args.max_num_seqs == best.serving.max_requests
    assert args.max_num_batched_tokens == inspect.signature(estimate_serving).parameters["max_batched_tokens"].default
    assert args.tensor_parallel_size == best.tensor
    assert args.data_parallel_size == best.replicas


def test_another_runtime_is_told_in_a_sentence() -> None:
    page = page_of(found(runtime="vllm"))
    assert not page.all("pre")
    assert "vllm is started by its own command" in card_of(page, "To serve it").text


def test_where_nothing_fits_it_says_what_would() -> None:
    page, least = page_of(NOT), NOT.ranked[0]
    assert NOT.best is None
    assert "Nothing works" in page.one("p", "lead").text
    assert least.why_not in page.one("p", "lead").text
    assert NOT.changes[0] in page.one("p", "lead").text
    assert [each.text for each in card_of(page, "What would make it work").all("li")] == NOT.changes
    titles = [each.text for each in page.all("h2")]
    assert not {"How quickly it answers", "How many requests fit at once", "To serve it"} & set(titles)
    tiles = tiles_of(page)
    assert gib(least.serving.parts["weights"]) in tiles["weights on a device"]
    assert gib(MEMORY_SHARE * least.serving.capacity_bytes) in tiles["a replica may use"]
    silent = page_of(dataclasses.replace(NOT, changes=[]))
    assert "Nothing that was tried" in silent.text


def test_what_is_too_slow_and_what_takes_too_many_is_shown_with_what_there_is() -> None:
    assert SLOW.best is None
    page = page_of(SLOW)
    assert page.one("p", "lead").one("span", "bad").text.endswith("too slow")
    assert "With 2 replicas of 4 tensor ranks" in page.one("p", "lead").text
    assert "a prompt alone takes 177 ms" in page.one("p", "lead").text
    assert "devices" not in tiles_of(page)
    few = page_of(FEW)
    assert few.one("p", "lead").one("span", "bad").text.endswith("too few devices")
    assert f"{FEW.ranked[0].num_devices:,} of 8" in tiles_of(few)["devices"]


@ALL
def test_the_foot_says_what_is_assumed(plan: ServeFound) -> None:
    foot = page_of(plan, command="shardline plan llama-3.1-8b --for serve").one("footer").text
    for words in ("closed form, not measured", "90%", "256 requests", "means", "Poisson", plan.asked.device.source):
        assert words in foot
    assert "shardline plan llama-3.1-8b --for serve" in foot


def test_names_are_text(tmp_path: Path) -> None:
    bad = "<script>document.title='broken in'</script> & \"x\" onload='1' $body"
    shape = dataclasses.replace(RATED.asked.shape, name=bad)
    asked = dataclasses.replace(RATED.asked, shape=shape, runtime="<b>r</b>")
    plan = dataclasses.replace(
        RATED,
        asked=asked,
        best=dataclasses.replace(best_of(RATED), asked=dataclasses.replace(asked, runtime="vllm")),
        alternatives=[(bad, RATED.ranked[1], bad), (f"with {bad}", RATED.ranked[0], bad)],
    )
    write_serve_page(tmp_path / "plan.html", plan, command=f"shardline plan '{bad}'")
    page = read_page((tmp_path / "plan.html").read_text())
    plain = " ".join(bad.split())
    assert not page.all("script")
    assert not page.all("b")
    assert page.one("h1").text.startswith(plain)
    assert [each.text for each in page.all("dt")] == [plain, f"With {plain}"]
    assert f"shardline plan '{plain}'" in page.one("footer").text
    assert not any("onload" in node.attributes for node in page.walk())


def test_a_place_that_can_t_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--html .*there is no folder"):
        write_serve_page(tmp_path / "missing" / "plan.html", FITS)
    assert list(tmp_path.iterdir()) == []
