"""docs/models.md: every family has its row, every column its tests, and nothing in it is red."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from shardline.models.families import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("models_table")


def test_every_family_passes_every_check(table):
    assert set(table.NAMES) == set(FAMILIES)
    header = ["family", "`model_type`", *table.COLUMNS]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| ")]
    assert rows[0] == header, "run `python docs/models_table.py`"
    assert [row[1] for row in rows[1:]] == [f"`{family}`" for family in table.NAMES]
    for row, family in zip(rows[1:], table.NAMES, strict=True):
        for cell, column in zip(row[2:], table.COLUMNS, strict=True):
            ticked = "-" if (family, column) in table.IMPOSSIBLE else "\u2713"
            assert cell.startswith(ticked), f"{family}, {column}: {cell}"


def test_every_test_of_a_column_exists(table):
    written = "".join((ROOT / "tests" / module).read_text() for module in table.MODULES)
    defined = set(re.findall(r"^def (test_\w+)", written, flags=re.MULTILINE))
    for column, (_, functions) in table.COLUMNS.items():
        assert set(functions) <= defined, column


def test_the_page_says_what_could_not_be_checked(table):
    assert PAGE.endswith(table.UNCHECKED)
    assert table.page(table.Recorder()).partition("| family")[0] == PAGE.partition("| family")[0]
