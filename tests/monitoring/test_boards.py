"""Dashboards as files: what Grafana needs of them, and names that exist."""

import itertools
import re

import pytest

from tests.docs import metrics_reference
from tests.monitoring import alerts, boards, files, grafana, recording_rules, test_alerts

#: Metrics that no board and no alert shows: details for a look at a single picker.
NOT_CHARTED = {
    "extproc_body_buffer_bytes": "part of the memory of the process",
    "extproc_config_reloads": "the gauge of a failed reload is charted",
    "extproc_continuation_ratio": "explains a cost of `adaptive`",
    "extproc_direct_responses": "requests that need no engine",
    "extproc_discovery_watch_state": "the seconds out of step are charted",
    "extproc_endpoint_adapter_load_seconds": "explains a cost of `adaptive`",
    "extproc_endpoint_context_seconds_per_token": "explains a cost of `adaptive`",
    "extproc_disaggregation_decisions": "only with stages of other endpoints",
    "extproc_disaggregation_kept_stages": "only with stages of other endpoints",
    "extproc_disaggregation_routed_stages": "only with stages of other endpoints",
    "extproc_endpoint_max_num_seqs": "explains a cost of `adaptive`",
    "extproc_endpoint_output_tokens": "explains a cost of `adaptive`",
    "extproc_flow_control_evictions": "rejections by cause, which are charted, have them",
    "extproc_http2_connections_open": "of the native transport only",
    "extproc_http2_limits": "of the native transport only",
    "extproc_http2_unsent_bytes": "of the native transport only",
    "extproc_idle_conversations_per_request": "explains a cost of `adaptive`",
    "extproc_kv_event_batches": "only with `kv_events`",
    "extproc_kv_event_blocks": "only with `kv_events`",
    "extproc_kv_event_cpu_weight": "only with `kv_events`",
    "extproc_kv_event_dropped_blocks": "only with `kv_events`",
    "extproc_kv_event_lower_blocks": "only with `kv_events`",
    "extproc_kv_event_refused_connections": "only with `kv_events`",
    "extproc_kv_event_subscription_state": "only with `kv_events`",
    "extproc_large_bodies": "the time that they take is charted",
    "extproc_loop_failures": "the gauge of failing loops is charted",
    "extproc_mapped_prompts": "only with `kv_events`",
    "extproc_match_source_tokens": "only with `kv_events`",
    "extproc_media_token_ratio": "of prompts with images, video or audio only",
    "extproc_model_list_polls": "scrapes show the same failures",
    "extproc_model_rewrites": "a matter of configuration",
    "extproc_peer_sync_failures": "the log names peer and reason",
    "extproc_peer_sync_inflight_requests": "only with peer synchronization",
    "extproc_plugin_exceptions": "bypasses, which follow, have an alert",
    "extproc_plugin_overruns": "bypasses, which follow, have an alert",
    "extproc_prefix_index_bytes": "the number of blocks is charted",
    "extproc_rejections": "the same by cause is charted",
    "extproc_render_waits": "only with `kv_events.render_budget_ms`",
    "extproc_request_predicted_ttft_seconds": "the ratio to what it was is charted",
    "extproc_scaling_from_zero_seconds": "learned; the cold start is charted",
    "extproc_scrape_duration_seconds": "the age of metrics is charted",
    "extproc_streams_open": "requests in flight are charted",
    "extproc_time_to_response_headers_seconds": "charted by endpoint",
    "extproc_unknown_model_requests": "rejections have the cause `unknown-model`",
    "extproc_xds_responses": "rejected ones have an alert",
    "extproc_xds_streams_open": "rejected responses have an alert",
}

#: Labels that Prometheus adds, and those of series that it makes itself.
_TARGET_LABELS = {"namespace", "instance", "job", "le"}

PANELS = [
    pytest.param(board, panel, id=f"{board.uid}: {panel.title}")
    for board in boards.BOARDS
    for panel in board.panels()
]
EXPRESSIONS = [
    *(
        query.promql()
        for board in boards.BOARDS
        for panel in board.panels()
        for query in panel.queries
    ),
    *(rule.expr for rule in recording_rules.RECORDING_RULES),
    *(alert.expr for alert in alerts.ALERTS),
]


def labels_by_series():
    """Labels of each series of the page, by its name."""
    result = {}
    for family in metrics_reference.families():
        result |= {key: set(family.labels) for key in family.sample_names}
    return result


def test_files_are_up_to_date():
    """`python -m tests.monitoring.files` would change nothing, and nothing else is there."""
    texts = files.texts()
    for path, text in texts.items():
        assert path.read_text(encoding="utf-8") == text, path
    present = {path for path in files.FOLDER.rglob("*") if path.is_file()}
    assert {path for path in present if path.name != "kustomization.yaml"} == set(texts)


@pytest.mark.parametrize("board", boards.BOARDS, ids=lambda board: board.uid)
def test_a_board_imports_without_edits(board):
    """Its data source and its scope are variables, and no panel covers another."""
    model = grafana.model(board)
    assert model["schemaVersion"] == grafana.SCHEMA_VERSION
    assert model["id"] is None
    names = [variable["name"] for variable in model["templating"]["list"]]
    assert names == ["datasource", "namespace", "pool", *(["model"] if board.has_models else [])]
    numbers = [panel["id"] for panel in model["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in model["panels"]:
        if panel["type"] != "row":
            for target in (panel, *panel["targets"]):
                assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    places = [panel["gridPos"] for panel in model["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for first, second in itertools.combinations(places, 2):
        beside = first["x"] + first["w"] <= second["x"] or second["x"] + second["w"] <= first["x"]
        above = first["y"] + first["h"] <= second["y"] or second["y"] + second["h"] <= first["y"]
        assert beside or above, (first, second)


@pytest.mark.parametrize(("board", "panel"), PANELS)
def test_a_panel_explains_itself(board, panel):
    """It has a sentence, a unit and legends; its variables are those of the board."""
    assert panel.description.endswith(".")
    assert panel.unit
    for query in panel.queries:
        assert query.legend
        variables = set(re.findall(r"\$(\w+)", query.promql())) - {"__rate_interval"}
        assert variables <= {"namespace", "pool", *(["model"] if board.has_models else [])}
        assert "$namespace" in query.promql()


@pytest.mark.parametrize("expr", EXPRESSIONS)
def test_labels_of_queries_exist(expr):
    """A matcher or a grouping by a label that a metric lacks would select or merge nothing."""
    known = labels_by_series()
    names = re.findall(r"(?<![:\w])extproc_\w+", expr)
    recorded = {rule.record for rule in recording_rules.RECORDING_RULES}
    for name, matchers in re.findall(r"(?<![:\w])(extproc_\w+)\{(.*?)\}", expr):
        assert set(re.findall(r"(\w+)[=!]", matchers)) <= known[name] | _TARGET_LABELS, name
    for record in re.findall(r"\w+:extproc_\w+:\w+", expr):
        assert record in recorded
    if names:
        known_labels = set().union(*(known[name] for name in names)) | _TARGET_LABELS
        grouped = ", ".join(re.findall(r"\b(?:by|on) \((.*?)\)", expr))
        grouped = set(re.findall(r"\w+", grouped)) - {"alertname", "severity"}
        assert grouped <= known_labels | ({"pool", "endpoint"} if ":" in expr else set())


@pytest.mark.parametrize("alert", alerts.ALERTS, ids=lambda alert: alert.name)
def test_labels_of_summaries_exist(alert):
    """Labels that a summary names are those of the series that fires."""
    records = {rule.record: rule.expr for rule in recording_rules.RECORDING_RULES}
    expr = alert.expr
    for record in reversed(records):
        expr += records[record] if record in expr else ""
    labels = set(re.findall(r"\w+", ", ".join(re.findall(r"\bby \((.*?)\)", expr))))
    if not labels:
        known = labels_by_series()
        names = re.findall(r"extproc_\w+", expr)
        labels = _TARGET_LABELS.union(*(known[name] for name in names))
    assert set(re.findall(r"\$labels\.(\w+)", alert.summary)) <= labels


def test_every_metric_is_charted_or_listed():
    """A new metric goes onto a board or into an alert, or says why not."""
    shown = set(re.findall(r"(?<![:\w])extproc_\w+", "\n".join(EXPRESSIONS)))
    families = metrics_reference.families()
    hidden = {family.name for family in families if shown.isdisjoint(family.sample_names)}
    assert hidden == set(NOT_CHARTED)


def series_of(name, instance, values):
    """Gauges of one replica, by endpoint."""
    return {
        f'{name}{{namespace="models",instance="{instance}",pool="vllm",endpoint="{endpoint}"}}': (
            test_alerts.gauge(value)
        )
        for endpoint, value in values.items()
    }


def check_panel(folder, board, title, series, values):
    """Let promtool compare the only query of a panel with values by labels, for all pools."""
    (panel,) = [panel for panel in board.panels() if panel.title == title]
    (query,) = panel.queries
    expr = re.sub(r"\$(namespace|pool|model)", ".*", query.promql())
    expected = [{"labels": labels, "value": value} for labels, value in values.items()]
    check = {"expr": expr, "eval_time": "30m", "exp_samples": expected}
    test_alerts.run_rules(folder, series, check, only="ExtprocDown")


@pytest.mark.parametrize(
    ("board", "title", "value"),
    [
        (boards.ONE_POOL, "Prompt tokens to compute", 10000),
        (boards.SLOW, "Seconds of prompts ahead", 5),
    ],
)
def test_tokens_on_an_endpoint_count_once(board, title, value, tmp_path):
    """Each replica estimates all of them, those that others sent too."""
    series = {
        **series_of("extproc_endpoint_queued_tokens", "a", {"a:1": 10000}),
        **series_of("extproc_endpoint_queued_tokens", "b", {"a:1": 9000}),
        **series_of("extproc_endpoint_prefill_seconds_per_token", "a", {"a:1": 0.0005}),
        **series_of("extproc_endpoint_prefill_seconds_per_token", "b", {"a:1": 0.0005}),
    }
    check_panel(tmp_path, board, title, series, {'{endpoint="a:1"}': value})


def test_ejected_endpoints_do_not_share_requests_in_flight(tmp_path):
    """Both that serve have 20; the mean over all four would be 10."""
    endpoints = ("a:1", "b:1", "c:1", "d:1")
    series = {
        **series_of("extproc_endpoint_up", "a", dict.fromkeys(endpoints, 1)),
        **series_of(
            "extproc_endpoint_ejected", "a", dict(zip(endpoints, (1, 1, 0, 0), strict=True))
        ),
        **series_of(
            "extproc_endpoint_inflight_requests",
            "a",
            dict(zip(endpoints, (0, 0, 20, 20), strict=True)),
        ),
    }
    title, labels = "Requests in flight per endpoint", '{namespace="models", pool="vllm"}'
    check_panel(tmp_path, boards.SCALING, title, series, {labels: 20})


@pytest.mark.parametrize(
    ("title", "in_a", "in_b"), [("Missing replicas", 8, 0), ("Work over capacity", 4, 0.2)]
)
def test_pools_of_the_same_name_are_scaled_separately(title, in_a, in_b, tmp_path):
    """Two of ten engines are available in one namespace, all ten in another."""
    values = {
        "desired_replicas{": (10, 10),
        'replicas{state="available",': (2, 10),
        "work_per_second{": (40, 10),
        "replica_work_per_second{": (5, 5),
    }
    series = {
        f'extproc_scaling_{name}namespace="{space}",pool="vllm"}}': test_alerts.gauge(value)
        for name, pair in values.items()
        for space, value in zip("ab", pair, strict=True)
    }
    labels = [f'{{namespace="{space}", pool="vllm"}}' for space in "ab"]
    expected = dict(zip(labels, (in_a, in_b), strict=True))
    check_panel(tmp_path, boards.SCALING, title, series, expected)


def test_engines_that_were_never_scraped_have_no_age(tmp_path):
    """An infinite one would leave the axis of the others without a scale."""
    series = series_of("extproc_endpoint_metrics_age_seconds", "a", {"a:1": 2, "b:1": 2})
    series[next(iter(series))] = " ".join(["Inf"] * 40)
    check_panel(tmp_path, boards.ONE_POOL, "Age of metrics", series, {'{endpoint="b:1"}': 2})


def test_work_over_no_capacity_is_left_out(tmp_path):
    """An infinite value would leave the axis without a scale."""
    values = {
        'replicas{state="available",': 0,
        "work_per_second{": 40,
        "replica_work_per_second{": 5,
    }
    series = {
        f'extproc_scaling_{name}namespace="a",pool="vllm"}}': test_alerts.gauge(value)
        for name, value in values.items()
    }
    check_panel(tmp_path, boards.SCALING, "Work over capacity", series, {})


def test_a_loss_by_the_shadow_is_on_the_axis():
    """Its panel has values below 0 and no lower bound; others begin at 0."""
    bounds = {
        panel["title"]: panel["fieldConfig"]["defaults"].get("min")
        for panel in grafana.model(boards.ONE_POOL)["panels"]
        if panel["type"] != "row"
    }
    assert [title for title, bound in bounds.items() if bound is None] == [
        "Expected saving of the shadow"
    ]
