"""Images go where they were sent before."""

from __future__ import annotations

import pytest

from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.request import InferenceRequest, MediaSpan
from extproc.scheduling import encoder_caches, prefix_affinity
from extproc.testing import builders
from tests.parsing.builders import chat, user
from tests.support import pictures


def item(digest, tokens=100):
    return MediaSpan("image", 0, 4, tokens, is_sized=True, digest=digest)


def scores(scorer, *media):
    """Scores of endpoints a and b for a request with media."""
    candidates = builders.candidates({"a": {}, "b": {}})
    return scorer.score(builders.context(media=media), candidates)


def send(scorer, name, *media):
    address = builders.candidate(name).endpoint.address
    request = InferenceRequest("chat", media=media)
    scorer.on_committed(Decision(request=request, endpoints=(Endpoint(address),)), 1.0)


def test_the_share_of_tokens_counts():
    """300 of 400 tokens were sent to the first endpoint; an item that comes twice counts once."""
    scorer = prefix_affinity.MmEmbeddingsCacheScorer()
    send(scorer, "a", item(1, 300))
    assert scores(scorer, item(1, 300), item(2), item(2)) == [0.75, 0.0]
    send(scorer, "b", item(2))
    assert scores(scorer, item(1, 300), item(2)) == [0.75, 0.25]
    assert scores(scorer) == [0.0, 0.0]


def test_items_follow_a_request_that_another_endpoint_answered(monkeypatch):
    """The endpoint that could not be used does not count as having them, nor against the bounds."""
    monkeypatch.setattr(encoder_caches, "MAX_ENTRIES", 2)
    scorer = prefix_affinity.MmEmbeddingsCacheScorer()
    first, other = (builders.candidate(name).endpoint for name in "ab")
    send(scorer, "a", item(2))
    send(scorer, "a", item(1, 300))
    request = InferenceRequest("chat", media=(item(1, 300),))
    scorer.on_moved(Decision(request=request, endpoints=(first, other)), other, 2.0)
    assert scores(scorer, item(1, 300)) == [0.0, 1.0]
    assert scores(scorer, item(2)) == [1.0, 0.0]


def test_items_without_identity_do_not_count():
    """Items within tool results have no digest: neither for nor against an endpoint."""
    scorer = prefix_affinity.MmEmbeddingsCacheScorer()
    send(scorer, "a", item(0), item(1))
    assert scores(scorer, item(0)) == [0.0, 0.0]
    assert scores(scorer, item(0), item(1)) == [1.0, 0.0]


def test_the_longest_unused_are_forgotten(monkeypatch):
    """First of an endpoint, then of the endpoint that had no image for longest."""
    scorer = prefix_affinity.MmEmbeddingsCacheScorer(entries_per_server=2)
    for digest in (1, 2, 1, 3):
        send(scorer, "a", item(digest))
    assert [scores(scorer, item(digest))[0] for digest in (1, 2, 3)] == [1.0, 0.0, 1.0]
    monkeypatch.setattr(encoder_caches, "MAX_ENTRIES", 2)
    send(scorer, "b", item(4))
    assert scores(scorer, item(1)) == [0.0, 0.0]
    assert scores(scorer, item(4)) == [0.0, 1.0]


@pytest.mark.parametrize("words", ["what is it?", "where is it?"])
def test_an_image_is_the_same_behind_any_text(words):
    """Its digest is that of its part alone."""
    address = pictures.url(pictures.png(1024, 768))
    part = {"type": "image_url", "image_url": {"url": address}}
    alone = chat(user([part])).media[0].digest
    assert alone
    assert chat(user([{"type": "text", "text": words}, part])).media[0].digest == alone
    other = {"type": "image_url", "image_url": {"url": address[:-8] + "AAAAAAA="}}
    assert chat(user([other])).media[0].digest != alone
