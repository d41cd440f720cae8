"""Reader of label selectors as kubectl and Kubernetes' `labels.Parse` take them."""

from __future__ import annotations

import re
from typing import Any, Final

from extproc.errors import ConfigError

#: A requirement; values in parentheses may hold commas.
_REQUIREMENT: Final = re.compile(
    r"""\s*(?:
        (?P<absent>!)?\s*(?P<there>[\w./-]+)
        |(?P<key>[\w./-]+)\s*(?P<equality>==?|!=)\s*(?P<value>[\w.-]*)
        |(?P<member>[\w./-]+)\s+(?P<set>in|notin)\s*\((?P<values>[\w.,\s-]*)\)
    )\s*(?:,|$)""",
    re.ASCII | re.VERBOSE,
)


def read_selector(flag: str, text: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Read a selector into labels that must be equal, and further expressions.

    Raises:
        ConfigError: A requirement cannot be read.
    """
    labels: dict[str, str] = {}
    expressions: list[dict[str, Any]] = []
    start, text = 0, text.strip()
    while start < len(text):
        requirement = _REQUIREMENT.match(text, start)
        if requirement is None:
            raise ConfigError(
                flag,
                wanted="key=value, key!=value, key in (a,b), key notin (a,b), key or !key, "
                "separated by commas",
                got=text,
                fix="write such as app=vllm,tier in (gpu,tpu),!canary",
            )
        start = requirement.end()
        key, value = requirement["key"], requirement["value"]
        if requirement["equality"] in {"=", "=="} and labels.setdefault(key, value) == value:
            continue
        if key:
            operator, values = "NotIn" if requirement["equality"] == "!=" else "In", [value]
        elif requirement["member"]:
            key, operator = requirement["member"], "In" if requirement["set"] == "in" else "NotIn"
            values = [word.strip() for word in requirement["values"].split(",")]
        else:
            key, operator, values = requirement["there"], "Exists", []
            if requirement["absent"]:
                operator = "DoesNotExist"
        expressions.append({"key": key, "operator": operator, "values": values})
    return labels, expressions
