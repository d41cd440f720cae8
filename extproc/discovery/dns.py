"""Resolution of host names through the system resolver."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

from extproc.discovery import dns_answers

#: Addresses of one name that are taken (count); an answer of DNS has room for some 4000.
MAX_ADDRESSES: Final = 4096


class DnsResolver:
    """Resolves A and AAAA records of all names concurrently.

    Args:
        timeout_s: For one name. The system's own time-out is 5 s and more per name server.
    """

    def __init__(self, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s

    async def resolve(self, names: Sequence[str]) -> dns_answers.Answers:
        """Resolves names; an empty answer for a name that failed or timed out."""
        return dict(
            zip(
                names,
                await asyncio.gather(*(self._resolve_name(name) for name in names)),
                strict=True,
            )
        )

    async def _resolve_name(self, name: str) -> tuple[str, ...]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError, UnicodeError):
            return ()
        addresses = {str(answer[4][0]) for answer in answers}
        if len(addresses) > MAX_ADDRESSES:
            # Name servers rotate what they answer: the same ones stay, in whatever order.
            return tuple(sorted(addresses)[:MAX_ADDRESSES])
        return tuple(addresses)
