"""A Grafana dashboard made from the metric registry: a metric that is renamed, added or gone can't be missed.

    dashboard = make_dashboard(Metrics("any").registry)      # the JSON that Grafana imports

Gauges are drawn as they are, counters as rates, histograms as three quantiles. A few ratios are drawn besides. Every
metric is in one panel; which row it is in goes by its name, and what no row claims is in the last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

__all__ = ["Panel", "make_dashboard", "panels", "series_of"]

ROWS = {
    "Traffic": r"num_requests|request_success|admission|corrupted|lora",
    "Latency": r"first_token|inter_token|e2e|time_per_output|_time_seconds",
    "Tokens": r"prompt_tokens|generation_tokens|iteration_tokens|computed_tokens",
    "Cache": r"cache|preemptions",
    "Speculation": r"spec_decode",
    "Requests": r"params",
    "Other": r"",
}
RATIOS = (
    ("Cache", "Prefix cache hit rate", "prefix_cache_hits_total", "prefix_cache_queries_total"),
    (
        "Speculation",
        "Acceptance rate of guesses",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_draft_tokens_total",
    ),
)
QUANTILES = (0.5, 0.9, 0.99)
SELECTOR = '{model_name=~"$model"}'
PANELS_A_ROW, PANEL_WIDTH, PANEL_HEIGHT = 3, 8, 7


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One graph: its queries, each with the name of its line."""

    row: str
    title: str
    text: str
    unit: str
    queries: tuple[tuple[str, str], ...]


def panels(registry: CollectorRegistry) -> list[Panel]:
    """Returns the panels, row by row."""
    found = [_panel(metric) for metric in registry.collect()]
    for row, title, part, whole in RATIOS:
        query = f"{_rate(f'shardline:{part}')} / {_rate(f'shardline:{whole}')}"
        found.append(Panel(row=row, title=title, text=title, unit="percentunit", queries=((query, "share"),)))
    order = list(ROWS)
    return sorted(found, key=lambda panel: order.index(panel.row))


def make_dashboard(registry: CollectorRegistry) -> dict[str, Any]:
    """Returns the dashboard as Grafana imports it."""
    drawn: list[dict[str, Any]] = []
    y, row, column = 0, None, 0
    for panel in panels(registry):
        if panel.row != row:
            y += PANEL_HEIGHT if column else 0
            row, column = panel.row, 0
            where = {"x": 0, "y": y, "w": 24, "h": 1}
            drawn.append({"type": "row", "title": row, "collapsed": False, "gridPos": where, "panels": []})
            y += 1
        elif column == PANELS_A_ROW:
            y, column = y + PANEL_HEIGHT, 0
        where = {"x": column * PANEL_WIDTH, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT}
        drawn.append(_draw(panel, where))
        column += 1
    return {
        "title": "Shardline serving",
        "uid": "shardline-serving",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "tags": ["shardline"],
        "templating": {"list": _variables()},
        "panels": [{"id": number, **panel} for number, panel in enumerate(drawn, start=1)],
    }


def series_of(query: str) -> set[str]:
    """Returns the series that a query names."""
    return set(re.findall(r"shardline:\w+", query))


def _panel(metric: Metric) -> Panel:
    name = metric.name.removeprefix("shardline:")
    title = metric.documentation.rstrip(".")
    row = next(row for row, pattern in ROWS.items() if re.search(pattern, name))
    unit = "s" if name.endswith("_seconds") else "percentunit" if name.endswith("_perc") else "short"
    if metric.type == "histogram":
        buckets = f"rate({metric.name}_bucket{SELECTOR}[$__rate_interval])"
        queries = tuple((f"histogram_quantile({q}, sum by (le) ({buckets}))", f"p{q * 100:g}") for q in QUANTILES)
    elif metric.type == "counter":
        title += ", per second"
        by = "finished_reason" if name == "request_success" else "model_name"
        queries = ((f"sum by ({by}) (rate({metric.name}_total{SELECTOR}[$__rate_interval]))", f"{{{{{by}}}}}"),)
    else:
        legend = "{{model_name}}"
        if name == "lora_requests_info":
            legend = "running: {{running_lora_adapters}}; waiting: {{waiting_lora_adapters}}"
        elif name.endswith("_info"):
            legend = "{{num_gpu_blocks}} blocks of {{block_size}}, {{cache_dtype}}"
        queries = ((f"{metric.name}{SELECTOR}", legend),)
    return Panel(row=row, title=title, text=metric.name, unit=unit, queries=queries)


def _rate(series: str) -> str:
    return f"sum(rate({series}{SELECTOR}[$__rate_interval]))"


def _draw(panel: Panel, where: dict[str, int]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": where,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"datasource": source, "expr": query, "legendFormat": legend, "refId": chr(ord("A") + number)}
            for number, (query, legend) in enumerate(panel.queries)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    return [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "query": "label_values(shardline:num_requests_running, model_name)",
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    ]
