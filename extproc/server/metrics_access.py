"""Access to `/metrics` by bearer tokens that the Kubernetes API accepts.

The API server says whose token it is (TokenReview), and whether that user may `get` the path
`/metrics` (SubjectAccessReview). Results are kept by a keyed hash of the token, never by the token.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from extproc.discovery.kubernetes import api_responses, objects
from extproc.discovery.kubernetes.request_client import ApiRequestClient
from extproc.discovery.kubernetes.settings import KubernetesSettings

_log = logging.getLogger("extproc.server")

#: Seconds for which a result is kept: an accepted token as long as controller-runtime keeps it, so that
#: an API server that is away for less does not stop scrapes; a refused one so that a right that was
#: just granted is soon there.
ALLOWED_S: Final = 60.0
REFUSED_S: Final = 10.0

#: Results that are kept at most, of accepted and of refused tokens each (count).
MAX_RESULTS: Final = 1024

#: Reviews at a time, at most (count), and seconds in which one ends: Prometheus gives up after 10.
MAX_REVIEWS: Final = 8
REVIEW_S: Final = 5.0

_TOKEN_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"  # noqa: S105 - a path
_ACCESS_REVIEWS: Final = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class ReviewResult(msgspec.Struct, frozen=True):
    """Result of the review of a token.

    Attributes:
        status: HTTP status of the answer: 200, 401, 403, or 503 where the API server gave none.
        reason: Text for the client; empty for 200.
    """

    status: int
    reason: str = ""


_ALLOWED: Final = ReviewResult(200)
_UNKNOWN_TOKEN: Final = ReviewResult(401, "expected a bearer token that the Kubernetes API accepts")
_UNAVAILABLE: Final = ReviewResult(
    503, "the Kubernetes API does not review the token now; the log of extproc has the reason"
)


class Reviewer(Protocol):
    """Reviews tokens, without a memory of them."""

    async def open(self) -> None:
        """Prepare for reviews.

        Raises:
            ConfigError: The address of the API server or the credentials are missing or broken.
        """

    async def close(self) -> None:
        """End all connections."""

    async def review(self, token: str) -> ReviewResult:
        """Review a token; a failure is status 503."""


class MetricsAccess:
    """Authorizes scrapes of `/metrics`. Mutable; on the event loop only."""

    def __init__(self, reviewer: Reviewer, clock: Callable[[], float] = time.monotonic) -> None:
        self._reviewer = reviewer
        self._clock = clock
        self._hash_key = secrets.token_bytes(32)
        # Apart, so that a flood of made-up tokens does not displace that of Prometheus.
        self._allowed: dict[bytes, tuple[float, ReviewResult]] = {}
        self._refused: dict[bytes, tuple[float, ReviewResult]] = {}
        self._pending: dict[bytes, asyncio.Future[ReviewResult]] = {}
        self._slots = asyncio.Semaphore(MAX_REVIEWS)
        self.open, self.close = reviewer.open, reviewer.close

    async def refusal(self, authorization: str) -> tuple[int, str] | None:
        """Status and reason for which a scrape is refused; None where it is not.

        Args:
            authorization: Header `Authorization`; empty without one.
        """
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or not (token.isascii() and token.isprintable()):
            result = _UNKNOWN_TOKEN
        else:
            result = await self._find_or_review(token)
        return None if result.status == 200 else (result.status, result.reason)

    async def _find_or_review(self, token: str) -> ReviewResult:
        key = hmac.digest(self._hash_key, token.encode("ascii"), "sha256")
        for results in (self._allowed, self._refused):
            expires_at, result = results.get(key, (0.0, _UNAVAILABLE))
            if self._clock() < expires_at:
                return result
            results.pop(key, None)
        pending = self._pending.get(key)
        if pending is None:
            loop = asyncio.get_running_loop()
            pending = self._pending[key] = loop.create_task(self._review(key, token))
        # Shielded: a client that leaves must not cancel the result of the others.
        return await asyncio.shield(pending)

    async def _review(self, key: bytes, token: str) -> ReviewResult:
        """Review a token and remember the result."""
        result = _UNAVAILABLE
        try:
            async with asyncio.timeout(REVIEW_S), self._slots:
                result = await self._reviewer.review(token)
        except TimeoutError:
            _log.warning("/metrics: no review of a token within %g s", REVIEW_S)
        finally:
            del self._pending[key]
        self._remember(key, result)
        return result

    def _remember(self, key: bytes, result: ReviewResult) -> None:
        if result.status == 503:
            return
        is_allowed = result.status == 200
        results = self._allowed if is_allowed else self._refused
        if len(results) >= MAX_RESULTS:
            del results[next(iter(results))]
        results[key] = (self._clock() + (ALLOWED_S if is_allowed else REFUSED_S), result)


class _User(msgspec.Struct, omit_defaults=True):
    """User of a token, in the form of both reviews."""

    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: _User = msgspec.field(default_factory=_User)


class _TokenReview(msgspec.Struct):
    status: _TokenStatus


class _AccessStatus(msgspec.Struct):
    allowed: bool = False
    denied: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus


class KubernetesReviewer(ApiRequestClient):
    """Reviewer that asks an API server."""

    def __init__(self, settings: KubernetesSettings) -> None:
        super().__init__(settings)
        #: Status of the failure that was logged last; None while nothing fails.
        self._logged_status: int | None = None

    async def review(self, token: str) -> ReviewResult:
        """Review a token, and then the right of its user."""
        token_body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token},
        }
        answer = await self._send(_TOKEN_REVIEWS, token_body)
        if isinstance(answer, api_responses.ApiError):
            return self._fail(answer, _TOKEN_REVIEWS)
        try:
            authentication = msgspec.json.decode(answer, type=_TokenReview).status
        except objects.BROKEN:
            return self._fail(api_responses.ApiError(0, "no TokenReview"), _TOKEN_REVIEWS)
        if not authentication.authenticated:
            self._log_recovery()
            return _UNKNOWN_TOKEN
        access_body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": _build_access_spec(authentication.user),
        }
        answer = await self._send(_ACCESS_REVIEWS, access_body)
        if isinstance(answer, api_responses.ApiError):
            return self._fail(answer, _ACCESS_REVIEWS)
        try:
            access = msgspec.json.decode(answer, type=_AccessReview).status
        except objects.BROKEN:
            return self._fail(api_responses.ApiError(0, "no SubjectAccessReview"), _ACCESS_REVIEWS)
        self._log_recovery()
        if access.allowed and not access.denied:
            return _ALLOWED
        return ReviewResult(
            403,
            f"{authentication.user.username} may not get /metrics; grant it "
            'nonResourceURLs: ["/metrics"], verbs: ["get"]',
        )

    async def _send(self, path: str, body: object) -> bytes | api_responses.ApiError:
        answer = await self.send_once("POST", path, body, seconds=REVIEW_S)
        if isinstance(answer, api_responses.ApiError) and answer.credentials_expired:
            answer = await self.send_once("POST", path, body, seconds=REVIEW_S)
        return answer

    def _fail(self, error: api_responses.ApiError, path: str) -> ReviewResult:
        """Log a failure unless the one before had the same status."""
        if error.status != self._logged_status:
            self._logged_status = error.status
            _, _, group, _, resource = path.split("/")
            # Other messages may quote what was sent, which is a token.
            text = error.message if error.status in {0, 403} else ""
            if error.status == 403:
                text += (
                    "; add to a ClusterRole of the service account: "
                    f'apiGroups: ["{group}"], resources: ["{resource}"], verbs: ["create"]'
                )
            failure = error.status or "no answer"
            _log.warning("/metrics: %s of %s: %s %s", "create", resource, failure, text)
        return _UNAVAILABLE

    def _log_recovery(self) -> None:
        if self._logged_status is not None:
            self._logged_status = None
            _log.info("/metrics: the Kubernetes API reviews tokens again")


def _build_access_spec(user: _User) -> dict[str, object]:
    """Build the spec of a SubjectAccessReview; it calls the name of a user otherwise than TokenReview."""
    fields = msgspec.to_builtins(user)
    if "username" in fields:
        fields["user"] = fields.pop("username")
    return {"nonResourceAttributes": {"path": "/metrics", "verb": "get"}, **fields}
