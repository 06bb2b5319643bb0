"""docs/parity.md names exactly the layouts, families and faults of the gate; its figures are within what is asked."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from parity.jobs import FAULTS, GRADIENT_TOLERANCE, LOSS_TOLERANCE
from parity.layouts import layouts
from parity.test_gate import EIGHT, FAMILIES, FAMILY_LAYOUTS
from training.test_library_optimizers import LAYOUTS, PARALLEL, RATES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
RUN = "run `python docs/parity_table.py`"


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("parity_table")


def rows(heading: str) -> list[list[str]]:
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1:]]


def test_the_page_has_every_layout_and_no_other():
    expected = [str(choice) for choice in layouts()] + [f"tied, {name}" for name in EIGHT]
    assert [row[0] for row in rows("Layouts")] == expected, RUN


def test_the_page_has_every_family_in_every_layout():
    expected = {f"{family}: {layout}" for family in FAMILIES for layout in FAMILY_LAYOUTS}
    found = [row[0] for row in rows("Families")]
    assert set(found) == expected, RUN
    assert len(found) == len(expected)


def test_the_page_has_every_fault_and_each_is_out_of_tolerance():
    faults = rows("Faults that the gate was shown")
    assert [row[0] for row in faults] == list(FAULTS), RUN
    for fault, loss, norm, gradient, _ in faults:
        assert not all(figure.startswith("(") for figure in (loss, norm, gradient)), fault


def test_the_page_has_every_optimizer_in_every_layout():
    found = rows("Optimizers that need whole matrices")
    assert len(found) == len(RATES) * (len(LAYOUTS) + len(PARALLEL)), RUN
    assert {row[0] for row in found} == {f"`{name}`" for name in RATES}


def test_its_figures_are_within_the_tolerances():
    for layout, _, loss, norm, gradient, _ in rows("Layouts") + rows("Families"):
        assert float(loss) <= LOSS_TOLERANCE, layout
        assert float(norm) <= LOSS_TOLERANCE, layout
        assert float(gradient) <= GRADIENT_TOLERANCE, layout


def test_the_words_are_those_of_the_generator(table):
    """Of a run without figures a page is made of words alone."""
    assert "fails" not in PAGE
    for line in table.page(table.Recorder()).splitlines():
        assert line in PAGE, RUN


def test_every_module_records_figures(table):
    written = "".join((ROOT / "tests" / module).read_text() for module in table.MODULES)
    recorded = set(re.findall(r'record_property\(\s*"(\w+)"', written))
    assert recorded == set(table.KINDS)
