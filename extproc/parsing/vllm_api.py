"""Rerank and score: one query against many documents.

The engine makes one prompt per pair. The query comes first in each of them, so it is the shared
prefix. Which fields make a valid request differs between engine versions: the engine judges.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from extproc.decision import Rejection
from extproc.parsing import canonical_prompt, envelope, inputs
from extproc.request import HttpRequest, InferenceRequest

_WANTED: Final = "invalid ranking request: must be a JSON object"


class RankingBody(envelope.Envelope, gc=False):
    """Query and documents under the names rerank (Jina, Cohere) and score (vLLM) give them."""

    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None
    documents: Any = None
    items: Any = None
    text_2: Any = None
    data_2: Any = None


_DECODER = msgspec.json.Decoder(RankingBody)


def parse_rerank(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read a rerank request; 400 without a model."""
    return _parse_pairs(raw, "rerank")


def parse_score(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Read a score request; 400 without a model."""
    return _parse_pairs(raw, "score")


def _parse_pairs(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    body = envelope.decode(_DECODER, raw, wanted=_WANTED)
    if isinstance(body, Rejection):
        return body
    sides = (
        (body.query, body.queries, body.text_1, body.data_1),
        (body.documents, body.items, body.text_2, body.data_2),
    )
    content = b"".join(
        [canonical_prompt.MESSAGE + b"".join(map(canonical_prompt.content, side)) for side in sides]
    )
    return envelope.request(api, raw, body, prompt=inputs.text_prompt(content))
