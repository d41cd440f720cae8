from __future__ import annotations

import copy

import pytest
import yaml

from extproc.cli import main
from extproc.config import envoy_lint, settings
from extproc.config.settings import FlowControlSection
from extproc.errors import ConfigError
from extproc.protocol import headers
from tests.config.envoy_files import (
    HOLDING,
    SHIPPED,
    USAGE_MODES,
    cluster,
    findings,
    host,
    http_options,
    load,
    manager,
    mutations,
    notes,
    processor,
    read,
    route,
    without,
)


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
@pytest.mark.parametrize("configured", [settings.Settings(), HOLDING], ids=["usual", "holding"])
def test_shipped_files_have_no_findings_that_cut(path, configured):
    """Whatever is shipped lets requests wait as long as they may, and answers take their time."""
    assert findings(load(path.name), configured) == []


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_files_have_no_notes(path):
    """There is nothing to improve in what is shipped."""
    assert notes(load(path.name)) == set()


CUTS = {
    "message timeout": (
        lambda tree: without(processor(tree), "message_timeout"),
        "message_timeout is 0.2 s",
    ),
    "message timeout short": (
        lambda tree: processor(tree).update(message_timeout="120s"),
        "message_timeout is 120 s",
    ),
    "stream idle": (
        lambda tree: without(manager(tree), "stream_idle_timeout"),
        "stream_idle_timeout is 300 s",
    ),
    "route timeout": (lambda tree: without(route(tree), "timeout"), "timeout is 15 s"),
    "route idle": (lambda tree: route(tree).update(idle_timeout="60s"), "idle_timeout is 60 s"),
    "tries": (
        lambda tree: route(tree)["retry_policy"].update(per_try_timeout="5s"),
        "per_try_timeout of retry_policy is 5 s",
    ),
    "silent tries": (
        lambda tree: (
            without(route(tree), "retry_policy"),
            host(tree).update(retry_policy={"per_try_idle_timeout": "5s"}),
        ),
        "per_try_idle_timeout of retry_policy is 5 s",
    ),
    "engines' stream duration": (
        lambda tree: http_options(tree, "engines").update(
            common_http_protocol_options={"idle_timeout": "2s", "max_stream_duration": "60s"}
        ),
        "max_stream_duration is 60 s: longer responses",
    ),
    "picker's stream duration": (
        lambda tree: http_options(tree, "extproc").update(
            common_http_protocol_options={"max_stream_duration": "60s"}
        ),
        "max_stream_duration is 60 s: the stream to extproc",
    ),
    "grpc timeout": (
        lambda tree: processor(tree)["grpc_service"].update(timeout="10s"),
        "grpc_service.timeout is 10 s",
    ),
    "picker's breakers": (
        lambda tree: without(cluster(tree, "extproc"), "circuit_breakers"),
        "let 1024 requests be open",
    ),
    "messages": (
        lambda tree: tree["static_resources"]["listeners"][0].update(
            per_connection_buffer_limit_bytes=1 << 30
        ),
        "above limits.max_message_bytes",
    ),
    "messages of a route": (
        lambda tree: host(tree)["routes"][0].update(request_body_buffer_limit=1 << 30),
        "request_body_buffer_limit is 1073741824, above limits.max_message_bytes",
    ),
    "no cluster of pickers": (
        lambda tree: tree["static_resources"]["clusters"].remove(cluster(tree, "extproc")),
        "no cluster has this name",
    ),
    "trailers": (
        lambda tree: processor(tree)["processing_mode"].update(
            request_body_mode="FULL_DUPLEX_STREAMED"
        ),
        "needs request_trailer_mode SEND",
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_limit_that_cuts_is_reported(name):
    """The limit, what it does, and what to write instead."""
    change, text = CUTS[name]
    tree = load()
    change(tree)
    (finding,) = [finding for finding in findings(tree) if text in finding.text]
    assert finding.severity == "cut"


ERRORS = {
    "message timeout zero": (
        lambda tree: processor(tree).update(message_timeout="0s"),
        "message_timeout",
    ),
    "observability": (
        lambda tree: processor(tree).update(observability_mode=True),
        "observability_mode",
    ),
    "no immediate responses": (
        lambda tree: processor(tree).update(disable_immediate_response=True),
        "disable_immediate_response",
    ),
    "headers": (
        lambda tree: processor(tree)["processing_mode"].update(request_header_mode="SKIP"),
        "request_header_mode",
    ),
    "mutations disallowed": (
        lambda tree: processor(tree).update(mutation_rules={"disallow_all": True}),
        "mutation_rules",
    ),
    "header disallowed": (
        lambda tree: processor(tree).update(
            mutation_rules={"disallow_expression": {"regex": "x-gateway-.*"}}
        ),
        "mutation_rules",
    ),
    "destination ignored": (
        lambda tree: (
            without(cluster(tree, "engines"), "original_dst_lb_config"),
            cluster(tree, "engines").update(type="STATIC", lb_policy="ROUND_ROBIN"),
        ),
        "destination",
    ),
    "destination in another header": (
        lambda tree: cluster(tree, "engines")["original_dst_lb_config"].update(
            http_header_name="x-other"
        ),
        "destination",
    ),
    "destination in other metadata": (
        lambda tree: cluster(tree, "engines").update(
            original_dst_lb_config={"metadata_key": {"key": "envoy.lb", "path": [{"key": "other"}]}}
        ),
        "destination",
    ),
    "no HTTP/2": (
        lambda tree: without(cluster(tree, "extproc"), "typed_extension_protocol_options"),
        "http2",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_setting_that_cannot_work_is_an_error(name):
    """Nothing that extproc says reaches the request."""
    change, check = ERRORS[name]
    tree = load()
    change(tree)
    assert [(result.severity, result.check) for result in findings(tree)] == [("error", check)]


NOTES = {
    "local_replies": lambda tree: without(manager(tree), "local_reply_config"),
    "access_log": lambda tree: without(manager(tree), "access_log"),
    "request_ids": lambda tree: without(manager(tree), "always_set_request_id_in_response"),
    "allow_mode_override": lambda tree: without(processor(tree), "allow_mode_override"),
    "picker_health": lambda tree: without(cluster(tree, "extproc"), "health_checks"),
    "metadata": lambda tree: without(processor(tree), "metadata_options"),
}


@pytest.mark.parametrize("check", NOTES)
def test_facts_to_know_are_notes(check):
    """They work as they are."""
    tree = load()
    NOTES[check](tree)
    assert check in notes(tree)


def test_request_ids_that_extproc_returns_are_no_note():
    """Either of the two returns them."""
    tree = load()
    without(manager(tree), "always_set_request_id_in_response")
    without(manager(tree), "preserve_external_request_id")
    (result,) = [item for item in read(tree, HOLDING) if item.check == "request_ids"]
    assert (result.severity, "own id Envoy replaces" in result.text) == ("note", True)
    returning = settings.Settings(responses=settings.ResponsesSection(request_id=True))
    (result,) = [item for item in read(tree, returning) if item.check == "request_ids"]
    assert result.severity == "fine"


_ERROR = {"inline_string": '{"error": {"message": "x"}}'}
_BODY_AS_TEXT = {"text_format": "%LOCAL_REPLY_BODY%", "content_type": "application/json"}
_BODY_AS_SOURCE = {"text_format_source": {"inline_string": "%LOCAL_REPLY_BODY%"}}


@pytest.mark.parametrize(
    ("config", "is_readable"),
    [
        ({"mappers": [{"status_code": 503}]}, False),
        ({"mappers": [{"body": {"inline_string": "sorry"}}]}, False),
        ({"mappers": [{"body": {"inline_string": '{"error": {"message": "x"}}'}}]}, True),
        ({"mappers": [{"body": {"filename": "sorry.json"}}]}, True),
        ({"mappers": [{"body_format_override": {"text_format": "%LOCAL_REPLY_BODY%"}}]}, False),
        ({"mappers": [{"body_format_override": {"json_format": {"error": "down"}}}]}, False),
        ({"body_format": {"json_format": {"message": "%LOCAL_REPLY_BODY%"}}}, False),
        ({"body_format": {"json_format": {"error": {"message": "x"}}}}, True),
        ({"body_format": {"text_format_source": {"inline_string": "x"}}}, False),
        ({"mappers": [{"body": _ERROR, "body_format_override": _BODY_AS_TEXT}]}, True),
        ({"mappers": [{"body": _ERROR, "body_format_override": _BODY_AS_SOURCE}]}, True),
        ({"mappers": [{"body": _ERROR}], "body_format": _BODY_AS_SOURCE}, True),
        ({"mappers": [{"body": {"filename": "x"}}], "body_format": _BODY_AS_TEXT}, True),
        ({"mappers": [{"body": _ERROR}], "body_format": {"text_format": "sorry"}}, False),
        ({"mappers": [{"body": _ERROR}], "body_format": {"json_format": {"oops": "x"}}}, False),
        ({"mappers": [None, {"body": None}], "body_format": None}, False),
        ({"mappers": [{"body_format_override": {"json_format": None}}]}, False),
        ({"mappers": [{"body_format_override": {"json_format": ["error"]}}]}, False),
        ({"body_format": {"text_format_source": {"filename": "x"}}}, True),
    ],
)
def test_local_replies_without_any_error_object_are_a_note(config, is_readable):
    """One that may be an error object is enough, since filters cannot be compared."""
    tree = load()
    manager(tree)["local_reply_config"] = config
    assert ("local_replies" in notes(tree)) is not is_readable


def test_failing_closed_where_envoy_could_choose_is_a_note():
    """The override-host profile goes on by least request without extproc."""
    tree = load("override-host.yaml")
    assert "picker_down" not in notes(tree)
    processor(tree)["failure_mode_allow"] = False
    assert "picker_down" in notes(tree)


def test_each_finding_has_the_expected_value_and_a_fix():
    """Of all faults in the tables of this module."""
    for change, _ in (*CUTS.values(), *WARNINGS.values(), *ERRORS.values()):
        tree = load()
        change(tree)
        for result in findings(tree):
            assert result.wanted, result
            assert result.fix, result


def test_mutation_rules_that_allow_the_destination_are_fine():
    """Envoy tries the allowed expression before `disallow_all`."""
    tree = load()
    allowed = {"disallow_all": True, "allow_expression": {"regex": "x-gateway-.*"}}
    processor(tree)["mutation_rules"] = allowed
    assert findings(tree) == []


def follow_metadata(tree):
    """Have engines chosen by metadata that the filter does not receive."""
    cluster(tree, "engines")["original_dst_lb_config"] = {
        "metadata_key": {"key": "envoy.lb", "path": [{"key": headers.DESTINATION}]}
    }
    without(processor(tree), "metadata_options")


WARNINGS = {
    "buffer filter": (
        lambda tree: manager(tree)["http_filters"].insert(
            0,
            {
                "name": "buffer",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer",
                    "max_request_bytes": 1000,
                },
            },
        ),
        "max_request_bytes of a buffer filter is 1000",
    ),
    "buffer filter of a route": (
        lambda tree: host(tree)["routes"][0].update(
            typed_per_filter_config={
                "buffer": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.BufferPerRoute",
                    "buffer": {"max_request_bytes": 1000},
                }
            }
        ),
        "max_request_bytes of a buffer filter is 1000",
    ),
    "other overrides allowed": (
        lambda tree: processor(tree).update(
            allowed_override_modes=[{**USAGE_MODES, "response_body_mode": "STREAMED"}]
        ),
        "allowed_override_modes lacks the modes",
    ),
    "headers timeout": (
        lambda tree: without(manager(tree), "request_headers_timeout"),
        "request_headers_timeout is off",
    ),
    "short request timeout": (
        lambda tree: manager(tree).update(request_timeout="30s"),
        "request_timeout is 30 s: slow uploads are cut",
    ),
    "no request timeout": (
        lambda tree: without(manager(tree), "request_timeout"),
        "request_timeout is off",
    ),
    "clients steer": (
        lambda tree: mutations(tree).remove({"remove": "x-gateway-destination-endpoint"}),
        "nothing removes x-gateway-destination-endpoint of clients",
    ),
    "headers removed too late": (
        lambda tree: manager(tree)["http_filters"].reverse(),
        "nothing removes test-epp-endpoint-selection, x-gateway-destination-endpoint, ",
    ),
    "stream duration": (
        lambda tree: manager(tree).update(
            common_http_protocol_options={"max_stream_duration": "600s"}
        ),
        "max_stream_duration is 600 s",
    ),
    "route duration": (
        lambda tree: route(tree).update(max_stream_duration={"max_stream_duration": "60s"}),
        "max_stream_duration is 60 s",
    ),
    "no bodies": (
        lambda tree: processor(tree)["processing_mode"].update(request_body_mode="NONE"),
        "request_body_mode is NONE",
    ),
    "no status": (
        lambda tree: processor(tree)["processing_mode"].update(response_header_mode="SKIP"),
        "response_header_mode is SKIP",
    ),
    "response trailers": (
        lambda tree: processor(tree)["processing_mode"].update(response_trailer_mode="SKIP"),
        "account of open requests is too low",
    ),
    "metadata": (follow_metadata, "lacks envoy.lb"),
    "buffer": (
        lambda tree: without(
            tree["static_resources"]["listeners"][0], "per_connection_buffer_limit_bytes"
        ),
        "larger bodies are 413",
    ),
    "window of HTTP/2": (
        lambda tree: without(manager(tree), "http2_protocol_options"),
        "larger bodies over HTTP/2 are 413, and over HTTP/1 33554432 bytes pass",
    ),
    "keep-alive": (
        lambda tree: without(cluster(tree, "engines"), "typed_extension_protocol_options"),
        "vLLM closes them after 5 s",
    ),
    "engines' breakers": (
        lambda tree: without(cluster(tree, "engines"), "circuit_breakers"),
        "let 1024 requests be open",
    ),
    "engines' connections": (
        lambda tree: without(
            cluster(tree, "engines")["circuit_breakers"]["thresholds"][0], "max_connections"
        ),
        "let 1024 requests be open",
    ),
}


@pytest.mark.parametrize("name", WARNINGS)
def test_surprising_settings_are_warnings(name):
    """It works, but not always as one thinks."""
    change, text = WARNINGS[name]
    tree = load()
    change(tree)
    (finding,) = [finding for finding in findings(tree) if text in finding.text]
    assert finding.severity == "warning"


def test_trusted_clients_are_named():
    """Trust in tenants and objectives of clients is a choice, and is shown."""
    tree = load()

    def shown():
        read = envoy_lint.read(tree, HOLDING, where="envoy.yaml")
        return [finding.text for finding in read if "clients" in finding.text]

    assert shown() == ["clients cannot choose tenant and objective"]
    mutations(tree).remove({"remove": "x-llm-d-inference-objective"})
    assert shown() == [
        "clients are trusted to choose tenant and objective: x-llm-d-inference-objective pass"
    ]


def test_failing_open_in_full_duplex_is_named():
    """It does not help once a piece of a body was sent."""
    tree = load("original-dst.yaml")
    processor(tree)["failure_mode_allow"] = True
    assert any("failure_mode_allow helps requests" in finding.text for finding in findings(tree))


def test_short_limits_without_flow_control_are_no_cut():
    """Short limits cut no wait if no request waits."""
    tree = load()
    processor(tree)["message_timeout"] = "120s"
    assert findings(tree, settings.Settings()) == []
    processor(tree)["message_timeout"] = "0.2s"
    assert [finding.severity for finding in findings(tree, settings.Settings())] == ["warning"]


def test_limits_are_compared_with_the_longest_wait():
    """Of all the configuration allows, within what a request may ask for."""
    longest = envoy_lint.longest_wait_s
    assert longest(settings.Settings()) == 0
    assert longest(HOLDING) == 300
    long = FlowControlSection(enabled=True, by_objective={"batch": 5000}, max_timeout_s=4000)
    assert longest(settings.Settings(flow_control=long)) == 4000


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda tree: tree["static_resources"].update(listeners=[]), "ext_proc filter"),
        (lambda tree: manager(tree).update(http_filters=[]), "ext_proc filter"),
        (lambda tree: route(tree).update(timeout="fast"), "timeout in seconds"),
        (lambda tree: route(tree).update(timeout=15), "timeout in seconds"),
        (
            lambda tree: cluster(tree, "engines")["circuit_breakers"]["thresholds"][0].update(
                max_requests="many"
            ),
            "max_requests as a whole number",
        ),
    ],
)
def test_a_file_that_is_no_envoy_configuration_is_an_error(change, wanted):
    """The error says what was wanted."""
    tree = load()
    change(tree)
    with pytest.raises(ConfigError) as refused:
        findings(tree)
    assert wanted in refused.value.wanted


def test_buffers_of_a_listener_with_a_default_filter_chain_alone_are_checked():
    """As Envoy Gateway writes it."""
    tree = load()
    (listener,) = tree["static_resources"]["listeners"]
    (listener["default_filter_chain"],) = listener.pop("filter_chains")
    assert findings(tree) == []
    listener["per_connection_buffer_limit_bytes"] = 32768
    assert [result.check for result in findings(tree)] == ["buffer_limit"]


def test_a_dump_of_a_running_envoy_is_read(tmp_path, capsys):
    """Managers and clusters are found wherever they stand; a cut is exit status 1."""
    tree = load()
    dump = {"configs": [{"dynamic_listeners": tree["static_resources"]["listeners"]}]}
    dump["configs"].append(
        {
            "static_clusters": [
                {"cluster": cluster}
                for cluster in copy.deepcopy(tree["static_resources"]["clusters"])
            ]
        }
    )
    path = tmp_path / "dump.yaml"
    path.write_text(yaml.safe_dump(dump))
    words = ["check", "--endpoints", "10.0.0.1:80", "--envoy", str(path)]
    assert main.main(words) == 0
    assert "requests do not wait" in capsys.readouterr().out
    route(tree)["timeout"] = "15s"
    path.write_text(yaml.safe_dump(dump))
    assert main.main(words) == 1
    assert (
        "cut     connection manager inference, route 0: timeout is 15 s" in capsys.readouterr().out
    )
