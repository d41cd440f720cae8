"""Responses of the API server: errors, list pages and watch lines.

Malformed input becomes a value, never an exception.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Generic, TypeVar

import msgspec

from extproc.discovery.kubernetes import objects, watch_plan

_Raw = TypeVar("_Raw")

#: Answers 403 in a row (count) after which a right that was there before is missing.
FINAL_DENIALS = 4

#: Refusals that come after the right was checked.
_AUTHORIZED = frozenset({404, 409})


class ApiError(msgspec.Struct, frozen=True):
    """A failed request: no response, or an unsuccessful status.

    Attributes:
        status: HTTP status; 0 when there was no answer at all.
        credentials_expired: Whether fresh credentials may help.
    """

    status: int
    message: str
    retry_after_s: float = 0.0
    credentials_expired: bool = False


class Denials:
    """Distinguishes a missing right from an API server that has not loaded its Roles yet.

    The right to do what was allowed before is missing from the fourth 403 in a row on, any other
    right from the first one.
    """

    def __init__(self) -> None:
        self._allowed: set[str] = set()
        self._refused: Counter[str] = Counter()

    def is_missing(self, verb: str, answer: bytes | ApiError) -> bool:
        """Records a response; returns True if the right to `verb` is missing."""
        if not isinstance(answer, ApiError) or answer.status in _AUTHORIZED:
            self._allowed.add(verb)
            self._refused[verb] = 0
            return False
        if answer.status != 403:
            self._refused[verb] = 0
            return False
        self._refused[verb] += 1
        return verb not in self._allowed or self._refused[verb] >= FINAL_DENIALS


class Applied(msgspec.Struct, frozen=True):
    """An object was added or modified.

    Attributes:
        version: Resource version to resume a watch after.
    """

    value: objects.Value
    version: str


class Deleted(msgspec.Struct, frozen=True):
    """An object was deleted."""

    namespace: str
    name: str
    version: str


class InvalidObject(msgspec.Struct, frozen=True):
    """An object that cannot be decoded; it counts as deleted.

    Attributes:
        version: Resource version to resume a watch after.
    """

    namespace: str
    name: str
    version: str
    reason: str


class Bookmark(msgspec.Struct, frozen=True):
    """A bookmark: no other event up to this version."""

    version: str


class WatchError(msgspec.Struct, frozen=True):
    """An ERROR event that ends the watch; 410 means the version is too old."""

    code: int
    message: str


class UndecodableMessage(msgspec.Struct, frozen=True):
    """A line that is no event: some unknown change was missed."""

    reason: str


#: An object that does not count.
_Absent = Deleted | InvalidObject

WatchEvent = Applied | Deleted | InvalidObject | Bookmark | WatchError | UndecodableMessage


class ListPage(msgspec.Struct, frozen=True):
    """One page of a list.

    Attributes:
        continue_token: Token of the next page; empty on the last.
    """

    values: tuple[objects.Value, ...]
    invalid_objects: tuple[InvalidObject, ...]
    version: str
    continue_token: str = ""


class ApiStatus(msgspec.Struct, frozen=True):
    """Error message of the server.

    Attributes:
        reason: Reason as a single word, such as `Forbidden`.
    """

    code: int = 0
    reason: str = ""
    message: str = ""


class _Line(msgspec.Struct, Generic[_Raw], gc=False):
    type: str
    object: _Raw


class _ListMeta(msgspec.Struct, rename={"version": "resourceVersion", "more": "continue"}):
    version: str = ""
    more: str = ""


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Key(msgspec.Struct, rename={"version": "resourceVersion"}):
    """Key of an object whose other fields cannot be decoded."""

    name: str = ""
    namespace: str = ""
    version: str = ""


class _Keyed(msgspec.Struct):
    metadata: _Key


_KEYED = msgspec.json.Decoder(_Keyed)
_STATUS = msgspec.json.Decoder(ApiStatus)
_LIST = msgspec.json.Decoder(_List)
_ANY_LINE = msgspec.json.Decoder(_Line[msgspec.Raw])


class WatchReader:
    """Parses pages and lines of one resource."""

    def __init__(self, resource: watch_plan.ResourceType) -> None:
        form = objects.FORMS[resource]
        self._value = form.value
        # A finalizer may hold a custom resource that is being deleted. Pods and slices say
        # themselves which endpoints end.
        self._ends_at_deletion = resource not in {watch_plan.PODS, watch_plan.SLICES}
        self._object: msgspec.json.Decoder[Any] = msgspec.json.Decoder(form.raw)
        generic: Any = _Line
        self._line: msgspec.json.Decoder[_Line[Any]] = msgspec.json.Decoder(generic[form.raw])

    def decode_event(self, text: bytes) -> WatchEvent:
        """Parses one line of a watch."""
        try:
            line = self._line.decode(text)
        except objects.BROKEN:
            return self._decode_other(text)
        raw = line.object
        version = raw.metadata.resource_version
        match line.type:
            case "ADDED" | "MODIFIED":
                if not raw.metadata.name:
                    return _NAMELESS
                value = self._decode_value(raw)
                return value if isinstance(value, _Absent) else Applied(value, version)
            case "DELETED":
                return Deleted(raw.metadata.namespace, raw.metadata.name, version)
            case "BOOKMARK":
                return Bookmark(version)
            case _:
                return self._decode_other(text)

    def decode_list(self, text: bytes) -> ListPage | UndecodableMessage:
        """Parses one page of a list."""
        try:
            page = _LIST.decode(text)
        except objects.BROKEN as error:
            return UndecodableMessage(_error_text(error))
        values: list[objects.Value] = []
        invalid_objects: list[InvalidObject] = []
        for item in page.items or ():
            value = self._decode_object(item)
            if isinstance(value, InvalidObject):
                invalid_objects.append(value)
            elif not isinstance(value, Deleted):
                values.append(value)
        return ListPage(
            tuple(values), tuple(invalid_objects), page.metadata.version, page.metadata.more
        )

    def _decode_object(self, text: msgspec.Raw) -> objects.Value | _Absent:
        try:
            raw = self._object.decode(text)
        except objects.BROKEN as error:
            key = _decode_key(text)
            return InvalidObject(key.namespace, key.name, key.version, _error_text(error))
        if not raw.metadata.name:
            return InvalidObject(raw.metadata.namespace, "", "", "it has no name")
        return self._decode_value(raw)

    def _decode_value(self, raw: Any) -> objects.Value | _Absent:
        """Converts an object; an object whose conversion raises is invalid, alone."""
        named = raw.metadata
        if self._ends_at_deletion and named.deletion_timestamp:
            return Deleted(named.namespace, named.name, named.resource_version)
        try:
            return self._value(raw)
        except Exception as error:  # noqa: BLE001 - one object must not hide all others
            reason = f"reading it raised {type(error).__name__}"
            return InvalidObject(named.namespace, named.name, named.resource_version, reason)

    def _decode_other(self, text: bytes) -> WatchEvent:
        """Parses a line without a valid object: an error, a bookmark or a broken object."""
        try:
            line = _ANY_LINE.decode(text)
        except objects.BROKEN as error:
            return UndecodableMessage(_error_text(error))
        key = _decode_key(line.object)
        match line.type:
            case "ERROR":
                failed = decode_status(line.object)
                return WatchError(failed.code, failed.message or failed.reason)
            case "BOOKMARK" if key.version:
                return Bookmark(key.version)
            case "DELETED" if key.name:
                return Deleted(key.namespace, key.name, key.version)
            case "ADDED" | "MODIFIED" if key.name:
                value = self._decode_object(line.object)
                if isinstance(value, _Absent):
                    return value
        return UndecodableMessage(f"an event of type {line.type[:40]!r} that says nothing")


_NAMELESS = UndecodableMessage("an object without a name")


def decode_status(text: bytes | msgspec.Raw) -> ApiStatus:
    """Parses an error message of the server, or a page of a proxy before it; its text on one line."""
    try:
        status = _STATUS.decode(text)
    except objects.BROKEN:
        status = ApiStatus(message=bytes(text)[:200].decode("utf-8", "replace"))
    return msgspec.structs.replace(status, message=" ".join(status.message.split()))


def _decode_key(text: msgspec.Raw) -> _Key:
    try:
        return _KEYED.decode(text).metadata
    except objects.BROKEN:
        return _Key()


def _error_text(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__
