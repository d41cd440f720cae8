"""Pace of an engine that has shown no step times: how long its answers take beside those of others.

Requests that are still open count with the time they took so far, so that an engine several times
slower than its pool shows it before its first answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from extproc.endpoint import StepTimeModel
from extproc.pool.inflight import InflightLoad

#: Seconds in which what was shown halves. An engine that seemed slow, and gets no requests while others
#: are idle, is tried again without them.
_HALVES_S = 60.0


class AnswerPace:
    """Seconds that the answers of one engine took, beside those that were due.

    Attributes:
        answers: Answers that came (count, fading).
    """

    __slots__ = ("_at", "_last", "_seconds", "_tokens", "answers")

    def __init__(self) -> None:
        self.answers = self._seconds = self._tokens = 0.0
        self._at = -math.inf
        self._last = (0, 0.0, 0)

    @property
    def is_known(self) -> bool:
        """True once an answer came."""
        return self.answers >= 1.0

    def update(self, account: InflightLoad, now: float) -> None:
        """Take in the answers that came since the last call."""
        last = self._last
        here = self._last = (account.answered, account.answered_s, account.answered_tokens)
        keep = math.exp2((self._at - now) / _HALVES_S)
        self._at = now
        self.answers = keep * self.answers + here[0] - last[0]
        self._seconds = keep * self._seconds + here[1] - last[1]
        self._tokens = keep * self._tokens + here[2] - last[2]

    def slowness(
        self, account: InflightLoad, rates: StepTimeModel, open_work: Iterable[tuple[float, int]]
    ) -> float:
        """Seconds that requests took for each that was due; a usual one counts, too.

        Args:
            rates: Step times by which answers are due.
            open_work: Requests without an answer that count with what they took so far, as
                `InflightLoad.open_work` gives them.
        """
        answer_s = account.answers.mean * rates.iteration_s(max(1, account.in_flight))
        usual_s = rates.prefill_s * account.typical_work.typical + answer_s
        took_s = usual_s + self._seconds
        due_s = usual_s + self._tokens * rates.prefill_s + self.answers * answer_s
        for open_s, tokens in open_work:
            took_s += open_s
            due_s += min(open_s, tokens * rates.prefill_s + answer_s)
        return took_s / due_s
