from __future__ import annotations

from extproc.config import settings
from extproc.config.settings import ResponsesSection
from tests.config.envoy_files import (
    USAGE_MODES,
    findings,
    host,
    load,
    manager,
    notes,
    processor,
)


def test_allowed_overrides_are_compared_as_envoy_compares_them():
    """The mode of request trailers is the configured one, and streams are asked for if sampled."""
    tree = load()
    processor(tree)["allowed_override_modes"] = [USAGE_MODES]
    assert findings(tree) == []
    sampling = settings.Settings(responses=ResponsesSection(stream_sample_ratio=0.5))
    assert [result.check for result in findings(tree, sampling)] == ["allow_mode_override"]
    del processor(tree)["processing_mode"]["request_trailer_mode"]
    assert [result.check for result in findings(tree)] == ["allow_mode_override"]


def test_sampled_streams_are_shown_or_a_finding():
    """Without a buffered request Envoy shows only what its own response mode shows."""
    sampling = settings.Settings(responses=ResponsesSection(stream_sample_ratio=0.5))
    tree = load("original-dst.yaml")
    assert findings(tree) == []
    (result,) = findings(tree, sampling)
    assert (result.severity, result.check) == ("warning", "stream_sample_ratio")
    assert "original-dst-buffered" in result.fix
    processor(tree)["processing_mode"]["response_body_mode"] = "STREAMED"
    assert findings(tree, sampling) == []
    for name in ("original-dst-buffered.yaml", "override-host.yaml", "override-host-eds.yaml"):
        assert findings(load(name), sampling) == []


def test_bodies_that_do_not_wait_for_headers_end_mode_overrides():
    """Envoy ignores the mode that extproc asks for then; without feedback it asks for none."""
    tree = load()
    processor(tree)["send_body_without_waiting_for_header_response"] = True
    assert [result.check for result in findings(tree)] == ["allow_mode_override"]
    (result,) = findings(tree)
    assert "send_body_without_waiting_for_header_response is on" in result.text
    silent = settings.Settings(responses=ResponsesSection(feedback=False))
    assert findings(tree, silent) == []
    processor(tree)["processing_mode"]["response_body_mode"] = "STREAMED"
    assert findings(tree) == []


def test_answers_are_held_back_where_their_mode_cannot_be_changed():
    """A buffered response mode needs a buffered request and an override that Envoy honors."""
    tree = load()
    processor(tree)["processing_mode"]["response_body_mode"] = "BUFFERED"
    assert findings(tree) == []
    processor(tree)["processing_mode"]["request_body_mode"] = "STREAMED"
    assert "response_body_mode" in [result.check for result in findings(tree)]
    processor(tree)["processing_mode"]["request_body_mode"] = "BUFFERED"
    processor(tree)["allow_mode_override"] = False
    assert "response_body_mode" in [result.check for result in findings(tree)]


def test_a_route_may_override_namespaces_to_forward_only():
    """Namespaces to receive stay those of the filter."""
    tree = load()
    extension = next(
        entry for entry in manager(tree)["http_filters"] if entry["name"].endswith("ext_proc")
    )
    overrides = {"metadata_options": {"forwarding_namespaces": {"untyped": ["envoy.lb"]}}}
    host(tree)["routes"][0]["typed_per_filter_config"] = {
        extension["name"]: {"overrides": overrides}
    }
    assert "metadata" not in notes(tree)
    overrides["metadata_options"]["receiving_namespaces"] = {"untyped": ["other"]}
    assert "metadata" in notes(tree)
