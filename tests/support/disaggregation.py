"""A pool whose engines encode, prefill or decode, and decisions for requests to it."""

from __future__ import annotations

import json

from extproc.config import factory, loader
from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.request import HttpRequest

FILE = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: encode-filter}
- {type: prefill-filter}
- {type: decode-filter}
- {type: active-request-scorer}
- {type: max-score-picker}
- {type: prefix-based-pd-decider, parameters: {nonCachedTokens: 64}}
- {type: always-disagg-multimodal-decider}
- type: disagg-profile-handler
  parameters:
    deciders: {prefill: prefix-based-pd-decider, encode: always-disagg-multimodal-decider}
schedulingProfiles:
- name: encode
  plugins:
  - {pluginRef: encode-filter}
  - {pluginRef: active-request-scorer}
  - {pluginRef: max-score-picker}
- name: prefill
  plugins:
  - {pluginRef: prefill-filter}
  - {pluginRef: active-request-scorer}
  - {pluginRef: max-score-picker}
- name: decode
  plugins:
  - {pluginRef: decode-filter}
  - {pluginRef: active-request-scorer}
  - {pluginRef: max-score-picker}
"""
ENCODE, PREFILL, OTHER_PREFILL, DECODE = (f"10.0.0.{n}:8000" for n in range(1, 5))
ROLES = {ENCODE: "encode", PREFILL: "prefill", OTHER_PREFILL: "prefill", DECODE: "decode"}
LONG = "A long prompt, which another engine computes. " * 20


def build(addresses=tuple(ROLES)):
    """A pool of these engines."""
    parts = factory.build(loader.settings(loader.parse(FILE, where="x")))
    parts.store.set_endpoints(
        [Endpoint(address, labels={"llm-d.ai/role": ROLES[address]}) for address in addresses], 0.0
    )
    return parts


def request(text=LONG, *, has_picture=False):
    """A request with this prompt."""
    content = [{"type": "text", "text": text}]
    if has_picture:
        content.append({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}})
    body = {"model": "m", "messages": [{"role": "user", "content": content}]}
    return HttpRequest(
        {":method": "POST", ":path": "/v1/chat/completions"}, json.dumps(body).encode()
    )


def decide(text=LONG, *, has_picture=False, addresses=tuple(ROLES)):
    """The decision for it in a new pool."""
    outcome = build(addresses).director.route(request(text, has_picture=has_picture), 1.0)
    assert isinstance(outcome, Decision)
    return outcome
