"""Session affinity: filter and scorer, with their parameters and the session table.

Two strategies. `encoded_endpoint_header` keeps no memory: the answer carries a token that names the
endpoint, and the client sends it back. `session_id` remembers which endpoint a client's own session
name is bound to: the one of its first request, until that is no candidate. For tests, a client names
its endpoint outright (`header-based-testing-filter`).
"""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import msgspec

from extproc.decision import Decision
from extproc.endpoint import Candidate, Endpoint
from extproc.request import shorten_id
from extproc.scheduling.framework import (
    PluginParameters,
    SchedulingContext,
    Signal,
    UpstreamParameters,
    check_response_header,
)

#: Sessions remembered, the longest unused forgotten first. 65536 are some 10 MB; the bound is
#: against names that clients make up.
MOST_SESSIONS = 65536

SessionStrategy = Literal["encoded_endpoint_header", "session_id"]


class EncodedEndpointHeader(UpstreamParameters, frozen=True, kw_only=True):
    """Parameters of the strategy without a memory.

    Attributes:
        header: Request and answer header with the token.
    """

    header: str = "x-session-token"

    def __post_init__(self) -> None:
        """Refuse a header that no response can have.

        Raises:
            ValueError: It is no name of a header, or of one for the framing of a response.
        """
        check_response_header(self.header)


class SessionSource(UpstreamParameters, frozen=True, kw_only=True):
    """One place where a session is named; exactly one field is set.

    Attributes:
        header: A request header.
        attribute: Any name: the session that the request parsers read from body and headers.
        cookie: A cookie, by its name in letters of the same case.
    """

    header: str = ""
    attribute: str = ""
    cookie: str = ""

    def __post_init__(self) -> None:
        """Refuse none and several.

        Raises:
            ValueError: Not exactly one field is set.
        """
        if bool(self.header) + bool(self.attribute) + bool(self.cookie) != 1:
            raise ValueError("expected one of header, attribute and cookie, got several or none")

    def find(self, context: SchedulingContext) -> str:
        """The session that is named in this place; empty when there is none."""
        if self.header:
            return context.headers.get(self.header.lower(), "")
        if self.cookie:
            return _find_cookie(context.headers.get("cookie", ""), self.cookie)
        return context.request.session


class SessionId(UpstreamParameters, frozen=True, kw_only=True):
    """Parameters of the strategy with a memory.

    Attributes:
        sources: Sources of the session; the first that is not empty counts.
        eviction_ttl_seconds: Seconds a session is remembered unused.
        eviction_sweep_seconds: No effect: what is too old is dropped when something is added.
    """

    sources: Annotated[tuple[SessionSource, ...], msgspec.Meta(min_length=1)] = (
        SessionSource(header="x-session-id"),
    )
    eviction_ttl_seconds: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    eviction_sweep_seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0


class SessionTable:
    """Endpoint of each session.

    Args:
        ttl_s: Seconds a session is remembered unused.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        #: Session to address and monotonic seconds, the longest unused first.
        self._bound: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bound)

    def find(self, session: str, now: float) -> str:
        """The address a session is bound to; empty when it is not, or no longer."""
        address, used_at = self._bound.get(session, ("", now))
        return address if now - used_at <= self._ttl_s else ""

    def bind(self, session: str, address: str, now: float) -> None:
        """Remember a session, and forget what is too old or too much."""
        self._bound[session] = (address, now)
        self._bound.move_to_end(session)
        while self._bound:
            _, used_at = next(iter(self._bound.values()))
            if len(self._bound) <= MOST_SESSIONS and now - used_at <= self._ttl_s:
                return
            self._bound.popitem(last=False)


class SessionAffinityPlugin(UpstreamParameters, frozen=True, kw_only=True, dict=True):
    """Parameters and state of the filter and the scorer.

    Attributes:
        strategy: `encoded_endpoint_header` or `session_id`.
        encoded_endpoint_header_config: Parameters of the first strategy.
        session_id_config: Parameters of the second strategy.
    """

    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS})

    strategy: SessionStrategy = "encoded_endpoint_header"
    encoded_endpoint_header_config: EncodedEndpointHeader = EncodedEndpointHeader()
    session_id_config: SessionId = SessionId()

    @cached_property
    def memory(self) -> SessionTable:
        """Endpoints of the sessions that are remembered here."""
        return SessionTable(self.session_id_config.eviction_ttl_seconds)

    @cached_property
    def _header(self) -> str:
        return self.encoded_endpoint_header_config.header.lower()

    @cached_property
    def _key(self) -> str:
        """Key of `Decision.plugin_keys`, the same for plugins that look in the same places."""
        return "session in " + ", ".join(
            source.header or source.attribute or f"cookie {source.cookie}"
            for source in self.session_id_config.sources
        )

    @property
    def _is_remembering(self) -> bool:
        return self.strategy == "session_id"

    def bound(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> str:
        """The address the session of a request is bound to; empty when there is none."""
        if not self._is_remembering:
            return find_candidate(context.headers.get(self._header, ""), candidates)
        session = self.keys(context).get(self._key, "")
        return self.memory.find(session, context.now) if session else ""

    def keys(self, context: SchedulingContext) -> Mapping[str, str]:
        """The session, where it is remembered here."""
        if self._is_remembering:
            for source in self.session_id_config.sources:
                session = source.find(context)
                if session:
                    return {self._key: shorten_id(session)}
        return {}

    def on_committed(self, decision: Decision, now: float) -> None:
        """Remember where the session went, unless it is bound to another candidate."""
        session = self._session(decision)
        if not session:
            return
        chosen, bound = decision.endpoints[0].address, self.memory.find(session, now)
        if bound in {"", chosen} or all(
            c.endpoint.address != bound for c in decision.scored_candidates
        ):
            self.memory.bind(session, chosen, now)

    def on_moved(self, decision: Decision, served: Endpoint, now: float) -> None:
        """Remember the endpoint that answered; one that a later turn took elsewhere stays there."""
        session = self._session(decision)
        if session and self.memory.find(session, now) == decision.endpoints[0].address:
            self.memory.bind(session, served.address, now)

    def answer_headers(
        self, context: SchedulingContext, chosen: Endpoint
    ) -> Sequence[tuple[str, str]]:
        """The token, where the client carries it."""
        return () if self._is_remembering else ((self._header, token(chosen)),)

    def _session(self, decision: Decision) -> str:
        """The session of a decision; empty when none is remembered here."""
        return decision.plugin_keys.get(self._key, "") if self._is_remembering else ""


class SessionAffinityFilter(SessionAffinityPlugin, frozen=True):
    """Keeps only the endpoint the session is bound to; all when it is none of the candidates.

    The hard form of the scorer `session-affinity-scorer`, with the same two strategies. Upstream:
    `filter/sessionaffinity/session_affinity.go`.
    """

    kind: ClassVar[str] = "session-affinity-filter"

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        bound = self.bound(context, candidates)
        return [c for c in candidates if c.endpoint.address == bound] or candidates


class SessionAffinityScorer(SessionAffinityPlugin, frozen=True):
    """1 for the endpoint the session is bound to, 0 for the others; 0 everywhere without a session.

    With `encoded_endpoint_header` a token in the request names the endpoint, and every answer
    brings the token of the endpoint that was chosen, also where Envoy took a fallback; our tokens
    hold the address, those of the upstream picker (`namespace/pod-rank-0`, the rank being the index
    of the port) are understood. With `session_id` the endpoint is remembered here, that of a
    fallback where one answered, by the first of `sessionIdConfig.sources` that is there:
    each is a `header`, a `cookie`, or an `attribute`, which is the session of the request parsers.
    A turn that goes elsewhere leaves it bound while its endpoint is a candidate, as upstream, and so
    does not count as use.
    Upstream: `scorer/sessionaffinity/session_affinity.go`.
    """

    kind: ClassVar[str] = "session-affinity-scorer"

    def score(self, context: SchedulingContext, candidates: Sequence[Candidate]) -> list[float]:
        bound = self.bound(context, candidates)
        return [float(c.endpoint.address == bound) for c in candidates]


def token(endpoint: Endpoint) -> str:
    """Token of an endpoint for clients: its address in URL-safe base64, unsigned."""
    return base64.urlsafe_b64encode(endpoint.address.encode()).decode()


def find_candidate(session: str, candidates: Sequence[Candidate]) -> str:
    """The address of the candidate a token names, by address, name or `namespace/name`.

    The last two are what tokens of the upstream picker hold, where also the only port of a pod is a
    rank: `namespace/pod-rank-0`. Empty when it names no candidate.
    """
    try:
        text = base64.b64decode(session.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return ""
    # The name as it is comes first: that of another pod may end like a rank.
    for name in dict.fromkeys((text, text.removesuffix("-rank-0"))):
        for candidate in candidates if name else ():
            endpoint = candidate.endpoint
            if name in (endpoint.address, endpoint.name, _qualified(endpoint)):
                return endpoint.address
    return ""


def _find_cookie(cookies: str, name: str) -> str:
    """The value of the first cookie of a name (RFC 6265, 4.2.1); empty when there is none."""
    for pair in cookies.split(";"):
        key, _, value = pair.partition("=")
        if key.strip() == name:
            return value.strip()
    return ""


def _qualified(endpoint: Endpoint) -> str:
    return f"{endpoint.labels.get('namespace', '')}/{endpoint.name}"


class HeaderBasedTestingFilter(PluginParameters, frozen=True, kw_only=True):
    """Keeps candidates that the header `test-epp-endpoint-selection` names; none without it.

    Tokens are `ip:port` or a bare `ip`, separated by commas. Any client can choose its endpoint
    with it, so it has no place in production. Upstream: `test/filter/request_header_based_filter.go`. The candidates stay in their order, where the
    upstream filter takes that of the header; the setting `conformance` keeps it.
    """

    kind: ClassVar[str] = "header-based-testing-filter"
    needs: ClassVar[frozenset[Signal]] = frozenset({Signal.HEADERS})

    def filter(
        self, context: SchedulingContext, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        tokens = context.headers.get("test-epp-endpoint-selection", "").split(",")
        named = {token.strip() for token in tokens} - {""}
        bare = {token.strip("[]") for token in named}
        return [c for c in candidates if c.endpoint.host_port in named or c.endpoint.ip in bare]
