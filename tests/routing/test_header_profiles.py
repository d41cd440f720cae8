"""Scheduling profiles that a header of the request chooses, as `header-profile-handler` configures."""

from __future__ import annotations

import msgspec
import pytest

from extproc.cli import main
from extproc.config import factory, loader
from extproc.decision import SATURATED, Decision, Rejection
from extproc.endpoint import Endpoint
from extproc.errors import ConfigError
from extproc.recording.reader import RecordedDecision
from extproc.recording.rows import DecisionRow
from extproc.request import HttpRequest
from extproc.routing.routing_config import RoutingConfig
from extproc.simulator.replay_agreement import AgreementMeter

FILE = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {{type: encode-filter}}
- {{type: prefill-filter}}
- {{type: decode-filter}}
- {{type: no-hit-lru-scorer}}
- {{type: header-profile-handler, parameters: {parameters}}}
schedulingProfiles:
- {{name: encode, plugins: [{{pluginRef: encode-filter}}]}}
- {{name: prefill, plugins: [{{pluginRef: prefill-filter}}, {{pluginRef: no-hit-lru-scorer}}]}}
- {{name: decode, plugins: [{{pluginRef: decode-filter}}]}}
"""
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
PREFILL, DECODE = "10.0.0.1:8000", "10.0.0.2:8000"


def settings(parameters="{}"):
    return loader.settings(loader.parse(FILE.format(parameters=parameters), where="x"))


def build(parameters="{}"):
    """A pool with an engine for prefill and one for decoding."""
    parts = factory.build(settings(parameters))
    roles = {PREFILL: "prefill", DECODE: "decode"}
    parts.store.set_endpoints(
        [Endpoint(address, labels={"llm-d.ai/role": role}) for address, role in roles.items()], 0.0
    )
    return parts


def request(**headers):
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpRequest({":method": "POST", ":path": "/v1/chat/completions", **named}, BODY)


def recorded(profile, chosen):
    """A decision of this profile for the engine of this address."""
    outcome = build().director.route(request(epp_profile="prefill"), 1.0)
    candidate = next(c for c in outcome.candidates if c.endpoint.address == chosen)
    return RecordedDecision(
        key=(1, 1),
        unix_s=1.0,
        row=DecisionRow(n=1, at=1.0, endpoint=1, model="m", profile=profile),
        chosen=candidate.endpoint,
        candidates=outcome.candidates,
        chosen_candidate=candidate,
    )


@pytest.mark.parametrize(
    ("value", "profile", "address"),
    [
        ("prefill", "prefill", PREFILL),
        (" decode ", "decode", DECODE),
        ("", "decode", DECODE),
        ("  ", "decode", DECODE),
    ],
)
def test_the_header_names_the_profile(value, profile, address):
    """A blank one is as good as none, and the decision names the profile that ran."""
    outcome = build().director.route(request(epp_profile=value), 1.0)
    assert isinstance(outcome, Decision)
    assert (outcome.profile, outcome.endpoints[0].address) == (profile, address)


def test_header_and_default_can_be_configured():
    """Names of headers are compared in lower case, those of profiles as they are."""
    director = build('{headerName: " X-Phase ", defaultProfile: prefill}').director
    assert director.route(request(), 1.0).profile == "prefill"
    assert director.route(request(epp_profile="decode"), 1.0).profile == "prefill"
    assert director.route(request(x_phase="decode"), 1.0).profile == "decode"
    assert director.route(request(x_phase="Decode"), 1.0).status == 400


def test_an_unknown_profile_is_refused():
    """The message names those that exist, and not what the client sent."""
    outcome = build().director.route(request(epp_profile="warmup"), 1.0)
    assert isinstance(outcome, Rejection)
    assert (outcome.status, outcome.cause) == (400, "unknown-profile")
    assert outcome.message == (
        "epp-profile names no scheduling profile; there are: decode, encode, prefill"
    )


def test_a_profile_whose_engines_are_missing_has_no_endpoint():
    """No engine encodes here."""
    assert build().director.route(request(epp_profile="encode"), 1.0) is SATURATED


def test_plugins_of_each_profile_learn_of_its_decisions():
    """A scorer of the profile for prefill alone also makes prompts be hashed for all."""
    parts = build()
    routing = parts.director.routing
    assert routing.hashes_prompts
    assert {name: len(plugins) for name, plugins in routing.observers.items()} == {
        "encode": 0,
        "prefill": 1,
        "decode": 0,
    }


def test_a_reload_without_a_change_keeps_the_profiles():
    """Their plugins hold state; another header or default builds them anew."""
    parts = build()

    def reload(wanted) -> RoutingConfig:
        routing, _ = factory.rebuild_routing(wanted, guards=parts.guards, before=parts.profiles)
        return routing

    same = msgspec.structs.replace(
        settings(), scheduling=msgspec.structs.replace(settings().scheduling, fallbacks=1)
    )
    assert reload(same).by_header is parts.director.routing.by_header
    assert reload(settings("{headerName: x-phase}")).by_header.header == "x-phase"
    without = msgspec.structs.replace(
        settings(), scheduling=msgspec.structs.replace(settings().scheduling, epp=None)
    )
    assert reload(without).by_header is None


def test_a_handler_with_one_profile_reads_no_header():
    """The only profile runs whatever the header says, as upstream."""
    text = """{apiVersion: llm-d.ai/v1alpha1, kind: EndpointPickerConfig,
        plugins: [{type: header-profile-handler}, {type: max-score-picker}],
        schedulingProfiles: [{name: p, plugins: [{pluginRef: max-score-picker}]}]}"""
    parts = factory.build(loader.settings(loader.parse(text, where="x")))
    parts.store.set_endpoints([Endpoint(PREFILL)], 0.0)
    assert parts.director.routing.by_header is None
    assert parts.director.route(request(epp_profile="other"), 1.0).profile == "p"


@pytest.mark.parametrize("parameters", ["{defaultProfile: other}", "{headerName: 3}"])
def test_parameters_that_cannot_be_are_refused(parameters):
    """Upstream would refuse each request without the header instead of a default that is missing."""
    with pytest.raises(ConfigError, match=r"other|headerName"):
        factory.build(settings(parameters))


def test_two_profiles_of_one_name_are_refused():
    """As upstream: the header could choose only one of them."""
    text = FILE.format(parameters="{}").replace("name: encode", "name: prefill")
    with pytest.raises(ConfigError, match="'prefill' twice"):
        factory.build(loader.settings(loader.parse(text, where="x")))


def test_a_recorded_decision_is_made_again_by_its_profile():
    """Recordings have no headers, but the name of the profile."""
    meter = AgreementMeter("recorded", settings())
    for profile, chosen in (("prefill", PREFILL), ("decode", DECODE)):
        meter.add(recorded(profile, chosen))
    assert (meter.summary().decisions, meter.summary().agreed) == (2, 2)


def test_a_replay_names_what_a_profile_reads_and_recordings_lack():
    """Also where another profile than the default one reads it."""
    text = FILE.format(parameters="{}").replace("no-hit-lru-scorer", "session-affinity-scorer")
    meter = AgreementMeter("recorded", loader.settings(loader.parse(text, where="x")))
    meter.add(recorded("decode", DECODE))
    assert meter.summary().unknown == ""
    meter.add(recorded("prefill", PREFILL))
    assert meter.summary().unknown == "request headers"


def test_check_names_header_and_profiles(tmp_path, capsys):
    """Nothing of it is unsupported."""
    path = tmp_path / "epp.yaml"
    path.write_text(FILE.format(parameters="{}"))
    assert main.main(["check", str(path), "--endpoints", DECODE, "--strict"]) == 0
    assert "by header   epp-profile names one of encode, prefill, decode" in capsys.readouterr().out
