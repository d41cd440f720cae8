"""Lints the ext_proc filter of an Envoy configuration.

What routes override of it is part of each filter (`envoy_tree.effective_processors`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from extproc.config import finding
from extproc.config.envoy_tree import YamlTree, is_regex_match, mode, routes, seconds
from extproc.config.finding import Finding
from extproc.config.settings import Settings
from extproc.protocol import headers

_DUPLEX: Final = "FULL_DUPLEX_STREAMED"

#: Modes in which Envoy holds a body back.
_BUFFERED: Final = frozenset({"BUFFERED", "BUFFERED_PARTIAL"})

#: It is for the body mode STREAMED, but `mode_override` is ignored in all modes.
_EARLY_BODY: Final = "send_body_without_waiting_for_header_response"

#: Modes that Envoy compares with those of `allowed_override_modes`, and what an entry without one has.
_UNSET_MODES: Final[Mapping[str, str]] = {
    "request_body_mode": "NONE",
    "request_trailer_mode": "DEFAULT",
    "response_header_mode": "DEFAULT",
    "response_body_mode": "NONE",
    "response_trailer_mode": "DEFAULT",
}


def options(
    processor: YamlTree, settings: Settings, *, by_header: bool, place: str, where: str
) -> Iterator[Finding]:
    """Check that what extproc answers is applied.

    Args:
        by_header: Whether all clusters behind the filter read the destination from its header.
    """
    service = processor.get("grpc_service") or {}
    timeout_s = seconds(service, "timeout", 0.0, where=where)
    if timeout_s:
        yield finding.cut(
            "grpc_timeout",
            place,
            f"grpc_service.timeout is {timeout_s:g} s: the stream to extproc ends then, and with "
            "it the account of the request",
            wanted="none",
            fix="remove it",
        )
    if processor.get("observability_mode"):
        yield finding.error(
            "observability_mode",
            place,
            "observability_mode is on: Envoy ignores what extproc answers",
            wanted="off",
            fix="remove observability_mode",
        )
    if processor.get("disable_immediate_response"):
        yield finding.error(
            "disable_immediate_response",
            place,
            "disable_immediate_response is on: a request that extproc refuses is a 500",
            wanted="off",
            fix="remove disable_immediate_response",
        )
    options = processor.get("metadata_options") or {}
    received = ((options.get("receiving_namespaces") or {}).get("untyped")) or []
    if "envoy.lb" not in received:
        yield Finding(
            "note" if by_header else "warning",
            "metadata",
            place,
            "metadata_options.receiving_namespaces lacks envoy.lb: the destination crosses as a "
            "header only",
            wanted="envoy.lb",
            fix="write metadata_options: {receiving_namespaces: {untyped: [envoy.lb]}}",
        )
    if settings.responses.feedback:
        if mode(processor, "request_body_mode") == "BUFFERED":
            yield from _mode_override(processor, settings, place=place)
        else:
            yield from _unseen_streams(processor, settings, place=place)


def _mode_override(processor: YamlTree, settings: Settings, *, place: str) -> Iterator[Finding]:
    """Check that extproc may ask for the bodies of responses."""
    unread = (
        "extproc cannot read the usage that responses report, so it learns neither token counts "
        "nor cached tokens"
    )
    if not processor.get("allow_mode_override"):
        yield finding.note(
            "allow_mode_override",
            place,
            f"allow_mode_override is off: {unread}",
            wanted="on",
            fix="write allow_mode_override: true",
        )
        return
    if processor.get(_EARLY_BODY) and mode(processor, "response_body_mode") == "NONE":
        yield finding.warning(
            "allow_mode_override",
            place,
            f"{_EARLY_BODY} is on: Envoy ignores the modes that extproc asks for, and {unread}",
            wanted="off",
            fix=f"remove {_EARLY_BODY}, which has no other effect with request_body_mode BUFFERED",
        )
        return
    allowed = processor.get("allowed_override_modes") or []
    body_modes = ["BUFFERED", *(["STREAMED"] if settings.responses.stream_sample_ratio else [])]
    for body_mode in body_modes if mode(processor, "response_body_mode") == "NONE" else []:
        wanted = _asked_modes(processor, body_mode)
        if allowed and not any(
            wanted == {name: entry.get(name, usual) for name, usual in _UNSET_MODES.items()}
            for entry in allowed
        ):
            written = ", ".join(
                f"{name}: {value}" for name, value in wanted.items() if value != _UNSET_MODES[name]
            )
            yield finding.warning(
                "allow_mode_override",
                place,
                f"allowed_override_modes lacks the modes that extproc asks for: {unread}",
                wanted=f"an entry {{{written}}}",
                fix=f"add {{{written}}} to allowed_override_modes, or remove the list",
            )


def _unseen_streams(processor: YamlTree, settings: Settings, *, place: str) -> Iterator[Finding]:
    """Check that extproc sees streams that it samples, where Envoy changes no mode."""
    body, response = mode(processor, "request_body_mode"), mode(processor, "response_body_mode")
    if settings.responses.stream_sample_ratio and body not in _BUFFERED and response == "NONE":
        yield finding.warning(
            "stream_sample_ratio",
            place,
            f"responses.stream_sample_ratio has no effect: with request_body_mode {body} Envoy "
            "ignores the modes that extproc asks for, and response_body_mode is NONE",
            wanted="request_body_mode BUFFERED",
            fix="use `extproc envoy-config original-dst-buffered` or override-host",
        )


def _asked_modes(processor: YamlTree, body_mode: str) -> Mapping[str, str]:
    """Return the modes that Envoy looks for in `allowed_override_modes`.

    A mode that extproc leaves as it is counts as configured, and the request body as NONE.
    """
    configured = processor.get("processing_mode") or {}
    return {
        **_UNSET_MODES,
        "request_trailer_mode": str(configured.get("request_trailer_mode", "DEFAULT")),
        "response_header_mode": "SEND",
        "response_body_mode": body_mode,
        "response_trailer_mode": "SEND",
    }


def modes(processor: YamlTree, *, place: str) -> Iterator[Finding]:
    """Check processing modes, alone and together."""
    if mode(processor, "request_header_mode") == "SKIP":
        yield finding.error(
            "request_header_mode",
            place,
            "request_header_mode is SKIP: extproc sees no request",
            wanted="SEND",
            fix="write request_header_mode: SEND",
        )
    if mode(processor, "request_body_mode") == "NONE":
        yield finding.warning(
            "request_body_mode",
            place,
            "request_body_mode is NONE: extproc sees neither model nor prompt",
            wanted=f"BUFFERED or {_DUPLEX}",
            fix=f"write request_body_mode: BUFFERED, or {_DUPLEX} with request_trailer_mode: SEND",
        )
    if mode(processor, "response_header_mode") == "SKIP":
        yield finding.warning(
            "response_header_mode",
            place,
            "response_header_mode is SKIP: extproc sees no status, so failing endpoints stay in "
            "use",
            wanted="SEND",
            fix="write response_header_mode: SEND",
        )
    for direction in ("request", "response"):
        trailers = mode(processor, f"{direction}_trailer_mode")
        if mode(processor, f"{direction}_body_mode") == _DUPLEX and trailers != "SEND":
            yield finding.cut(
                f"{direction}_trailer_mode",
                place,
                f"{direction}_body_mode {_DUPLEX} needs {direction}_trailer_mode SEND",
                wanted="SEND",
                fix=f"write {direction}_trailer_mode: SEND",
            )
    yield from _held_answers(processor, place=place)
    if mode(processor, "response_trailer_mode") != "SEND":
        yield finding.warning(
            "response_trailers",
            place,
            "response_trailer_mode is not SEND: extproc cannot tell when a response ends, so its "
            "account of open requests is too low",
            wanted="SEND",
            fix="write response_trailer_mode: SEND",
        )


def _held_answers(processor: YamlTree, *, place: str) -> Iterator[Finding]:
    """Check that Envoy does not hold responses back."""
    answers = mode(processor, "response_body_mode")
    is_switched = processor.get("allow_mode_override") and not processor.get(_EARLY_BODY)
    if answers in _BUFFERED and not (
        is_switched and mode(processor, "request_body_mode") in _BUFFERED
    ):
        yield finding.cut(
            "response_body_mode",
            place,
            f"response_body_mode is {answers}: streamed responses are held back, and in BUFFERED "
            "those longer than the buffer are a 500",
            wanted="NONE, or request_body_mode BUFFERED with allow_mode_override",
            fix="write response_body_mode: NONE, or allow_mode_override: true where "
            "request_body_mode is BUFFERED",
        )


def retries(manager: YamlTree, processor: YamlTree, *, place: str) -> Iterator[Finding]:
    """Check what cannot be done again once a piece of a body was sent."""
    if mode(processor, "request_body_mode") != _DUPLEX:
        return
    if processor.get("failure_mode_allow"):
        yield finding.warning(
            "failure_mode_allow",
            place,
            f"failure_mode_allow helps requests with a body in {_DUPLEX} only while Envoy knows that "
            "no replica of extproc is there: once a piece was sent, a lost replica is a 500",
            wanted="off, or request_body_mode BUFFERED",
            fix="write failure_mode_allow: false, or request_body_mode: BUFFERED",
        )
    if any(route["retry_policy"] for route in routes(manager)):
        yield finding.warning(
            "duplex_retries",
            place,
            f"a route or its virtual host has a retry_policy with request_body_mode {_DUPLEX}: Envoy may send a body "
            "that ends with trailers twice",
            wanted="no retries, or request_body_mode BUFFERED",
            fix="remove retry_policy, or write request_body_mode: BUFFERED",
        )


def mutations(processor: YamlTree, *, place: str) -> Iterator[Finding]:
    """Check that the filter may set the header of the destination."""
    rules = processor.get("mutation_rules") or {}
    rule = ""
    if is_regex_match(rules.get("disallow_expression"), headers.DESTINATION):
        rule = "disallow_expression"
    elif rules.get("disallow_all") and not is_regex_match(
        rules.get("allow_expression"), headers.DESTINATION
    ):
        rule = "disallow_all"
    if rule:
        yield finding.error(
            "mutation_rules",
            place,
            f"mutation_rules.{rule} keeps extproc from setting {headers.DESTINATION}: Envoy drops "
            "what was chosen",
            wanted=f"{headers.DESTINATION} allowed",
            fix=f"remove {rule} from mutation_rules",
        )
