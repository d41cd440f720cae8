"""A picker of three endpoints whose configuration is read again, at one moment."""

from __future__ import annotations

import json

from extproc.config import loader, reloading
from extproc.decision import Deferral, Rejection
from extproc.endpoint import Endpoint, Load, ServedModels
from extproc.pool.endpoint_health import RequestOutcome
from extproc.protocol.messages import BodyMode, BodyModes, MessageKind, ProcessingRequest
from extproc.request import HttpRequest
from extproc.server import app, stream_handler
from tests.support.config_text import EPP_HEAD

HEAD = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\nseed: 1\n"
ADDRESSES = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")

PLUGIN = """
import msgspec
from typing import ClassVar
class First(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "first"
    needs: ClassVar[frozenset] = frozenset()
    def pick(self, turn, candidates, totals, *, count):
        return [0]
"""


ALLOWED = loader.FlagOverride(
    ("scheduling", "allow_unsupported"), value=True, flag="--allow-unsupported"
)


def read(text):
    """Settings of a file of ours, or of an EndpointPickerConfig if the text begins with plugins."""
    if text.startswith("plugins:"):
        return loader.settings(loader.parse(EPP_HEAD + text, where="c.yaml"), [ALLOWED])
    return loader.settings(loader.parse(HEAD + text, where="c.yaml"))


class ReloadingScene:
    """A picker with three endpoints at one moment."""

    def __init__(self, settings):
        self.now = 100.0
        self.started = settings
        self.picker = app.EndpointPickerProcess(settings, clock=lambda: self.now)
        for runtime in self.picker.pool_registry.by_name.values():
            runtime.parts.store.set_endpoints(
                [Endpoint(address) for address in ADDRESSES], self.now
            )

    def read_again(self, settings):
        self.picker.apply_settings(reloading.apply_live_fields(self.started, settings))

    @property
    def runtime(self):
        return next(iter(self.picker.pool_registry.by_name.values()))

    @property
    def store(self):
        return self.runtime.parts.store

    @property
    def shared(self):
        return self.picker.servicer.shared

    @property
    def flow_controller(self):
        return self.picker.pool_registry.flow_controllers[""]

    def raw(self, model="m", subset=None, **headers):
        body = json.dumps({"model": model, "prompt": "x"}).encode()
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        all_headers = {":method": "POST", ":path": "/v1/completions", **named}
        return HttpRequest(all_headers, body, subset=subset)

    def route(self, **request):
        return self.picker.pool_registry.pool_selector.route(self.raw(**request), self.now)

    def decision(self, **request):
        return self.route(**request).outcome

    def prepared(self, **request):
        return self.runtime.parts.director.preparer.prepare(self.raw(**request))

    def list_models(self, *models, adapters=()):
        for member in self.store.pool.members:
            listed = ServedModels(bases=frozenset(models), adapters=frozenset(adapters))
            self.store.observe_models(member.endpoint, listed)

    def observe(self, waiting):
        for member in self.store.pool.members:
            observed = Load(at=self.now, engine="vllm", waiting=waiting, running=1.0, kv_usage=0.5)
            self.store.observe(self.store.begin_scrape(member.endpoint), observed, self.now)

    def answers(self, body=b'{"model":"m","prompt":"x"}'):
        """Answers of a stream to a request."""
        stream = stream_handler.open_stream(self.shared)
        headers = {":method": "POST", ":path": "/v1/completions"}
        modes = BodyModes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE)
        list(stream.handle(ProcessingRequest(MessageKind.REQUEST_HEADERS, headers, modes=modes)))
        replies = list(
            stream.handle(
                ProcessingRequest(MessageKind.REQUEST_BODY, body=body, end_of_stream=True)
            )
        )
        stream.finish()
        return [(type(reply).__name__, getattr(reply, "status", None)) for reply in replies]

    def fail(self, times):
        """True if an endpoint is ejected after so many failures in a row."""
        endpoint = self.store.pool.members[0].endpoint
        for _ in range(times):
            self.store.record_outcome(
                endpoint, RequestOutcome.FAILED, sent_at=self.now, now=self.now
            )
        return self.store.pool.members[0].condition.state.name

    def held(self, **request):
        """A request that waits, or why it may not."""
        prepared = self.prepared(**request)
        return self.flow_controller.enqueue(
            prepared, Deferral(1.0, Rejection(429, "busy", reason="x")), self.now
        )
