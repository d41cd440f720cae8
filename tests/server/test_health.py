"""The table of health names and the first look at endpoints.

Source: docs/spec/protocol.md#health-service.
"""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2

from extproc.config import factory
from extproc.config.settings import Settings
from extproc.endpoint import Endpoint, Load
from extproc.pool.endpoint_health import RequestOutcome
from extproc.pool.observed_page import ScrapeToken
from extproc.pool.store import PoolStore
from extproc.server import health
from extproc.server.health import (
    SUPPORTED_APP_PROTOCOLS,
    HealthServicer,
    InitialScrapeGate,
    Readiness,
)

EXT_PROC = "envoy.service.ext_proc.v3.ExternalProcessor"
READINESS_NAMES = ["", "readiness", EXT_PROC]
PLAIN = ["inference-extension", "whatever"]


def check_health(
    name: str, *, draining: bool = False, elected: bool | None = None, **facts: bool
) -> str:
    """Answer of the service about a name; facts are true unless they are named."""
    readiness = Readiness(
        lambda: facts.get("synced", True),
        is_scraped=lambda: facts.get("measured", True),
        is_protocol_supported=lambda: facts.get("fits", True),
        is_leader=None if elected is None else lambda: elected,
    )
    if draining:
        readiness.start_draining()
    answer = HealthServicer(readiness).check(health_pb2.HealthCheckRequest(service=name))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


@pytest.mark.parametrize("name", [*READINESS_NAMES, *PLAIN, "liveness"])
def test_without_election_every_name_is_serving(name: str):
    """Every name is serving, unknown ones too."""
    assert check_health(name) == "SERVING"


@pytest.mark.parametrize("name", [*READINESS_NAMES, *PLAIN])
@pytest.mark.parametrize("fact", ["synced", "fits"])
def test_without_election_every_name_follows_sync_and_protocol(name: str, fact: str):
    """Before the first sync, and for an unread protocol, only liveness is serving."""
    assert check_health(name, **{fact: False}) == "NOT_SERVING"


@pytest.mark.parametrize("name", [*READINESS_NAMES, *PLAIN])
def test_without_election_draining(name: str):
    """A draining picker is not serving."""
    assert check_health(name, draining=True) == "NOT_SERVING"


@pytest.mark.parametrize("name", READINESS_NAMES)
def test_readiness_waits_for_the_first_scrape(name: str):
    """The names that data planes route by wait for metrics."""
    assert check_health(name, measured=False) == "NOT_SERVING"


@pytest.mark.parametrize("name", PLAIN)
def test_other_names_do_not_wait_for_the_first_scrape(name: str):
    """Other names do not look at metrics, as those of the reference do not look at plugins."""
    assert check_health(name, measured=False) == "SERVING"


@pytest.mark.parametrize("elected", [None, True, False])
@pytest.mark.parametrize("fact", ["synced", "fits", "measured", "nothing"])
@pytest.mark.parametrize("draining", [False, True])
def test_liveness_is_always_serving(*, elected: bool | None, fact: str, draining: bool):
    """EPP protocol 004: whenever the process answers."""
    assert (
        check_health("liveness", elected=elected, draining=draining, **{fact: False}) == "SERVING"
    )


@pytest.mark.parametrize("name", READINESS_NAMES)
def test_with_election_the_leader_serves(name: str):
    """Synced, measured, fitting and elected: serving; without any of these not."""
    assert check_health(name, elected=True) == "SERVING"
    assert check_health(name, elected=False) == "NOT_SERVING"
    assert check_health(name, elected=True, draining=True) == "NOT_SERVING"
    for fact in ("synced", "measured", "fits"):
        assert check_health(name, elected=True, **{fact: False}) == "NOT_SERVING"


@pytest.mark.parametrize("elected", [True, False])
@pytest.mark.parametrize("name", PLAIN)
def test_with_election_other_names_are_unknown(*, name: str, elected: bool):
    """In the reply, not as a gRPC error; whatever else holds."""
    assert check_health(name, elected=elected) == "SERVICE_UNKNOWN"
    assert check_health(name, elected=elected, synced=False, draining=True) == "SERVICE_UNKNOWN"


@pytest.mark.parametrize("elected", [None, True])
def test_the_list_agrees_with_check(*, elected: bool | None):
    """List names what is known, with the answers that Check gives."""
    readiness = Readiness(
        lambda: True,
        is_scraped=lambda: False,
        is_leader=None if elected is None else lambda: elected,
    )
    statuses = HealthServicer(readiness).list().statuses
    names = {"", "liveness", "readiness", EXT_PROC}
    assert set(statuses) == (names if elected else names | {"inference-extension"})
    for name, response in statuses.items():
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        assert status == check_health(name, elected=elected, measured=False)


def test_app_protocol_decides_readiness():
    """Plain HTTP, plaintext HTTP/2 and an unset protocol are supported, and nothing else."""
    assert "kubernetes.io/h2c" in SUPPORTED_APP_PROTOCOLS
    assert "" in SUPPORTED_APP_PROTOCOLS
    assert "kubernetes.io/wss" not in SUPPORTED_APP_PROTOCOLS


class Looking:
    """A first look at two endpoints, with a clock by hand."""

    def __init__(self, *addresses: str, most_s: float = 3.0) -> None:
        self.now = 100.0
        self.store = PoolStore(on_gone=lambda _: None)
        self.store.set_endpoints([Endpoint(address) for address in addresses], 100.0)
        self.done = InitialScrapeGate(lambda: {"": self.store.pool}, lambda: self.now, most_s)

    def scraped(self, address: str) -> None:
        member = self.store.pool.find(address)
        assert member is not None
        self.store.observe(self.store.begin_scrape(member.endpoint), Load(at=self.now), self.now)

    def failed(self, address: str) -> None:
        member = self.store.pool.find(address)
        assert member is not None
        mark = self.store.begin_scrape(member.endpoint)
        self.store.scrape_failed(mark, "timeout", self.now)


def test_every_endpoint_is_scraped_before_readiness():
    """Readiness waits for a scrape of each endpoint, and later endpoints do not revoke it."""
    looking = Looking("10.0.0.1:1", "10.0.0.2:1")
    assert not looking.done()
    looking.scraped("10.0.0.1:1")
    assert not looking.done()
    looking.failed("10.0.0.2:1")
    assert looking.done()
    looking.store.set_endpoints([Endpoint("10.0.0.3:1")], looking.now)
    assert looking.done()


def test_endpoints_that_never_answer_do_not_block():
    """When the time is over it is done all the same."""
    looking = Looking("10.0.0.1:1")
    assert not looking.done()
    looking.now += 2.9
    assert not looking.done()
    looking.now += 0.1
    assert looking.done()


def test_an_empty_pool_is_ready():
    """Without endpoints there is nothing to wait for."""
    assert Looking().done()


def test_a_zero_timeout_does_not_wait():
    """Readiness does not wait with 0 s, and without scrapes."""
    assert Looking("10.0.0.1:1", most_s=0.0).done()


def test_a_pool_with_only_failing_endpoints_is_reported():
    """A picker stays ready then, and its page says what is the matter."""
    store = factory.build(Settings()).store
    store.set_endpoints([Endpoint("10.0.0.1:8000"), Endpoint("10.0.0.2:8000")], 0.0)
    assert list(health.lines({"llama": store.pool})) == []
    for member in store.pool.members:
        for _ in range(9):
            store.scrape_failed(ScrapeToken(member.endpoint, 0), "refused", 1.0)
            store.record_outcome(member.endpoint, RequestOutcome.FAILED, sent_at=1.0, now=1.0)
    assert list(health.lines({"llama": store.pool})) == [
        "0 of 2 endpoints of pool llama take part: all are failing"
    ]
