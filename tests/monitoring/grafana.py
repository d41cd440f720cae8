"""The JSON model of Grafana dashboards, as far as the boards of `boards.py` use it.

https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

#: The newest version of the classic JSON model, since Grafana 12.2; older ones read it as well.
SCHEMA_VERSION = 42

#: What the words in angle brackets of a query stand for. Without a label `namespace` or `pool`, `.*`
#: of the variables matches too.
_WORDS = {
    "<process>": 'namespace=~"$namespace"',
    "<model>": 'namespace=~"$namespace",pool=~"$pool",model=~"$model"',
    "<pool>": 'namespace=~"$namespace",pool=~"$pool"',
    "<rate>": "$__rate_interval",
}

_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

_GRID_COLUMNS = 24
_HEIGHTS = {"stat": 4, "row": 1}
_HEIGHT = 8


class Query(msgspec.Struct, frozen=True):
    """A query of a panel.

    Attributes:
        expr: PromQL with the words of `_WORDS`.
        legend: Name of a series, with labels in double braces.
        staged: What must have happened before it returns a series, as a fault of `test_faults.py`
            or a feature that is not always there; empty if traffic is enough.
    """

    expr: str
    legend: str
    staged: str = ""

    def promql(self) -> str:
        """The query as a dashboard has it."""
        return _filled(self.expr)


class Panel(msgspec.Struct, frozen=True):
    """A panel.

    Attributes:
        title: Its title.
        description: The text behind its `i`: what it shows and when to worry.
        unit: Unit of Grafana, such as `s`, `reqps`, `percentunit`.
        queries: Its queries.
        kind: Type of the panel.
        width: Columns of 24.
        steps: Colors by lower bound; the first bound is ignored.
        stacked: Whether series are stacked.
        is_signed: Whether values may be below 0.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: Literal["timeseries", "stat", "table", "heatmap", "state-timeline"] = "timeseries"
    width: int = 8
    steps: Sequence[tuple[float, str]] = ((0.0, "green"),)
    stacked: bool = False
    is_signed: bool = False


class DashboardRow(msgspec.Struct, frozen=True):
    """Panels under a heading."""

    title: str
    panels: Sequence[Panel]


class Board(msgspec.Struct, frozen=True):
    """A dashboard.

    Attributes:
        uid: Its identity in Grafana, and the name of its file.
        title: Its title.
        answers: The questions that it answers, for its description and the documentation.
        rows: Its rows.
        one_pool: Whether it shows one pool at a time.
        has_models: Whether its queries have the variable `model`.
    """

    uid: str
    title: str
    answers: str
    rows: Sequence[DashboardRow]
    one_pool: bool = False
    has_models: bool = False

    def panels(self) -> Iterator[Panel]:
        """All its panels."""
        for row in self.rows:
            yield from row.panels


def model(board: Board) -> dict[str, Any]:
    """The JSON model of a board."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.answers,
        "tags": ["extproc"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "id": None,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "links": [_links()],
        "annotations": {"list": [_alert_annotation()]},
        "templating": {"list": list(_variables(board))},
        "panels": list(_panels(board)),
    }


def _filled(text: str) -> str:
    for word, meaning in _WORDS.items():
        text = text.replace(word, meaning)
    return text


def _links() -> Mapping[str, Any]:
    """Links to the other boards, which keep time and variables."""
    return {
        "type": "dashboards",
        "title": "extproc",
        "tags": ["extproc"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "icon": "external link",
        "tooltip": "",
        "targetBlank": False,
        "url": "",
    }


def _alert_annotation() -> Mapping[str, Any]:
    """Marks on the time axis while an alert of `alerts.py` fires."""
    return {
        "name": "Alerts",
        "datasource": _DATASOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Extproc.*",alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{pool}} {{endpoint}}",
        "step": "30s",
    }


def _variables(board: Board) -> Iterator[Mapping[str, Any]]:
    yield {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "options": [],
        "refresh": 1,
    }
    yield _variable("namespace", "label_values(extproc_info, namespace)", several=True)
    pools = 'label_values(extproc_pool_match_state{namespace=~"$namespace"}, pool)'
    yield _variable("pool", pools, several=not board.one_pool)
    if board.has_models:
        models = "label_values(extproc_requests_total{<pool>}, model)"
        yield _variable("model", _filled(models), several=True)


def _variable(name: str, query: str, *, several: bool) -> Mapping[str, Any]:
    variable: dict[str, Any] = {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"qryType": 1, "query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
        "options": [],
        "current": {},
    }
    if several:
        variable |= {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return variable


def _panels(board: Board) -> Iterator[Mapping[str, Any]]:
    number, y = 1, 0
    for row in board.rows:
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": _GRID_COLUMNS, "x": 0, "y": y},
        }
        number, y, x, height = number + 1, y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > _GRID_COLUMNS:
                x, y, height = 0, y + height, 0
            own = _HEIGHTS.get(panel.kind, _HEIGHT)
            position = {"h": own, "w": panel.width, "x": x, "y": y}
            yield {"id": number, "gridPos": position, **_panel(panel)}
            number, x, height = number + 1, x + panel.width, max(height, own)
        y += height


def _panel(panel: Panel) -> Mapping[str, Any]:
    steps = [
        {"color": color, "value": bound if position else None}
        for position, (bound, color) in enumerate(panel.steps)
    ]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        **({} if panel.is_signed else {"min": 0}),
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
    }
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 25 if panel.stacked else 8,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if len(steps) > 1 else "off"},
            "showPoints": "never",
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _DATASOURCE,
        "targets": list(_targets(panel)),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        **({"transformations": [_without_times()]} if panel.kind == "table" else {}),
    }


def _targets(panel: Panel) -> Iterator[Mapping[str, Any]]:
    formats = {"table": "table", "heatmap": "heatmap"}
    for number, query in enumerate(panel.queries):
        is_instant = panel.kind == "table"
        yield {
            "refId": chr(ord("A") + number),
            "datasource": _DATASOURCE,
            "expr": query.promql(),
            "legendFormat": query.legend,
            "format": formats.get(panel.kind, "time_series"),
            "exemplar": panel.kind == "timeseries" and "_seconds_bucket" in query.expr,
            "instant": is_instant,
            "range": not is_instant,
        }


def _options(panel: Panel) -> Mapping[str, Any]:
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if panel.kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "auto",
        }
    if panel.kind == "heatmap":
        return {
            "calculate": False,
            "yAxis": {"unit": panel.unit},
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
            "tooltip": {"mode": "single", "yHistogram": False},
        }
    if panel.kind == "state-timeline":
        return {"showValue": "never", "mergeValues": True, "rowHeight": 0.8}
    return {"showHeader": True, "cellHeight": "sm"}


def _without_times() -> Mapping[str, Any]:
    """A table of labels needs no column of times."""
    return {"id": "organize", "options": {"excludeByName": {"Time": True, "__name__": True}}}
