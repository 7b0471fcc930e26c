# SPDX-License-Identifier: Apache-2.0
"""Images in prompts: tokens and patches as the library makes them, forms of images, and messages."""

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.models.language import tiny_model
from tests.support.models.vision_language import (
    IMAGES,
    PROMPTS,
    SLOT,
    STOP,
    make_image,
    own_inputs,
    policy,
    sampled,
    save_tiny_seeing_model,
    tiny_processor,
    tiny_seeing_model,
    tiny_seeing_tokenizer,
    user,
)
from visalign.adapters.causal_lm.images import ImageProcessor
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.adapters.causal_lm.value_head import ValueModel
from visalign.errors import UserError
from visalign.vision.pixels import read_pixels


@pytest.fixture(scope="module")
def shared() -> CausalLMPolicy:
    return policy()


def answer(actor: CausalLMPolicy, prompt: Any, images: Any = None) -> Any:
    return actor.generate([prompt], seeds=1, stopping=STOP, images=None if images is None else [images])


def test_tokens_and_patches_are_those_of_the_processor(shared) -> None:
    encoded = shared._image_prompts.encode(PROMPTS, IMAGES)
    assert encoded.encoded_images is not None and encoded.images == IMAGES
    for index in range(len(PROMPTS)):
        own = own_inputs(shared, index)
        assert list(encoded.ids[index]) == own["input_ids"][0].tolist()
        if IMAGES[index]:
            patches = torch.cat([image.patches for image in encoded.encoded_images[index]])
            assert torch.equal(patches, own["pixel_values"])
            assert [list(image.grid) for image in encoded.encoded_images[index]] == own["image_grid_thw"].tolist()
    assert [sum(p.tokens for p in row) for row in encoded.encoded_images] == [6 + 5, 0, 25, 0]


def test_images_stand_in_their_parts_or_in_the_list(shared) -> None:
    first, second = make_image(24, 16, 1), make_image(8, 40, 2)
    listed = answer(shared, user(SLOT, "x", SLOT), [first, second])
    within = {"type": "image", "image": first}
    mixed = answer(shared, user(within, "x", SLOT), [second])
    inside = answer(shared, user(within, "x", {"type": "image", "image": second}))
    plain = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>x<|vision_start|><|image_pad|>"
    text = answer(shared, plain + "<|vision_end|><|im_end|>\n<|im_start|>assistant\n", [first, second])
    columns = [{"text": None, "image": None, **part} for part in (SLOT, {"type": "text", "text": "x"}, SLOT)]
    dataset = answer(shared, user(*columns), [first, second])
    for other in (mixed, inside, text, dataset):
        assert other.images == listed.images == [[first, second]]
        assert torch.equal(other.prompt_ids, listed.prompt_ids)
        assert torch.equal(other.log_prob, listed.log_prob)


def test_an_image_is_the_same_as_a_file_and_as_a_tensor() -> None:
    image = make_image(24, 16, 1)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    turned, frames = io.BytesIO(), io.BytesIO()
    Image.fromarray(np.rot90(np.array(image)).copy()).save(turned, "PNG", exif=exif)
    image.save(frames, "PNG", save_all=True, append_images=[make_image(24, 16, 5)])
    animated = Image.open(frames)
    animated.seek(1)
    clear, white = image.convert("RGBA"), image.copy()
    clear.putpixel((0, 0), (7, 7, 7, 0))
    white.putpixel((0, 0), (255, 255, 255))
    for form in (image, pixels, pixels.double() / 255, Image.open(turned), animated):
        assert torch.equal(read_pixels(form, "it"), pixels)
    assert torch.equal(read_pixels(clear, "it"), read_pixels(white, "it")) and animated.tell() == 1


def test_patches_are_remembered_by_content_within_a_limit(monkeypatch) -> None:
    cut = ImageProcessor(tiny_processor().image_processor)  # type: ignore[attr-defined]
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    first = cut(image, "it")
    assert cut(image.clone(), "it") is first and cut(image.float(), "it") is first
    image[0, 0, 0] = 200
    second = cut(image, "it")
    assert second is not first and second != first and second.patches[0, 0] != first.patches[0, 0]
    assert cut(torch.zeros(3, 8, 4, dtype=torch.uint8).repeat(1, 1, 2), "it") is first
    monkeypatch.setattr("visalign.adapters.causal_lm.images.MEMORY", 2 * first.patches.nbytes)
    cut(torch.ones(3, 8, 8), "it")
    assert len(cut._cache) == 2 and cut(torch.zeros(3, 8, 8), "it") is first
    assert cut(image, "it") is not second


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        (user(SLOT, SLOT), [make_image(8, 8)], r"Prompt 0 has 2 image parts without an image, and images\[0\] hol"),
        ("text", [make_image(8, 8)], r"Prompt 0 marks 0 images by <\|image_pad\|>, and 1 are given"),
        ("<|image_pad|>" * 2, [make_image(8, 8)] * 2, r"Prompt 0 shows two images with nothing between them"),
        (user(SLOT), ["a.png"], r"image 0 of prompt 0, 'a.png', cannot be read: .*No such file .*Repair it or leave"),
        (user(SLOT), [torch.zeros(8, 8, 3)], r"shape \(8, 8, 3\); an image is \[3, H, W\] \(image.permute"),
        (user(SLOT), [torch.full((3, 8, 8), 90.0)], r"values in \[90, 90\], allowed is \[0, 1\]: pass uint8"),
        (user(SLOT), [torch.zeros(3, 4, 900)], r"refuses image 0 of prompt 0 of 4 × 900 pixels: .*ratio"),
        (user(SLOT), [Image.new("I;16", (8, 8))], r"of PIL mode I;16, deeper than 8 bits"),
    ],
)
def test_wrong_images_are_named(shared, prompt, images, message) -> None:
    with pytest.raises(UserError, match=message):
        answer(shared, prompt, images)


def test_prompts_that_images_make_too_long() -> None:
    big = [[make_image(64, 64)], [], [make_image(8, 8)], []]
    actor = policy(max_prompt_tokens=70)
    prompts = [user(SLOT), *PROMPTS[1:]]
    with pytest.raises(UserError, match=r"Prompt 0 has 85 tokens, and at most 70 are allowed with its images"):
        sampled(actor, prompts=prompts, images=big)


def test_images_of_another_rollout_are_refused(shared) -> None:
    rollout = sampled(shared)
    swapped = replace(rollout, images=[[make_image(8, 8)]] * len(rollout))
    with pytest.raises(UserError, match=r"sample 7 has 25 image tokens, and its images take 1\. Score"):
        shared.log_probs(swapped, torch.tensor([7]))


def test_a_model_without_its_processor_reads_text_alone(tmp_path) -> None:
    blind = CausalLMPolicy(tiny_seeing_model(), tiny_seeing_tokenizer())
    assert torch.equal(answer(blind, "hello").log_prob, answer(policy(), "hello").log_prob), "text needs no processor"
    message = r"Qwen2VLForConditionalGeneration is used as a text policy .* build it with"
    with pytest.raises(UserError, match=message):
        answer(blind, "hello", [make_image(8, 8)])
    with pytest.raises(UserError, match=message):
        answer(blind, user({"type": "image", "image": make_image(8, 8)}))
    with pytest.raises(UserError, match="The rollout has images, and this policy reads text"):
        blind.log_probs(sampled(policy()))
    tiny_seeing_model().save_pretrained(tmp_path)
    tiny_seeing_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"cannot load|without its processor"):
        CausalLMPolicy.from_pretrained(tmp_path)


def test_processors_must_fit_the_model() -> None:
    with pytest.raises(UserError, match=r"A processor was given for a qwen3"):
        CausalLMPolicy(tiny_model(vocab_size=80), tiny_processor())
    bare = CausalLMPolicy(tiny_seeing_model(), tiny_processor(template=None))
    with pytest.raises(UserError, match=r"is a conversation, and this tokenizer has no chat template"):
        answer(bare, user(SLOT), [make_image(8, 8)])


def test_a_separate_value_model_refuses_images(tmp_path) -> None:
    values = ValueModel.from_pretrained(save_tiny_seeing_model(tmp_path))
    with pytest.raises(UserError, match=r"ValueModel reads only text, and this rollout has images"):
        values.values(sampled(policy()))
