"""Which prompts go on from which, and where the one before went.

A conversation is known by the deepest block of its latest prompt, which every later prompt of it
contains. Engines forget prefixes, and so does the index that follows them; this does not, so that a
conversation whose prefix is lost can still be told from one that is new.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from extproc.pool.accounts import Account

#: Weight of a request in the share. At 0.01 it follows a change of traffic within a few hundred.
_ALPHA = 0.01


class Recurrence:
    """The latest prompts and where they went. Mutable; one owner.

    Args:
        most: Prompts remembered (count). 65,536 take some 12 MB.

    Attributes:
        share: Share of requests that go on from an earlier one, 0..1.
        prompt_tokens: Of a request, mean.
    """

    __slots__ = ("_most", "_went", "prompt_tokens", "share")

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._went: OrderedDict[int, Account] = OrderedDict()
        self.share = 0.5
        self.prompt_tokens = 0.0

    def __len__(self) -> int:
        """Prompts remembered (count)."""
        return len(self._went)

    def home(self, chain: Sequence[int]) -> Account | None:
        """Where the latest prompt went that this one goes on from; None if it is new.

        Args:
            chain: The prompt's block hashes, root first.
        """
        went = self._went
        for block in reversed(chain):
            account = went.get(block)
            if account is not None:
                return account
        return None

    def growth(self, prompt_tokens: int) -> float:
        """Tokens a conversation will grow by: young ones grow to the size of the others.

        Args:
            prompt_tokens: Of its latest prompt.
        """
        return self.share * max(0.0, self.prompt_tokens - prompt_tokens)

    def sent(self, chain: Sequence[int], account: Account, *, prompt_tokens: int) -> None:
        """A prompt was sent.

        Args:
            chain: Its block hashes, root first.
            account: Of the endpoint it was sent to.
            prompt_tokens: Of the prompt.
        """
        if not chain:
            return
        went = self._went
        self.share += _ALPHA * ((self.home(chain) is not None) - self.share)
        self.prompt_tokens += _ALPHA * (prompt_tokens - self.prompt_tokens)
        went[chain[-1]] = account
        went.move_to_end(chain[-1])
        if len(went) > self._most:
            went.popitem(last=False)
