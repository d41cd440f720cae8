"""Outlier detection: ejects endpoints that fail, and probes them again.

Evidence comes from requests, the strongest there is, and from scrapes, which only say whether an
engine can be reached and whether it moves. What was measured with Envoy 1.40, and what follows:

- An engine that refuses, resets or times out before its answer begins shows as response headers of
  Envoy's own: 503, 504, or 502 for what is no HTTP. It is a failure like a 5xx of the engine.
- A client that leaves before the answer begins shows as the end of the stream without response
  headers. That says nothing, unless the engine gave no sign of life all the while.
- After the answer began, a reset by the engine looks like a client that left, and like the end.
- With retries in the data plane the answer may be another endpoint's; `served` metadata says whose.

An endpoint is left out while it wants to be and the rest of the pool can spare it. With n endpoints,
c of them surely gone (the port refuses, or scrapes and requests agree), at most min(floor(s * (n - c)), n - c - 1) of
the others are left out, s being `max_ejection_share`, the worst first.
"""

from __future__ import annotations

import math
import random
from collections import Counter

import msgspec

from extproc.pool.endpoint_health import (
    HEALTHY,
    UNREACHABLE_AFTER,
    HealthState,
    HealthStatus,
    OutlierDetectionSettings,
    RequestOutcome,
)

#: Requests in the window below which a share of failures means nothing (count, fading).
_FEWEST = 8.0

#: Failures left in the window that are as good as none (count, fading).
_FORGOTTEN = 0.01

#: Share of a back-off that chance takes away, so that replicas do not probe together.
_JITTER = 0.2

#: Seconds for which others come first after a failure. An engine that died fails all its requests
#: within that, and has less in flight than the others until then.
_SUSPECT_S = 1.0

# Globals, where every request passes: they cost less than the look-up in the enum.
_SERVED, _FAILED = RequestOutcome.SERVED, RequestOutcome.FAILED
_NO_RESPONSE, _CLIENT_ERROR = RequestOutcome.NO_RESPONSE, RequestOutcome.CLIENT_ERROR
_HEALTHY = HealthState.HEALTHY
_SUSPECT = HealthState.SUSPECT
_DOWN = HealthState.DOWN


class HealthRecord:
    """Health evidence of one endpoint incarnation.

    Attributes:
        condition: As of the last change.
        consecutive_failures: Failed requests since the last that was served.
        good: Served requests since the first failure, fading.
        bad: Failed ones, fading.
        at: When they faded last.
        ejection_cause: Why it should be left out for its requests; empty when it should not.
        last_failed: Whether the last request with a clear outcome failed.
        misses: Scrapes in a row that did not connect.
        missed_at: When the first of them was seen.
        scrape_unreliable: Requests are served though scrapes fail: then those say nothing until one succeeds.
        ever_scraped: Whether a scrape ever connected.
        refused: Whether its port refused the last scrape.
        sign_at: Last sign of life, or of having nothing to do.
        probe_at: When the last probe was sent.
        back_at: When it came back from the last ejection.
        restarted_at: When its last restart was seen.
    """

    __slots__ = (
        "at",
        "back_at",
        "bad",
        "condition",
        "consecutive_failures",
        "ejection_cause",
        "ejections",
        "ever_scraped",
        "good",
        "incarnation",
        "last_failed",
        "missed_at",
        "misses",
        "probe_at",
        "refused",
        "restarted_at",
        "scrape_unreliable",
        "sign_at",
    )

    def __init__(self, incarnation: int, condition: HealthStatus, now: float) -> None:
        self.incarnation = incarnation
        self.condition = condition
        self.back_at = self.restarted_at = -math.inf
        self.sign_at = now
        self.probe_at = math.inf
        self.last_failed = self.scrape_unreliable = self.ever_scraped = self.refused = False
        self.misses = self.ejections = 0
        self.missed_at = math.inf
        self.reset(now)

    @property
    def unreachable(self) -> bool:
        """True when scrapes cannot connect, and no served request contradicts them."""
        return self.misses >= UNREACHABLE_AFTER and not self.scrape_unreliable

    @property
    def certain(self) -> bool:
        """True when scrapes cannot connect, and the port refuses or requests fail as well."""
        return (self.last_failed or self.refused) and self.unreachable

    def reset(self, now: float) -> None:
        """Drop the evidence of its requests."""
        self.consecutive_failures = 0
        self.good = self.bad = 0.0
        self.at = now
        self.ejection_cause = ""

    def fade(self, now: float, window_s: float) -> None:
        """Decay the evidence of earlier requests."""
        keep = math.exp((self.at - now) / window_s)
        self.good *= keep
        self.bad *= keep
        self.at = now


class OutlierDetector:
    """Health of the endpoints of one pool. Mutable; owned by `PoolStore`.

    Args:
        settings: Thresholds and times; may be replaced at any time.

    Attributes:
        version: Changes whenever a condition does.
        newest: Monotonic seconds at which the last endpoint was added or readmitted; minus infinity
            before.
        ejections: Ejections by cause (count).
        probes: Requests that tried an endpoint, by what they came to: `ok`, `failed`, `unclear`.
    """

    def __init__(self, settings: OutlierDetectionSettings, rng: random.Random) -> None:
        self.settings = settings
        self._rng = rng
        self._records: dict[int, HealthRecord] = {}
        self._changed: set[int] = set()
        self.version = 0
        self.newest = -math.inf
        self.ejections: Counter[str] = Counter()
        self.probes: Counter[str] = Counter()

    def reconfigure(self, settings: OutlierDetectionSettings, now: float) -> None:
        """Apply other settings from the next outcome or scrape on.

        Where requests eject no more, those that they ejected come back.
        """
        self.settings = settings
        if not settings.failures:
            for record in self._records.values():
                record.reset(now)
            self.update_ejections(now)

    def condition(self, incarnation: int) -> HealthStatus:
        """Health of an endpoint."""
        return self._records[incarnation].condition

    def take_changed(self) -> set[int]:
        """Return the engines whose condition changed since the last call, by incarnation; some may be gone."""
        changed, self._changed = self._changed, set()
        return changed

    def count_ejections(self, incarnation: int) -> int:
        """Times that an endpoint was ejected."""
        return self._records[incarnation].ejections

    def on_endpoint_added(self, incarnation: int, now: float, *, late: bool) -> None:
        """Begin the record of an endpoint; call `update_ejections` after the last new one.

        Args:
            late: Whether others were there before it.
        """
        condition = HealthStatus(since=now) if late else HEALTHY
        self._records[incarnation] = HealthRecord(incarnation, condition, now)
        if late:
            self.newest = now

    def on_endpoint_removed(self, incarnation: int) -> None:
        """Drop the record of an endpoint; call `update_ejections` after the last of them."""
        del self._records[incarnation]

    def record_sent(self, incarnation: int, now: float) -> None:
        """Record a request to an ejected endpoint: it is the probe, if one was due."""
        record = self._records[incarnation]
        known = record.condition
        if known.state is _SUSPECT:
            self._clear_suspicion(record)
        elif known.state is not _HEALTHY and known.until <= now:
            record.probe_at = now
            until = now + self.settings.base_s
            self._set_condition(
                record, msgspec.structs.replace(known, state=HealthState.PROBING, until=until)
            )

    def record_outcome(
        self,
        incarnation: int,
        outcome: RequestOutcome,
        *,
        sent_at: float,
        now: float,
        cause: str = "errors",
        sole: bool = True,
    ) -> None:
        """Record the outcome of a request.

        Args:
            sole: Whether no other endpoint can have answered in its place.
        """
        record = self._records.get(incarnation)
        if record is None:
            return
        if outcome is _SERVED:
            self._served(record, sent_at, now, sole=sole)
        elif outcome is _FAILED:
            self._failed(record, sent_at, now, cause)
        elif outcome is _NO_RESPONSE and self._is_stalled(record, sent_at, now):
            self._failed(record, sent_at, now, "hung")
        else:
            if outcome is _CLIENT_ERROR:
                record.sign_at = now
            self._end_probe(record, sent_at, now)

    def record_scrape(
        self, incarnation: int, now: float, *, restarted: bool, moved: bool | None, idle: bool
    ) -> None:
        """Record a scrape that connected.

        Args:
            moved: Whether its counters moved; None when it has none.
        """
        record = self._records[incarnation]
        # The port refused before and listens now: failures in between were no answers of the engine.
        back = record.unreachable or record.refused
        record.refused = False
        record.misses, record.missed_at = 0, math.inf
        record.scrape_unreliable, record.ever_scraped = False, True
        if moved or idle:
            record.sign_at = now
        # It may be known as hung and take part, where the pool could not spare it.
        hung = "hung" in (record.condition.cause, record.ejection_cause)
        if back or restarted or (hung and moved):
            record.last_failed = False
            record.reset(now)
            self.update_ejections(now)
            if restarted:
                record.restarted_at = now
        elif self.settings.failures and moved is False and not idle:
            known = record.condition
            if now - record.sign_at < self.settings.stall_timeout_s:
                return
            if known.state <= _SUSPECT:
                if not record.ejection_cause:
                    record.ejection_cause = "hung"
                    self.update_ejections(now)
            elif hung:
                # Whatever is sent to it stays there: not before it shows a sign of life.
                until = now + self.settings.base_s
                self._set_condition(record, msgspec.structs.replace(known, until=until))

    def record_scrape_failure(
        self, incarnation: int, now: float, *, connected: bool, refused: bool
    ) -> None:
        """Record a scrape that failed.

        Args:
            connected: Something answered, only not with a page: that says nothing.
            refused: The endpoint's own port refused the connection.
        """
        record = self._records[incarnation]
        before = record.unreachable, record.certain
        record.refused = refused
        if connected:
            record.misses, record.missed_at = 0, math.inf
        else:
            record.misses += 1
            record.missed_at = min(record.missed_at, now)
            if record.misses == UNREACHABLE_AFTER and record.scrape_unreliable:
                self._allow_probes(now)
        if (record.unreachable, record.certain) != before:
            self.update_ejections(now)

    def update_ejections(self, now: float) -> None:
        """Decide again which endpoints are ejected."""
        suspects: list[HealthRecord] = []
        certain: list[HealthRecord] = []
        doubtful: list[HealthRecord] = []
        rest = len(self._records)
        for record in self._records.values():
            if not (record.misses or record.ejection_cause or record.condition.state):
                continue
            # `unreachable` and `certain`, written out: hundreds may fail, and each comes here.
            unreachable = record.misses >= UNREACHABLE_AFTER and not record.scrape_unreliable
            if unreachable and (record.last_failed or record.refused):
                rest -= 1
                if record.condition.state is _DOWN:
                    continue  # it stays out
                certain.append(record)
            elif unreachable or record.ejection_cause:
                doubtful.append(record)
            suspects.append(record)
        spare = min(int(self.settings.max_ejection_share * rest), rest - 1)
        # Of equals those who are out stay out.
        doubtful.sort(
            key=lambda record: (
                record.unreachable,
                record.consecutive_failures,
                record.condition.state,
            ),
            reverse=True,
        )
        out = {id(record) for record in (*certain, *doubtful[: max(spare, 0)])}
        for record in suspects:
            if id(record) in out:
                self._eject(record, now)
            elif record.condition.state > _SUSPECT:
                self._readmit(record, now)

    def _served(self, record: HealthRecord, sent_at: float, now: float, *, sole: bool) -> None:
        record.sign_at = now
        if sent_at >= record.probe_at:
            self.probes["ok"] += 1
        if sole and record.missed_at <= sent_at:
            gone = record.unreachable
            record.scrape_unreliable = True
            if gone:
                self._allow_probes(now)
                self.update_ejections(now)
        known = record.condition
        if known.state is _SUSPECT:
            self._clear_suspicion(record)
        elif known.state is not _HEALTHY:
            if sent_at < known.since:
                return
            record.reset(now)
        elif not record.consecutive_failures and not record.bad:
            record.last_failed = False
            return
        record.last_failed, record.consecutive_failures = False, 0
        record.fade(now, self.settings.window_s)
        record.good += 1.0
        if record.bad < _FORGOTTEN:
            record.bad = 0.0
        self._weigh_evidence(record, now, "errors")

    def _failed(self, record: HealthRecord, sent_at: float, now: float, cause: str) -> None:
        known = record.condition
        if known.state <= _SUSPECT and sent_at < max(record.back_at, record.restarted_at):
            return  # it was sent to an ejected endpoint, or to the process before this one
        certain = record.certain
        record.last_failed = True
        if known.state > _SUSPECT:
            if sent_at >= record.probe_at:
                self.probes["failed"] += 1
                record.probe_at = math.inf
                times, state = known.times + 1, _excluded_state(record)
                until = self._until(record, times, now)
                self._set_condition(
                    record, HealthStatus(state, known.cause, known.since, until, times)
                )
            if record.certain is not certain:
                self.update_ejections(now)
            return
        record.consecutive_failures += 1
        if record.bad:
            record.fade(now, self.settings.window_s)
        else:
            record.good, record.at = 0.0, now
        record.bad += 1.0
        self._weigh_evidence(record, now, cause)
        if record.condition.state <= _SUSPECT and self.settings.failures:
            self._suspect(record, now)

    def _suspect(self, record: HealthRecord, now: float) -> None:
        """Prefer other endpoints for a moment, if enough of them are there."""
        known = record.condition
        others = sum(1 for other in self._records.values() if _is_avoided(other.condition, now))
        spare = int(self.settings.max_ejection_share * len(self._records))
        if others < spare or known.state is _SUSPECT:
            until = now + _SUSPECT_S
            doubt = msgspec.structs.replace(known, state=_SUSPECT, cause="suspect", until=until)
            self._set_condition(record, doubt)

    def _clear_suspicion(self, record: HealthRecord) -> None:
        """End the suspicion of an endpoint."""
        known = record.condition
        self._set_condition(record, HealthStatus(since=known.since, times=known.times))

    def _end_probe(self, record: HealthRecord, sent_at: float, now: float) -> None:
        """A probe that says nothing makes room for the next one."""
        known = record.condition
        if known.state is HealthState.PROBING and sent_at >= record.probe_at:
            self.probes["unclear"] += 1
            record.probe_at = math.inf
            self._set_condition(
                record, msgspec.structs.replace(known, state=_excluded_state(record), until=now)
            )

    def _is_stalled(self, record: HealthRecord, sent_at: float, now: float) -> bool:
        """True when the endpoint gave no sign of life during a long request.

        Twice as long as where counters stand still: an engine that has none may be at one answer.
        """
        return now - sent_at >= 2.0 * self.settings.stall_timeout_s and record.sign_at < sent_at

    def _weigh_evidence(self, record: HealthRecord, now: float, cause: str) -> None:
        """Weigh what requests say of an endpoint that takes part."""
        settings = self.settings
        before, row = record.ejection_cause, record.consecutive_failures
        total = record.good + record.bad
        guilty = settings.failures > 0 and (
            row >= settings.failures
            or (total >= _FEWEST and record.bad >= settings.failure_share * total)
        )
        record.ejection_cause = (before or cause) if guilty else ""
        worse = guilty and row % settings.failures == 0
        if (
            worse
            or (record.ejection_cause != before)
            or record.unreachable
            or record.condition.state
        ):
            self.update_ejections(now)

    def _eject(self, record: HealthRecord, now: float) -> None:
        known = record.condition
        if known.state is HealthState.PROBING or known.state is _excluded_state(record):
            return
        times = 1 if now - record.back_at > self.settings.cap_s else known.times + 1
        cause = "unreachable" if record.unreachable else record.ejection_cause
        record.probe_at = math.inf
        self.ejections[cause] += 1
        record.ejections += 1
        until = self._until(record, times, now)
        self._set_condition(record, HealthStatus(_excluded_state(record), cause, now, until, times))

    def _readmit(self, record: HealthRecord, now: float) -> None:
        record.back_at = now
        record.probe_at = math.inf
        self.newest = now
        self._set_condition(record, HealthStatus(since=now, times=record.condition.times))

    def _has_missed_servers(self) -> bool:
        """True while an endpoint serves requests although scrapes cannot connect to it."""
        records = self._records.values()
        return any(r.scrape_unreliable and r.misses >= UNREACHABLE_AFTER for r in records)

    def _allow_probes(self, now: float) -> None:
        """Let requests try endpoints that were left to scrapes, where those prove unreliable."""
        for record in self._records.values():
            known = record.condition
            if known.state is _DOWN and known.until == math.inf and not record.refused:
                until = self._until(record, known.times, now)
                self._set_condition(record, msgspec.structs.replace(known, until=until))

    def _set_condition(self, record: HealthRecord, condition: HealthStatus) -> None:
        record.condition = condition
        self._changed.add(record.incarnation)
        self.version += 1

    def _until(self, record: HealthRecord, times: int, now: float) -> float:
        """Time of the next probe: after `base_s` * 2^(times - 1) seconds, at most `cap_s`.

        One that scrapes could reach and cannot any more is left to them: a request could only fail,
        unless another endpoint serves requests although scrapes miss it too.
        """
        if record.unreachable and (
            record.refused or (record.ever_scraped and not self._has_missed_servers())
        ):
            return math.inf
        settings = self.settings
        backoff_s = min(settings.cap_s, settings.base_s * 2.0 ** min(times - 1, 30))
        return now + backoff_s * (1.0 - _JITTER * self._rng.random())


def _is_avoided(condition: HealthStatus, now: float) -> bool:
    """True for an ejected endpoint, and for a suspect one until its second is over."""
    return condition.state > _SUSPECT or (condition.state is _SUSPECT and condition.until > now)


def _excluded_state(record: HealthRecord) -> HealthState:
    """State of an ejected endpoint."""
    return _DOWN if record.unreachable else HealthState.EJECTED
