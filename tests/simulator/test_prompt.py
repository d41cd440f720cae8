from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from extproc.simulator import prompt


def test_a_follow_up_begins_with_the_earlier_prompt_and_its_answer():
    """So its blocks are found, up to the last full one."""
    first = prompt.chat([("system", "be kind"), ("user", "hello")])
    answer = prompt.answer(first, 30)
    again = [("system", "be kind"), ("user", "hello"), ("assistant", answer), ("user", "more")]
    assert prompt.chat(again).startswith(first + answer.encode())


@given(st.binary(max_size=200), st.integers(0, 50))
def test_an_answer_is_one_four_byte_word_per_token(text, tokens):
    """It re-tokenizes to as many tokens as were generated."""
    answer = prompt.answer(text, tokens)
    assert answer.isascii()
    assert len(answer) == tokens * prompt.BYTES_PER_TOKEN


@given(st.binary(max_size=400), st.binary(max_size=400), st.text(max_size=5))
def test_block_hashes_of_a_common_beginning_are_common(first, second, salt):
    """Chained: equal up to the first differing block, different from there on."""
    left, right = (prompt.hashes(text, salt=salt, block_tokens=4) for text in (first, second))
    assert len(left) == len(first) // 16
    for depth, (a, b) in enumerate(zip(left, right, strict=False), start=1):
        assert (a == b) is (first[: depth * 16] == second[: depth * 16])


def test_salts_separate_equal_texts():
    """Another adapter, another chain."""
    chains = [prompt.hashes(b"x" * 64, salt=salt, block_tokens=4) for salt in ("", "a", "b")]
    assert len({chain[0] for chain in chains}) == 3


def test_parts_that_are_no_text_are_rendered_as_json():
    """An image URL is stable bytes in its place."""
    parts = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": {"url": "u"}}]
    assert prompt.content_text(parts) == b'see {"type":"image_url","image_url":{"url":"u"}}'
