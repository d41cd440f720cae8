"""Endpoints and what is known of them: frozen values, no behaviour beyond their own facts.

An endpoint is one `ip:port` of one engine. Its load is what was scraped from it, with the time of
the scrape. A candidate is an endpoint still in play in one scheduling turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

#: Labels of an endpoint nobody labelled.
NO_LABELS: Mapping[str, str] = {}


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """One `ip:port` of one engine.

    Attributes:
        address: `ip:port`, IPv6 in brackets: the form EPP protocol 004 puts in the header.
        name: What people call it; the address when nobody named it.
        labels: Free labels from discovery (hardware, zone, role).
        incarnation: Grows each time discovery brings an address back, so that accounts and
            beliefs of an earlier life are never charged to the new one.
    """

    address: str
    name: str = ""
    labels: Mapping[str, str] = NO_LABELS
    incarnation: int = 0

    @property
    def ip(self) -> str:
        """The host part, without brackets."""
        return self.address.rpartition(":")[0].strip("[]")


class Load(msgspec.Struct, frozen=True, gc=False):
    """What one scrape of one endpoint said. A value that the page did not carry is None.

    Attributes:
        at: Monotonic seconds at which the page was received; minus infinity if never.
        engine: `vllm`, `sglang`, `trtllm`, `triton`; empty when not recognised.
        waiting: Requests queued in the engine (count).
        running: Requests in the running batch (count).
        kv_usage: Share of KV blocks held by live requests, 0..1. Says nothing about cached
            prefixes: an idle engine with a full prefix cache reads 0.
        adapters: LoRA adapters with requests in the batch; None when the engine did not say.
        waiting_adapters: LoRA adapters the engine lists as waiting.
        adapter_slots: Adapters that fit on the device (`max_lora`).
        kv_blocks: KV blocks of the engine (count).
        block_tokens: Tokens per KV block.
        prefix_queries: Prompt tokens looked up in the prefix cache since start (counter).
        prefix_hits: Prompt tokens found there since start (counter).
        started_at: Unix time the engine process started, to tell a restart.
    """

    at: float = -math.inf
    engine: str = ""
    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    adapters: frozenset[str] | None = None
    waiting_adapters: frozenset[str] | None = None
    adapter_slots: int | None = None
    kv_blocks: int | None = None
    block_tokens: int | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    started_at: float | None = None


#: Nothing was ever scraped.
UNKNOWN = Load()


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """An endpoint in one scheduling turn, with everything a plugin may look at.

    Attributes:
        endpoint: Which one.
        load: Its last scrape, or `UNKNOWN` when there is none or it is stale.
        age_s: Seconds since the last scrape, stale or not; infinity if never.
        in_flight: Requests this picker has open there.
        requests: Dead-reckoned requests on the engine: own now + max(0, scraped - own at scrape),
            where scraped = running + waiting. Equals `in_flight` while the load is unknown.
        prompt_tokens: Estimated prompt tokens of the requests this picker has open there.
        matched_tokens: Estimated leading prompt tokens of this request believed to be cached there.
    """

    endpoint: Endpoint
    load: Load = UNKNOWN
    age_s: float = math.inf
    in_flight: int = 0
    requests: float = 0.0
    prompt_tokens: int = 0
    matched_tokens: int = 0
