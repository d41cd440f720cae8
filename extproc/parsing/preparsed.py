"""Preparsed requests: `surfaces` and `model_edit` use the stored results of parsing."""

from __future__ import annotations

import msgspec

from extproc import decision
from extproc.decision import BodyEdit, Rejection
from extproc.request import HttpRequest, InferenceRequest


class ModelPlace(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Bytes of a body that a model name replaces.

    Attributes:
        start: Offset of the first byte that is replaced.
        stop: Offset behind the last one; equal to `start` where the name is added.
        before: Bytes before a name that is added.
        after: Bytes after it.
        is_form: Whether it is a field of a form, where a name is plain text; else it is JSON.
    """

    start: int
    stop: int
    before: bytes = b""
    after: bytes = b""
    is_form: bool = False

    def fill(self, model: str) -> BodyEdit | None:
        """Fill in a name; None for a name that would end a form field with a line break."""
        if not self.is_form:
            content = self.before + msgspec.json.encode(model) + self.after
        elif "\r" in model or "\n" in model:
            return None
        else:
            content = model.encode()
        return BodyEdit(self.start, self.stop, content)


class ParseResult(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Results of parsing a body.

    Attributes:
        request: The request; None where it is refused.
        refusal: Text for `decision.bad_request`; empty where it is not rejected.
        supplied: The request as if a header had named its model, where nothing names one and nothing
            else is wrong with it; None elsewhere.
        place: Where another model name goes; None where none can.
    """

    request: InferenceRequest | None
    refusal: str
    supplied: InferenceRequest | None
    place: ModelPlace | None


class PreparsedRequest(HttpRequest, frozen=True, gc=False):
    """A request whose body is parsed already.

    Attributes:
        outcome: Result for `surfaces.parse`.
        supplied: See `ParseResult`.
        place: See `ParseResult`.
    """

    outcome: InferenceRequest | Rejection = decision.bad_request("")
    supplied: InferenceRequest | None = None
    place: ModelPlace | None = None


def attach(raw: HttpRequest, result: ParseResult) -> PreparsedRequest:
    """Attach the results of parsing to a request."""
    outcome = result.request or decision.bad_request(result.refusal)
    return PreparsedRequest(
        raw.headers,
        raw.body,
        raw.truncated,
        raw.subset,
        outcome=outcome,
        supplied=result.supplied,
        place=result.place,
    )
