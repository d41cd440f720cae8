"""Decoder of header blocks (RFC 7541).

Its costs follow the size of a block and of its list; a block that a peer made to be expensive ends the
connection after little work.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Final, TypeAlias

#: Name and value of a header field.
HeaderField: TypeAlias = tuple[bytes, bytes]

#: Bytes that RFC 7541 and RFC 9113 count for each field beside its name and value.
FIELD_OVERHEAD: Final = 32

#: Table that a peer may use before it knows of a setting (bytes).
DEFAULT_TABLE_BYTES: Final = 4096

#: Largest number in a block: above it lengths and indices mean nothing.
_MAX_NUMBER: Final = 1 << 24

#: Names of appendix A in their order, with values where it has them, and `_` for a space.
_STATIC_NAMES: Final = """
:authority :method=GET :method=POST :path=/ :path=/index.html :scheme=http :scheme=https
:status=200 :status=204 :status=206 :status=304 :status=400 :status=404 :status=500
accept-charset accept-encoding=gzip,_deflate accept-language accept-ranges accept
access-control-allow-origin age allow authorization cache-control content-disposition
content-encoding content-language content-length content-location content-range
content-type cookie date etag expect expires from host if-match if-modified-since
if-none-match if-range if-unmodified-since last-modified link location max-forwards
proxy-authenticate proxy-authorization range referer refresh retry-after server set-cookie
strict-transport-security transfer-encoding user-agent vary via www-authenticate
"""

_STATIC_TABLE: Final = tuple(
    (name.encode(), value.replace("_", " ").encode())
    for name, _, value in (entry.partition("=") for entry in _STATIC_NAMES.split())
)

#: More than two updates of the table's size, which section 4.2 allows at the start of a block.
_MANY_UPDATES: Final = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}", re.DOTALL)


#: Length of the Huffman code of each symbol (appendix B), in bits, as hexadecimal numbers of two
#: digits. The last is the end of a string, which never occurs in one. The code is canonical: codes of
#: one length are consecutive, in the order of their symbols.
_HUFFMAN_LENGTHS: Final = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b"
    "080606060505050606060606060607080f060c0a0d0607070707070707070707070707070707070707070707"
    "0807080d130d0e060f05060506050606060507070606060506070605050607070707070f0b0e0d1c14161414"
    "1616161716171717171718171818161718171717171516171617171816151416161717151716161815161717"
    "151516151716171714161616171616171a1a1413161716191a1a1a1b1b1a181913151a1b1b1a1b1815151a1a"
    "1c1b1b1b14181415161515171616191918181a171a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)

_END_OF_STRING: Final = 256

#: The longest padding behind the last symbol (bits).
_MAX_PADDING: Final = 7


class HpackError(Exception):
    """Block that cannot be decoded."""


class HeaderListError(Exception):
    """Block that expands to more than is allowed."""


class HpackDecoder:
    """Decodes the header blocks of one connection, in their order.

    Args:
        max_list_bytes: Largest list of fields, as RFC 9113 counts it.

    Attributes:
        max_table_bytes: Bound of the dynamic table, which the peer chose.
    """

    def __init__(self, max_list_bytes: int) -> None:
        self.table_bytes = 0
        self.max_table_bytes = DEFAULT_TABLE_BYTES
        self._allowed_bytes = DEFAULT_TABLE_BYTES
        self._max_list_bytes = max_list_bytes
        self._table: deque[HeaderField] = deque()

    def limit_table(self, allowed_bytes: int) -> None:
        """Allow a table of this size from the next block on, which must begin with a smaller one."""
        self._allowed_bytes = allowed_bytes
        if not allowed_bytes:
            # Emptied here: a client that never used its table need not announce a smaller one.
            self.max_table_bytes = 0
            self._evict(0)

    def decode(self, block: bytes) -> list[HeaderField]:
        """Decode a block.

        Raises:
            HpackError: It breaks a rule of RFC 7541.
            HeaderListError: Its list is too large.
        """
        try:
            return self._decode(block)
        except IndexError as error:
            raise HpackError("a header block is cut short") from error

    def _decode(self, block: bytes) -> list[HeaderField]:
        at, end = self._read_updates(block), len(block)
        fields: list[HeaderField] = []
        list_bytes = 0
        while at < end:
            head = block[at]
            if head & 0x80:
                index, at = head & 0x7F, at + 1
                if index == 0x7F:
                    index, at = _read_number(block, at - 1, 0x7F)
                field = self._find(index)
            else:
                is_indexed = head & 0x40
                if not is_indexed and head & 0x20:
                    raise HpackError("an update of the table's size is behind a field")
                index, at = _read_number(block, at, 0x3F if is_indexed else 0x0F)
                if index:
                    name = self._find(index)[0]
                else:
                    name, at = _read_string(block, at)
                value, at = _read_string(block, at)
                field = (name, value)
                if is_indexed:
                    self._insert(field)
            list_bytes += len(field[0]) + len(field[1]) + FIELD_OVERHEAD
            if list_bytes > self._max_list_bytes:
                raise HeaderListError("a header list is too large")
            fields.append(field)
        return fields

    def _read_updates(self, block: bytes) -> int:
        """Apply updates of the table's size; returns the offset of what follows them."""
        if _MANY_UPDATES.match(block):
            raise HpackError("a block begins with more than two updates of the table's size")
        at = 0
        while at < len(block) and block[at] & 0xE0 == 0x20:
            size, at = _read_number(block, at, 0x1F)
            if size > self._allowed_bytes:
                raise HpackError("an update of the table's size exceeds the setting")
            self.max_table_bytes = size
            self._evict(size)
        if self.max_table_bytes > self._allowed_bytes:
            raise HpackError("no update of the table's size follows a smaller setting")
        return at

    def _find(self, index: int) -> HeaderField:
        """Return an entry of the static or the dynamic table."""
        if index <= len(_STATIC_TABLE):
            if not index:
                raise HpackError("index 0")
            return _STATIC_TABLE[index - 1]
        index -= len(_STATIC_TABLE) + 1
        if index >= len(self._table):
            raise HpackError("an index is beyond the table")
        return self._table[index]

    def _insert(self, field: HeaderField) -> None:
        size = len(field[0]) + len(field[1]) + FIELD_OVERHEAD
        self._evict(self.max_table_bytes - size)
        if size <= self.max_table_bytes:
            self._table.appendleft(field)
            self.table_bytes += size

    def _evict(self, max_bytes: int) -> None:
        """Drop the oldest entries until the table is not larger."""
        while self._table and self.table_bytes > max_bytes:
            name, value = self._table.pop()
            self.table_bytes -= len(name) + len(value) + FIELD_OVERHEAD


def _read_number(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Read a number (section 5.1) whose prefix has the bits of a mask; returns it and what follows."""
    number = block[at] & mask
    at += 1
    if number < mask:
        return number, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        number += (byte & 0x7F) << shift
        if number > _MAX_NUMBER or shift > 28:
            raise HpackError("a number is too large")
        if byte < 0x80:
            return number, at
        shift += 7


def _read_string(block: bytes, at: int) -> tuple[bytes, int]:
    """Read a string (section 5.2); returns it and the offset of what follows."""
    is_huffman, size = block[at] & 0x80, block[at] & 0x7F
    at += 1
    if size == 0x7F:
        size, at = _read_number(block, at - 1, 0x7F)
    end = at + size
    if end > len(block):
        raise HpackError("a string is cut short")
    data = block[at:end]
    return (decode_huffman(data) if is_huffman else data), end


def _build_huffman_symbols() -> Mapping[tuple[int, int], int]:
    """Symbols by length and value of their Huffman codes."""
    symbols: dict[tuple[int, int], int] = {}
    code, last = 0, 0
    for length, symbol in sorted(
        (length, symbol) for symbol, length in enumerate(_HUFFMAN_LENGTHS)
    ):
        code <<= length - last
        symbols[length, code] = symbol
        code, last = code + 1, length
    return symbols


class _HuffmanState(dict[int, tuple["_HuffmanState", bytes]]):
    """Bits of a Huffman code that began in an earlier byte; maps the next byte to what it completes.

    Entries are computed when they are first needed: texts need some hundred of all 65,000.
    """

    def __init__(self, length: int, code: int) -> None:
        self._length = length
        self._code = code
        self.is_padding = length <= _MAX_PADDING and code == (1 << length) - 1

    def __missing__(self, byte: int) -> tuple[_HuffmanState, bytes]:
        """Compute the effect of a byte.

        Raises:
            HpackError: It completes the end of the string.
        """
        length, code, completed = self._length, self._code, bytearray()
        for shift in range(7, -1, -1):
            length, code = length + 1, code << 1 | byte >> shift & 1
            symbol = _HUFFMAN_SYMBOLS.get((length, code))
            if symbol == _END_OF_STRING:
                raise HpackError("the end of a string is encoded in it")
            if symbol is not None:
                completed.append(symbol)
                length = code = 0
        state = _HUFFMAN_STATES.get((length, code))
        if state is None:
            state = _HUFFMAN_STATES[length, code] = _HuffmanState(length, code)
        entry = self[byte] = (state, bytes(completed))
        return entry


_HUFFMAN_SYMBOLS: Final = _build_huffman_symbols()
_HUFFMAN_START: Final = _HuffmanState(0, 0)
_HUFFMAN_STATES: Final[dict[tuple[int, int], _HuffmanState]] = {(0, 0): _HUFFMAN_START}


def decode_huffman(data: bytes) -> bytes:
    """Decode a string (section 5.2), a byte at a time; it must end with a symbol and padding."""
    state, pieces = _HUFFMAN_START, []
    for byte in data:
        state, piece = state[byte]
        pieces.append(piece)
    if not state.is_padding:
        raise HpackError("the padding of a string is wrong")
    return b"".join(pieces)
