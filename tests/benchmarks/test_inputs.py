import pytest
import torch

from benchmarks.inputs import (
    CONTRAST_SIGMA,
    docstring_sentences,
    image_batches,
    noise_images,
    sentences_of,
)


def test_noise_images_when_seeded_then_equal_and_centred():
    first = noise_images(2, 32, torch.Generator().manual_seed(3))
    again = noise_images(2, 32, torch.Generator().manual_seed(3))
    assert first.shape == (2, 3, 32, 32)
    assert torch.equal(first, again)
    assert first.mean(dim=(1, 2, 3)).abs().max() < 1e-5


def test_noise_images_when_drawn_then_differ_in_contrast():
    images = noise_images(400, 8, torch.Generator().manual_seed(0))
    log_contrast = images.std(dim=(1, 2, 3)).log()
    # the standard error over 400 images is 0.025 of the mean and 0.018 of the deviation
    assert abs(float(log_contrast.mean())) < 0.1
    assert float(log_contrast.std()) == pytest.approx(CONTRAST_SIGMA, abs=0.07)


def test_noise_images_when_drawn_then_have_a_falling_spectrum():
    images = noise_images(16, 64, torch.Generator().manual_seed(0))
    images = images / images.std(dim=(1, 2, 3), keepdim=True)
    power = torch.fft.rfft2(images).abs().square().mean(dim=(0, 1))
    # a 1/f amplitude falls by 4 from frequency 4 to 16, its power by 16
    ratio = float(power[0, 4] / power[0, 16])
    assert 8 < ratio < 32


def test_image_batches_when_seeds_differ_then_images_differ():
    one, two = image_batches(1, 32, seed=1), image_batches(1, 32, seed=2)
    assert one[0][0].shape == (1, 3, 32, 32)
    assert not torch.equal(one[0][0], two[0][0])


def test_docstring_sentences_when_drawn_again_then_are_the_same_and_distinct():
    sentences = docstring_sentences(40, seed=0)
    assert sentences == docstring_sentences(40, seed=0)
    assert len(set(sentences)) == 40
    assert all(5 <= len(sentence.split()) <= 60 for sentence in sentences)


def test_docstring_sentences_when_too_many_asked_then_error():
    with pytest.raises(ValueError, match="the standard library gave"):
        docstring_sentences(10**6, seed=0)


def test_sentences_of_when_code_or_short_then_left_out():
    text = "Read the file and return its lines. Too short.\n\n>>> This is a line of code here"
    assert sentences_of(text) == ["Read the file and return its lines."]
