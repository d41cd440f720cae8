"""Error responses: a rejection as an immediate response with a JSON body.

The body has the OpenAI error shape, because that is what clients parse; its message starts with
the reference picker's text (`inference error: <Code> - `), because that is what its tests match.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.decision import CANONICAL_CODES, Rejection
from extproc.protocol.messages import Headers, ImmediateResponse

REASON_HEADER = "x-llm-d-request-dropped-reason"

#: HTTP status to the OpenAI error type.
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

#: HTTP status to gRPC status (codes.proto), for gRPC clients.
_GRPC: Mapping[int, int] = {
    400: 3,  # INVALID_ARGUMENT
    401: 16,  # UNAUTHENTICATED
    403: 7,  # PERMISSION_DENIED
    404: 5,  # NOT_FOUND
    408: 4,  # DEADLINE_EXCEEDED
    412: 9,  # FAILED_PRECONDITION
    413: 8,  # RESOURCE_EXHAUSTED
    429: 8,  # RESOURCE_EXHAUSTED
    500: 13,  # INTERNAL
    503: 14,  # UNAVAILABLE
}


def immediate_response(rejection: Rejection, *, grpc: bool) -> ImmediateResponse:
    """Build the immediate response of a rejection.

    Args:
        rejection: The rejection to send.
        grpc: Whether the client speaks gRPC.
    """
    headers: Headers = (("content-type", "application/json"),)
    if rejection.reason:
        headers = (*headers, (REASON_HEADER, rejection.reason))
    if rejection.retry_after_s is not None:
        headers = (*headers, ("retry-after", str(rejection.retry_after_s)))
    return ImmediateResponse(
        status=rejection.status,
        headers=headers,
        body=error_body(rejection),
        grpc_status=_GRPC.get(rejection.status, 2) if grpc else None,
    )


def error_body(rejection: Rejection) -> bytes:
    """The JSON error body of a rejection."""
    code = CANONICAL_CODES.get(rejection.status, "Unknown")
    fallback = "server_error" if rejection.status >= 500 else "invalid_request_error"
    error: dict[str, str | int] = {
        "message": f"inference error: {code} - {rejection.message}",
        "type": _TYPES.get(rejection.status, fallback),
        "code": rejection.status,
    }
    if rejection.code:
        # OpenAI's own way: the kind of error in `type`, which one it is in `code`.
        error |= {"type": "invalid_request_error", "code": rejection.code}
    return msgspec.json.encode({"error": error})
