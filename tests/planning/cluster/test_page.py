"""The page of a plan: self-contained, well-formed, its numbers those of the JSON, its bars in proportion."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from planning.cluster.page_reader import Node, read_page
from shardline.config import UsageError
from shardline.hardware.catalogue import device
from shardline.models.presets import preset
from shardline.planning.cluster.bars import MEMORY, STEP, VERDICTS
from shardline.planning.cluster.explain import found_to_json
from shardline.planning.cluster.figures import GIB, gib, seconds, share, three, ticks, time_ticks
from shardline.planning.cluster.job import MEMORY_PARTS, TIME_PARTS, Memory
from shardline.planning.cluster.page import make_page, write_page
from shardline.planning.cluster.search import Asked, Candidate, Found, search
from shardline.planning.cluster.shape import ModelShape

LLAMA = ModelShape.of(preset("llama-3.1-8b"), name="llama-3.1-8b")
SMALLEST = 0.001  # percent: what the drawing rounds to


def found(**changes: Any) -> Found:
    asked: dict[str, Any] = {"shape": LLAMA, "device": device("h100"), "num_devices": 8}
    return search(Asked(**{**asked, "sequence_length": 8192, "global_batch": 64, **changes}))


FITS = found()
PIPED = found(
    shape=ModelShape.of(preset("llama-3.1-70b"), name="llama-3.1-70b"),
    num_devices=64,
    global_batch=128,
    fixed={"tensor": 8, "pipeline": 4},
    micro_batch=1,
)
NOT = found(device=device("rtx-4090"), num_devices=1, global_batch=8)
ALL = pytest.mark.parametrize("plan", [FITS, PIPED, NOT], ids=["fits", "piped", "not"])


def page_of(plan: Found, **options: Any) -> Node:
    return read_page(make_page(plan, **options))


def drawn(plan: Found) -> list[tuple[Node, Candidate]]:
    """Every bar with its layout, in the page's order."""
    others = [each for _, each, _ in plan.alternatives if each is not None]
    candidates = [*plan.ranked, *(each for each in others if all(each.job != one.job for one in plan.ranked))]
    return list(zip(page_of(plan).all("svg", "memory"), candidates, strict=True))


@ALL
def test_it_is_one_document_that_needs_nothing_else(plan: Found):
    text = make_page(plan, command="shardline plan")
    page = read_page(text)
    assert [page.one(tag).tag for tag in ("html", "head", "body", "main", "header", "h1", "footer")]
    assert page.one("head").one("title").text == f"{page.one('h1').text} - plan"
    for node in page.walk():
        assert node.tag not in ("script", "link", "img", "iframe", "object", "base"), node.tag
        assert not {"src", "href", "srcset", "onload", "onclick"} & set(node.attributes)
    assert not re.search(r"@import|url\((?!#)|https?://", text)
    assert "default-src 'none'" in text
    assert len(text) < 150_000


@ALL
def test_pictures_say_what_they_show_and_tables_what_their_columns_are(plan: Found):
    page = page_of(plan)
    pictures = [each for each in page.all("svg") if each.attributes.get("role") == "img"]
    assert len(pictures) >= len(plan.ranked)
    for picture in pictures:
        title, desc = picture.children[:2]
        assert isinstance(title, Node)
        assert isinstance(desc, Node)
        assert (title.tag, desc.tag) == ("title", "desc")
        assert title.text
        assert desc.text
    assert all(each.attributes["scope"] in ("col", "row") for each in page.all("th"))
    assert page.one("html").attributes["lang"] == "en"
    ids = [node.attributes["id"] for node in page.walk() if "id" in node.attributes]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("plan", [FITS, PIPED], ids=["fits", "piped"])
def test_the_numbers_are_those_of_the_json(plan: Found):
    page, answer = page_of(plan), found_to_json(plan)
    memory, each_tokens = answer["memory_gib"], answer["tokens_per_s_per_device"]
    tiles = {tile.children[0].text: tile.text for tile in page.all("div", "tile")}  # type: ignore[union-attr]
    assert f"{memory['total']:.1f} GiB of {memory['capacity']:.1f}" in tiles["memory, fullest device"]
    assert f"band {memory['low']:.1f} to {memory['high']:.1f}" in tiles["memory, fullest device"]
    whole = f"{each_tokens * plan.asked.num_devices:,.0f}"
    assert f"{whole} {each_tokens:,.0f} on each device" in tiles["tokens per second"]
    assert seconds(answer["step_s"]) in tiles["a step"]
    assert f"{answer['mfu']:.0%}" in tiles["MFU"]
    assert f"{answer['num_tried']:,}" in tiles["layouts compared"]
    lead = page.one("p", "lead").text
    for figure in (
        f"{memory['total']:.1f} GiB",
        f"{whole} tokens/s",
        seconds(answer["step_s"]),
        f"{answer['mfu']:.0%}",
    ):
        assert figure in lead
    assert answer["mfu_convention"] in page.one("footer").text
    for reason in answer["reasons"]:
        assert reason in page.one("main").text
    rows = {row.children[0].text: row.text for row in page.all("table", "times")[0].all("tr")}  # type: ignore[union-attr]
    for name, value in answer["step_parts_s"].items():
        if value:
            assert rows[STEP[name][0]].endswith(f"{seconds(value)} {share(value / answer['step_s'])}")
        else:
            assert STEP[name][0] not in rows


@ALL
def test_the_ranked_table_has_a_row_for_every_layout(plan: Found):
    (table,) = [each for each in page_of(plan).all("table") if "tokens/s each" in each.text]
    heads, *rows = [[cell.text for cell in row.children if isinstance(cell, Node)] for row in table.all("tr")]
    assert len(rows) == len(plan.ranked)
    for cells, each, answer in zip(rows, plan.ranked, found_to_json(plan)["ranked"], strict=True):
        row = dict(zip(heads, cells, strict=True))
        assert row["layout"] == each.job.layout.ranks()
        assert row["micro-batches"] == f"{each.job.num_micro_batches} x {each.job.micro_batch}"
        assert row["recompute"] == each.job.recompute
        assert row["GiB"] == f"{answer['memory_gib']:.1f}"
        assert row["verdict"].endswith(answer["verdict"])
        assert row["tokens/s each"] == f"{answer['tokens_per_s_per_device']:,.0f}"
        assert row["step"] == seconds(each.time.step_s)


@ALL
def test_bars_are_as_long_as_their_bytes_on_one_scale(plan: Found):
    scales = set()
    for picture, each in drawn(plan):
        bars = {(each.classes & set(MEMORY)).pop(): each for each in picture.all("rect", "part")}
        assert list(bars) == [name for name in MEMORY if each.memory.parts[name]]
        scale = picture.all("line", "limit")[0].percent("x1") / each.memory.capacity_bytes
        scales.add(round(scale * GIB, 4))
        end = 0.0
        for name, bar in bars.items():
            assert bar.percent("x") == pytest.approx(end, rel=1e-4, abs=SMALLEST)
            assert bar.percent("width") == pytest.approx(each.memory.parts[name] * scale, rel=1e-4, abs=SMALLEST)
            end += each.memory.parts[name] * scale
        assert end == pytest.approx(each.memory.expected_bytes * scale)
        check_band(picture, each.memory, scale)
        beyond = picture.all("rect", "over")
        assert bool(beyond) == (each.memory.expected_bytes > each.memory.capacity_bytes)
        for bar in beyond:
            over = each.memory.expected_bytes - each.memory.capacity_bytes
            assert bar.percent("width") == pytest.approx(over * scale, rel=1e-4, abs=SMALLEST)
    assert len(scales) == 1


def check_band(picture: Node, memory: Memory, scale: float) -> None:
    lines = picture.all("line", "band")
    if memory.low_bytes * scale >= 100:
        assert not lines
        return
    across, low, high = lines
    ends = pytest.approx((memory.low_bytes * scale, memory.high_bytes * scale), rel=1e-4, abs=SMALLEST)
    assert (across.percent("x1"), across.percent("x2")) == ends
    assert (low.percent("x1"), high.percent("x1")) == ends


def test_what_fits_ends_before_the_limit_and_what_needs_far_more_runs_out_of_the_picture():
    torn = {}
    for picture, each in drawn(FITS):
        limit = picture.all("line", "limit")[0].percent("x1")
        assert 10 < limit < 100
        end = max(bar.percent("x") + bar.percent("width") for bar in picture.all("rect", "part"))
        assert (end < limit) == (each.memory.expected_bytes < each.memory.capacity_bytes)
        torn[each.memory.expected_bytes] = bool(picture.all("path", "torn"))
        assert torn[each.memory.expected_bytes] == (end > 100)
    assert sorted(torn.values()) == [torn[size] for size in sorted(torn)]  # only the largest
    assert any(torn.values())


def test_the_alternatives_that_do_not_fit_are_drawn_with_their_verdict():
    page = page_of(FITS)
    rows = [row for row in page.all("li", "row") if row.all("div", "much")]
    (plain,) = [row for row in rows if "plain data parallelism" in row.text]
    assert plain.one("div", "much").one("span", "bad").text.endswith("does not fit")
    assert sum("chosen" in row.classes for row in rows) == 1
    assert "plain data parallelism" in page.text
    for name, _, why in FITS.alternatives:
        assert name in [each.text for each in page.all("dt")]
        assert why in [each.text for each in page.all("dd")]


def test_an_alternative_without_a_layout_is_said_and_not_drawn():
    plan = dataclasses.replace(FITS, alternatives=[("tensor 3", None, "32 heads are not a multiple of 3")])
    page = page_of(plan)
    assert len(page.all("svg", "memory")) == len(plan.ranked)
    assert page.one("dt").text == "tensor 3"
    assert page.one("dd").text == "32 heads are not a multiple of 3"


def test_the_step_s_bar_is_its_parts():
    picture, time = page_of(PIPED).one("svg", "step"), PIPED.ranked[0].time
    bars = {(each.classes & set(STEP)).pop(): each.percent("width") for each in picture.all("rect")}
    assert set(bars) == {name for name, value in time.parts.items() if value}
    for name, width in bars.items():
        assert width == pytest.approx(100 * time.parts[name] / time.step_s, abs=SMALLEST)
    assert sum(bars.values()) == pytest.approx(100, abs=0.02)


def test_every_part_and_verdict_has_its_words():
    assert tuple(MEMORY) == MEMORY_PARTS
    assert set(STEP) == set(TIME_PARTS)
    assert set(VERDICTS) == {each.memory.verdict for plan in (FITS, NOT) for _, each in drawn(plan)} | {"tight"}


def test_where_nothing_fits_it_says_what_needs_least_and_what_would_help():
    page = page_of(NOT)
    assert NOT.best is None
    least = found_to_json(NOT)["memory_gib"]
    assert page.one("p", "lead").one("span", "verdict").text.endswith("does not fit")
    assert f"{least['total']:.1f} GiB of {least['capacity']:.1f}" in page.one("p", "lead").text
    for change in NOT.changes:
        assert change in [each.text for each in page.all("li")]
    titles = [each.text for each in page.all("h2")]
    assert "What would make it fit" in titles
    assert "What needs least" in titles
    assert not any("step go" in title or "config" in title for title in titles)
    silent = page_of(dataclasses.replace(NOT, changes=[]))
    assert "Nothing that was tried" in silent.text


def test_it_shows_the_config_or_the_settings_of_another_engine():
    (config,) = page_of(FITS).all("pre")
    assert f"global_batch: {FITS.asked.global_batch}" in config.text
    megatron = page_of(found(engine="megatron"))
    assert "As a config" not in megatron.text
    assert "sequence_parallel: true" in megatron.all("pre")[0].text or "tensor: 1" in megatron.all("pre")[0].text


def test_what_is_offloaded_is_counted_in_the_host_s_memory():
    plan = found(offload=frozenset({"optimizer"}))
    row, memory = page_of(plan).all("li", "chosen")[0], plan.ranked[0].memory
    share_of_host = memory.host_bytes / memory.host_capacity_bytes
    assert 0 < share_of_host < 1
    said = f"host {memory.host_bytes / GIB:,.0f} of {memory.host_capacity_bytes / GIB:,.0f}"
    assert said in row.one("div", "much").text
    limit = row.all("line", "limit")[0].percent("x1")
    assert row.one("rect", "kept").percent("width") == pytest.approx(share_of_host * limit, abs=SMALLEST)
    assert not row.all("rect", "over")
    assert "offload optimizer" in row.text
    assert "host" not in page_of(FITS).all("li", "chosen")[0].one("div", "much").text


def test_a_host_that_is_too_small_is_seen_to_be():
    shape = ModelShape.from_parameters(530e9)
    plan = found(shape=shape, num_devices=16, engine="deepspeed", offload=frozenset({"optimizer", "parameters"}))
    memory = plan.ranked[0].memory
    assert plan.best is None
    assert memory.expected_bytes < memory.capacity_bytes
    picture = page_of(plan).all("svg", "memory")[0]
    limit = picture.all("line", "limit")[0].percent("x1")
    width = picture.one("rect", "kept").percent("width")
    assert width == pytest.approx(limit * memory.host_bytes / memory.host_capacity_bytes, rel=1e-4)
    assert picture.one("rect", "over").percent("width") == pytest.approx(width - limit, abs=2 * SMALLEST)
    assert f"{memory.host_bytes / GIB:.0f} GiB of the host's" in page_of(plan).one("p", "lead").text


def test_names_and_commands_are_text():
    bad = "<script>document.title='broken in'</script> & \"x\" onload='1' $body"
    plan = dataclasses.replace(
        FITS,
        asked=dataclasses.replace(FITS.asked, shape=dataclasses.replace(LLAMA, name=bad), engine="<b>e</b>"),
        alternatives=[(bad, FITS.ranked[1], bad)],
        ranked=FITS.ranked[:1],
    )
    page = page_of(plan, command=f"shardline plan '{bad}'")
    plain = " ".join(bad.split())
    assert not page.all("script")
    assert not page.all("b")
    assert page.one("h1").text.startswith(plain)
    assert page.one("head").one("title").text.startswith(plain)
    assert [each.text for each in page.all("dt")] == [plain]
    assert f"shardline plan '{plain}'" in page.one("footer").text
    assert not any("onload" in node.attributes for node in page.walk())


def test_it_is_written_whole_in_place_of_an_old_one(tmp_path: Path):
    path = tmp_path / "plan.html"
    path.write_text("old")
    with path.open() as reader:
        write_page(path, FITS, command="shardline plan llama-3.1-8b")
        assert reader.read() == "old"  # who reads meanwhile never sees half of a page
    assert "shardline plan llama-3.1-8b" in read_page(path.read_text()).one("footer").text
    assert [each.name for each in tmp_path.iterdir()] == ["plan.html"]


def test_a_link_stays_a_link(tmp_path: Path):
    (tmp_path / "real.html").write_text("old")
    link = tmp_path / "plan.html"
    link.symlink_to("real.html")
    write_page(str(link), FITS)
    assert link.is_symlink()
    assert "llama-3.1-8b" in (tmp_path / "real.html").read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "is a folder; name a file in it, for example"),
        ("missing/plan.html", "there is no folder"),
        ("file/plan.html", "can't be written (Not a directory)"),
        ("x" * 300 + ".html", "can't be written (File name too long)"),
        ("pipe", "is not a plain file"),
    ],
    ids=["folder", "missing", "file", "long", "pipe"],
)
def test_places_that_can_t_be_written_are_named(tmp_path: Path, name: str, said: str):
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match=r"^--html ") as error:
        write_page(tmp_path / name, FITS)
    assert said in str(error.value)
    assert sorted(tmp_path.iterdir()) == before
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 s"), (9.096, "9.10 s"), (0.9997, "1.00 s"), (0.0123, "12.3 ms"), (73.84, "73.8 s"), (119, "119 s"),
     (150, "2.50 min"), (20600, "5.72 h"), (192000, "2.22 days"), (4.2e-6, "4.20 us"), (0.42949, "429 ms")],
)  # fmt: skip
def test_seconds_in_words(value: float, text: str):
    assert seconds(value) == text


@pytest.mark.parametrize("top", [0.07, 1.0, 9.98, 81.5, 122.2, 4096.0])
def test_ticks_are_round_and_few(top: float):
    found = ticks(top)
    assert 3 <= len(found) <= 7
    assert found[0] == 0
    assert top - (found[1] - found[0]) < found[-1] <= top
    assert len(f"{found[1]:.12g}".strip("0.")) <= 2


def test_ticks_of_time_are_round_in_their_unit():
    assert time_ticks(0.25, most=3) == [(0, "0 ms"), (pytest.approx(0.1), "100 ms"), (pytest.approx(0.2), "200 ms")]
    assert time_ticks(150, most=3) == [(0, "0 min"), (60, "1 min"), (120, "2 min")]


def test_shares_and_sizes_in_words():
    assert [three(value) for value in (0, 0.008712, 9.996, 53.04, 1234.5)] == ["0", "0.00871", "10.0", "53.0", "1,230"]
    assert [share(value) for value in (0, 0.0004, 0.0472, 0.317, 1)] == ["0.0%", "< 0.1%", "4.7%", "32%", "100%"]
    assert [gib(value * GIB) for value in (0.04, 61.12, 1077.9)] == ["0.0 GiB", "61.1 GiB", "1,078 GiB"]
