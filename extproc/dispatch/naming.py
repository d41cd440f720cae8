"""The name of a model as a request has it, and as its engine knows it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.decision import Splice
from extproc.parsing import envelope, paths, rewriting
from extproc.pool.serving import Serving
from extproc.request import RawRequest, Request


class Renamed(msgspec.Struct, frozen=True, gc=False):
    """A request whose engine knows the model by another name.

    Attributes:
        request: What is asked for: the base model, and the adapter if there is one.
        sent: The same as the engine is asked for it. It is hashed as this one, so that it shares
            blocks with requests that used the engine's name from the start.
    """

    request: Request
    sent: Request


def of(
    request: Request, headers: Mapping[str, str], serving: Serving, *, kubeai_names: bool
) -> Renamed | None:
    """Find out what the engine is to be asked for.

    A gateway's header names the model in place of the body (EPP protocol report 1.6). Then the name
    may be KubeAI's `model_adapter`.

    Args:
        request: As parsed.
        headers: Of the request, names in lower case.
        serving: Who serves what.
        kubeai_names: Whether `model_adapter` is understood.

    Returns:
        None where the name stays what it is.
    """
    target = envelope.model_header(headers)
    asked = msgspec.structs.replace(request, model=target) if target else request
    if kubeai_names and not asked.adapter and "_" in asked.model:
        alias = serving.alias(asked.model)
        if alias is not None:
            return Renamed(
                request=msgspec.structs.replace(asked, model=alias.base, adapter=alias.adapter),
                sent=msgspec.structs.replace(asked, model=alias.adapter),
            )
    return Renamed(asked, asked) if target else None


def splice(raw: RawRequest, request: Request, name: str) -> Splice | None:
    """The edit that gives the body this name.

    Args:
        raw: The request as it came.
        request: The same, parsed.
        name: The engine's name for the model.

    Returns:
        None where the body cannot be edited.
    """
    found = rewriting.splice(raw, name)
    # A body on an unknown path is looked into, but may be anything: nothing is added to it.
    if found is not None and found.start == found.stop and request.api == paths.OPAQUE:
        return None
    return found
