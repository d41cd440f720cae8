"""Sessions that plugins of an upstream file name by headers and cookies."""

from __future__ import annotations

import pytest

from extproc.config import lint, loader, profile_builder
from extproc.errors import ConfigError
from extproc.scheduling.session_affinity import EncodedEndpointHeader, SessionId, SessionSource
from tests.support.config_text import EPP_HEAD


def read(text):
    return loader.settings(loader.parse(EPP_HEAD + text, where="file.yaml"))


def sources(settings):
    profile = profile_builder.build_profile(settings, where="file.yaml")
    return profile.filters[0].session_id_config.sources


def affinity(sources):
    return (
        "- type: session-affinity-filter\n"
        f"  parameters: {{strategy: session_id, sessionIdConfig: {{sources: {sources}}}}}\n"
    )


@pytest.mark.parametrize(
    ("producer", "attribute", "source"),
    [
        ("parameters: {headerName: X-Conv}", "session-id-producer", SessionSource(header="X-Conv")),
        ("name: s, parameters: {cookieName: sid}", "s", SessionSource(cookie="sid")),
        (
            "name: s, parameters: {cookieName: sid}",
            "x",
            SessionSource(attribute="SessionIDDataKey/x"),
        ),
    ],
)
def test_a_session_attribute_is_the_header_or_cookie_of_its_producer(producer, attribute, source):
    """A source that names the attribute of a producer reads what the producer would."""
    settings = read(
        f"plugins:\n- {{type: session-id-producer, {producer}}}\n"
        + affinity(f"[{{header: x-first}}, {{attribute: SessionIDDataKey/{attribute}}}]")
    )
    assert sources(settings) == (SessionSource(header="x-first"), source)
    assert not [text for text in lint.find_warnings(settings) if "session" in text]


@pytest.mark.parametrize(
    ("written", "source"),
    [
        ("attribute: SessionIDDataKey, producer: s", SessionSource(cookie="sid")),
        ("attribute: agent-identity, producer: null", SessionSource(attribute="agent-identity")),
        ("attribute: agent-identity, producer: ''", SessionSource(attribute="agent-identity")),
        ("header: x-s, producer: ''", SessionSource(header="x-s")),
    ],
)
def test_the_producer_of_an_attribute_may_have_a_key_of_its_own(written, source):
    """Later releases of upstream name attribute and producer apart."""
    settings = read(
        "plugins:\n- {type: session-id-producer, name: s, parameters: {cookieName: sid}}\n"
        + affinity(f"[{{{written}}}]")
    )
    assert sources(settings) == (source,)


@pytest.mark.parametrize(
    ("producer", "message"),
    [
        ("3", "expected text, got 3"),
        ("0", "expected text, got 0"),
        ("false", "expected text, got false"),
        ("sess", "expected the name of a plugin of this file, got sess; did you mean sess1?"),
    ],
)
def test_the_producer_of_an_attribute_is_a_plugin_of_the_file(producer, message):
    """Otherwise the session would be another one than that of the file."""
    with pytest.raises(ConfigError) as raised:
        read(
            "plugins:\n- {type: session-id-producer, name: sess1, parameters: {headerName: a}}\n"
            + affinity(f"[{{attribute: SessionIDDataKey, producer: {producer}}}]")
        )
    assert f"sessionIdConfig.sources[0].producer: {message}" in str(raised.value)


@pytest.mark.parametrize(
    "parameters", ["{}", "{headerName: null}", "{headerName: a, cookieName: b}", "{header: a}"]
)
def test_a_producer_has_exactly_one_location(parameters):
    """As upstream, one of headerName and cookieName has to be there, and nothing else."""
    with pytest.raises(ConfigError, match=r"plugins\[0\]\.parameters"):
        read(f"plugins:\n- {{type: session-id-producer, parameters: {parameters}}}\n")


@pytest.mark.parametrize(
    "config",
    [
        "3",
        "{sources: 3}",
        "{sources: [3]}",
        "{sources: [{attribute: 3}]}",
        "{sources: {}}",
        "{sources: ''}",
        "{sources: false}",
        "{evictionTtlSeconds: ''}",
        "{evictionTtlSeconds: []}",
        "{evictionSweepSeconds: false}",
    ],
)
def test_malformed_sessions_are_refused(config):
    """Empty values of another type are no defaults."""
    settings = read(
        "plugins:\n- {type: session-id-producer, parameters: {headerName: x-conv}}\n"
        f"- {{type: session-affinity-filter, parameters: {{sessionIdConfig: {config}}}}}\n"
    )
    with pytest.raises(ConfigError, match="sessionIdConfig"):
        sources(settings)


@pytest.mark.parametrize(
    ("parameters", "header", "sessions"),
    [
        ("encodedEndpointHeaderConfig: {header: ''}", EncodedEndpointHeader(), SessionId()),
        (
            "encodedEndpointHeaderConfig: {header: ' X-Token '}",
            EncodedEndpointHeader(header="X-Token"),
            SessionId(),
        ),
        (
            "sessionIdConfig: {sources: [], evictionTtlSeconds: 0, evictionSweepSeconds: 0}",
            EncodedEndpointHeader(),
            SessionId(),
        ),
        (
            "sessionIdConfig: {sources: [{header: ' x-s '}], evictionTtlSeconds: 7}",
            EncodedEndpointHeader(),
            SessionId(sources=(SessionSource(header="x-s"),), eviction_ttl_seconds=7.0),
        ),
    ],
)
def test_empty_settings_of_sessions_are_the_usual_ones(parameters, header, sessions):
    """As upstream, nothing and 0 count as absent, and blanks around a name not at all."""
    settings = read(
        f"plugins:\n- {{type: session-affinity-filter, parameters: {{{parameters}}}}}\n"
    )
    plugin = profile_builder.build_profile(settings, where="file.yaml").filters[0]
    assert plugin.encoded_endpoint_header_config == header
    assert plugin.session_id_config == sessions


@pytest.mark.parametrize("header", ["0", "[]", "false"])
def test_a_header_that_is_no_text_is_refused(header):
    """It is no empty name."""
    config = f"encodedEndpointHeaderConfig: {{header: {header}}}"
    settings = read(f"plugins:\n- {{type: session-affinity-filter, parameters: {{{config}}}}}\n")
    with pytest.raises(ConfigError, match=r"encodedEndpointHeaderConfig\.header: expected text"):
        sources(settings)


@pytest.mark.parametrize(("written", "header"), [("X-Token", "X-Token"), ("''", "x-session-token")])
def test_the_header_of_earlier_releases_carries_the_token(written, header):
    """`headerName` of llm-d-router 0.9 is read, with a warning that names the section."""
    plugin = f"{{type: session-affinity-filter, parameters: {{headerName: {written}}}}}"
    document = loader.parse(f"{EPP_HEAD}plugins: [{plugin}]\n", where="file.yaml")
    profile = profile_builder.build_profile(loader.settings(document), where="file.yaml")
    assert profile.filters[0].encoded_endpoint_header_config.header == header
    (warning,) = document.warnings
    assert warning == (
        "plugin session-affinity-filter: headerName is of earlier releases: write "
        "encodedEndpointHeaderConfig.header"
    )


GATE = "featureGates: [flowControl]\n"


@pytest.mark.parametrize(
    ("head", "agent", "headers", "tenant"),
    [
        (GATE, "", {"session_id": "d", "session-id": "c", "x-session-affinity": "b"}, "b"),
        (GATE, "", {"x-session-affinity": "b", "x-claude-code-session-id": "a"}, "a"),
        (GATE, "null", {"x-session-affinity": "b"}, "b"),
        (GATE, "[X-A, x-b]", {"x-claude-code-session-id": "a", "x-a": "1", "x-b": "2"}, "1"),
        (GATE, "[x-a]", {"x-a": "1", "x-llm-d-inference-fairness-id": "team"}, "team"),
        (GATE, "", {"x-a": "1"}, ""),
        ("", "", {"session-id": "c"}, ""),
    ],
)
def test_the_session_of_an_agent_is_its_tenant(head, agent, headers, tenant):
    """Without a fairness header, and with flow control, the first header of an agent counts."""
    parameters = f", parameters: {{additionalSessionHeaders: {agent}}}" if agent else ""
    settings = read(f"{head}plugins:\n- {{type: agent-identity{parameters}}}\n")
    assert settings.flow_control.headers.tenant(headers, "m") == tenant


def test_without_agent_identity_sessions_are_no_tenants():
    """As upstream, only the plugin makes a session a flow."""
    settings = read(GATE + "plugins:\n- type: queue-scorer\n")
    assert settings.flow_control.headers.tenant({"session-id": "c"}, "m") == ""


def test_added_headers_of_agents_come_before_the_session_of_the_parsers():
    """A source that names the attribute of agent-identity reads the headers of the file first."""
    settings = read(
        "plugins:\n- {type: agent-identity, parameters: {additionalSessionHeaders: [x-a]}}\n"
        + affinity("[{attribute: agent-identity}]")
    )
    assert sources(settings) == (
        SessionSource(header="x-a"),
        SessionSource(attribute="agent-identity"),
    )
