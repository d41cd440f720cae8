"""Mean prompt bytes per token, learned for each model.

A picker sees bytes; what a request costs is counted in tokens. Engines tell how many: in their
counters, for all requests that finished between two scrapes, and in the `usage` of an answer that
is watched. A tokenizer belongs to a model and not to an engine, so what one endpoint shows holds
for all of them.
"""

from __future__ import annotations

import msgspec

from extproc.endpoint import Load
from extproc.pool.inflight import InflightLoad
from extproc.request import BYTES_PER_TOKEN

#: Bytes per token that a tokenizer can have on average: below, the engine counted what no text was
#: sent for (images); above, it did not read what was sent.
_BOUNDS = (1.0, 8.0)

#: Requests, fading, from which a model's own ratio counts. Prompts differ by a quarter or so, so
#: that the mean of eight is within ten percent.
_MIN_TOKENS = 7.5

#: Share of the past that a request leaves: about the last hundred requests count.
_DECAY = 0.99

#: Finished requests of a comparison with the counters (count). The edges of a window, where an
#: answer has ended for the engine and not for us, are small beside it.
_WINDOW = 16

#: Share by which our requests and the engine's may differ in number: more are others' requests.
_MAX_FOREIGN_SHARE = 0.1

#: Change of a ratio that is published, as a share of it: tables are kept by ratio.
_CHANGE = 0.02

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
        if self.known and abs(ratio - self.ratio) > _CHANGE * self.ratio:
            self.ratio = ratio

    @property
    def known(self) -> bool:
        return self.requests >= _MIN_TOKENS


class _Window(msgspec.Struct, frozen=True, gc=False):
    """Start of a comparison window: the engine's counters, and ours."""

    finished: float
    tokens: float
    answered: int


class BytesPerTokenEstimator:
    """Bytes per token of every model that requests named."""

    def __init__(self) -> None:
        self._all = _Sums()
        self._by_model: dict[str, _Sums] = {}
        self._windows: dict[int, _Window] = {}

    def bytes_per_token(self, model: str) -> float:
        """Mean bytes of a prompt token, 1 to 8.

        Args:
            model: LLM or adapter name.

        Returns:
            The model's own ratio; while it showed too little that of all models together, since an
            adapter has the tokenizer of its base model; without any `BYTES_PER_TOKEN`.
        """
        own = self._by_model.get(model)
        return own.ratio if own is not None and own.known else self._all.ratio

    def ratio_for(self, model: str, prompt_bytes: int) -> float:
        """Of one prompt: token ids are `BYTES_PER_TOKEN` each.

        Args:
            model: LLM or adapter name.
            prompt_bytes: Bytes of prompt text; 0 when it came as token ids.
        """
        return self.bytes_per_token(model) if prompt_bytes else BYTES_PER_TOKEN

    @property
    def ratios(self) -> dict[str, float]:
        """Bytes per token by model, of models that showed enough."""
        return {model: sums.ratio for model, sums in self._by_model.items() if sums.known}

    def observe_usage(self, model: str, *, prompt_bytes: int, tokens: int) -> None:
        """Take in the prompt tokens that the `usage` of an answer reports.

        Args:
            model: LLM or adapter name.
            prompt_bytes: Bytes of text in the prompt; 0 when it was tokenized already.
            tokens: Prompt tokens by the engine.
        """
        if prompt_bytes and tokens:
            self._add(model, prompt_bytes, tokens, 1.0)

    def record_scrape(self, account: InflightLoad, load: Load) -> None:
        """Compare what was sent to an endpoint with what its engine counted.

        Only finished requests are compared, because both sides know them, and only windows in
        which both finished as many.

        Args:
            account: Our requests there; its `texts` are taken when a window ends.
        """
        finished, tokens = load.counters.finished, load.counters.finished_prompt_tokens
        if finished is None or tokens is None:
            return
        key = account.endpoint.incarnation
        start = self._windows.get(key)
        if start is not None and finished >= start.finished and tokens >= start.tokens:
            count = finished - start.finished
            if count < _WINDOW:
                return
            answered = account.answered - start.answered
            if abs(answered - count) <= _MAX_FOREIGN_SHARE * count:
                self._compare(account.texts, (tokens - start.tokens) / count, answered)
        account.forget_texts()
        self._windows[key] = _Window(finished, tokens, account.answered)

    def forget(self, incarnation: int) -> None:
        """An endpoint left."""
        self._windows.pop(incarnation, None)

    def _compare(self, texts: dict[str, list[int]], mean_tokens: float, answered: int) -> None:
        """Take in a window.

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
