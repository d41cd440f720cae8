from __future__ import annotations

import json
import subprocess
import sys

from extproc.endpoint import Endpoint
from tests.support import ext_proc_script
from tests.support.pool_fixture import PoolFixture

FIRST, SECOND = "10.0.0.1:8000", "10.0.0.2:8000"


def route(house: PoolFixture, destination: str) -> None:
    ext_proc_script.play(
        [ext_proc_script.request_headers(ends=True), ext_proc_script.route(destination)],
        house.decide,
    )


def test_063_endpoints_come_and_go_without_restart():
    """An endpoint that left is not chosen any more, and one that came is."""
    pool_fixture = PoolFixture({FIRST: None})
    route(pool_fixture, FIRST)
    pool_fixture.store.set_endpoints([Endpoint(SECOND)], pool_fixture.now)
    route(pool_fixture, SECOND)
    pool_fixture.store.set_endpoints([Endpoint(FIRST)], pool_fixture.now)
    route(pool_fixture, FIRST)


def test_063_an_endpoint_that_cannot_be_reached_is_avoided():
    """An endpoint whose scrapes cannot connect is left out while another one answers."""
    pool_fixture = PoolFixture({FIRST: None, SECOND: None}, profile="round-robin")
    for _ in range(2):
        pool_fixture.store.scrape_failed(
            pool_fixture.store.begin_scrape(Endpoint(FIRST, incarnation=1)),
            "refused",
            pool_fixture.now,
        )
    for _ in range(4):
        route(pool_fixture, SECOND)


def test_066_the_core_runs_without_kubernetes():
    """Routing over a static list loads no Kubernetes client and no network code."""
    script = (
        "import sys, json;"
        "from tests.support import ext_proc_script as talk;"
        "from tests.support.pool_fixture import PoolFixture;"
        "talk.play([talk.request_headers(ends=True), talk.route()],"
        " PoolFixture({talk.ADDRESS: None}).decide);"
        "print(json.dumps([name for name in sys.modules if 'kubernetes' in name]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, timeout=300
    )
    assert json.loads(run.stdout) == []
