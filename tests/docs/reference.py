"""The configuration reference of the README, made from the docstrings of the settings.

    python -m tests.docs.reference

prints the block; a test holds the README against it.
"""

from __future__ import annotations

import inspect
import re
import textwrap

import msgspec

from extproc.config import grammar, settings
from extproc.prefix import blocks

SECTIONS = (
    ("server", settings.Server),
    ("pool", settings.Source),
    ("scrape", settings.Scrape),
    ("scheduling", grammar.Scheduling),
    ("prefix", settings.Prefix),
    ("prefix.schedule", blocks.Schedule),
    ("limits", settings.Limits),
    ("answers", settings.Answers),
    ("explain", settings.Explain),
    ("log", settings.Log),
)


def attributes(section: type[msgspec.Struct]) -> dict[str, str]:
    """Field to its text in the `Attributes` of the docstring."""
    text = inspect.getdoc(section) or ""
    part = text.partition("Attributes:\n")[2]
    found = {}
    for match in re.finditer(r"^    (\w+): (.*(?:\n {8}.*)*)", part, re.MULTILINE):
        found[match.group(1)] = " ".join(match.group(2).split())
    return found


def shown(value: object) -> str:
    """A default as YAML."""
    if isinstance(value, msgspec.Struct):
        return "see below"
    if value in ((), {}):
        return "none"
    return "`" + msgspec.json.encode(value).decode() + "`"


def table(name: str, section: type[msgspec.Struct]) -> str:
    """One section as a Markdown table."""
    rows = [f"**{name}**", "", "| field | default | meaning and reason |", "|---|---|---|"]
    texts = attributes(section)
    for field in msgspec.structs.fields(section):
        if field.required:
            default = "required"
        elif field.default_factory is not msgspec.NODEFAULT:
            default = shown(field.default_factory())
        else:
            default = shown(field.default)
        text = texts[field.name].replace("|", "\\|")
        rows.append(f"| `{field.encode_name}` | {default} | {text} |")
    return "\n".join(rows)


def block() -> str:
    """All sections."""
    tables = [table(name, section) for name, section in SECTIONS]
    texts = attributes(settings.Settings)
    top = [
        "**top level**",
        "",
        "| field | default | meaning and reason |",
        "|---|---|---|",
        f"| `conformance` | `false` | {texts['conformance']} |",
        f"| `seed` | `null` | {texts['seed']} |",
    ]
    return "\n\n".join([*tables, "\n".join(top)])


if __name__ == "__main__":
    print(textwrap.dedent(block()))
