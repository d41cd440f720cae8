"""Metric families as text, read back by the parsers of the Prometheus client."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from extproc.telemetry.metric_family import MetricFamily
from extproc.telemetry.request_series import MetricHistogram, merge


def render(*families, is_openmetrics=False):
    pieces = [
        piece for family in families for piece in family.render(is_openmetrics=is_openmetrics)
    ]
    return "".join(pieces) + ("# EOF\n" if is_openmetrics else "")


def parse(*families, is_openmetrics=False):
    text = render(*families, is_openmetrics=is_openmetrics)
    parse_page = openmetrics.text_string_to_metric_families if is_openmetrics else parse_text
    return list(parse_page(text))


def example():
    histogram = MetricHistogram((0.5, 1))
    for value in (0.1, 0.7, 5.0):
        histogram.add(value)
    duration = MetricFamily("histogram", "x_duration_seconds", "Seconds.", ("pool",))
    duration.add_histogram(("p",), histogram)
    mean = MetricFamily("summary", "x_headers_seconds", "Seconds.", ("pool",))
    mean.add_histogram(("p",), histogram)
    return (
        MetricFamily("counter", "x_requests", "Requests.", ("pool",), [(("p",), 3)]),
        MetricFamily("gauge", "x_age_seconds", "Age.", samples=[((), math.inf)]),
        MetricFamily("info", "x", "About.", ("pool",), [(("p",), 1)]),
        duration,
        mean,
    )


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_samples_are_read_back(is_openmetrics):
    """All types, in both formats."""
    families = parse(*example(), is_openmetrics=is_openmetrics)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    count = "1.0" if is_openmetrics else "1"
    assert samples == {
        ("x_requests_total", "p"): 3.0,
        ("x_age_seconds",): math.inf,
        ("x_info", "p"): 1.0,
        ("x_duration_seconds_bucket", "p", "0.5"): 1.0,
        ("x_duration_seconds_bucket", "p", count): 2.0,
        ("x_duration_seconds_bucket", "p", "+Inf"): 3.0,
        ("x_duration_seconds_count", "p"): 3.0,
        ("x_duration_seconds_sum", "p"): 5.8,
        ("x_headers_seconds_count", "p"): 3.0,
        ("x_headers_seconds_sum", "p"): 5.8,
    }
    assert {family.name: family.type for family in families}["x_duration_seconds"] == "histogram"


@pytest.mark.parametrize("is_openmetrics", [False, True])
@given(values=st.lists(st.text(st.characters(codec="utf-8")), min_size=2, max_size=2))
def test_label_values_are_escaped(is_openmetrics, values):
    """Names of models and tenants are text of clients."""
    family = MetricFamily("gauge", "x", 'A "text"\\\n.', ("b", "a"), [(values, 1.5)])
    (parsed,) = parse(family, is_openmetrics=is_openmetrics)
    (sample,) = parsed.samples
    assert sample.labels == {"b": values[0], "a": values[1]}
    assert sample.value == 1.5


def test_a_family_without_samples_has_its_header():
    """A dashboard finds the name, and a scraper the type."""
    text = render(MetricFamily("counter", "x_requests", "Requests.", ("pool",)))
    assert text == "# HELP x_requests_total Requests.\n# TYPE x_requests_total counter\n"


def test_histograms_are_merged_unless_they_are_empty():
    """The sum of the buckets, and of the values."""
    first, second = MetricHistogram((1, 2)), MetricHistogram((1, 2))
    assert merge([]) is merge([first, second]) is None
    first.add(0.5)
    second.add(1.5)
    merged = merge([first, second])
    assert (merged.cumulative, merged.total, first.cumulative) == ([1, 2, 2], 2.0, [1, 1, 1])
