"""The checklist of the endpoint picker protocol, in our own words, and where each point stands.

A literal table. A point is met when a test named `test_<number>_<what>` is green; `table.py` prints
which those are.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Status(Enum):
    """State of a point."""

    TESTED = "tested"
    """A test without Envoy exists."""
    E2E = "e2e"
    """A test with a real Envoy exists."""


class Point(msgspec.Struct, frozen=True):
    """One point.

    Attributes:
        number: In the checklist.
        section: Letter of its section.
        mark: Who demands it: S the protocol, R and R-lw the reference pickers' tests, E Envoy,
            C the conformance suite, X hardening.
        text: What is demanded.
        status: Where it stands.
    """

    number: int
    section: str
    mark: str
    text: str
    status: Status = Status.TESTED


SECTIONS = {
    "A": "Transport, health, TLS",
    "B": "Request phase, wire form",
    "C": "Subset and selection header",
    "D": "Endpoints",
    "E": "Errors",
    "F": "Objectives and rewrite",
    "G": "Response phase",
    "H": "gRPC traffic",
    "I": "Scraping",
    "J": "Lifecycle and robustness",
    "K": "Gateway side",
}

_E2E = Status.E2E

POINTS = (
    Point(1, "A", "S", "the ext_proc method is served under Envoy's name"),
    Point(2, "A", "C", "TLS by default with a certificate made at start, h2 negotiated"),
    Point(3, "A", "C", "plaintext h2c by flag"),
    Point(4, "A", "R", "tls.crt and tls.key of a folder; a changed pair is picked up"),
    Point(5, "A", "C", "health name inference-extension follows the first sync"),
    Point(6, "A", "S", "readiness only when synced"),
    Point(7, "A", "S", "liveness whenever the process answers"),
    Point(8, "A", "S", "the ext_proc service name answers like readiness"),
    Point(9, "A", "R", "the empty name answers like readiness"),
    Point(10, "A", "X", "health is served on the ext_proc port too"),
    Point(11, "A", "R", "draining: not ready at once, streams still served"),
    Point(12, "A", "R", "h2c pools need a gRPC parser to be ready"),
    Point(13, "A", "R", "with leader election an unknown health name is unknown"),
    Point(14, "A", "X", "receive limit is settable, 4 MB at least, oversize ends one stream"),
    Point(15, "A", "C", "two pickers side by side, each for its own pool"),
    Point(16, "A", "C", "the reference picker's flags are accepted"),
    Point(17, "B", "E", "headers answered before any body"),
    Point(18, "B", "E", "nothing said for body pieces before the headers answer"),
    Point(19, "B", "E", "full duplex: every body answer is a streamed_response"),
    Point(20, "B", "E", "body pieces of at most 62,000 bytes"),
    Point(21, "B", "E", "end_of_stream once, on the last piece"),
    Point(22, "B", "E", "body ended by trailers: no end_of_stream, then a trailers answer"),
    Point(23, "B", "E", "headers are set by raw_value alone"),
    Point(24, "B", "S", "destination header and metadata agree"),
    Point(25, "B", "R", "clear_route_cache on the request headers answer"),
    Point(26, "B", "R", "body bytes unchanged"),
    Point(27, "B", "R", "rewritten model and content-length"),
    Point(28, "B", "R", "a body cut inside a token is joined before parsing"),
    Point(29, "B", "X", "a second end_of_stream is ignored"),
    Point(30, "B", "X", "an empty body is routed like none"),
    Point(31, "B", "C", "bodiless: one answer, with a destination"),
    Point(32, "B", "C", "GET on any path is routed"),
    Point(33, "B", "C", "POST with model and prompt on an unknown path is routed"),
    Point(34, "B", "R", "bytes that are no JSON on an unknown path are routed unchanged"),
    Point(35, "B", "R-lw", "request headers are not echoed, so duplicates survive"),
    Point(36, "B", "R", "names in any case; raw_value before value; either alone"),
    Point(37, "B", "R", "x-request-id made when absent, kept when present"),
    Point(38, "B", "R", "traceparent goes on when present and is not needed"),
    Point(39, "B", "X", "a client's destination header is overwritten"),
    Point(40, "B", "R", "control headers are removed, not echoed"),
    Point(41, "B", "X", "other body modes are answered one to one"),
    Point(42, "B", "R", "old header aliases, new names win"),
    Point(43, "B", "S", "metadata absent or empty is legal"),
    Point(44, "B", "X", "a hint on the headers, the body or both"),
    Point(45, "C", "S", "no hint: everybody"),
    Point(46, "C", "S", "a hint of one: that one, despite its load"),
    Point(47, "C", "S", "a hint of three: the best of them"),
    Point(48, "C", "S", "a hint that names no endpoint of the pool: 503 with reason"),
    Point(49, "C", "S", "an empty hint: 503"),
    Point(50, "C", "R-lw", "a hint as one comma string"),
    Point(51, "C", "R-lw", "a list element that holds commas"),
    Point(52, "C", "R-lw", "bare IP: all its ports; with port: one; wrong port: none"),
    Point(53, "C", "R-lw", "blanks and empty tokens dropped, non-strings ignored"),
    Point(54, "C", "X", "the hint counts for bodiless requests"),
    Point(55, "C", "C", "selection header in test mode, beats the hint"),
    Point(56, "C", "C", "foreign addresses in the selection header are ignored"),
    Point(57, "C", "C", "100 requests at concurrency 10 stay on the two selected", _E2E),
    Point(58, "C", "C", "ranks of one address are distinguished by port"),
    Point(59, "C", "S", "one endpoint by default; fallbacks by option, in order, in the hint"),
    Point(60, "D", "S", "only ready pods of the pool"),
    Point(61, "D", "S", "pods times target ports"),
    Point(62, "D", "R", "active-ports annotation"),
    Point(63, "D", "R", "an endpoint that left is not chosen, one that came is"),
    Point(64, "D", "R", "pool changes apply live"),
    Point(65, "D", "S", "pool deleted: not ready"),
    Point(66, "D", "R", "a static list or file works without Kubernetes"),
    Point(67, "E", "S", "no endpoint is ready, with body: 503"),
    Point(68, "E", "S", "no endpoint is ready, without body: 503 (the reference says 500)"),
    Point(69, "E", "R", "broken JSON on an OpenAI path: 400"),
    Point(70, "E", "R", "no model: 400, even with no endpoints"),
    Point(71, "E", "R", "missing messages, prompt or input: 400 in the reference's words"),
    Point(72, "E", "S", "sheddable and saturated: 429"),
    Point(73, "E", "R", "plugins left no endpoint: 429"),
    Point(74, "E", "R", "evicted in flight: 429", _E2E),
    Point(75, "E", "R", "after a refusal the stream ends with OK"),
    Point(76, "E", "X", "an exception in a decision still answers"),
    Point(77, "E", "X", "errors never leak accounts"),
    Point(78, "E", "R", "Prefer: if-available and no cached prefix: 412"),
    Point(79, "E", "E", "statuses are members of Envoy's enum"),
    Point(80, "E", "C", "picker down: fail closed 5xx, fail open 200", _E2E),
    Point(81, "F", "R", "objective header to priority"),
    Point(82, "F", "R", "objectives of other pools ignored"),
    Point(83, "F", "R", "precedence of rewrite rules"),
    Point(84, "F", "R", "rewrite rule beats header"),
    Point(85, "F", "R", "weights of rewrite targets"),
    Point(86, "F", "R", "the answer names the client's model"),
    Point(87, "F", "R", "without CRDs priority is 0"),
    Point(88, "F", "R", "both API groups are read"),
    Point(89, "G", "R", "response headers answered at once, with the marker"),
    Point(90, "G", "C", "test mode reports the endpoint that served"),
    Point(91, "G", "R", "SSE pieces pass at once with their bytes and boundaries"),
    Point(92, "G", "R", "SSE: a piece passes before the next one exists"),
    Point(93, "G", "R", "JSON in two pieces: same bytes, one end_of_stream"),
    Point(94, "G", "R", "an empty last piece leaves the body unchanged"),
    Point(95, "G", "R", "broken JSON in a response passes"),
    Point(96, "G", "R", "response trailers: body without end_of_stream, trailers answer last"),
    Point(97, "G", "R", "long response pieces are split and join to the same bytes"),
    Point(98, "G", "R", "stream: true streams whatever the content type"),
    Point(99, "G", "R", "a stream may start with the response headers"),
    Point(100, "G", "R", "response before the request was complete: only the response is answered"),
    Point(101, "G", "X", "response headers are not echoed, so Set-Cookie survives"),
    Point(102, "G", "R", "usage is counted in SSE and JSON, across pieces, with cached tokens"),
    Point(103, "G", "R", "a response without body: headers answer only"),
    Point(104, "G", "R", "upstream errors pass and are counted by :status"),
    Point(105, "G", "R", "the end is accounted exactly once, however it comes"),
    Point(106, "G", "R", "metadata on the last response body only: what an answer cost"),
    Point(107, "H", "R", "vLLM gRPC Generate and Embed are parsed, bytes unchanged"),
    Point(108, "H", "R", "a frame cut across pieces is joined"),
    Point(109, "H", "R", "compressed flag or short frame: 400"),
    Point(110, "H", "R", "unknown gRPC method: routed raw, response skipped"),
    Point(111, "H", "R", "gRPC response: frames, then trailers"),
    Point(112, "I", "S", "vLLM series are read, label filters honored"),
    Point(113, "I", "S", "of several LoRA series the newest counts; none is no error"),
    Point(114, "I", "S", "adapter lists split and trimmed, slots read as a number"),
    Point(115, "I", "R", "other engines' names work"),
    Point(116, "I", "R", "one missing series leaves the others; failures age the load"),
    Point(117, "I", "R", "each rank is scraped on its own port"),
    Point(118, "I", "R", "lower queue and KV wins; a loaded adapter beats KV"),
    Point(119, "J", "R", "client gone: handler ends, accounts freed"),
    Point(120, "J", "R", "leader election: exactly one is ready, another after it ends"),
    Point(121, "J", "R", "engines killed under load, all gone, and back", _E2E),
    Point(122, "J", "R", "picker killed and restarted", _E2E),
    Point(123, "J", "X", "1,000 slow streams, none waits for another"),
    Point(124, "J", "X", "bodies over the limit: 413"),
    Point(125, "J", "X", "unknown messages are ignored"),
    Point(126, "K", "E", "full duplex configurations send trailers both ways", _E2E),
    Point(127, "K", "E", "metadata namespaces are forwarded and received", _E2E),
    Point(128, "K", "E", "the cluster reads the destination header", _E2E),
    Point(129, "K", "E", "failure_mode_allow only where the cluster can route alone", _E2E),
    Point(130, "K", "X", "control headers of clients are stripped", _E2E),
    Point(131, "K", "E", "the health check names a registered service and port", _E2E),
    Point(132, "K", "E", "time-outs are long enough for streams", _E2E),
)
