"""The time of encoders in the estimated time, and where it is spent already."""

from __future__ import annotations

import msgspec
import pytest

from extproc.decision import Decision
from extproc.request import MediaSpan
from extproc.scheduling.estimated_time import EstimatedTime
from extproc.testing import builders

IMAGE = MediaSpan("image", 0, 4000, 1000, is_sized=True, digest=7)
FIELDS = {"prompt_tokens": 1100, "prompt_bytes": 400, "media": (IMAGE,)}


def costs(model, *, endpoints=None, **fields):
    context = builders.context(**{**FIELDS, **fields})
    return model.cost(context, builders.candidates(endpoints or {"a": {}, "b": {}})).costs


def commit(model, name, media=(IMAGE,)):
    request = builders.context(**{**FIELDS, "media": media}).request
    endpoint = builders.candidate(name).endpoint
    model.on_committed(Decision(request=request, endpoints=(endpoint,)), 1.0)


def test_an_image_costs_the_time_of_its_encoder_once():
    """A quarter of 1,000 tokens more, until the endpoint was sent it."""
    model = EstimatedTime()
    prefill_s = builders.candidate("a").rates.prefill_s
    blind = costs(EstimatedTime(encoder_share=0.0))
    assert costs(model) == pytest.approx([cost + 250 * prefill_s for cost in blind], rel=1e-3)
    commit(model, "a")
    first, second = costs(model)
    assert second - first == pytest.approx(250 * prefill_s)
    other = msgspec.structs.replace(IMAGE, digest=8)
    assert len(set(costs(model, media=(other,)))) == 1


def test_an_image_is_encoded_where_its_request_was_answered():
    """An endpoint that could not be used still has it to encode."""
    model = EstimatedTime()
    commit(model, "a")
    first, other = (builders.candidate(name).endpoint for name in "ab")
    request = builders.context(**FIELDS).request
    model.on_moved(Decision(request=request, endpoints=(first, other)), other, 2.0)
    passed_over, served = costs(model)
    assert passed_over - served == pytest.approx(250 * builders.candidate("a").rates.prefill_s)


def test_an_image_that_comes_twice_is_encoded_once():
    """Its second copy costs the time of a prefix alone; items without identity may differ."""
    model, blind = EstimatedTime(), EstimatedTime(encoder_share=0.0)
    prefill_s = builders.candidate("a").rates.prefill_s
    for digest, tokens in ((7, 250), (0, 500)):
        images = [msgspec.structs.replace(IMAGE, start=at, digest=digest) for at in (0, 4000)]
        fields = {"prompt_tokens": 2200, "prompt_bytes": 8400, "media": tuple(images)}
        added = costs(model, **fields)[0] - costs(blind, **fields)[0]
        assert added == pytest.approx(tokens * prefill_s, rel=1e-2)


def test_a_cached_prefix_covers_its_images():
    """An image whose KV blocks are cached is not encoded; behind the cached prefix it is."""
    shares = {}
    for matched in (900, 800):
        endpoints = {"a": {"matched_tokens": matched}}
        with_encoder = costs(EstimatedTime(), endpoints=endpoints)[0]
        shares[matched] = (
            with_encoder - costs(EstimatedTime(encoder_share=0.0), endpoints=endpoints)[0]
        )
    assert shares[900] == 0.0
    assert shares[800] > 0.0


@pytest.mark.parametrize("prompt_tokens", [60, 0])
def test_an_empty_prefix_covers_no_image(prompt_tokens: int):
    """Not at the beginning of a prompt, nor where an endpoint encodes for another one."""
    small = msgspec.structs.replace(IMAGE, size=200, tokens=50)
    fields = {"prompt_tokens": prompt_tokens, "prompt_bytes": 4 * prompt_tokens, "media": (small,)}
    prefill_s = builders.candidate("a").rates.prefill_s
    blind = costs(EstimatedTime(encoder_share=0.0), **fields)
    added = [a - b for a, b in zip(costs(EstimatedTime(), **fields), blind, strict=True)]
    assert added == pytest.approx([12.5 * prefill_s] * 2, rel=1e-2)


def test_the_longest_unused_images_are_forgotten():
    """An endpoint keeps 16,384 tokens: two of these images, or one that is larger."""
    model = EstimatedTime()
    images = [msgspec.structs.replace(IMAGE, digest=digest, tokens=7000) for digest in (1, 2, 3)]
    for image in images:
        commit(model, "a", (image,))
    known = [costs(model, media=(image,)) for image in images]
    assert [first < second for first, second in known] == [False, True, True]
    large = msgspec.structs.replace(IMAGE, digest=4, tokens=20_000)
    commit(model, "a", (large,))
    first, second = costs(model, media=(large,))
    assert first < second


def test_terms_explain_the_cost():
    """The parts of a cost with an image sum up to it."""
    model = EstimatedTime()
    context = builders.context(**FIELDS)
    result = model.cost(context, builders.candidates({"a": {}, "b": {}}))
    sums = [sum(values) for values in zip(*(values for _, values in result.terms), strict=True)]
    assert sums == pytest.approx(list(result.costs))
