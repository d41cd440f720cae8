"""Ring of recent decisions by request id, for `extproc explain --id` and /debug/decisions.

Bounded twice: by decisions, and by the candidates they hold, since a decision over two hundred
endpoints is two hundred times as large as one over one. An endpoint that a subset hint names counts
as a candidate, for there is no end to those. Prompts and block hashes are not kept.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import msgspec

from extproc.decision import Decision
from extproc.request import shorten_id

#: What engines put in front of the request id, by API, to make the id of an answer.
_ENGINE_PREFIX = re.compile(r"^(chatcmpl|cmpl|resp|msg|embd|pool|score|rerank|classify)[-_]")

#: What they append for one of several prompts.
_CHOICE_SUFFIX = re.compile(r"-\d{1,4}$")

#: Of responses that were not read.
NO_USAGE: Mapping[str, int] = {}


class DecisionRecord(msgspec.Struct, eq=False):
    """One decision and the result of its request.

    Attributes:
        id: Request id.
        at: Monotonic seconds of the decision.
        decision: Without prompt and blocks.
        status: HTTP status of the answer; empty while there is none.
        seconds: From the first event to the end of the stream; None while it is open.
        usage: Tokens the engine reported, by kind.
    """

    id: str
    at: float
    decision: Decision
    status: str = ""
    seconds: float | None = None
    usage: Mapping[str, int] = NO_USAGE


class DecisionLog:
    """Bounded ring of decisions.

    Args:
        capacity: Decisions kept (count); 0 keeps none.
        most_candidates: Candidates kept, summed over decisions (count); some 500 bytes each.
    """

    def __init__(self, capacity: int, *, most_candidates: int = 20_000) -> None:
        self._capacity = capacity
        self._most = most_candidates
        self._records: OrderedDict[str, DecisionRecord] = OrderedDict()
        self._candidates = 0

    def __len__(self) -> int:
        return len(self._records)

    def resize(self, capacity: int) -> None:
        """Keep another number of decisions, from the next one on."""
        self._capacity = capacity

    def add(
        self, request_id: str, decision: Decision, now: float, *, pool: str = ""
    ) -> DecisionRecord:
        """Adds a decision; a later decision of the same id replaces an earlier one.

        Args:
            request_id: As the client or the data plane named it.
            decision: As committed.
            now: Monotonic seconds.
            pool: Name of the pool, where the decision does not name it.
        """
        request_id = shorten_id(request_id)
        request = decision.request
        if request.prompt:
            request = msgspec.structs.replace(request, prompt=b"")
        slim = msgspec.structs.replace(
            decision, request=request, block_hashes=(), pool=decision.pool or pool
        )
        recorded = DecisionRecord(request_id, now, slim)
        if not self._capacity:
            return recorded
        old = self._records.pop(request_id, None)
        if old is not None:
            self._candidates -= _weight(old.decision)
        self._records[request_id] = recorded
        self._candidates += _weight(slim)
        while len(self._records) > self._capacity or (
            self._candidates > self._most and len(self._records) > 1
        ):
            _, gone = self._records.popitem(last=False)
            self._candidates -= _weight(gone.decision)
        return recorded

    def find(self, request_id: str) -> DecisionRecord | None:
        """Returns the decision of a request; None when it is no longer in the ring.

        Args:
            request_id: The `x-request-id`, or the id in the body of the answer that an engine makes
                of it, such as `chatcmpl-` and the request id.
        """
        for name in _spellings(request_id):
            recorded = self._records.get(shorten_id(name))
            if recorded is not None:
                return recorded
        return None

    def latest(self, count: int) -> Iterator[DecisionRecord]:
        """Returns the latest decisions, newest first."""
        for _, recorded in zip(range(count), reversed(self._records.values()), strict=False):
            yield recorded


def _spellings(request_id: str) -> Iterator[str]:
    """Returns the request ids that an id may stand for, the most literal first."""
    yield request_id
    bare = _ENGINE_PREFIX.sub("", request_id)
    yield bare
    yield _CHOICE_SUFFIX.sub("", bare)


def _weight(decision: Decision) -> int:
    subset = decision.request.subset
    return len(decision.candidates) + (len(subset) if subset else 0)
