from __future__ import annotations

import pytest

from bench.peers import report, routing
from bench.peers.cells import CELLS, CellMeasurement
from bench.peers.pickers import NAMES, PickerPorts, envoy_config

BUSY = next(cell.name for cell in CELLS if cell.connections == 32 and cell.max_ratio == 0.6)


def measurement(picker, *, number, cpu_us, p50_ms=2.0, p99_ms=5.0):
    return CellMeasurement(
        cell=BUSY,
        picker=picker,
        round=number,
        requests=100,
        cpu_us=cpu_us,
        cores=0.5,
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        rps=100.0,
        scrapes_per_s=40.0,
        envoy_us=500.0,
        rss_mib=80.0,
        load=1.0,
    )


def run(*, native_us=(300.0, 600.0), peer_us=(1000.0, 1000.0)):
    """Two rounds, in the second of which the machine was slower for one picker."""
    rows = []
    for number, (ours, theirs) in enumerate(zip(native_us, peer_us, strict=True)):
        rows += [
            measurement("direct", number=number, cpu_us=0.0, p50_ms=0.5),
            measurement("native", number=number, cpu_us=ours),
            measurement("go-equal", number=number, cpu_us=theirs, p99_ms=10.0),
        ]
    return report.summarize(rows)


def test_ratios_are_taken_within_a_round():
    """A round that was slow for all pickers leaves the ratio as it was."""
    ratios = run(native_us=(300.0, 3000.0), peer_us=(1000.0, 10_000.0))["cells"][0]["ratios"]
    assert ratios["native/go-equal"]["cpu_us"] == [0.3, 0.3, 0.3]


def test_added_latency_is_that_above_envoy_without_a_picker():
    """The p50 of the picker minus the p50 of the listener without one."""
    pickers = run()["cells"][0]["pickers"]
    assert pickers["native"]["added_p50_ms"] == [1.5, 1.5, 1.5]


def test_bars_compare_medians():
    """A median of 0.45 meets the bar of 0.6, one of 0.75 misses it."""
    fast = {bar.compared: bar for bar in report.bars(run())}
    assert fast["CPU, same scorers / llm-d"].is_met
    slow = {bar.compared: bar for bar in report.bars(run(native_us=(700.0, 800.0)))}
    assert not slow["CPU, same scorers / llm-d"].is_met


@pytest.mark.parametrize(
    ("native_us", "words"),
    [
        ((300.0, 600.0), "ahead of llm-d"),
        ((1300.0, 1300.0), f"behind llm-d in CPU at {BUSY} (1.30"),
    ],
)
def test_the_page_says_where_extproc_loses(native_us, words):
    """The text above the tables names each load in which it is behind."""
    result = {**run(native_us=native_us), "peer": "llm-d v1"}
    machine = {"cores": 2, "cpu": "a CPU", "memory_gib": 24, "python": "3.11"}
    result |= {"command": "make", "date": "2026-01-01", "commit": "abc", "machine": machine}
    assert words in report.block(result)


def test_every_picker_has_two_listeners_and_a_cluster():
    """One listener shows response bodies; without a picker there is no filter and no cluster."""
    rows = {
        ("native", "plain"): PickerPorts(1, 2, 3),
        ("go-equal", "tls"): PickerPorts(4, 5, 6),
        ("direct", "plain"): PickerPorts(0, 8, 9),
    }
    resources = envoy_config(rows)["static_resources"]
    ports = [it["address"]["socket_address"]["port_value"] for it in resources["listeners"]]
    assert ports == [2, 3, 5, 6, 8, 9]
    tls = {cluster["name"]: "transport_socket" in cluster for cluster in resources["clusters"]}
    assert tls == {"engines": False, "native-plain": False, "go-equal-tls": True}
    modes = [
        http_filter["typed_config"]["processing_mode"]["response_body_mode"]
        for listener in resources["listeners"]
        for http_filter in listener["filter_chains"][0]["filters"][0]["typed_config"][
            "http_filters"
        ]
        if http_filter["name"] == "envoy.filters.http.ext_proc"
    ]
    assert modes == ["NONE", "FULL_DUPLEX_STREAMED"] * 2


def test_every_picker_of_a_load_has_a_name_in_words():
    """The tables can name all of them."""
    assert {picker for cell in CELLS for picker in cell.pickers} == set(NAMES)
    assert set(routing.PICKERS) <= set(routing.ROUTING_NAMES)


def test_routing_rows_are_medians_of_the_runs_of_a_cache_size():
    """Cache sizes and pickers are kept apart."""
    fields = [
        name for name in routing.RoutingRun.__struct_fields__ if name not in ("kv_tokens", "picker")
    ]
    runs = [
        routing.RoutingRun(kv_tokens=kv, picker="native", **dict.fromkeys(fields, value))
        for kv, value in ((8000, 1.0), (8000, 2.0), (8000, 4.0), (16_000, 9.0))
    ]
    small, large = routing.summarize(runs)
    assert (small["runs"], small["hit_ratio"]) == (3, [2.0, 1.0, 4.0])
    assert large["hit_ratio"] == [9.0, 9.0, 9.0]
