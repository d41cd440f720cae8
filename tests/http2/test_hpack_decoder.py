"""RFC 7541: header blocks, against the independent encoder and decoder `hpack`."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.http2.hpack_decoder import (
    HeaderListError,
    HpackDecoder,
    HpackError,
    decode_huffman,
)

NAMES = st.one_of(
    st.sampled_from([b":path", b"content-type", b"te", b"accept", b"x-a", b"x-b"]),
    st.binary(max_size=20),
)
VALUES = st.one_of(st.sampled_from([b"", b"/", b"trailers", b"x" * 200]), st.binary(max_size=300))
LISTS = st.lists(st.tuples(NAMES, VALUES), max_size=12)


def decoder(limit=1 << 20):
    return HpackDecoder(limit)


@given(
    st.lists(st.tuples(LISTS, st.booleans(), st.sampled_from([None, 0, 60, 300, 4096])), max_size=8)
)
def test_blocks_of_another_encoder_are_decoded(blocks):
    encoder, decode = hpack.Encoder(), decoder().decode
    for fields, huffman, table_bytes in blocks:
        if table_bytes is not None:
            encoder.header_table_size = table_bytes
        assert decode(encoder.encode(fields, huffman=huffman)) == fields


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_blocks_have_the_meaning_of_another_decoder(blocks):
    """Numbers of many digits, and more than two updates of the table, are refused here only."""
    other, own = hpack.Decoder(), decoder()
    for block in blocks:
        try:
            expected = [tuple(field) for field in other.decode(block, raw=True)]
        except (hpack.HPACKError, UnicodeDecodeError):
            with pytest.raises(HpackError):
                own.decode(block)
            return
        try:
            actual = own.decode(block)
        except HpackError as error:
            if "too large" in str(error) or "more than two" in str(error):
                return
            raise
        assert actual == expected
        assert own.table_bytes == other.header_table._current_size


@given(st.binary(max_size=60))
def test_any_text_survives_the_huffman_code(text):
    encoder = hpack.huffman.HuffmanEncoder(
        hpack.huffman_constants.REQUEST_CODES, hpack.huffman_constants.REQUEST_CODES_LENGTH
    )
    assert decode_huffman(encoder.encode(text)) == text


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",  # the end of a string
        b"\x00",  # padding of zeros
        b"\x1f\xff",  # padding of more than seven bits
    ],
)
def test_section_5_2_wrong_padding_is_an_error(data):
    with pytest.raises(HpackError):
        decode_huffman(data)


@pytest.mark.parametrize(
    "block",
    [
        b"\x80",  # index 0
        b"\xbe",  # beyond the tables
        b"\x00\x01",  # cut inside of a name
        b"\x00\x01a",  # no value
        b"\x00\x01a\x05b",  # a value cut short
        b"\xff\xff\xff\xff\xff\xff\x7f",  # a number too large
        b"\xff" + b"\x80" * 10,  # a number without end
        b"\x3f\xe2\x1f",  # a table larger than the setting
        b"\x82\x20",  # an update behind a field
        b"\x20\x20\x20",  # three updates
    ],
)
def test_a_broken_block_is_an_error(block):
    with pytest.raises(HpackError):
        decoder().decode(block)


def test_section_4_2_a_smaller_table_must_be_confirmed():
    table = decoder()
    assert table.decode(b"\x40\x01a\x01b\xbe") == [(b"a", b"b"), (b"a", b"b")]
    table.limit_table(0)
    with pytest.raises(HpackError):
        table.decode(b"\xbe")
    table = decoder()
    table.decode(b"\x40\x01a\x01b")
    table.limit_table(0)
    assert table.decode(b"\x20\x40\x01c\x01d") == [(b"c", b"d")]
    assert table.table_bytes == 0


def test_section_4_4_an_entry_larger_than_the_table_empties_it():
    table = decoder()
    table.decode(b"\x40\x01a\x01b")
    table.decode(b"\x40\x01a\x7f\xff\x1f" + b"b" * 4222)
    assert table.table_bytes == 0


def test_a_list_that_expands_too_far_is_refused_early():
    table = decoder(10_000)
    table.decode(b"\x40\x01x\x7f\x81\x1e" + b"y" * 3968)
    with pytest.raises(HeaderListError):
        table.decode(b"\xbe" * 16_000)
