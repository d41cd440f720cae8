"""Alerts with series of a made-up hour: silent while all is well, firing in what they are for."""

import re

import pytest
import yaml

from tests.docs import metrics_reference
from tests.monitoring import alerts, boards, files, prometheus, recording_rules

#: The hour is healthy until this minute; what is staged happens then.
STAGED = 60
_END = 100

_WHERE = 'namespace="models",job="extproc"'
_POOL = f'{_WHERE},instance="a",pool="vllm"'
_ENDPOINTS = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "10.0.0.4:8000")
_BOUNDS = {"0.25": 0.5, "0.5": 0.99, "10": 1.0, "60": 1.0, "+Inf": 1.0}
_LAG = {"0.005": 0.99, "0.1": 1.0, "5": 1.0, "+Inf": 1.0}


def counter(before, after=None):
    """A counter that rises by so much each minute, and from the staged minute on by another."""
    after = before if after is None else after
    return f"0+{before}x{STAGED - 1} {STAGED * before}+{after}x{_END - STAGED}"


def gauge(before, after=None):
    """A gauge before and after the staged minute."""
    after = before if after is None else after
    return f"{before}x{STAGED - 1} {after}x{_END - STAGED}"


def seldom(amount=1):
    """A counter that rises by so much every fourth minute."""
    return " ".join(str(minute // 4 * amount) for minute in range(_END + 1))


def endpoint_series(name, *values, **labels):
    """A series for each endpoint; the last value is that of further ones."""
    more = "".join(f',{key}="{value}"' for key, value in labels.items())
    return {
        f'{name}{{{_POOL},endpoint="{endpoint}"{more}}}': values[min(number, len(values) - 1)]
        for number, endpoint in enumerate(_ENDPOINTS)
    }


def histogram(name, labels, shares, before, after=None, late="+Inf"):
    """Buckets with these shares, and after the staged minute all above `late`."""
    result = {}
    for bound, share in shares.items():
        is_late = after is not None and float(bound) < float(late)
        rest = 0 if is_late else (before if after is None else after)
        result[f'{name}_bucket{{{labels},le="{bound}"}}'] = counter(int(before * share), rest)
    return result


#: A pool at night: its few requests fail, and one engine is slow to answer its own.
NIGHT = {
    f'extproc_requests_total{{{_WHERE},instance="a",pool="night",model="m",status="429"}}': seldom(),
    **{
        f"extproc_endpoint_response_headers_seconds_{name}"
        f'{{{_WHERE},instance="a",pool="night",endpoint="{endpoint}"}}': seldom(amount)
        for endpoint, amounts in zip(_ENDPOINTS, ((1, 8), (1, 1), (1, 1), (1, 1)), strict=True)
        for name, amount in zip(("count", "sum"), amounts, strict=True)
    },
}

#: Four engines, two replicas of extproc of which one is replaced, a little of everything that is usual.
HEALTHY = {
    **NIGHT,
    f'up{{{_WHERE},instance="a"}}': gauge(1),
    f'up{{{_WHERE},instance="b"}}': "1x20 stale",
    f'up{{{_WHERE},instance="c"}}': f"_x20 1x{_END - 20}",
    f'extproc_info{{{_WHERE},instance="a",pool="vllm",profile="adaptive"}}': gauge(1),
    f'extproc_info{{{_WHERE},instance="b",pool="vllm",profile="adaptive"}}': "1x20 stale",
    f'extproc_info{{{_WHERE},instance="c",pool="vllm",profile="adaptive"}}': f"_x20 1x{_END - 20}",
    f'extproc_pool_match_state{{{_POOL},state="none"}}': gauge(1),
    # Scaled to zero on purpose.
    f'extproc_pool_match_state{{{_WHERE},instance="a",pool="idle",state="none"}}': gauge(1),
    f'extproc_scaling_desired_replicas{{{_WHERE},instance="a",pool="idle"}}': gauge(0),
    **endpoint_series("extproc_endpoint_up", gauge(1)),
    # A short ejection is what ejections are for.
    **endpoint_series("extproc_endpoint_ejected", f"0x30 1 0x{_END - 31}", gauge(0)),
    **endpoint_series("extproc_routed_requests_total", counter(600)),
    **endpoint_series("extproc_responses_total", counter(598), status="200"),
    **endpoint_series("extproc_responses_total", counter(2), status="503"),
    **endpoint_series("extproc_scrapes_total", counter(300), result="ok"),
    **endpoint_series("extproc_scrapes_total", counter(3), result="timeout"),
    **endpoint_series("extproc_endpoint_metrics_age_seconds", gauge(0.2)),
    **endpoint_series("extproc_endpoint_slowness_ratio", gauge(1.2), gauge(1)),
    **endpoint_series("extproc_endpoint_response_headers_seconds_sum", counter(300), counter(240)),
    **endpoint_series("extproc_endpoint_response_headers_seconds_count", counter(600)),
    **endpoint_series("extproc_prefix_predicted_tokens_total", counter(60000)),
    **endpoint_series("extproc_prefix_observed_tokens_total", counter(55000)),
    f'extproc_requests_total{{{_POOL},model="m",status="200"}}': counter(2392),
    f'extproc_requests_total{{{_POOL},model="m",status="404"}}': counter(3),
    f'extproc_requests_total{{{_POOL},model="m",status="429"}}': counter(1),
    f'extproc_requests_total{{{_POOL},model="m",status="503"}}': counter(8),
    f'extproc_rejection_causes_total{{{_POOL},status="404",cause="unknown-model"}}': counter(3),
    f'extproc_rejection_causes_total{{{_POOL},status="429",cause="shed"}}': counter(1),
    # One client did not want to wait.
    f'extproc_rejection_causes_total{{{_POOL},status="429",cause="queue-timeout"}}': (
        f"0x40 1x{_END - 41}"
    ),
    f"extproc_prompt_tokens_total{{{_POOL}}}": counter(600000),
    f"extproc_matched_tokens_total{{{_POOL}}}": counter(400000),
    **histogram("extproc_request_ttft_seconds", f'{_POOL},streaming="true"', _BOUNDS, 2400),
    # Whole answers, which get longer, have no first token.
    **histogram(
        "extproc_request_ttft_seconds", f'{_POOL},streaming="false"', _BOUNDS, 240, 4800, late="10"
    ),
    **histogram("extproc_flow_control_request_queue_duration_seconds", _POOL, _BOUNDS, 2400),
    **histogram("extproc_event_loop_lag_seconds", f'{_WHERE},instance="a"', _LAG, 6000),
    f'extproc_config_reload_failed{{{_WHERE},instance="a"}}': gauge(0),
    f'extproc_config_restart_needed{{{_WHERE},instance="a"}}': gauge(0),
    f'extproc_discovery_watch_unsynced_seconds{{{_WHERE},instance="a",collection="pods"}}': gauge(
        0
    ),
    f"extproc_discovery_dropped_addresses{{{_POOL}}}": gauge(0),
    f'extproc_loop_degraded{{{_WHERE},instance="a",loop="scrape"}}': gauge(0),
    f'extproc_streams_total{{{_WHERE},instance="a",result="ok"}}': counter(2400),
    f'extproc_streams_total{{{_WHERE},instance="a",result="cancelled"}}': counter(30),
    f"extproc_scaling_desired_replicas{{{_POOL}}}": f"4x20 5x6 4x{_END - 27}",
    f'extproc_scaling_replicas{{{_POOL},state="available"}}': gauge(4),
    f"extproc_scaling_counters_complete{{{_POOL}}}": gauge(1),
    f"extproc_scaling_failures_total{{{_POOL}}}": counter(0),
    f'extproc_peer_sync_peers{{{_WHERE},instance="a"}}': gauge(1),
    f'extproc_peer_sync_peers{{{_WHERE},instance="c"}}': f"_x20 1x{_END - 20}",
    f'extproc_leader{{{_WHERE},instance="a"}}': gauge(1),
    f'extproc_leader{{{_WHERE},instance="c"}}': f"_x20 0x{_END - 20}",
}

#: Series that differ when what an alert is for happens in the staged minute.
FAULTS = {
    "ExtprocDown": {
        f'extproc_info{{{_WHERE},instance="a",pool="vllm",profile="adaptive"}}': f"1x{STAGED} stale",
        f'extproc_info{{{_WHERE},instance="c",pool="vllm",profile="adaptive"}}': (
            f"_x20 1x{STAGED - 21} stale"
        ),
    },
    "ExtprocScrapeFails": {
        f'up{{{_WHERE},instance="c"}}': gauge(1, 0),
        f'extproc_info{{{_WHERE},instance="c",pool="vllm",profile="adaptive"}}': (
            f"_x20 1x{STAGED - 21} stale"
        ),
    },
    "ExtprocPoolWithoutEndpoints": endpoint_series("extproc_endpoint_up", gauge(1, 0)),
    "ExtprocManyEndpointsEjected": endpoint_series(
        "extproc_endpoint_ejected", gauge(0, 1), gauge(0, 1), gauge(0)
    ),
    "ExtprocRequestsFail": {
        f'extproc_requests_total{{{_POOL},model="m",status="503"}}': counter(8, 200)
    },
    "ExtprocEndpointErrors": {
        **endpoint_series("extproc_responses_total", counter(598, 450), counter(598), status="200"),
        **endpoint_series("extproc_responses_total", counter(2, 150), counter(2), status="503"),
    },
    "ExtprocEndpointEjected": endpoint_series("extproc_endpoint_ejected", gauge(0, 1), gauge(0)),
    "ExtprocEndpointScrapesFail": {
        **endpoint_series("extproc_scrapes_total", counter(300, 0), counter(300), result="ok"),
        **endpoint_series("extproc_scrapes_total", counter(3, 30), counter(3), result="timeout"),
    },
    "ExtprocEndpointSlow": endpoint_series(
        "extproc_endpoint_response_headers_seconds_sum", counter(300, 1200), counter(240)
    ),
    "ExtprocFirstTokenSlow": histogram(
        "extproc_request_ttft_seconds", f'{_POOL},streaming="true"', _BOUNDS, 2400, 2400, late="10"
    ),
    "ExtprocCachePredictionsWrong": endpoint_series(
        "extproc_prefix_observed_tokens_total", counter(55000, 5000), counter(55000)
    ),
    "ExtprocPrefixHitsDropped": {
        f"extproc_matched_tokens_total{{{_POOL}}}": counter(400000, 60000)
    },
    "ExtprocQueueFull": {
        f'extproc_rejection_causes_total{{{_POOL},status="429",cause="queue-full"}}': counter(0, 60)
    },
    "ExtprocQueueWaitLong": histogram(
        "extproc_flow_control_request_queue_duration_seconds", _POOL, _BOUNDS, 2400, 2400, late="60"
    ),
    "ExtprocConfigRejected": {
        f'extproc_config_reload_failed{{{_WHERE},instance="a"}}': gauge(0, 1)
    },
    "ExtprocConfigNeedsRestart": {
        f'extproc_config_restart_needed{{{_WHERE},instance="a"}}': f"0x10 1x{_END - 10}"
    },
    "ExtprocDiscoveryOutOfStep": {
        f'extproc_discovery_watch_unsynced_seconds{{{_WHERE},instance="a",collection="pods"}}': (
            f"0x{STAGED - 1} 60+60x{_END - STAGED}"
        )
    },
    "ExtprocEndpointsDropped": {f"extproc_discovery_dropped_addresses{{{_POOL}}}": gauge(0, 7)},
    "ExtprocLoopFails": {
        f'extproc_loop_degraded{{{_WHERE},instance="a",loop="scrape"}}': gauge(0, 1)
    },
    "ExtprocException": {
        f'extproc_exceptions_total{{{_WHERE},instance="a",type="KeyError",place="x.py:1"}}': (
            f"_x90 1x{_END - 91}"
        )
    },
    "ExtprocFallbackDecisions": {
        f'extproc_degraded_decisions_total{{{_POOL},reason="x"}}': counter(0, 600)
    },
    "ExtprocPluginBypassed": {
        f'extproc_plugin_bypasses_total{{{_WHERE},instance="a",role="scorer",kind="x"}}': (
            f"1x{90} 2x{_END - 91}"
        )
    },
    "ExtprocEventLoopStalls": histogram(
        "extproc_event_loop_lag_seconds", f'{_WHERE},instance="a"', _LAG, 6000, 60, late="5"
    ),
    "ExtprocStreamsFail": {
        f'extproc_streams_total{{{_WHERE},instance="a",result="protocol"}}': counter(0, 100)
    },
    "ExtprocXdsRejected": {
        f'extproc_xds_nacks_total{{{_WHERE},instance="a",type="clusters"}}': f"_x90 1x{_END - 91}"
    },
    "ExtprocRecordingLost": {
        f'extproc_recorded_rows_total{{{_WHERE},instance="a",result="failed"}}': counter(0, 5)
    },
    "ExtprocTracesLost": {
        f'extproc_trace_spans_total{{{_WHERE},instance="a",result="dropped"}}': counter(0, 5)
    },
    "ExtprocMatchNotInForce": {f'extproc_pool_match_state{{{_POOL},state="rejected"}}': gauge(1)},
    "ExtprocReplicasMissing": {f"extproc_scaling_desired_replicas{{{_POOL}}}": gauge(4, 6)},
    "ExtprocScalingFails": {f"extproc_scaling_failures_total{{{_POOL}}}": counter(0, 4)},
    "ExtprocScalingCountersIncomplete": {
        f"extproc_scaling_counters_complete{{{_POOL}}}": gauge(1, 0)
    },
    "ExtprocPeersMissing": {f'extproc_peer_sync_peers{{{_WHERE},instance="c"}}': gauge(1, 0)},
    "ExtprocNoLeader": {f'extproc_leader{{{_WHERE},instance="a"}}': gauge(1, 0)},
}

#: Counts from before the hour, which no alert is for.
OLD = {
    f'extproc_exceptions_total{{{_WHERE},instance="a",type="KeyError",place="y.py:1"}}': gauge(3),
    f'extproc_plugin_bypasses_total{{{_WHERE},instance="a",role="filter",kind="y"}}': gauge(3),
    f'extproc_xds_nacks_total{{{_WHERE},instance="a",type="endpoints"}}': gauge(3),
}


def _values(text):
    """The value of each minute, as text, of promtool's notation."""
    for word in text.split():
        start, _, count = word.partition("x")
        value, _, step = start.partition("+")
        if value in {"_", "stale"}:
            yield from [value] * int(count or 1)
        else:
            for number in range(int(count or 0) + 1):
                yield str(float(value) + number * float(step or 0))


def with_failed_scrapes(series):
    """The same hour where every third scrape of everything fails."""
    result = {}
    for name, text in series.items():
        failed = "0" if name.startswith("up{") else "stale"
        values = list(_values(text))
        for minute in range(2, len(values), 3):
            if values[minute] != "_":
                values[minute] = failed
        result[name] = " ".join(values)
    return result


def with_pause(series):
    """The same counters with ten idle minutes."""
    result = {}
    for name, text in series.items():
        values = list(_values(text))
        result[name] = " ".join([*values[:20], *[values[20]] * 10, *values[20:]])
    return result


#: Further ones: an engine that is given so little that it answers as early as the others, and computes
#: slowly; a pool that was idle before; and a counter of a process that began anew within the hour.
MORE_FAULTS = [
    (
        "ExtprocEndpointSlow",
        endpoint_series("extproc_endpoint_slowness_ratio", gauge(1, 5), gauge(1)),
    ),
    ("ExtprocFirstTokenSlow", with_pause(FAULTS["ExtprocFirstTokenSlow"])),
    (
        "ExtprocXdsRejected",
        {
            f'extproc_xds_nacks_total{{{_WHERE},instance="a",type="clusters"}}': (
                f"3x50 _x40 1x{_END - 91}"
            )
        },
    ),
]


def run_rules(folder, series, *checks, only=""):
    """Let promtool evaluate the rules over series, of the alerts all or only this, and compare."""
    records, all_alerts = files.groups()
    chosen = [rule for rule in all_alerts["rules"] if only in {"", rule["alert"]}]
    rules = folder / "rules.yml"
    rules.write_text(files.dumped({"groups": [records, {**all_alerts, "rules": chosen}]}))
    case = {
        "interval": "1m",
        "input_series": [{"series": key, "values": value} for key, value in series.items()],
        "promql_expr_test": list(checks),
    }
    path = folder / "test.yml"
    path.write_text(
        yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [case]})
    )
    prometheus.promtool("test", "rules", path)


def test_rules_are_valid(tmp_path):
    """The parser of Prometheus takes every rule."""
    path = tmp_path / "rules.yml"
    path.write_text(files.dumped({"groups": files.groups()}))
    assert "SUCCESS" in prometheus.promtool("check", "rules", path)


def test_a_healthy_hour_is_silent(tmp_path):
    """With a rollout, a short ejection, rejected requests and a pool at zero, nothing fires."""
    expr = 'ALERTS{alertstate="firing"}'
    checks = [{"expr": expr, "eval_time": f"{minute}m", "exp_samples": []} for minute in range(96)]
    run_rules(tmp_path, HEALTHY, *checks)


def test_failed_scrapes_raise_no_alert(tmp_path):
    """The same is silent where many scrapes fail, and long after an event of its own kind."""
    expr = 'ALERTS{alertstate="firing"}'
    checks = [
        {"expr": expr, "eval_time": f"{minute}m", "exp_samples": []} for minute in range(22, 96)
    ]
    run_rules(tmp_path, with_failed_scrapes({**HEALTHY, **OLD}), *checks)


def test_an_outage_of_prometheus_makes_no_old_count_new(tmp_path):
    """Series that were missing for seven minutes have the counts that they had before."""
    series = {}
    for name, text in {**HEALTHY, **OLD}.items():
        values = list(_values(text))
        series[name] = " ".join([*values[:STAGED], *["_"] * 7, *values[STAGED + 7 :]])
    named = "|".join(alert.name for alert in alerts.ALERTS if "increase(" in alert.expr)
    expr = f'ALERTS{{alertname=~"{named}",alertstate="firing"}}'
    checks = [
        {"expr": expr, "eval_time": f"{minute}m", "exp_samples": []} for minute in range(22, 96)
    ]
    run_rules(tmp_path, series, *checks)


@pytest.mark.parametrize("has_failed_scrapes", [False, True])
@pytest.mark.parametrize(("name", "fault"), [*FAULTS.items(), *MORE_FAULTS])
def test_an_alert_fires(name, fault, has_failed_scrapes, tmp_path):
    """It does in the fault that it is for, once, also where many scrapes fail."""
    expr = f'count by (alertname) (ALERTS{{alertname="{name}",alertstate="firing"}})'
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1}]
    series = {**HEALTHY, **fault}
    run_rules(
        tmp_path,
        with_failed_scrapes(series) if has_failed_scrapes else series,
        *(
            {"expr": expr, "eval_time": f"{minute}m", "exp_samples": expected}
            for minute in (93, 94, 95)
        ),
        only=name,
    )


#: Counters whose series come with their first event, and why rules may miss that one.
LATE = {
    "extproc_degraded_decisions_total": "a share of many requests",
    "extproc_endpoint_response_headers_seconds_count": "a mean of many requests",
    "extproc_endpoint_response_headers_seconds_sum": "a mean of many requests",
    "extproc_flow_control_request_queue_duration_seconds_bucket": "a quantile of many requests",
    "extproc_recorded_rows_total": "at zero with the recording",
    "extproc_request_ttft_seconds_bucket": "a quantile of many requests",
    "extproc_requests_total": "a share of many requests",
    "extproc_responses_total": "a share of many requests",
    "extproc_routed_requests_total": "a share of many requests",
    "extproc_scaling_failures_total": "at zero with the loop that scales a pool",
    "extproc_scrapes_total": "a share of five minutes of scrapes",
    "extproc_trace_spans_total": "at zero with the exporter of spans",
}


def test_counters_of_rules_are_there_before_their_first_event():
    """The rate of a series is blind for what it had when it appeared."""
    page = "".join(
        piece
        for family in metrics_reference.families()
        for piece in family.render(is_openmetrics=False)
    )
    late = set()
    for expr in [rule.expr for rule in (*recording_rules.RECORDING_RULES, *alerts.ALERTS)]:
        for name, matchers in re.findall(r"\b(?:rate|increase)\((\w+)(?:\{(.*?)\})?\[", expr):
            lines = [line for line in page.splitlines() if re.match(rf"{name}[{{ ]", line)]
            _, _, values = matchers.partition('=~"')
            if not lines or "!=" in matchers or name in LATE:
                is_handled = f"or last_over_time({name}[" in expr
                assert is_handled or name in LATE, name
                late |= set() if is_handled else {name}
                continue
            for value in values.rstrip('"').split("|"):
                assert any(f'"{value}"' in line for line in lines) or not value, (name, value)
    assert late == set(LATE)


def test_every_alert_is_staged():
    """No alert is without a test, and names are unique."""
    assert list(FAULTS) == [alert.name for alert in alerts.ALERTS]
    assert all(name.startswith("Extproc") for name in FAULTS)


def test_recorded_series_are_used():
    """Each recording rule serves an alert, itself or through another one."""
    expressions = [alert.expr for alert in alerts.ALERTS]
    expressions += [rule.expr for rule in recording_rules.RECORDING_RULES]
    for rule in recording_rules.RECORDING_RULES:
        assert any(rule.record in expr for expr in expressions), rule.record


@pytest.mark.parametrize("alert", alerts.ALERTS, ids=lambda alert: alert.name)
def test_a_runbook_names_panels_that_exist(alert):
    """Boards have the panels that runbooks look at."""
    panels = {
        board.title.partition(" / ")[2]: {panel.title for panel in board.panels()}
        for board in boards.BOARDS
    }
    for title, text in re.findall(
        r"\[([\w ]+)\]\(dashboards\.md#[\w-]+\), panels? (.*?)(?: \(.*?\))?[.:;]", alert.look
    ):
        named = re.split(r", | and ", re.sub(r" \(.*?\)", "", text))
        assert set(named) <= panels[title], (title, named)
