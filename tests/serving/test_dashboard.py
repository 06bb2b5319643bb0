"""The Grafana dashboard draws every metric that there is and none that there isn't."""

from __future__ import annotations

import json
from pathlib import Path

from shardline.serving.dashboard import make_dashboard, panels, series_of
from shardline.serving.metrics import Metrics

FILE = Path(__file__).parents[2] / "docs" / "grafana.json"


def samples_of(metrics: Metrics) -> set[str]:
    """Every series name, those included whose labels are not there yet."""
    names = set()
    for metric in metrics.registry.collect():
        names.add(metric.name)
        names |= {f"{metric.name}_total"} if metric.type == "counter" else set()
        names |= {f"{metric.name}_{suffix}" for suffix in ("bucket", "count", "sum") if metric.type == "histogram"}
    exposed = {line.split("{")[0] for line in metrics.render().decode().splitlines() if line.startswith("shardline:")}
    assert {name for name in exposed if not name.endswith("_created")} <= names
    return names


def test_every_series_of_the_dashboard_exists_in_the_registry():
    existing = samples_of(Metrics("m"))
    targets = [target for panel in json.loads(FILE.read_text())["panels"] for target in panel.get("targets", [])]
    assert len(targets) > 30
    for target in targets:
        named = series_of(target["expr"])
        assert named
        assert named <= existing, target["expr"]


def test_every_metric_is_drawn():
    registry = Metrics("m").registry
    drawn = " ".join(query for panel in panels(registry) for query, _ in panel.queries)
    for metric in registry.collect():
        assert any(name.startswith(metric.name) for name in series_of(drawn)), metric.name


def test_the_file_in_the_manual_is_current():
    assert json.loads(FILE.read_text()) == make_dashboard(Metrics("any").registry), "run `make docs`"


def test_no_panel_lies_on_another():
    cells = set()
    for panel in make_dashboard(Metrics("m").registry)["panels"]:
        where = panel["gridPos"]
        covered = {
            (x, y)
            for x in range(where["x"], where["x"] + where["w"])
            for y in range(where["y"], where["y"] + where["h"])
        }
        assert not covered & cells, panel["title"]
        assert where["x"] + where["w"] <= 24
        cells |= covered
