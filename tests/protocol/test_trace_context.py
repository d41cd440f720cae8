"""Parsing of trace context, and the decision which requests are traced."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.protocol.trace_context import (
    TraceContext,
    TraceSampler,
    parse_traceparent,
    sampled_trace_id,
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
OTHER_SPAN = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{SPAN}-01"
UNSAMPLED = f"00-{TRACE}-{SPAN}-00"


def sampler(ratio=1.0, *, is_parent_based=True):
    return TraceSampler(ratio, is_parent_based=is_parent_based, rng=random.Random(1))


def no_call():
    return ""


def start(trace_sampler, *, client="", data_plane="", **headers):
    if client:
        headers["traceparent"] = client
    return trace_sampler.start(headers, lambda: data_plane)


def test_traceparent_is_read_and_written_alike():
    """A context that is parsed gives the header again."""
    parsed = parse_traceparent(SAMPLED)
    assert parsed == TraceContext(TRACE, SPAN, 1)
    assert parsed.is_sampled
    assert parsed.traceparent == SAMPLED
    assert not parse_traceparent(UNSAMPLED).is_sampled


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        SAMPLED[:-1],
        f"{SAMPLED}-",
        f"{SAMPLED}-00",
        SAMPLED.upper(),
        f" {SAMPLED}",
        f"{SAMPLED}\n",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00_{TRACE}_{SPAN}_01",
        f"0x-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"cc-{TRACE}-{SPAN}-01.what",
    ],
)
def test_malformed_traceparent_is_none(value):
    """A value that the recommendation calls invalid starts no context."""
    assert parse_traceparent(value) is None
    assert sampled_trace_id({"traceparent": value}) == ""


@pytest.mark.parametrize("value", [f"cc-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what"])
def test_later_versions_may_have_more_fields(value):
    """A later version is read as far as this one knows it, and passed on as version 00."""
    assert parse_traceparent(value).traceparent == SAMPLED


@pytest.mark.parametrize(("flags", "known"), [("ff", "03"), ("fe", "02"), ("09", "01")])
def test_undefined_flags_are_dropped(flags, known):
    """Only the flags for sampling and random ids are passed on."""
    assert parse_traceparent(f"00-{TRACE}-{SPAN}-{flags}").traceparent[-2:] == known


@given(st.text(max_size=80))
def test_any_text_is_parsed(value):
    """Parsing has an answer for any header value."""
    parsed = parse_traceparent(value)
    assert parsed is None or parse_traceparent(parsed.traceparent) == parsed


def test_sampled_trace_id():
    """The trace id is that of a sampled trace, or empty."""
    assert sampled_trace_id({"traceparent": SAMPLED}) == TRACE
    assert sampled_trace_id({"traceparent": UNSAMPLED}) == ""
    assert sampled_trace_id({}) == ""


def test_span_is_a_child_of_the_clients():
    """A sampled client's trace goes on with a span of ours, and with its tracestate."""
    context = start(sampler(0.0), client=SAMPLED, tracestate="a=1,b=2")
    assert context.trace_id == TRACE
    assert context.parent_span_id == SPAN
    assert context.tracestate == "a=1,b=2"
    assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-01", context.traceparent)
    assert context.span_id != SPAN


def test_a_long_tracestate_is_left_out():
    """Clients choose it, and spans wait in memory."""
    for length, expected in ((512, 512), (513, 0), (60_000, 0)):
        context = start(sampler(0.0), client=SAMPLED, tracestate="a=" + "x" * (length - 2))
        assert len(context.tracestate) == expected


def test_unsampled_client_is_not_traced():
    """A client that does not sample decides for us, and its header stays as it is."""
    assert start(sampler(), client=UNSAMPLED) is None
    assert sampler().start({"traceparent": UNSAMPLED}, pytest.fail) is None


def test_data_plane_is_the_nearer_caller():
    """Within the client's trace the span of the data plane is the parent."""
    context = start(sampler(), client=SAMPLED, data_plane=f"00-{TRACE}-{OTHER_SPAN}-01")
    assert context.parent_span_id == OTHER_SPAN


def test_client_beats_another_trace_of_the_data_plane():
    """The client's trace goes on, where the data plane began one of its own."""
    context = start(sampler(), client=SAMPLED, data_plane=f"00-{'a' * 32}-{OTHER_SPAN}-01")
    assert (context.trace_id, context.parent_span_id) == (TRACE, SPAN)


@pytest.mark.parametrize("client", ["", "rubbish"])
def test_data_plane_starts_traces_of_clients_without(client):
    """If the client sends no valid context, the trace of the data plane continues."""
    context = start(sampler(0.0), client=client, data_plane=SAMPLED)
    assert (context.trace_id, context.parent_span_id) == (TRACE, SPAN)
    assert start(sampler(), client=client, data_plane=UNSAMPLED) is None


def test_root_is_sampled_by_chance():
    """Requests without a caller are sampled as often as the ratio says, each with ids of its own."""
    trace_sampler = sampler(0.25)
    contexts = [trace_sampler.start({}, no_call) for _ in range(4000)]
    traced = [context for context in contexts if context is not None]
    assert 900 < len(traced) < 1100
    assert len({context.trace_id for context in traced}) == len(traced)
    assert all(parse_traceparent(context.traceparent) for context in traced)
    assert all(not context.parent_span_id for context in traced)


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (1.0, 100)])
def test_ratio_is_exact_at_its_ends(ratio, count):
    """Zero samples nothing, and one everything."""
    trace_sampler = sampler(ratio)
    assert sum(trace_sampler.start({}, no_call) is not None for _ in range(100)) == count


def test_ratio_alone_decides_without_parents():
    """A sampler that follows no parent decides by the trace id, as every other one of its ratio."""
    low, high = f"00-{'f' * 16}{'0' * 15}1-{SPAN}-00", f"00-{'0' * 16}{'f' * 16}-{SPAN}-01"
    trace_sampler = sampler(0.5, is_parent_based=False)
    assert start(trace_sampler, client=low).trace_id == low[3:35]
    assert start(trace_sampler, client=low).is_sampled
    assert start(trace_sampler, client=high) is None
