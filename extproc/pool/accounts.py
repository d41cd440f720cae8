"""In-flight accounts: what this picker has open on each endpoint.

An account belongs to one incarnation of one endpoint. It is changed only by tickets, and a ticket
is closed exactly once, so the counters return to zero when the last stream ends and can never go
below it.
"""

from __future__ import annotations

from extproc.endpoint import Endpoint


class Account:
    """The open requests of one endpoint incarnation.

    Attributes:
        endpoint: Whose account it is.
        in_flight: Open requests (count).
        prompt_tokens: Estimated prompt tokens of the open requests.
        opened: Tickets ever opened (count).
        adapters: Open requests by adapter or model name.
    """

    __slots__ = ("adapters", "endpoint", "in_flight", "opened", "prompt_tokens")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.in_flight = 0
        self.prompt_tokens = 0
        self.opened = 0
        self.adapters: dict[str, int] = {}

    def open(self, target: str, prompt_tokens: int, *, cached_tokens: int, now: float) -> Ticket:
        """Charge one request and hand out its ticket.

        Args:
            target: Adapter or model name of the request.
            prompt_tokens: Estimated prompt tokens, 0 or more.
            cached_tokens: Of these, believed to be in the engine's prefix cache.
            now: Monotonic seconds.
        """
        self.in_flight += 1
        self.opened += 1
        self.prompt_tokens += prompt_tokens
        self.adapters[target] = self.adapters.get(target, 0) + 1
        return Ticket(self, target, prompt_tokens, cached_tokens=cached_tokens, opened_at=now)


class Ticket:
    """The handle of one open request.

    Attributes:
        opened_at: Monotonic seconds at which it was charged.
        prompt_tokens: Estimated prompt tokens.
        cached_tokens: Of these, believed to be in the engine's prefix cache.
    """

    __slots__ = ("_account", "_target", "cached_tokens", "opened_at", "prompt_tokens")

    def __init__(
        self,
        account: Account,
        target: str,
        prompt_tokens: int,
        *,
        cached_tokens: int,
        opened_at: float,
    ) -> None:
        self._account: Account | None = account
        self._target = target
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.opened_at = opened_at

    def close(self, now: float) -> None:
        """Give back what was charged.

        Args:
            now: Monotonic seconds.

        Raises:
            RuntimeError: The ticket was closed before, which is a bug of the caller.
        """
        del now
        account = self._account
        if account is None:
            raise RuntimeError("ticket closed twice; close it in one finally block")
        self._account = None
        account.in_flight -= 1
        account.prompt_tokens -= self.prompt_tokens
        left = account.adapters[self._target] - 1
        if left:
            account.adapters[self._target] = left
        else:
            del account.adapters[self._target]
