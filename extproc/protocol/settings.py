"""Settings that all exchanges of a server share."""

from __future__ import annotations

import msgspec


class ExchangeSettings(msgspec.Struct, frozen=True):
    """Settings that all exchanges of a server share.

    Attributes:
        max_body_bytes: Largest request body that is assembled.
        response_marker: Put `x-went-into-resp-headers: true` on responses.
        conformance: Honor `test-epp-endpoint-selection` and report the served endpoint.
        feedback: Ask for the bodies of answers by `mode_override` where the request mode allows.
        restore_model: Put the client's name for its model back into answers, and ask for their
            bodies where a name was changed.
        scores: Tell the data plane what endpoints were compared by.
    """

    max_body_bytes: int
    response_marker: bool = True
    conformance: bool = False
    feedback: bool = True
    restore_model: bool = True
    scores: bool = False
