"""Parse job: parses a body apart from its request, as in another process.

What comes back is small: of the prompt only what is hashed, and the place for another model name in
place of a search through the body.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.decision import Rejection
from extproc.parsing import envelope, first_user_message, model_edit, preparsed, surfaces
from extproc.request import HttpRequest, InferenceRequest


class ParseJob(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A request without its body.

    Attributes:
        headers: See `HttpRequest`.
        truncated: See `HttpRequest`.
        subset: See `HttpRequest`.
        max_prompt_bytes: Bytes of a prompt that are hashed.
    """

    headers: Mapping[str, str]
    truncated: bool
    subset: tuple[str, ...] | None
    max_prompt_bytes: int


def describe(raw: HttpRequest, *, max_prompt_bytes: int) -> ParseJob:
    """The job of reading a request's body; arguments as of `ParseJob`."""
    return ParseJob(raw.headers, raw.truncated, raw.subset, max_prompt_bytes)


def run(job: ParseJob, body: bytes) -> preparsed.ParseResult:
    """Read a body.

    Args:
        job: The request around it.
        body: The body.

    Returns:
        The request or its rejection, with the prompt cut to what is hashed of it, and the place of
        the model.
    """
    raw = HttpRequest(job.headers, body, job.truncated, job.subset)
    place = model_edit.find_place(raw)
    outcome = surfaces.parse(raw)
    if isinstance(outcome, InferenceRequest):
        return preparsed.ParseResult(_cut_prompt(outcome, job.max_prompt_bytes), "", None, place)
    supplied = surfaces.parse_supplied(raw, "supplied") if outcome == envelope.NO_MODEL else None
    if supplied is None or isinstance(supplied, Rejection):
        return preparsed.ParseResult(None, outcome.message, None, place)
    return preparsed.ParseResult(
        None, outcome.message, _cut_prompt(supplied, job.max_prompt_bytes), place
    )


def _cut_prompt(request: InferenceRequest, max_prompt_bytes: int) -> InferenceRequest:
    """Cut the prompt where hashing ends, unless a conversation starts after that."""
    if len(request.prompt) <= max_prompt_bytes:
        return request
    cut = msgspec.structs.replace(request, prompt=request.prompt[:max_prompt_bytes])
    return (
        cut
        if first_user_message.first_user_message(cut)
        == first_user_message.first_user_message(request)
        else request
    )
