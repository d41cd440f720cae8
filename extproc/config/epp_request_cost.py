"""Converts the plugin of an EndpointPickerConfig that reports what a request cost.

Upstream, an expression in CEL over the `usage` of the response is evaluated, and a rate limiter of the
gateway reads the number in dynamic metadata. Here `responses.request_cost` has a weight for each kind of
token, so sums of tokens with constant factors are converted. Others are refused: a limit that gets no
number would no longer limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from extproc.config import validation
from extproc.config.pool_sections import EppPlugins
from extproc.config.validation import Place
from extproc.errors import ConfigError
from extproc.scheduling.framework import UpstreamParameters

_REPORTER: Final = "request-attribute-reporter"

#: Where the cost is in dynamic metadata, upstream by default and here always.
_NAMESPACE: Final = "envoy.lb"
_KEY: Final = "x-gateway-inference-request-cost"

#: Sum of weights by kind of token; a constant has the kind "".
_Weights = Mapping[str, float]

#: Numbers of `usage` that upstream has, as weights here.
_DETAILS: Final = "usage.prompt_tokens_details"
_FIELDS: Final[Mapping[str, _Weights]] = {
    "usage.prompt_tokens": {"prompt": 1.0},
    "usage.completion_tokens": {"completion": 1.0},
    "usage.total_tokens": {"prompt": 1.0, "completion": 1.0},
    f"{_DETAILS}.cached_tokens": {"cached": 1.0},
}

#: Those that upstream always has, so that a guard has no effect.
_ALWAYS: Final = frozenset(name for name in _FIELDS if not name.startswith(_DETAILS))

_TOKEN: Final = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?)|(?P<name>[a-z_]+(?:\.[a-z_]+)*)"
    r"|(?P<sign>&&|[()?:+*/-]))"
)

#: Longest expression (characters), and the deepest one (parentheses and guards).
_MAX_LENGTH: Final = 1000
_MAX_DEPTH: Final = 30


class _MetadataKey(UpstreamParameters, frozen=True, kw_only=True):
    namespace: str = ""
    name: str


class _Attribute(UpstreamParameters, frozen=True, kw_only=True):
    key: _MetadataKey
    expression: validation.Name
    condition: str = ""


class _Reporter(UpstreamParameters, frozen=True, kw_only=True):
    attributes: tuple[_Attribute, ...]


def convert_request_cost(plugins: EppPlugins, file: Place) -> dict[str, object]:
    """Convert the expression of a reporter to keys of our section `responses`; empty without one.

    Streams are requested as well, because upstream reads all responses.

    Raises:
        ConfigError: The expression is no sum of tokens, or its value is for another key.
    """
    section: dict[str, object] = {}
    for plugin, place in plugins.find_plugins({_REPORTER}, file):
        attributes = validation.to_struct(plugin.parameters, _Reporter, where=place).attributes
        if section or len(attributes) != 1:
            raise ConfigError(
                place / "attributes",
                wanted="one attribute in the file",
                got=f"{len(attributes)} here" + (", and one before" if section else ""),
                fix=f"keep the one of {_KEY}",
            )
        weights = _convert_attribute(attributes[0], place / "attributes" / 0)
        section = {"request_cost": weights, "stream_sample_ratio": 1.0}
    return section


def _convert_attribute(attribute: _Attribute, place: Place) -> dict[str, float]:
    key = attribute.key
    namespace = key.namespace or _NAMESPACE
    if (namespace, key.name) != (_NAMESPACE, _KEY):
        raise ConfigError(
            place / "key",
            wanted=f"{_KEY} in {_NAMESPACE}, where the cost is",
            got=f"{validation.show(key.name)} in {validation.show(namespace)}",
            fix="have the gateway read the cost there, and write that key",
        )
    condition = _Expression(attribute.condition)
    if attribute.condition.strip() and not (
        condition.read_guards() <= _ALWAYS and condition.is_read
    ):
        raise ConfigError(
            place / "condition",
            wanted=f"has() of {', '.join(sorted(_ALWAYS))}, joined by &&",
            got=validation.show(attribute.condition),
            fix="remove it: responses without usage have no cost",
        )
    weights = _Expression(attribute.expression).read_weights()
    if weights is None:
        raise ConfigError(
            place / "expression",
            wanted=f"a sum of {', '.join(_FIELDS)} with constant factors, or of (has(usage.x) ? usage.x : 0)",
            got=validation.show(attribute.expression),
            fix="write such a sum, or remove the plugin if no limit of the gateway reads its value",
        )
    return weights


class _UnsupportedError(Exception):
    """The expression has another form."""


class _Expression:
    """An expression in CEL, read from the left.

    Attributes:
        is_read: Whether all of it was read.
    """

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        self._at = self._depth = 0
        text, start = text.strip(), 0
        while start < len(text) <= _MAX_LENGTH and (match := _TOKEN.match(text, start)):
            self._tokens.append(match[0].strip())
            start = match.end()
        self._is_known = start == len(text)

    @property
    def is_read(self) -> bool:
        return self._is_known and self._at == len(self._tokens)

    def read_guards(self) -> frozenset[str]:
        """Names in `has(NAME) && has(NAME)`; one that is empty where another form begins."""
        names: set[str] = set()
        while True:
            if self._tokens[self._at : self._at + 2] != ["has", "("]:
                return frozenset(("",))
            self._at += 2
            names.add(self._take())
            if self._take() != ")":
                return frozenset(("",))
            if not self._skip("&&"):
                return frozenset(names)

    def read_weights(self) -> dict[str, float] | None:
        """Weights by kind of token, without zeros; None for another form, and for no tokens."""
        try:
            weights = self._read_choice()
        except _UnsupportedError:
            return None
        known = {kind: weight for kind, weight in weights.items() if weight}
        is_finite = all(map(math.isfinite, known.values()))
        return known if self.is_read and known and "" not in known and is_finite else None

    def _take(self) -> str:
        """The next token; empty at the end."""
        self._at += 1
        return self._tokens[self._at - 1] if self._at <= len(self._tokens) else ""

    def _skip(self, *tokens: str) -> str:
        """The next token if it is one of these, and read past it; else empty."""
        if self._at < len(self._tokens) and self._tokens[self._at] in tokens:
            return self._take()
        return ""

    def _expect(self, token: str) -> None:
        if not self._skip(token):
            raise _UnsupportedError

    def _read_choice(self) -> _Weights:
        """A sum, or a guarded one that is 0 without what it is guarded by."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _UnsupportedError
        if self._tokens[self._at : self._at + 1] != ["has"]:
            weights = self._read_sum()
        else:
            guards = self.read_guards()
            self._expect("?")
            weights = self._read_choice()
            self._expect(":")
            # A guard of details that are absent would remove other tokens too.
            known = _ALWAYS if weights.keys() - {"cached"} else {*_FIELDS, _DETAILS}
            if any(self._read_choice().values()) or not guards <= known:
                raise _UnsupportedError
        self._depth -= 1
        return weights

    def _read_sum(self) -> _Weights:
        total = dict(self._read_product())
        while sign := self._skip("+", "-"):
            for kind, weight in self._read_product().items():
                total[kind] = total.get(kind, 0.0) + (weight if sign == "+" else -weight)
        return total

    def _read_product(self) -> _Weights:
        product = self._read_factor()
        while sign := self._skip("*", "/"):
            other = self._read_factor()
            if sign == "*" and product.keys() == {""}:
                product, other = other, product
            # Upstream divides constants as whole numbers.
            is_scaled = other.keys() == {""} and (sign == "*" or product.keys() != {""})
            if not is_scaled or (sign == "/" and not other[""]):
                raise _UnsupportedError
            factor = other[""] if sign == "*" else 1.0 / other[""]
            product = {kind: weight * factor for kind, weight in product.items()}
        return product

    def _read_factor(self) -> _Weights:
        sign = -1.0 if self._skip("-") else 1.0
        if self._skip("double", "int", "("):
            if self._tokens[self._at - 1] != "(":
                self._expect("(")
            weights = self._read_choice()
            self._expect(")")
        else:
            name = self._take()
            known = {"": float(name)} if name[:1].isdigit() else _FIELDS.get(name)
            if known is None:
                raise _UnsupportedError
            weights = known
        return {kind: sign * weight for kind, weight in weights.items()}
