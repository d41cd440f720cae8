"""Huffman code of HPACK (RFC 7541, section 5.2 and appendix B), decoded a byte at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Length of the code of each symbol, in bits, as hexadecimal numbers of two digits. The last is the
#: end of a string, which never occurs in one. The code is canonical: codes of one length are
#: consecutive, in the order of their symbols.
_LENGTHS: Final = bytes.fromhex(
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


class HuffmanError(Exception):
    """String that no encoder writes."""


def _build_symbols() -> Mapping[tuple[int, int], int]:
    """Symbols by length and value of their codes."""
    symbols: dict[tuple[int, int], int] = {}
    code, last = 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(_LENGTHS)):
        code <<= length - last
        symbols[length, code] = symbol
        code, last = code + 1, length
    return symbols


class _State(dict[int, tuple["_State", bytes]]):
    """Bits of a code that began in an earlier byte; maps the next byte to what it completes.

    Entries are computed when they are first needed: texts need some hundred of all 65,000.

    Args:
        length: Number of the bits.
        code: Their value.
    """

    def __init__(self, length: int, code: int) -> None:
        self._length = length
        self._code = code
        self.is_padding = length <= _MAX_PADDING and code == (1 << length) - 1

    def __missing__(self, byte: int) -> tuple[_State, bytes]:
        """Compute the effect of a byte.

        Raises:
            HuffmanError: It completes the end of the string.
        """
        length, code, completed = self._length, self._code, bytearray()
        for shift in range(7, -1, -1):
            length, code = length + 1, code << 1 | byte >> shift & 1
            symbol = _SYMBOLS.get((length, code))
            if symbol == _END_OF_STRING:
                raise HuffmanError("the end of a string is encoded in it")
            if symbol is not None:
                completed.append(symbol)
                length = code = 0
        state = _STATES.get((length, code))
        if state is None:
            state = _STATES[length, code] = _State(length, code)
        entry = self[byte] = (state, bytes(completed))
        return entry


_SYMBOLS: Final = _build_symbols()
_START: Final = _State(0, 0)
_STATES: Final[dict[tuple[int, int], _State]] = {(0, 0): _START}


def decode_huffman(data: bytes) -> bytes:
    """Decode a string.

    Raises:
        HuffmanError: It does not end with a symbol and padding.
    """
    state, pieces = _START, []
    for byte in data:
        state, piece = state[byte]
        pieces.append(piece)
    if not state.is_padding:
        raise HuffmanError("the padding of a string is wrong")
    return b"".join(pieces)
