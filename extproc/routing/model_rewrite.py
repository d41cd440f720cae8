"""Model rewrite: the model name of a request and the name its engine knows."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.decision import Outcome, Rejection
from extproc.parsing import envelope, model_edit, surfaces
from extproc.pool.model_index import ModelIndex
from extproc.request import HttpRequest, InferenceRequest


class ModelRewrite(msgspec.Struct, frozen=True, gc=False):
    """A request whose model name differs from the name its engine knows.

    Attributes:
        request: The request with the base model, and the adapter if there is one.
        hashed: The same named as engines hash it, so that it shares blocks with requests that used
            the engine's name from the start.
        upstream_model: The name to put into the body; empty where it stays.
    """

    request: InferenceRequest
    hashed: InferenceRequest
    upstream_model: str = ""


def resolve_model(
    request: InferenceRequest,
    headers: Mapping[str, str],
    serving: ModelIndex,
    *,
    rewrite_target: str,
    kubeai_names: bool,
) -> ModelRewrite | None:
    """Resolve the model name of a request to the name its engine knows.

    A rewrite's target, or else a gateway's header, names the model in place of the body
    (docs/spec/protocol.md#model-rewrite). Then the name may be SGLang's `model:adapter`, or
    KubeAI's `model_adapter`.

    Args:
        request: As parsed.
        headers: Of the request, names in lower case.
        serving: Endpoints by model.
        rewrite_target: Model of a rewrite; empty where there is none.
        kubeai_names: Whether `model_adapter` is understood.

    Returns:
        None where the name is what it seems.
    """
    target = rewrite_target or envelope.model_header(headers)
    request = msgspec.structs.replace(request, model=target) if target else request
    name = request.model
    if not request.adapter:
        if ":" in name and (alias := serving.parse_sglang_name(name)) is not None:
            both = msgspec.structs.replace(request, model=alias.base, adapter=alias.adapter)
            return ModelRewrite(both, both, target)
        if kubeai_names and "_" in name and (alias := serving.parse_kubeai_name(name)) is not None:
            return ModelRewrite(
                msgspec.structs.replace(request, model=alias.base, adapter=alias.adapter),
                msgspec.structs.replace(request, model=alias.adapter),
                alias.adapter,
            )
    return ModelRewrite(request, request, target) if target else None


def attach_model_rewrite(
    outcome: Outcome, raw: HttpRequest, request: InferenceRequest, sent: str
) -> Outcome:
    """Attach the model names for the request body and for the response to an outcome.

    Args:
        outcome: Of the renamed request.
        raw: The request as it came.
        request: As parsed.
        sent: See `ModelRewrite`.
    """
    if not sent or isinstance(outcome, Rejection):
        return outcome
    splice = model_edit.locate_model(raw, sent)
    client_model = ""
    if splice is not None:
        if raw.body[splice.start : splice.stop] == splice.content:
            # The body says so already.
            return outcome
        if splice.start != splice.stop:
            client_model = request.model
        elif request.api == surfaces.OPAQUE:
            # A body on an unknown path is looked into, but may be anything: nothing is added.
            splice = None
    return msgspec.structs.replace(
        outcome, model_rewrite=sent, body_edit=splice, client_model=client_model
    )
