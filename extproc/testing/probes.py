"""Repeated calls of a plugin with equal arguments, for the checks of all roles."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from extproc.decision import NO_KEYS, Decision
from extproc.endpoint import Candidate
from extproc.scheduling import plugin_guard
from extproc.scheduling.framework import (
    Observer,
    Plugin,
    RequestKeyProvider,
    ResponseHeaderProvider,
    SchedulingContext,
    Signal,
)
from extproc.testing import builders

Role = TypeVar("Role", bound=Plugin)
AnswerT = TypeVar("AnswerT")

#: Calls a plugin.
CallT = Callable[[Role, SchedulingContext, list[Candidate]], AnswerT]

_KIND = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def demand(holds: object, about: str, expected: str, actual: object = "others") -> None:
    """Raise AssertionError about a plugin in a situation, unless a rule of the contract holds."""
    if not holds:
        raise AssertionError(f"{about}: expected {expected}, got {short(actual)}")


def short(value: object) -> str:
    """Return a value as text of at most 160 characters, for messages."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


class _AnswerPair:
    """Two answers, formatted only when an error message needs them."""

    def __init__(self, first: object, between: str, second: object) -> None:
        self._parts = first, between, second

    def __repr__(self) -> str:
        return " ".join(map(short, self._parts))


def describe_situation(plugin: Plugin, candidates: Sequence[Candidate], *, is_scraped: bool) -> str:
    """Describe a plugin and its candidates, for messages."""
    scraped = "some" if is_scraped else "none"
    return f"{plugin.kind} with {len(candidates)} endpoints, {scraped} of them scraped"


def probe_context(seed: int = 1) -> SchedulingContext:
    """Build the context of the checks: 1000 prompt tokens, an adapter that some endpoints hold."""
    return builders.context(
        seed,
        model="lora",
        prompt=b"p" * 4000,
        prompt_tokens=1000,
        session="s-1",
        headers={":method": "POST", ":path": "/v1/chat/completions", "x-session": "s-1"},
        blocks=tuple(range(1, 17)),
        first_user_message="Which way?",
    )


@contextlib.contextmanager
def report_errors(about: str, expected: str, advice: str = "") -> Iterator[None]:
    """Report whatever a plugin raises, an exit as well, as a breach of the contract."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raised = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise AssertionError(f"{about}: expected {expected}, got {raised}{advice}") from error


def build_plugin(make: Callable[[], Role]) -> Role:
    """Build a plugin."""
    with report_errors(
        getattr(make, "__name__", str(make)),
        "a plugin that can be built without parameters",
        "; give every parameter a default, or pass a function that builds one",
    ):
        return make()


def build_checked(make: Callable[[], Role]) -> Role:
    """Build a plugin and check its declaration: kind, needs, frozen and strict parameters."""
    plugin = build_plugin(make)
    cls: Any = type(plugin)
    about: str = cls.__name__
    with report_errors(about, "kind, needs and extra_metrics that can be read"):
        kind, needs = plugin.kind, plugin.needs
        extra_metrics = read_extra_metrics(plugin)
    demand(_KIND.fullmatch(str(kind)), about, "a kind in lower case with dashes", kind)
    signals = isinstance(needs, frozenset) and all(isinstance(signal, Signal) for signal in needs)
    demand(signals, about, "needs as a frozenset of Signal", needs)
    demand(
        isinstance(extra_metrics, frozenset),
        about,
        "extra_metrics as a frozenset of names, because needs has Signal.EXTRA",
        extra_metrics,
    )
    demand(isinstance(plugin, msgspec.Struct), about, "a msgspec struct", cls.__bases__)
    config = cls.__struct_config__
    demand(config.frozen, about, "frozen=True", "fields that can be set")
    demand(
        config.forbid_unknown_fields,
        about,
        "forbid_unknown_fields=True, so that a misspelled parameter is an error",
        "unknown fields ignored",
    )
    return plugin


def read_extra_metrics(plugin: Plugin) -> Any:
    """The names of the extra metrics that a plugin reads; None for a plugin that declares none."""
    return getattr(plugin, "extra_metrics", None if Signal.EXTRA in plugin.needs else frozenset())


def stable_answer(
    make: Callable[[], Role],
    call: CallT[Role, AnswerT],
    candidates: Sequence[Candidate],
    *,
    about: str,
    check_answer: Callable[[AnswerT], None],
    seeds: Sequence[int] = (1, 2),
) -> AnswerT:
    """Return the answer of a plugin, checked to be repeatable and free of side effects.

    Args:
        about: The plugin and the situation.
        seeds: Seeds of the context that must give the same answer.

    Raises:
        AssertionError: The plugin breaks a rule.
    """
    arguments, plugin, other = list(candidates), build_plugin(make), build_plugin(make)
    answer = _call_without_effect(call, plugin, arguments, about)
    _check_form(check_answer, answer, about)
    for seed in seeds:
        again = call_plugin(call, plugin, probe_context(seed), arguments, about)
        demand(
            again == answer,
            about,
            f"the same answer to the same call (seed {seed}; state may change in on_committed only, "
            "because dry runs call the plugin too)",
            _AnswerPair(answer, "and then", again),
        )
    _call_optional_methods(plugin, candidates[0], about)
    demand(
        call_plugin(call, other, probe_context(), arguments, about) == answer,
        about,
        "the same answer of a second instance: no shared state, no chance but the rng of the context",
        "another answer",
    )
    _call_optional_methods(other, candidates[0], about)
    first, second = (
        call_plugin(call, instance, probe_context(), arguments, about)
        for instance in (plugin, other)
    )
    _check_form(check_answer, first, about)
    demand(
        first == second,
        about,
        "equal answers after equal decisions",
        _AnswerPair(first, "and", second),
    )
    return answer


def _check_form(check_answer: Callable[[AnswerT], None], answer: AnswerT, about: str) -> None:
    """Check an answer, which may be of a type that the check cannot even read."""
    try:
        check_answer(answer)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{about}: expected an answer of the types of its role, got {short(answer)}"
        ) from error


def _call_without_effect(
    call: CallT[Role, AnswerT], plugin: Role, candidates: list[Candidate], about: str
) -> AnswerT:
    """Answer of a plugin, which must change neither the candidates nor the context."""
    context, order = probe_context(), list(map(id, candidates))
    before = _encode_arguments(candidates, context)
    answer = call_plugin(call, plugin, context, candidates, about)
    demand(
        list(map(id, candidates)) == order,
        about,
        "unchanged order of the candidates",
        "another order",
    )
    demand(
        _encode_arguments(candidates, context) == before,
        about,
        "unchanged context and candidates",
        "a change",
    )
    return answer


def call_plugin(
    call: CallT[Role, AnswerT],
    plugin: Role,
    context: SchedulingContext,
    candidates: list[Candidate],
    about: str,
) -> AnswerT:
    """Return the answer of a plugin in a situation."""
    with report_errors(about, "an answer"):
        return call(plugin, context, candidates)


def _call_optional_methods(plugin: Plugin, chosen: Candidate, about: str) -> None:
    """Call the optional methods of a plugin: keys, answer headers, `on_committed`."""
    context, keys, pairs = probe_context(), NO_KEYS, list[tuple[str, str]]()
    with report_errors(about, "on_committed, keys and answer_headers to accept any decision"):
        if isinstance(plugin, RequestKeyProvider):
            keys = dict(plugin.keys(context))
        if isinstance(plugin, ResponseHeaderProvider):
            pairs = list(plugin.answer_headers(context, chosen.endpoint))
        if isinstance(plugin, Observer):
            plugin.on_committed(_decision(context, chosen, keys), context.now)
    _check_texts(keys.items(), f"{about}, keys")
    _check_texts(pairs, f"{about}, answer_headers")
    invalid = [pair for pair in pairs if not plugin_guard.is_valid_header(*pair)]
    demand(
        not invalid,
        f"{about}, answer_headers",
        "headers for responses, names in lower case and values in visible ASCII",
        invalid,
    )


def _decision(context: SchedulingContext, chosen: Candidate, keys: Mapping[str, str]) -> Decision:
    return Decision(
        request=context.request,
        endpoints=[chosen.endpoint],
        candidates=[chosen],
        scored_candidates=[chosen],
        totals=[0.0],
        block_hashes=context.blocks,
        plugin_keys=keys,
    )


def _check_texts(pairs: Iterable[tuple[str, str]], about: str) -> None:
    wrong = [
        pair
        for pair in pairs
        if not isinstance(pair, Sequence) or [isinstance(it, str) for it in pair] != [True, True]
    ]
    demand(not wrong, about, "pairs of text", wrong)


def _encode_arguments(candidates: Sequence[Candidate], context: SchedulingContext) -> bytes:
    """Arguments of a plugin as bytes, to detect mutation."""
    return msgspec.json.encode([candidates, context.request, context.headers, context.blocks])
