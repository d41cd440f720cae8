"""Model list of an endpoint: its page, and the poller that reads it seldom, and soon after a restart.

vLLM lists its base model under every served name and, with `parent` set to the base model, each
LoRA adapter it can serve, loaded or not (docs/spec/engines.md#models-page). Other engines list the
base model. A list that cannot be read whole is no list: who is missing from it would be kept from
traffic.

The scrape loop of the endpoint drives the poller, so that the two share one connection.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from extproc.endpoint import Endpoint, ServedModels
from extproc.request import is_long_name
from extproc.scrape import client

if TYPE_CHECKING:
    from extproc.scrape.scraper import Scraper

#: Where OpenAI's API has the list, and so every engine that speaks it.
PATH: Final = "/v1/models"

#: Names taken from one engine (count); far more adapters than one serves.
MAX_NAMES: Final = 4096

#: Longest page read. A card of vLLM has about 500 bytes.
MAX_BYTES: Final = MAX_NAMES * 512


class _Card(msgspec.Struct, gc=False):
    """One entry; other fields may be of any type, since some engines use them otherwise.

    They are not built before their type is known: two bytes of JSON can make an object of a hundred.
    """

    id: str
    parent: msgspec.Raw = msgspec.Raw()
    max_model_len: msgspec.Raw = msgspec.Raw()


class _Page(msgspec.Struct, gc=False):
    data: list[_Card]


_DECODER = msgspec.json.Decoder(_Page)
_TEXT = msgspec.json.Decoder(str)
_LENGTH: msgspec.json.Decoder[int] = msgspec.json.Decoder(
    Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
)


def read(page: bytes) -> ServedModels | None:
    """Returns the model names on a page.

    Returns:
        None when it is no such page, lists nothing, or lists more than `MAX_NAMES` names or one
        that no request may carry (`request.MAX_NAME_BYTES`).
    """
    if len(page) > MAX_BYTES:
        return None
    try:
        cards = _DECODER.decode(page).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not cards or len(cards) > MAX_NAMES:
        return None
    if any(not card.id or is_long_name(card.id) for card in cards):
        return None
    try:
        adapters = frozenset(card.id for card in cards if _is_adapter(card))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    bases = [card for card in cards if card.id not in adapters]
    lengths = [length for length in map(_read_length, bases) if length is not None]
    return ServedModels(frozenset(card.id for card in bases), adapters, min(lengths, default=None))


def _read_length(card: _Card) -> int | None:
    """Returns the longest context of a card, in tokens; None without a number in range."""
    try:
        return _LENGTH.decode(card.max_model_len)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _is_adapter(card: _Card) -> bool:
    """Returns True if a card names another card as its parent."""
    if bytes(memoryview(card.parent)[:1]) != b'"':
        return False
    return _TEXT.decode(card.parent) not in ("", card.id)


class ModelListSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals of model list polling.

    Attributes:
        interval_s: Seconds between two lists; None for never.
        retry_s: Wait after the first failure; it doubles with each further one, up to the interval.
            An engine that has just started may not list anything yet.
        jitter: Each wait is spread by this share to either side, lest all poll at once.
        unlisted_retry_s: Least time between two lists when requests for unlisted models want one sooner, or
            the engine answered 404 to a request for a model. 5: an adapter that was just loaded is
            found soon, and one that was unloaded is missed. With more than 200 endpoints the budget of
            lists (`schedule.LISTS_RATIO`) makes it longer, so that a client that makes names up
            costs 40 small pages a second at most.
    """

    interval_s: float | None
    retry_s: float = 2.0
    jitter: float = 0.1
    unlisted_retry_s: float = 5.0

    def wait_s(self, *, failures: int, least_s: float, rng: random.Random) -> float:
        """Returns seconds until the next list of an endpoint, after so many failures in a row.

        Args:
            least_s: Wait that the budget of lists allows, see `schedule.least_list_wait_s`.
        """
        wait_s = math.inf if self.interval_s is None else self.interval_s
        if failures:
            # 2^30 is beyond any interval; the bound keeps the power a float.
            wait_s = min(wait_s, self.retry_s * 2.0 ** min(failures - 1, 30))
        return max(wait_s, least_s) * rng.uniform(1.0 - self.jitter, 1.0 + self.jitter)


#: For who wants no lists.
NEVER = ModelListSettings(interval_s=None)


class ModelListPoller:
    """Polls the models of one endpoint incarnation.

    A failure leaves what is known: models change with the process, not with its load.

    Attributes:
        target: Its own port, wherever its metrics are.
    """

    def __init__(self, scraper: Scraper, endpoint: Endpoint) -> None:
        self.target = client.target(
            endpoint.ip, endpoint.port, path=PATH, accept="application/json"
        )
        self._endpoint = endpoint
        self._scraper = scraper
        self._settings = scraper.settings.models
        self._signs_at_poll = (0, 0)
        self._requested = self._due = -math.inf
        self._failures = 0
        self._listed = False

    async def step(self) -> str:
        """Polls if a poll is due: `ok`, the failure reason, or empty if none was due."""
        began = self._scraper.clock()
        interval_s = self._settings.interval_s
        if interval_s is None or not (
            began >= self._due or self._is_forgotten() or self._is_due(began)
        ):
            return ""
        self._requested, self._signs_at_poll = began, self._count_signs()
        fetched = await self._scraper.client.get(self.target)
        if isinstance(fetched, client.FetchFailed):
            outcome, models = fetched.reason, None
        else:
            models = read(fetched)
            outcome = "unreadable" if models is None else "ok"
        self._listed = models is not None
        if models is None:
            self._failures += 1
        else:
            self._failures = 0
            self._scraper.store.observe_models(self._endpoint, models)
        self._due = began + self._settings.wait_s(
            failures=self._failures,
            least_s=self._scraper.least_list_wait_s(),
            rng=self._scraper.rng,
        )
        return outcome

    def _is_forgotten(self) -> bool:
        """Returns True if the pool dropped the last list, as it does at an engine restart."""
        members = self._scraper.store.pool.ranks_at(self._endpoint.host_port)
        return self._listed and any(member.models is None for member in members)

    def _count_signs(self) -> tuple[int, int]:
        """Signs of another list: requests for unlisted models, and 404 from this engine (counts)."""
        members = self._scraper.store.pool.ranks_at(self._endpoint.host_port)
        not_found = sum([member.account.not_found for member in members])
        return self._scraper.unlisted_models(), not_found

    def _is_due(self, now: float) -> bool:
        """Returns True if there was a sign of another list since the last one, some time ago."""
        wait_s = max(self._settings.unlisted_retry_s, self._scraper.least_list_wait_s())
        return now >= self._requested + wait_s and self._count_signs() != self._signs_at_poll
