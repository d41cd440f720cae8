"""Log of unexpected exceptions in streams: counted by place, logged once a minute each."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable

from extproc.supervision import origin_of

_log = logging.getLogger("extproc.server")

#: Seconds between two log entries about one place: a client may run into a bug with every request.
_AGAIN_S = 60.0

#: Places counted apart (count). The code has few of them, but plugins may raise any type.
_MOST_PLACES = 100

#: Key of all further places.
_OTHER = ("other", "other")


class BugLog:
    """Counts and logs unexpected exceptions without messages, which may quote requests.

    Args:
        counts: Counter of exceptions by type and place; updated here.
        clock: Monotonic seconds.
    """

    def __init__(self, counts: Counter[tuple[str, str]], clock: Callable[[], float]) -> None:
        self._counts = counts
        self._clock = clock
        self._logged: dict[tuple[str, str], float] = {}

    def note(self, error: BaseException) -> None:
        """Count an exception, and log its type and stack."""
        key = origin_of(error)
        if key not in self._counts and len(self._counts) >= _MOST_PLACES:
            key = _OTHER
        self._counts[key] += 1
        now = self._clock()
        if now - self._logged.get(key, -_AGAIN_S) < _AGAIN_S:
            return
        self._logged[key] = now
        frames = traceback.extract_tb(error.__traceback__)
        places = (f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
        _log.error("a request ran into a bug: %s\n%s", key[0], "\n".join(places))
