"""Rows of a recording: JSON lines, each with its type in `kind`.

A recording begins with a header. An endpoint and its state have a row before the first decision that
refers to them, and a state again with the next candidates once it changed. A decision has a row when it
is made, and another one when its request ended. A second header starts anew, so recordings may be
concatenated.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from extproc.decision import Disaggregation
from extproc.endpoint import NO_EXTRA, NO_LABELS, NO_LOAD, Load, StepTimeModel

#: Version of the rows; a reader refuses others.
VERSION: Final = 4


class RecordingRow(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", gc=False
):
    """Base of all rows."""


class HeaderRow(RecordingRow, frozen=True, kw_only=True, omit_defaults=True, tag="recording"):
    """First row.

    Attributes:
        version: `VERSION`.
        software: Version of extproc that recorded.
        unix_s: Unix time at which `clock_s` was read.
        clock_s: Monotonic seconds, the clock of all rows.
        process: Identifier of the process, in which decisions have their numbers and rows their clock;
            empty where it is unknown.
        settings: What decisions depend on of the configuration, as in a file.
        pools: Sections that a pool has for itself, by the name of the pool.
    """

    version: int
    software: str = ""
    unix_s: float = 0.0
    clock_s: float = 0.0
    process: str = ""
    settings: Mapping[str, object] = {}
    pools: Mapping[str, Mapping[str, object]] = {}


class AddressRow(RecordingRow, frozen=True, kw_only=True, omit_defaults=True, tag="endpoint"):
    """An endpoint; other rows name it by `n`.

    Attributes:
        n: Its number in this recording.
        address: `ip:port`.
        name: Its name; empty for none.
        pool: Name of its pool; empty where there is one.
    """

    n: int
    address: str
    name: str = ""
    labels: Mapping[str, str] = NO_LABELS
    pool: str = ""


class RecordedLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A scraped load, without the counters; attributes as in `Load`, but `at`.

    Attributes:
        at: Monotonic seconds of the scrape; None before the first, where values of others stand in.
    """

    at: float | None = None
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
    extra: Mapping[str, float] = NO_EXTRA


_LOAD_FIELDS: Final = RecordedLoad.__struct_fields__


def record_load(load: Load) -> RecordedLoad | None:
    """A load as it is recorded; None for one that never was."""
    if load is NO_LOAD:
        return None
    fields = {name: getattr(load, name) for name in _LOAD_FIELDS}
    return RecordedLoad(**{**fields, "at": None if load.at == NO_LOAD.at else load.at})


def restore_load(load: RecordedLoad | None) -> Load:
    """The load that was recorded."""
    if load is None:
        return NO_LOAD
    fields = {name: getattr(load, name) for name in _LOAD_FIELDS}
    return Load(**{**fields, "at": NO_LOAD.at if load.at is None else load.at})


class StateRow(RecordingRow, frozen=True, kw_only=True, omit_defaults=True, tag="state"):
    """Load and step times of an endpoint from here on.

    Attributes:
        n: Number of the endpoint.
        load: Load as the scheduler saw it; None where nothing is known.
        rates: Learned step times.
        is_imputed: Whether a part of `load` is the mean of other endpoints.
        scraped_at: Monotonic seconds of its own last scrape, where `load` is imputed.
    """

    n: int
    load: RecordedLoad | None = None
    rates: StepTimeModel
    is_imputed: bool = False
    scraped_at: float | None = None


class CandidateTable(msgspec.Struct, frozen=True, gc=False):
    """Candidates of a decision by column; those behind the first are fields of `Candidate`.

    Attributes:
        endpoints: Numbers of their endpoints.
        residency: Position in `AdapterResidency`.
    """

    endpoints: Sequence[int]
    in_flight: Sequence[int]
    estimated_requests: Sequence[float]
    prompt_tokens: Sequence[int]
    matched_tokens: Sequence[int]
    queued_tokens: Sequence[float]
    unscraped_tokens: Sequence[float]
    residency: Sequence[int]
    active_context_tokens: Sequence[float]
    conversation_local: Sequence[bool]


#: Columns of a table behind the endpoints.
CANDIDATE_FIELDS: Final = CandidateTable.__struct_fields__[1:]


class DecisionRow(msgspec.Struct, omit_defaults=True, tag_field="kind", tag="decision", gc=False):
    """A request and the endpoint chosen for it; `complete` sets endpoint and candidates.

    `set_stages` sets what is known of stages.

    Attributes:
        n: Its number; grows.
        at: Monotonic seconds of the decision.
        endpoint: Number of the chosen endpoint.
        queued_s: Seconds that the request waited before it.
        pool: Name of the pool; empty where there is one.
        profile: Name of the scheduling profile.
        picker: Kind of the picker.
        degraded: Why the decision was degraded; empty for a normal one.
        adapter: LoRA adapter, where it is named apart from the model.
        prompt_tokens: Estimated prompt tokens.
        prompt_bytes: Bytes they are estimated from; 0 where they are exact.
        max_tokens: Limit of the answer; None without one.
        is_stream: Whether the client requested a streamed answer.
        session: Hash of the session, 60 bits; 0 for none.
        affinity_seed: Hash of session or first user message by which ties are broken, 32 bits; None
            without either.
        blocks: Chain of block hashes of the prompt, root first: 8 bytes each, little-endian, which JSON
            has as base64.
        matched_tokens: Prompt tokens predicted as cached on the chosen endpoint.
        conversation_stats: As in `Decision`.
        candidates: Candidates of the scheduler; None where decisions came too fast to record all.
        decision_type: Stages that were split, such as `prefill-decode`; empty where no profile
            chooses endpoints for stages, as are the next ones.
        prefill_endpoint: Address of the endpoint that computes the prompt; empty for the chosen one.
        prefill_reason: Why the chosen endpoint computes the prompt, such as `cached`.
        encode_endpoints: Addresses of the endpoints that encode media, by commas.
        encode_reason: Why there are none.
    """

    n: int
    at: float
    endpoint: int
    queued_s: float = 0.0
    pool: str = ""
    profile: str = ""
    picker: str = ""
    degraded: str = ""
    api: str = ""
    model: str = ""
    adapter: str = ""
    prompt_tokens: int = 0
    prompt_bytes: int = 0
    max_tokens: int | None = None
    is_stream: bool = False
    priority: int = 0
    session: int = 0
    affinity_seed: int | None = None
    blocks: bytes = b""
    matched_tokens: int = 0
    conversation_stats: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    candidates: CandidateTable | None = None
    decision_type: str = ""
    prefill_endpoint: str = ""
    prefill_reason: str = ""
    encode_endpoints: str = ""
    encode_reason: str = ""

    @property
    def chain(self) -> Sequence[int]:
        """The hashes in `blocks`."""
        return unpack_hashes(self.blocks)

    def complete(self, endpoint: int, candidates: CandidateTable | None) -> None:
        """Set the endpoint and the candidates."""
        self.endpoint, self.candidates = endpoint, candidates

    def set_stages(self, stages: Disaggregation) -> None:
        """Set the endpoints of stages, and the reasons why there are none."""
        self.decision_type = stages.decision_type
        if stages.prefill is not None:
            self.prefill_endpoint = stages.prefill.endpoints[0].address
        if stages.encode is not None:
            addresses = [endpoint.address for endpoint in stages.encode.endpoints]
            self.encode_endpoints = ",".join(addresses)
        self.prefill_reason, self.encode_reason = stages.prefill_reason, stages.encode_reason


def pack_hashes(chain: Sequence[int]) -> bytes:
    """Block hashes as bytes, 8 each, little-endian."""
    packed = chain if isinstance(chain, array) else array("Q", chain)
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(packed: bytes) -> array[int]:
    """Block hashes of `pack_hashes`.

    Raises:
        ValueError: The number of bytes is no multiple of 8.
    """
    chain = array("Q", packed)
    if sys.byteorder == "big":
        chain.byteswap()
    return chain


class EndRow(RecordingRow, frozen=True, omit_defaults=True, tag="end"):
    """The end of a request; built by position.

    Attributes:
        n: Number of its decision.
        status: HTTP status; empty without response headers.
        ttft_s: Seconds from the decision to the first chunk of a stream; None where chunks were not
            shown.
        total_s: Seconds from the decision to the end.
        prompt_tokens: As the engine reported; None where it did not, as are the next two.
        cached_tokens: Of these, tokens found in its cache.
        output_tokens: Tokens of the answer.
    """

    n: int
    status: str = ""
    ttft_s: float | None = None
    total_s: float = 0.0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None


class LossRow(RecordingRow, frozen=True, kw_only=True, omit_defaults=True, tag="loss"):
    """Decisions and ends that were not recorded since the row before, because too many waited.

    Attributes:
        rows: How many.
    """

    rows: int


Row = HeaderRow | AddressRow | StateRow | DecisionRow | EndRow | LossRow
