"""A flow controller and its pool, at a time that a test sets."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

from extproc.config.settings import FlowControlSection
from extproc.decision import Deferral
from extproc.endpoint import Endpoint, Load
from extproc.request import HttpRequest
from extproc.server.flow_control_shell import AsyncFlowController
from extproc.supervision import ExceptionLog
from extproc.telemetry.counters import PoolCounters
from tests.support.pool_fixture import PoolFixture

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


class FlowControlFixture:
    """A pool, its director and a flow controller, at a time that a test sets."""

    def __init__(self, *addresses, profile="balanced", pool="", **holding):
        self.requests = 0
        self.pool_fixture = PoolFixture(dict.fromkeys(addresses), profile=profile)
        routing = self.pool_fixture.director.routing
        settings = routing.settings.__class__(stale_after_s=60.0, busy_s=0.5)
        self.pool_fixture.director.reconfigure(routing.__class__(routing.profile, {}, settings))
        self.bugs = Counter()
        self.counters = PoolCounters(pool)
        self.flow_controller = AsyncFlowController(
            self.pool_fixture.director,
            FlowControlSection(enabled=True, **holding),
            clock=lambda: self.now,
            on_exception=ExceptionLog(self.bugs, lambda: self.now).record,
            pool=pool,
            counters=self.counters.queue,
        )

    @property
    def now(self):
        return self.pool_fixture.now

    def ask(self, model="m", *, tokens=10, priority=0, **headers):
        """Outcome of a request: a decision, a rejection, or a wait."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.requests += 1
        body = json.dumps(
            {"model": model, "prompt": f"{self.requests} " + "word " * tokens}
        ).encode()
        raw = HttpRequest({":method": "POST", ":path": "/v1/completions", **named}, body)
        prepared = self.pool_fixture.director.preparer.prepare(raw)
        request = prepared.request.__class__(
            **{
                name: getattr(prepared.request, name)
                for name in prepared.request.__struct_fields__
                if name != "priority"
            },
            priority=priority,
        )
        prepared = prepared.__class__(request, prepared.chain, raw, request)
        outcome = self.pool_fixture.director.decide(prepared, self.now)
        if isinstance(outcome, Deferral):
            return self.flow_controller.enqueue(prepared, outcome, self.now)
        return outcome

    def come(self, *addresses):
        """These endpoints are all there are."""
        self.pool_fixture.store.set_endpoints(
            [Endpoint(address) for address in addresses], self.now
        )
        self.flow_controller.notify_capacity()

    def load(self, address, **facts):
        """A scrape of an endpoint."""
        store = self.pool_fixture.store
        mark = store.begin_scrape(store.pool.find(address).endpoint)
        store.observe(mark, Load(at=self.now, engine="vllm", **facts), self.now)
        self.flow_controller.notify_capacity()


async def answered(*held):
    """Let the loop turn until these are answered."""
    for _ in range(50):
        if all(request.admission.done() for request in held):
            return [request.admission.result() for request in held]
        await asyncio.sleep(0)
    raise AssertionError([request.admission for request in held])
