"""Health on the metrics page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families as families

from extproc.pool.endpoint_health import RequestOutcome
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.exposition import Exposition
from tests.support.metrics_pages import build_exposition, build_view
from tests.support.pool_fixture import PoolFixture

FIRST, SECOND, THIRD = (f"10.0.0.{n}:8000" for n in (1, 2, 3))


def exposition_of(house: PoolFixture) -> Exposition:
    """The metrics page of one pool."""
    detector = house.store.outlier_detector
    watched = build_view(
        house.store.pool,
        ejections=detector.ejections,
        probes=detector.probes,
        count_ejections=detector.count_ejections,
    )
    return build_exposition(ProcessCounters(), {"p": watched}, now=house.now)


def page(house: PoolFixture) -> dict[tuple[str, str], float]:
    """Samples of health by name and by the label that tells them apart."""
    exposition = exposition_of(house)
    return {
        (sample.name, labels.get("endpoint") or labels.get("cause") or labels.get("result", "")): (
            sample.value
        )
        for family in families(exposition.render().decode())
        for sample in family.samples
        if (labels := sample.labels).get("pool") == "p"
    }


def test_ejections_and_probes_are_exported():
    """A gauge for each endpoint, ejections by cause, trials by what they came to."""
    pool_fixture = PoolFixture({FIRST: None, SECOND: None, THIRD: None})
    member = pool_fixture.store.pool.find(FIRST)
    assert member is not None
    for _ in range(3):
        pool_fixture.store.record_outcome(
            member.endpoint, RequestOutcome.FAILED, sent_at=pool_fixture.now, now=pool_fixture.now
        )
    shown = page(pool_fixture)
    assert shown["extproc_endpoint_ejected", FIRST] == 1.0
    assert shown["extproc_endpoint_ejected", SECOND] == 0.0
    assert shown["extproc_endpoint_up", FIRST] == 1.0
    assert shown["extproc_ejections_total", "errors"] == 1.0
    pool_fixture.now += 10.0
    pool_fixture.store.record_sent(member.endpoint, pool_fixture.now)
    pool_fixture.store.record_outcome(
        member.endpoint, RequestOutcome.SERVED, sent_at=pool_fixture.now, now=pool_fixture.now
    )
    shown = page(pool_fixture)
    assert shown["extproc_endpoint_ejected", FIRST] == 0.0
    assert shown["extproc_probes_total", "ok"] == 1.0


def test_dropped_addresses_are_exported():
    """A pool that is cut at the bound of its size can be alerted on."""
    pool_fixture = PoolFixture({FIRST: None})
    watched = build_view(pool_fixture.store.pool, dropped_addresses=3616)
    exposition = build_exposition(ProcessCounters(), {"p": watched})
    assert b'extproc_discovery_dropped_addresses{pool="p"} 3616.0' in exposition.render()


def test_an_endpoint_may_leave_while_the_page_is_rendered():
    """The page goes on with what it had: the event loop serves others between two pieces."""
    pool_fixture = PoolFixture({FIRST: None, SECOND: None})
    pieces = exposition_of(pool_fixture).pieces(is_openmetrics=False)
    text = ""
    for piece in pieces:
        text += piece
        if "# TYPE extproc_endpoint_up " in piece:
            break
    pool_fixture.store.set_endpoints([], pool_fixture.now)
    text += "".join(pieces)
    shown = [line for line in text.splitlines() if line.startswith("extproc_endpoint_ejections_")]
    assert len(shown) == 2
