"""Estimates of tokens: of prompts, shared by open requests, of a typical request, of an answer.

A picker sees bytes; what a request costs is counted in tokens (`BytesPerTokenEstimator`). Shared
prefixes of open requests are in the cache once, and count once (`SharedContext`). A typical request
stands for those whose length is unknown (`TypicalWork`); answers are as long as those of the pool
were (`AnswerTokens`).
"""

from __future__ import annotations

import math
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import sub
from typing import Final

import msgspec

from extproc.endpoint import DEFAULT_STEP_TIMES, Load
from extproc.pool.media_correction import MediaCorrection
from extproc.request import BYTES_PER_TOKEN, InferenceRequest, MediaSpan

#: Blocks of a chain of which one is followed: it stands for all of them. What is shared is shared
#: from the root, so only the last few blocks of a shared beginning are counted wrongly.
_STRIDE = 4

#: An open request in the entry of a block, and the bits below it: tokens.
_USER: Final = 1 << 32
_TOKENS: Final = _USER - 1


class CachedTokens(msgspec.Struct, frozen=True, gc=False):
    """Prompt tokens of a request that are predicted as cached on an endpoint.

    Attributes:
        tokens: Those that count.
        estimated: Those that the estimate alone predicts, which it is corrected by.
    """

    tokens: int
    estimated: int


class PromptSize(msgspec.Struct, frozen=True, gc=False):
    """Size of a prompt.

    Attributes:
        prompt_bytes: Bytes they are estimated from, the room of media included; 0 when they are exact.
    """

    tokens: int
    prompt_bytes: int
    has_media: bool = False

    @classmethod
    def from_request(cls, request: InferenceRequest) -> PromptSize:
        """Size of the prompt of a request."""
        return cls(request.prompt_tokens, request.stable_bytes, bool(request.media))


class ContextShare(msgspec.Struct, frozen=True, gc=False):
    """Prompt blocks that one open request holds.

    Attributes:
        blocks: All of them; one of `_STRIDE` is followed.
        tokens: That all of its blocks are.
        growth: Tokens its conversation will grow by.
    """

    blocks: Sequence[int]
    tokens: int
    growth: float


class SharedContext:
    """Prompt tokens of all open requests on one endpoint. Mutable; its account owns it.

    Attributes:
        tokens: Prompt tokens, and what young conversations among them will grow by.
        shared: Prompt tokens that are not counted, because another open request has them.
    """

    __slots__ = ("_blocks", "_depths", "_entries", "shared", "tokens")

    def __init__(self) -> None:
        self.tokens = 0.0
        self.shared = 0
        # Open requests with a block, times `_USER`, plus the tokens it was counted for: the last block
        # of a prompt stands for fewer than the same one of a prompt that goes on from it, and the order
        # in which they end is unknown.
        self._blocks: dict[int, int] = {}
        self._depths: Sequence[int] = ()
        self._entries: Sequence[int] = ()

    def open(self, blocks: Sequence[int], tokens: Sequence[int], *, growth: float) -> ContextShare:
        """Add an opened request.

        Args:
            blocks: Its prompt's chain of block hashes, root first; not empty.
            tokens: Prompt tokens by depth of a chain.
            growth: Tokens its conversation will grow by.
        """
        if tokens is not self._depths:
            begins = tokens[::_STRIDE]
            sizes = map(sub, begins[1:], begins)
            self._depths, self._entries = tokens, tuple([_USER + size for size in sizes])
        by_block = self._blocks
        followed = blocks[::_STRIDE]
        last = len(followed) - 1
        prompt_tokens = tokens[len(blocks)]
        rest = _USER + prompt_tokens - tokens[last * _STRIDE]
        entries = (*self._entries[:last], rest)
        fresh = dict(zip(followed, entries, strict=True))
        if by_block.keys().isdisjoint(fresh) and len(fresh) > last:
            by_block.update(fresh)
            self.tokens = self.tokens + growth + prompt_tokens
            return ContextShare(blocks, prompt_tokens, growth)
        if by_block.get(followed[last], 0) & _TOKENS >= rest - _USER:
            growth = 0.0  # where another open prompt goes on from this one, it has grown already
        total, shared = self.tokens + growth, self.shared + prompt_tokens
        for block, entry in zip(followed, entries, strict=True):
            known = by_block.get(block)
            if known is None:
                by_block[block], more = entry, entry - _USER
            else:
                more = entry - _USER - (known & _TOKENS)
                if more <= 0:
                    by_block[block] = known + _USER
                    continue  # all of it is counted
                by_block[block] = known + _USER + more
            total += more
            shared -= more
        self.tokens, self.shared = total, shared
        return ContextShare(blocks, prompt_tokens, growth)

    def count_blocks(self, blocks: Sequence[int]) -> int:
        """Leading blocks of a chain that open requests have, in steps of those that are followed."""
        by_block, count = self._blocks, 0
        for block in blocks[::_STRIDE]:
            if block not in by_block:
                break
            count += _STRIDE
        return min(count, len(blocks))

    def close(self, share: ContextShare) -> None:
        """Remove a request that ended.

        Args:
            share: Result of `open`; closed once.
        """
        by_block = self._blocks
        self.tokens -= share.growth
        self.shared -= share.tokens
        for block in share.blocks[::_STRIDE]:
            left = by_block[block] - _USER
            if left >= _USER:
                by_block[block] = left
            else:
                del by_block[block]
                self.tokens -= left
                self.shared += left
        if not by_block:
            self.tokens = 0.0  # what rounding left
            by_block.clear()  # an empty table stays as large as it was


#: Answered requests remembered (count): some seconds of a busy pool, and enough for a median that
#: half of them would have to move.
_MAX_REQUESTS = 128

#: Tokens of a request before any was answered.
_DEFAULT_TOKENS = 500

#: Change of the median that is published, as a share of it: all that is priced is priced anew.
_MEDIAN_CHANGE = 0.2


class TypicalWork:
    """Median of the uncached prompt tokens of recently answered requests, pool-wide.

    A median, because pages say how many requests of others wait and nothing of their length: a mean
    is whatever the one longest prompt makes of it. Requests that were refused or abandoned do not
    count, since the part of them that ran is unknown.

    Attributes:
        typical: The median in tokens, above 0, within a fifth; `_DEFAULT_TOKENS` before any.
    """

    __slots__ = ("_on_change", "_recent", "_sorted", "typical")

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self.typical = _DEFAULT_TOKENS

    def add(self, tokens: int) -> None:
        """Record an answered request.

        Args:
            tokens: Its uncached prompt tokens, above 0.
        """
        recent, ordered = self._recent, self._sorted
        if len(recent) >= _MAX_REQUESTS:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(tokens)
        insort(ordered, tokens)
        median = ordered[len(ordered) // 2]
        if abs(median - self.typical) > _MEDIAN_CHANGE * self.typical:
            self.typical = median
            self._on_change()

    def price(self, requests: float, kv_tokens: int | None) -> float:
        """Uncached prompt tokens of requests whose length is unknown.

        Args:
            kv_tokens: Size of the engine's KV cache in tokens, which no request exceeds; None while
                unknown.
        """
        return requests * (min(kv_tokens, self.typical) if kv_tokens else self.typical)


#: Answers that the mean answer is taken over, and those that the default one counts for.
_ANSWERS, _DEFAULT_ANSWERS = 128.0, 1.0


class AnswerTokens:
    """Mean tokens of an answer, of a pool.

    How long an answer gets is up to the request and not to the engine: what one engine generates
    says as much of the next request on any other. Tokens of answers that have not ended count as
    well once another one ends, so that long ones do not come late.

    Args:
        mean: Tokens per answer before any.
        on_change: Called when the mean changed by a fifth.
    """

    __slots__ = ("_answers", "_is_counted", "_on_change", "_shared", "_tokens", "mean")

    def __init__(
        self,
        mean: float = DEFAULT_STEP_TIMES.output_tokens,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.mean = self._shared = mean
        self._answers = _DEFAULT_ANSWERS
        self._tokens = mean * _DEFAULT_ANSWERS
        self._is_counted = False
        self._on_change = on_change

    def add(self, tokens: float, answers: float) -> None:
        """Record what an engine did between two scrapes."""
        if not self._is_counted:
            self._is_counted = True
            self._tokens, self._answers = self.mean * _DEFAULT_ANSWERS, _DEFAULT_ANSWERS
        self._add(tokens, answers)

    def guess(self, tokens: float) -> None:
        """Record an answer by the time it took, while no engine has counted any.

        Args:
            tokens: Those that come in this time. Most of it may be a queue, so that more than are
                usual count as usual.
        """
        if not self._is_counted:
            self._add(min(max(1.0, tokens), DEFAULT_STEP_TIMES.output_tokens), 1.0)

    def _add(self, tokens: float, answers: float) -> None:
        keep = math.exp(-answers / _ANSWERS)
        self._tokens = keep * self._tokens + tokens
        self._answers = keep * self._answers + answers
        self.mean = max(1.0, self._tokens / self._answers)
        if abs(self.mean - self._shared) > _MEDIAN_CHANGE * self._shared:
            self._shared = self.mean
            self._on_change()


#: Bytes per token that a tokenizer can have on average: below, the engine counted what no text was
#: sent for (images); above, it did not read what was sent.
_BOUNDS = (1.0, 8.0)

#: Least mean of a prompt with media (bytes per token).
_LEAST_MEAN = 0.5

#: Requests, fading, from which a model's own ratio counts. Prompts differ by a quarter or so, so
#: that the mean of eight is within ten percent.
_MIN_REQUESTS = 7.5

#: Mean prompt tokens (count) from which a ratio counts: a chat template adds ten to thirty, which would
#: be most of a shorter prompt, and none of a long one.
_LEAST_TOKENS = 64.0

#: Share of the past that a request leaves: about the last hundred requests count.
_DECAY = 0.99

#: Finished requests of a comparison with the counters (count). The edges of a window, where an
#: answer has ended for the engine and not for us, are small beside it.
_WINDOW = 16

#: Share by which our requests and the engine's may differ in number: more are others' requests.
_MAX_FOREIGN_SHARE = 0.1

#: Change of a ratio that is published, as a share of it: tables are kept by ratio.
_RATIO_CHANGE = 0.02

#: Models remembered, the least recently learned forgotten first.
_MAX_MODELS = 64


class _Sums:
    """Fading sums of one model."""

    __slots__ = ("prompt_bytes", "ratio", "requests", "tokens")

    def __init__(self) -> None:
        self.prompt_bytes = 0.0
        self.tokens = 0.0
        self.requests = 0.0
        self.ratio = float(BYTES_PER_TOKEN)

    def add(self, prompt_bytes: float, tokens: float, requests: float) -> None:
        keep = _DECAY**requests
        self.prompt_bytes = self.prompt_bytes * keep + prompt_bytes
        self.tokens = self.tokens * keep + tokens
        self.requests = self.requests * keep + requests
        ratio = self.prompt_bytes / self.tokens
        if self.known and abs(ratio - self.ratio) > _RATIO_CHANGE * self.ratio:
            self.ratio = ratio

    @property
    def known(self) -> bool:
        return self.requests >= _MIN_REQUESTS and self.tokens >= _LEAST_TOKENS * self.requests


class _Window(msgspec.Struct, frozen=True, gc=False):
    """Start of a comparison window: the engine's counters, and ours."""

    finished: float
    tokens: float
    answered: int


class BytesPerTokenEstimator:
    """Mean prompt bytes per token of every model that requests named, learned.

    Engines tell how many tokens they counted: in their counters, for all requests that finished
    between two scrapes, and in the `usage` of an answer that is watched. A tokenizer belongs to a
    model and not to an engine, so what one endpoint shows holds for all of them.

    Attributes:
        media: What images, videos and audio take, learned from prompts that have any.
    """

    def __init__(self) -> None:
        self.media = MediaCorrection()
        self._all = _Sums()
        self._by_model: dict[str, _Sums] = {}
        self._windows: dict[int, _Window] = {}

    def bytes_per_token(self, model: str) -> float:
        """Mean bytes of a prompt token, 1 to 8.

        Returns:
            The model's own ratio; while it showed too little that of all models together, since an
            adapter has the tokenizer of its base model; without any `BYTES_PER_TOKEN`.
        """
        own = self._by_model.get(model)
        return own.ratio if own is not None and own.known else self._all.ratio

    def mean_ratio(self, model: str, size: PromptSize) -> float:
        """Bytes per token of one prompt; token ids are `BYTES_PER_TOKEN` each.

        A prompt with media has a mean of its own.
        """
        if size.has_media and size.prompt_bytes and size.tokens:
            # In steps, since tables are kept by ratio.
            return max(_LEAST_MEAN, round(size.prompt_bytes / size.tokens, 1))
        return self.bytes_per_token(model) if size.prompt_bytes else BYTES_PER_TOKEN

    @property
    def ratios(self) -> dict[str, float]:
        """Bytes per token by model, of models that showed enough."""
        return {model: sums.ratio for model, sums in self._by_model.items() if sums.known}

    def observe_usage(
        self,
        model: str,
        *,
        prompt_bytes: int,
        tokens: int,
        media: Sequence[MediaSpan] = (),
        media_tokens: int | None = None,
    ) -> None:
        """Record the prompt tokens that the `usage` of an answer reports.

        Args:
            media: Images, videos and audio in the prompt.
            media_tokens: Of the tokens, those of media. None where the engine does not say: then
                media are learned by what the text does not account for, and not the text.
        """
        if media and media_tokens is None:
            text_tokens = prompt_bytes / self.bytes_per_token(model)
            self.media.observe_usage(model, media, prompt_tokens=tokens, text_tokens=text_tokens)
            return
        if media and media_tokens is not None:
            self.media.observe_tokens(model, media, media_tokens)
            tokens -= media_tokens
        if prompt_bytes and tokens > 0:
            self._add(model, prompt_bytes, tokens, 1.0)

    def record_scrape(
        self, load: Load, *, incarnation: int, texts: Mapping[str, Sequence[int]], answered: int
    ) -> bool:
        """Compare what was sent to an endpoint with what its engine counted.

        Only finished requests are compared, because both sides know them, and only windows in
        which both finished as many.

        Args:
            texts: Our answered requests there since the last window began, by model: how many, and
                bytes of their prompts.
            answered: Our answered requests there since it came (count).

        Returns:
            True if a window begins: texts up to now do not belong to it.
        """
        finished, tokens = load.counters.finished, load.counters.finished_prompt_tokens
        if finished is None or tokens is None:
            return False
        start = self._windows.get(incarnation)
        if start is not None and finished >= start.finished and tokens >= start.tokens:
            count = finished - start.finished
            if count < _WINDOW:
                return False
            in_window = answered - start.answered
            if abs(in_window - count) <= _MAX_FOREIGN_SHARE * count:
                self._compare(texts, (tokens - start.tokens) / count, in_window)
        self._windows[incarnation] = _Window(finished, tokens, answered)
        return True

    def forget(self, incarnation: int) -> None:
        """Drop the comparison window of an endpoint that left."""
        self._windows.pop(incarnation, None)

    def _compare(
        self, texts: Mapping[str, Sequence[int]], mean_tokens: float, answered: int
    ) -> None:
        """Update the ratio of a model by a window.

        What several models share is split as their ratios so far foretell: the factor by which all
        of them together were wrong is every one's.
        """
        requests = sum(count for count, _ in texts.values())
        if requests < (1 - _MAX_FOREIGN_SHARE) * answered or not mean_tokens:
            return
        guesses = {model: size / self.bytes_per_token(model) for model, (_, size) in texts.items()}
        factor = mean_tokens * requests / max(sum(guesses.values()), 1.0)
        for model, (count, size) in texts.items():
            self._add(model, size, guesses[model] * factor, count)

    def _add(self, model: str, prompt_bytes: float, tokens: float, requests: float) -> None:
        if not _BOUNDS[0] * tokens <= prompt_bytes <= _BOUNDS[1] * tokens:
            return
        sums = self._by_model.pop(model, None) or _Sums()
        self._by_model[model] = sums
        if len(self._by_model) > _MAX_MODELS:
            del self._by_model[next(iter(self._by_model))]
        sums.add(prompt_bytes, tokens, requests)
        self._all.add(prompt_bytes, tokens, requests)


def weak_callback(method: Callable[[], None]) -> Callable[[], None]:
    """A method that does not keep its object alive, and does nothing once that is freed.

    Accounts call it, and lie in snapshots, which the garbage collector does not track: with a
    reference back to the store nothing of a removed pool would be freed.
    """
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call
