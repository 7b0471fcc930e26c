# SPDX-License-Identifier: Apache-2.0
"""Image intake: every accepted form gives the right pixels, everything else is refused with its message."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from visalign.errors import UserError
from visalign.rewards.base import memory
from visalign.rewards.base.images import load_images, pixels_of
from visalign.rewards.weights.resize import model_levels, resized_shape
from visalign.vision.resize import resize_by_products, resize_like_pil

RED = (200, 10, 30)


def only(item) -> torch.Tensor:
    batch = load_images([item])
    assert batch.reasons == [None]
    image = batch.images[0]
    assert image is not None and image.dtype == torch.float32 and image.shape[0] == 3
    return image


def reason(item) -> str:
    batch = load_images([item])
    assert batch.images == [None] and batch.valid.tolist() == [False]
    assert batch.reasons[0] is not None
    return batch.reasons[0]


def levels(image: torch.Tensor) -> list[int]:
    """Red, green, blue of the upper left pixel on the 8-bit scale."""
    return (image[:, 0, 0] * 255).round().int().tolist()


def test_tensor_forms_agree():
    uint8 = torch.randint(0, 256, (3, 3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    expected = uint8.float() / 255
    channels_last = uint8.permute(0, 2, 3, 1)
    floats = (expected, expected.double(), expected.numpy())
    for form in (*floats, uint8, uint8.numpy(), channels_last, channels_last.numpy()):
        batch = load_images(form)
        assert len(batch) == 3 and batch.valid.all()
        assert torch.equal(torch.stack([image for _, image in batch.readable()]), expected)
    items = [expected[0], uint8[1], np.asarray(channels_last[2])]
    assert torch.equal(torch.stack([image for _, image in load_images(items).readable()]), expected)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "P"])
def test_color_modes(mode):
    image = Image.new("RGB", (4, 3), RED)
    image = image.quantize(2) if mode == "P" else image.convert(mode)
    assert np.abs(np.array(levels(only(image))) - RED).max() <= (3 if mode in ("YCbCr", "HSV") else 0)
    assert only(image).shape == (3, 3, 4)


@pytest.mark.parametrize("mode", ["L", "LA", "1", "I;16", "I;16B", "I", "F"])
def test_grey_modes(mode):
    white = {"1": 1, "I;16": 65535, "I;16B": 65535, "I": 65535, "F": 1.0, "LA": (255, 255)}.get(mode, 255)
    assert levels(only(Image.new(mode, (2, 2), white))) == [255, 255, 255]  # type: ignore[arg-type]


def test_sixteen_bits_are_kept(tmp_path: Path):
    Image.fromarray(np.full((2, 2), 12345, dtype=np.uint16)).save(tmp_path / "deep.png")
    assert only(tmp_path / "deep.png")[0, 0, 0].item() == pytest.approx(12345 / 65535, abs=1e-7)


def test_transparency_is_composited_over_white(tmp_path: Path):
    half = Image.new("RGBA", (2, 2), (255, 0, 0, 128))
    assert levels(only(half)) == [255, 127, 127]
    assert levels(only(Image.new("LA", (2, 2), (0, 0)))) == [255, 255, 255]
    assert levels(only(Image.new("La", (2, 2), (0, 0)))) == [255, 255, 255]
    palette = Image.new("P", (2, 2), 0)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    palette.save(tmp_path / "p.png", transparency=b"\x00\xff")
    assert levels(only(tmp_path / "p.png")) == [255, 255, 255]
    Image.new("RGB", (2, 2), RED).save(tmp_path / "keyed.png", transparency=RED)
    assert levels(only(tmp_path / "keyed.png")) == [255, 255, 255]


def test_exif_rotation_is_applied(tmp_path: Path):
    image = Image.new("RGB", (6, 2), "black")
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    image.save(tmp_path / "turned.png", exif=exif)
    turned = only(tmp_path / "turned.png")
    assert turned.shape == (3, 6, 2)
    assert turned[:, 0, 1].tolist() == [1, 1, 1]


def test_first_frame_of_an_animation_and_the_image_is_left_alone(tmp_path: Path):
    frames = [Image.new("RGB", (3, 3), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert levels(only(tmp_path / "a.gif")) == [255, 0, 0]
    with Image.open(tmp_path / "a.gif") as opened:
        opened.seek(1)
        assert levels(only(opened)) == [255, 0, 0]
        assert opened.tell() == 1


def test_mixed_sizes_and_one_bad_among_good(tmp_path: Path):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"junk" * 10)
    batch = load_images([Image.new("RGB", (1, 1), RED), tmp_path / "broken.png", Image.new("L", (7, 5))])
    assert batch.valid.tolist() == [True, False, True]
    assert [image.shape for _, image in batch.readable()] == [(3, 1, 1), (3, 5, 7)]
    assert batch.reasons[1] is not None and "cannot be decoded" in batch.reasons[1]


def test_reasons_of_bad_files(tmp_path: Path):
    assert "no such image file" in reason(tmp_path / "missing.png")
    assert "URLs are not read" in reason("https://example.org/a.png")
    (tmp_path / "text.jpg").write_text("not an image")
    assert "cannot be decoded (UnidentifiedImageError" in reason(tmp_path / "text.jpg")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for kind in ("png", "jpg", "webp"):
        uncut = tmp_path / f"whole.{kind}"
        Image.fromarray(noise).save(uncut)
        (tmp_path / f"cut.{kind}").write_bytes(uncut.read_bytes()[: uncut.stat().st_size // 2])
        assert "cannot be decoded" in reason(tmp_path / f"cut.{kind}")


def test_reasons_of_bad_pil_images():
    assert "no pixels: 0×4" in reason(Image.new("RGB", (0, 4)))
    assert "its values are" in reason(Image.new("I", (2, 2), 70000))
    assert "its values are" in reason(Image.new("F", (2, 2), float("nan")))
    closed = Image.new("RGB", (2, 2))
    closed.close()
    assert "cannot be decoded" in reason(closed)


def test_decompression_bombs(tmp_path: Path, monkeypatch):
    Image.new("RGB", (10, 10)).save(tmp_path / "bomb.png")
    image = Image.new("RGB", (10, 10))
    for limit in (60, 40):  # PIL warns of the file, and refuses it
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        for item in (tmp_path / "bomb.png", image):
            assert "decompression bomb" in reason(item) and "MAX_IMAGE_PIXELS" in reason(item)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert load_images([tmp_path / "bomb.png", image]).valid.all()


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo.png")
    (tmp_path / "folder.png").mkdir()
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(tmp_path / "socket.png"))
        for file in (tmp_path / "fifo.png", tmp_path / "socket.png", tmp_path / "folder.png", "/dev/zero"):
            assert "it is not a regular file" in reason(file)
    assert [pixels_of(tmp_path / "fifo.png"), pixels_of(torch.zeros(3, 4, 5))] == [0, 20]


def test_an_image_is_as_large_as_the_machine_bears(tmp_path: Path, monkeypatch):
    Image.new("1", (300, 200)).save(tmp_path / "wide.png")
    monkeypatch.setattr(memory, "machine_memory", lambda: 59_999 * 4 * memory.BYTES_PER_PIXEL)
    assert "has more than 59999 pixels" in reason(tmp_path / "wide.png")
    assert "VISALIGN_MAX_PIXELS" in reason(Image.new("L", (300, 200)))
    assert pixels_of(tmp_path / "wide.png") == 60_000
    monkeypatch.setenv("VISALIGN_MAX_PIXELS", "60000")
    assert load_images([tmp_path / "wide.png"]).valid.all()
    for limit in ("0", "many", "٣"):
        monkeypatch.setenv("VISALIGN_MAX_PIXELS", limit)
        with pytest.raises(UserError, match=rf"VISALIGN_MAX_PIXELS is '{limit}'; it is a number of pixels"):
            load_images([tmp_path / "wide.png"])


def test_the_memory_of_a_control_group_counts(monkeypatch):
    total = memory.machine_memory()
    assert 0 < memory.free_memory() <= total
    cgroup = {"memory.max": 1 << 20, "memory.current": 1 << 18}
    monkeypatch.setattr(memory, "_of_group", lambda name, otherwise: cgroup[name])
    monkeypatch.setattr(memory, "machine_memory", memory.machine_memory.__wrapped__)
    assert memory.machine_memory() == 1 << 20 and memory.free_memory() == (1 << 20) - (1 << 18)


def test_nan_costs_its_row_only():
    images = torch.rand(3, 3, 4, 4)
    images[1, 0, 2, 2] = torch.nan
    images[2, 0, 0, 0] = torch.inf
    batch = load_images(images)
    assert batch.valid.tolist() == [True, False, False]
    assert batch.reasons[1] == "the image holds NaN or infinite pixels"


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        (torch.rand(3, 8, 8), ValueError, r"shape \(3, 8, 8\) .*not a batch of images. Allowed: a float tensor"),
        (torch.rand(2, 8, 8, 3), ValueError, "not have the 3 channels where they belong"),
        (torch.zeros(2, 3, 8, 3, dtype=torch.uint8), ValueError, "may have its channels first or last"),
        (torch.rand(2, 3, 8, 8) * 2 - 1, ValueError, r"allowed is \[0, 1\].*images / 2 \+ 0.5"),
        (torch.rand(2, 3, 8, 8) * 255, ValueError, "divide by 255 or pass uint8"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), TypeError, "dtype torch.int64. Allowed"),
        (Image.new("RGB", (2, 2)), TypeError, "images is a Image. Allowed"),
        ([Image.new("RGB", (2, 2)), 7], TypeError, r"images\[1\] is a int"),
        ([torch.rand(1, 3, 4, 4)], ValueError, r"images\[0\] of shape \(1, 3, 4, 4\) .*is not a batch"),
    ],
)
def test_refused(items, error, message):
    with pytest.raises(error, match=message):
        load_images(items)


def test_rounding_slack_is_clamped():
    batch = load_images(torch.full((1, 3, 2, 2), 1 + 5e-7))
    assert batch.images[0] is not None and batch.images[0].max() == 1


SIDES = st.tuples(st.integers(1, 90), st.integers(1, 90))
FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def hard_edges(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Random extreme levels, where overshoot and its clipping matter most."""
    return np.random.default_rng(seed).choice([0, 3, 128, 250, 255], (*shape, 3)).astype(np.uint8)


@settings(max_examples=60, deadline=None, phases=[Phase.generate])
@given(SIDES, SIDES, st.sampled_from(["bicubic", "bilinear"]), st.integers(0, 999))
def test_resize_equals_pils_passes(source, target, interpolation, seed):
    array = hard_edges(source, seed)
    across = Image.fromarray(array).resize((target[1], source[0]), FILTERS[interpolation])
    expected = np.array(across.resize((target[1], target[0]), FILTERS[interpolation]))
    levels = torch.from_numpy(array).permute(2, 0, 1)[None]
    for resize in (resize_like_pil, resize_by_products):  # the second one is the GPU's
        assert np.array_equal(resize(levels.float(), target, interpolation)[0].permute(1, 2, 0).numpy(), expected)


@settings(max_examples=40, deadline=None, phases=[Phase.generate])
@given(
    st.tuples(st.integers(8, 40), st.integers(0, 40)),
    st.sampled_from([24, (24, 40), (40, 24)]),
    st.sampled_from(["shortest", "longest"]),
    st.integers(0, 999),
)
def test_model_input_equals_open_clips_own_transform(sides, size, mode, seed):
    from open_clip.transform import PreprocessCfg, image_transform_v2

    array = np.random.default_rng(seed).integers(0, 256, (sides[0], sum(sides), 3), dtype=np.uint8)
    config = PreprocessCfg(size=size, resize_mode=mode, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), fill_color=9)
    expected = image_transform_v2(config, is_train=False)(Image.fromarray(array)) * 255  # type: ignore[operator]
    image = torch.from_numpy(array).permute(2, 0, 1) / 255
    ours = model_levels(image, vars(config))
    assert ours.shape == expected.shape
    assert np.abs(np.asarray(ours) - np.asarray(expected)).max() <= 1.001


def test_resize_refusals():
    with pytest.raises(ValueError, match="resize_mode is 'fit'; allowed are 'shortest'"):
        resized_shape(4, 4, {"size": 8, "resize_mode": "fit"})
    with pytest.raises(ValueError, match="300×1 is too elongated"):
        model_levels(torch.zeros(3, 1, 300), {"size": 8})
