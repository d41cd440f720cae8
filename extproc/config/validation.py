"""Converts plain trees (mappings, lists, scalars) to frozen structs; errors name the path.

msgspec checks types and ranges. This module reports unknown keys first, with a suggestion, and
rewrites msgspec's messages as expected value, actual value and fix.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, TypeVar, cast

import msgspec
from msgspec import inspect

from extproc.errors import ConfigError
from extproc.request import MAX_NAME_BYTES

#: A step into a tree: a key or an index.
Step = str | int
Path = tuple[Step, ...]

StructT = TypeVar("StructT")

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_AT = re.compile(r"^(?P<message>.*?)(?: - at `(?P<at>.*)`)?$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `(?P<types>[^`]*)`(?P<bound>.*?)(?:, got `(?P<got>.*)`)?$")
_NOT_AMONG = "Invalid enum value "
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")

#: Keys of command lines, which may hold a password: errors do not repeat what stands there.
_COMMANDS = frozenset({"launch", "exec", "command"})

#: Types of a list in a file.
_COLLECTIONS = (
    inspect.VarTupleType,
    inspect.ListType,
    inspect.SetType,
    inspect.FrozenSetType,
)

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")

#: Longest Go duration (seconds): 2**63 ns.
_MAX_DURATION_S = 2.0**63 * 1e-9


def parse_duration(text: str) -> float | None:
    """Seconds of a Go duration such as `1m30s`; None for any other text, and for more than Go takes."""
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    seconds = sum(float(number) * _UNIT_S[unit] for number, unit in parts)
    return seconds if seconds < _MAX_DURATION_S else None


def format_path(path: Path) -> str:
    """Format a path such as `scheduling.profile.scorers[1].weight`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else step
    return text


class Place(msgspec.Struct, frozen=True):
    """Place of a value, for errors; its text is such as `pool.yaml: pools[0].name`.

    Attributes:
        file: File or flag.
        path: Path in it; empty for all of it.
    """

    file: str
    path: Path = ()

    def __truediv__(self, step: Step) -> Place:
        """Place below this one."""
        return Place(self.file, (*self.path, step))

    def __str__(self) -> str:
        return f"{self.file}: {format_path(self.path)}" if self.path else self.file


def to_struct(tree: object, into: type[StructT], *, where: Place | str) -> StructT:
    """Convert a tree to a struct.

    A null in a struct with `NULL_IS_ABSENT` takes the default of its field.

    Args:
        where: Place of `tree`, or its file, for errors.

    Raises:
        ConfigError: A key is unknown or missing, a value has the wrong type or is out of range.
    """
    place = Place(where) if isinstance(where, str) else where
    info = _info(cast("Hashable", into))
    _refuse_unknown(tree, info, place)
    tree = _drop_nulls(tree, info)
    try:
        return msgspec.convert(tree, into)
    except msgspec.ValidationError as error:
        raise _from_msgspec_error(str(error), tree, into, place) from None


def is_for_files(key: str) -> bool:
    """True if a file may have the key of a field; the others begin with an underscore."""
    return not key.startswith("_")


def suggest(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return advice to write the most similar name; `otherwise` if none is similar."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else otherwise


def show(value: object) -> str:
    """Format a value for an error: at most 60 characters, strings in quotes."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return f"a mapping with {len(value)} keys"
        case list():
            return f"a list of {len(value)}"
        case _:
            text = repr(value)
            return text if len(text) <= 60 else f"{text[:57]}..."


@lru_cache(maxsize=256)
def _info(into: Hashable) -> inspect.Type:
    """Return msgspec's description of a type, cached because that of all settings takes 20 ms."""
    return inspect.type_info(into)


def _refuse_unknown(tree: object, info: inspect.Type, place: Place) -> None:
    """Walk tree and type in parallel and raise ConfigError at the first key without a field."""
    if isinstance(info, inspect.UnionType):
        tagged = _tagged(info)
        if tagged and isinstance(tree, dict):
            _refuse_unknown(tree, _tagged_struct(tree, tagged, place), place)
            return
        for member in info.types:
            _refuse_unknown(tree, member, place)
    elif isinstance(info, inspect.StructType) and isinstance(tree, dict):
        fields = {
            field.encode_name: field.type
            for field in info.fields
            if is_for_files(field.encode_name)
        }
        if info.tag_field is not None:
            fields[info.tag_field] = inspect.AnyType()
        for key, value in tree.items():
            below = fields.get(key) if isinstance(key, str) else None
            if below is None:
                raise unknown_key(key, fields, place)
            _refuse_unknown(value, below, place / key)
    elif isinstance(info, inspect.VarTupleType | inspect.ListType) and isinstance(tree, list):
        for at, value in enumerate(tree):
            _refuse_unknown(value, info.item_type, place / at)


def _drop_nulls(tree: object, info: inspect.Type) -> object:
    """The tree without keys that are null in a file, and absent to their structs.

    A null of a required key stays, for an error that names the key.
    """
    if isinstance(info, inspect.UnionType):
        for member in info.types:
            tree = _drop_nulls(tree, member)
    elif isinstance(info, inspect.StructType) and isinstance(tree, dict):
        fields = {field.encode_name: field.type for field in info.fields}
        required = {field.encode_name for field in info.fields if field.required}
        is_absent = getattr(info.cls, "NULL_IS_ABSENT", False)
        return {
            key: _drop_nulls(value, fields[key]) if key in fields else value
            for key, value in tree.items()
            if not is_absent or value is not None or key in required
        }
    elif isinstance(info, inspect.VarTupleType | inspect.ListType) and isinstance(tree, list):
        return [_drop_nulls(value, info.item_type) for value in tree]
    return tree


def _tagged(info: inspect.UnionType) -> list[inspect.StructType]:
    """Return the tagged structs of a union; empty if it has none."""
    return [
        member
        for member in info.types
        if isinstance(member, inspect.StructType) and member.tag_field is not None
    ]


def _tagged_struct(
    tree: Mapping[object, object], members: Sequence[inspect.StructType], place: Place
) -> inspect.StructType:
    """Return the struct that the tag of a mapping selects."""
    key = str(members[0].tag_field)
    tags = [str(member.tag) for member in members]
    if key not in tree:
        raise ConfigError(
            place,
            wanted=f"the key {key}: one of {', '.join(tags)}",
            got=show(tree),
            fix=f"add {key}",
        )
    tag = tree[key]
    for member in members:
        if member.tag == tag:
            return member
    raise ConfigError(
        place / key,
        wanted=f"one of {', '.join(tags)}",
        got=show(tag),
        fix=suggest(str(tag), tags, f"write {tags[0]}"),
    )


def unknown_key(key: object, fields: Iterable[str], place: Place) -> ConfigError:
    """Return the error of a key that is not among the fields of a struct."""
    names = sorted(fields)
    return ConfigError(
        place / str(key),
        wanted=f"one of {', '.join(names)}" if names else "no keys",
        got=f"the unknown key {key}",
        fix=suggest(str(key), names, "remove it"),
    )


def _from_msgspec_error(text: str, tree: object, into: type, place: Place) -> ConfigError:
    """Convert a message of msgspec to a ConfigError."""
    split = _AT.match(text)
    message = split["message"] if split else text
    local, known = _steps(split["at"] if split else None)
    spot = Place(place.file, (*place.path, *local))
    actual = _show_at(spot.path, _look(tree, local)) if known else ""
    expected = _EXPECTED.match(message)
    if expected:
        actual = actual or expected["got"] or "something else"
        return ConfigError(
            spot,
            wanted=_wanted(expected["types"], expected["bound"]),
            got=actual,
            fix=_fix(expected["types"], expected["bound"], actual),
        )
    if message.startswith(_NOT_AMONG):
        names = _choices(_type_at(_info(cast("Hashable", into)), local, tree))
        value = _look(tree, local) if known else message.removeprefix(_NOT_AMONG).strip("'")
        return _not_among(value, names, spot)
    missing = re.match(r"^Object missing required field `(.*)`$", message)
    if missing:
        return ConfigError(
            spot, wanted=f"the key {missing[1]}", got=actual, fix=f"add {missing[1]}"
        )
    # A struct's own check: "expected x of at least 1, got 0".
    wanted, _, rest = message.partition(", got ")
    return ConfigError(
        spot, wanted=wanted.removeprefix("expected "), got=rest or actual, fix="change the value"
    )


def _show_at(path: Path, value: object) -> str:
    """Format the value at a path for an error; of a command line no word."""
    keys = [step for step in path if isinstance(step, str)]
    if not value or isinstance(value, bool | dict | list) or _COMMANDS.isdisjoint(keys[-1:]):
        return show(value)
    return "text" if isinstance(value, str) else "another value"


def _wanted(types: str, bound: str) -> str:
    words = " or ".join(_WORDS.get(name, name) for name in types.split(" | "))
    if bound.startswith(" of length <="):
        return f"{words} of at most {bound.rpartition(' ')[2]}"
    if bound.startswith(" of length"):
        return f"{words} that is not empty"
    if bound.startswith(" matching regex"):
        pattern = bound.partition("'")[2].rstrip("'")
        return f"{words} that matches {pattern}"
    return f"{words}{bound}"


def _fix(types: str, bound: str, actual: str) -> str:
    quoted = actual.startswith(("'", '"'))
    if bound:
        return "change the value"
    if quoted and ("int" in types or "float" in types):
        return "write the number without quotes and without a unit; the unit is in the name"
    if quoted and "bool" in types:
        return "write true or false without quotes"
    if types == "str":
        return "put the value in quotes"
    if "object" in types and actual == "null":
        return "remove the line or put keys under it"
    return f"write {_wanted(types, '')}"


def _not_among(value: object, names: Sequence[str], spot: Place) -> ConfigError:
    wanted = f"one of {', '.join(names)}" if len(names) > 1 else ", ".join(names)
    usual = f"write {names[0]}" if names else "change the value"
    return ConfigError(
        spot,
        wanted=wanted or "another value",
        got=show(value),
        fix=suggest(str(value), names if len(names) > 1 else (), usual),
    )


def _choices(info: inspect.Type | None) -> list[str]:
    """Return the values that a type lists, also in unions, and as keys or items of collections."""
    if isinstance(info, inspect.LiteralType):
        return [str(value) for value in info.values]
    if isinstance(info, inspect.UnionType):
        return [name for member in info.types for name in _choices(member)]
    if isinstance(info, inspect.DictType):
        return _choices(info.key_type) + _choices(info.value_type)
    return _choices(info.item_type) if isinstance(info, _COLLECTIONS) else []


def _steps(at: str | None) -> tuple[Path, bool]:
    """Split `$.a.b[0]` into steps; False if they lead to several values (`[...]`)."""
    if at is None:
        return (), True
    steps: list[Step] = []
    for key, index in _STEP.findall(at):
        if index == "...":
            return tuple(steps), False
        steps.append(int(index) if index else key)
    return tuple(steps), not at.startswith("key")


def _look(tree: object, path: Path) -> object:
    for step in path:
        if isinstance(tree, dict | list):
            tree = tree[step]  # type: ignore[index]  # msgspec walked the same way
    return tree


def _type_at(info: inspect.Type, path: Path, tree: object) -> inspect.Type | None:
    """Return the type at a path; None behind a union of several structs without tags."""
    for step in path:
        if isinstance(info, inspect.UnionType):
            info = _member_of(info, tree)
        if isinstance(info, inspect.StructType):
            info = next(field.type for field in info.fields if field.encode_name == step)
        elif isinstance(info, _COLLECTIONS):
            info = info.item_type
        else:
            return None
        tree = _look(tree, (step,))
    return info


def _member_of(info: inspect.UnionType, tree: object) -> inspect.Type:
    """Return the member of a union that matches a mapping or a list; the union if there is none."""
    if isinstance(tree, list):
        return next((member for member in info.types if isinstance(member, _COLLECTIONS)), info)
    tagged = _tagged(info)
    if tagged and isinstance(tree, dict):
        return next((member for member in tagged if member.tag == tree.get(member.tag_field)), info)
    return next((member for member in info.types if isinstance(member, inspect.StructType)), info)


Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
PositiveMilliseconds = Annotated[float, msgspec.Meta(gt=0)]
PositiveRate = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
#: Name of a model, an adapter or an objective; requests with longer ones are refused.
BoundedName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
#: Name of an extra metric.
MetricName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z_][A-Za-z0-9_./-]{0,63}$")]


def check_distinct(values: Sequence[int], key: str, place: Place) -> None:
    """Check that no two entries of a list have the same value of a key.

    Args:
        values: Of the entries, in order.
        place: Of the list.

    Raises:
        ConfigError: A value stands twice.
    """
    for at, value in enumerate(values):
        if value in values[:at]:
            raise ConfigError(
                place / at / key,
                wanted=f"every {key} once",
                got=f"{value} twice",
                fix=f"write the settings of a {key} into one entry",
            )
