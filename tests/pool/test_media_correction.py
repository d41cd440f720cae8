"""Tokens of media, corrected by the usage that engines report."""

import pytest

from extproc.pool.media_correction import MediaCorrection
from extproc.pool.request_tokens import BytesPerTokenEstimator
from extproc.request import MediaSpan


def image(tokens=1000, *, is_sized=True, count=1, kind="image"):
    return MediaSpan(kind, 0, 4 * tokens, tokens, is_sized, count)


def observe(correction, *media, prompt, text=0, model="m", times=4):
    for _ in range(times):
        correction.observe_usage(model, media, prompt_tokens=prompt, text_tokens=text)


def test_the_estimate_stands_until_four_images():
    """Three images are not enough; with the fourth, the observed ratio counts."""
    correction = MediaCorrection()
    expected = []
    for _ in range(4):
        observe(correction, image(), prompt=600, text=100, times=1)
        expected.append(correction.tokens("m", [image(2000)]))
    assert expected == [[2000.0]] * 3 + [[pytest.approx(1000.0)]]
    assert correction.factors == {("m", "image"): pytest.approx(0.5)}
    assert correction.tokens("other", [image()]) == [1000.0]


def test_images_without_a_size_take_the_mean():
    """While none of them was observed, they take what the model's other images took on average."""
    correction = MediaCorrection()
    observe(correction, image(800), prompt=400)
    assert correction.tokens("m", [image(999, is_sized=False)]) == [pytest.approx(400.0)]
    observe(correction, image(999, is_sized=False), prompt=2000)
    assert correction.tokens("m", [image(999, is_sized=False)]) == [pytest.approx(2000.0)]
    assert correction.tokens("m", [image(800)]) == [pytest.approx(400.0)]


def test_kinds_are_learned_apart():
    """Tokens of audio do not change the estimate of images."""
    correction = MediaCorrection()
    observe(correction, image(kind="audio"), prompt=3000)
    assert correction.tokens("m", [image(), image(kind="audio")]) == [1000.0, pytest.approx(3000)]


def test_long_texts_teach_nothing():
    """If an image is a tenth of a prompt, the difference may be an error of the text."""
    correction = MediaCorrection()
    observe(correction, image(), prompt=10_000, text=8000)
    assert correction.factors == {}


def test_tokens_that_the_engine_counts_are_learned_beside_any_text():
    """Its count has no error of the text, which is learned as well."""
    ratios = BytesPerTokenEstimator()
    for _ in range(100):
        ratios.observe_usage(
            "m", prompt_bytes=20_000, tokens=10_500, media=[image()], media_tokens=500
        )
    assert ratios.media.factors == {("m", "image"): pytest.approx(0.5)}
    assert ratios.ratios == {"m": pytest.approx(2.0)}
    ratios.observe_usage("n", prompt_bytes=0, tokens=7, media=[image(0)], media_tokens=0)
    ratios.observe_usage("n", prompt_bytes=9, tokens=7, media=[image()], media_tokens=2**31 - 1)
    assert set(ratios.ratios) == {"m"}


@pytest.mark.parametrize("prompt", [0, 10, 62, 100_000])
def test_what_cannot_be_teaches_nothing(prompt):
    """Less than a sixteenth of the estimate was not read; sixteen times as much is no image."""
    correction = MediaCorrection()
    observe(correction, image(), prompt=prompt)
    assert correction.factors == {}


def test_models_are_forgotten():
    """Names of clients leave no more than 64 models."""
    correction = MediaCorrection()
    for number in range(100):
        observe(correction, image(), prompt=500, model=str(number))
    assert len(correction.factors) == 64
    assert correction.tokens("0", [image()]) == [1000.0]


def test_the_tail_of_many_images_counts_each():
    """A span of many images without sizes has as many means."""
    correction = MediaCorrection()
    observe(correction, image(800), prompt=400)
    tail = image(99_900, is_sized=False, count=100)
    assert correction.tokens("m", [tail]) == [pytest.approx(40_000.0)]
