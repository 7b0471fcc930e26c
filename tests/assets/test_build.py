# SPDX-License-Identifier: Apache-2.0
"""The scripts that trained the packaged models: true questions, packing, and a tiny build from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor

from assets.build.__main__ import STAGES, build
from assets.build.judge import Learner, cell_targets, new_judge, question_loss
from assets.build.judge_data import BETTER, LOOKS, Question, Questions, appearance, part, rate
from assets.build.judge_inputs import PATCH, TOKENS, answer_states, judge_tokenizer, pack_questions, patches_of, see
from assets.build.language import (
    MISREAD_SHARE,
    corpus_record,
    encode,
    misread,
    new_language,
    new_tokenizer,
    pack,
    solution_loss,
)
from assets.build.stage import Plan, packaged
from visalign.data.shapes.prompts import CATEGORIES, train_prompts
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import DISTORTIONS, SIZE, STYLES, Canvas, Scene, SceneObject
from visalign.data.shapes.verifier import verify_scene
from visalign.data.text_tasks.tasks import TASKS, check_answer, task_record

TOKENIZER: Any = judge_tokenizer()
WORLD = Questions(3)
RECORDS = {record["prompt"]: record for record in train_prompts()}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    model = new_judge().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # so that positions and images show in the logits
    return model


def scene(*objects: tuple[str, str, float, float], style: str = "flat") -> Scene:
    items = tuple(SceneObject(shape=s, color=c, x=x, y=y, radius=7.0) for s, c, x, y in objects)
    return Scene(record={}, objects=items, background=(50, 50, 50), style=style, texture_seed=0)


def test_patches_are_those_of_the_models_image_processor() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    processor: Any = AutoProcessor.from_pretrained(packaged("shapes-vlm")).image_processor
    cut = processor(images=[Image.fromarray(image) for image in images], return_tensors="pt")
    assert cut["image_grid_thw"].tolist() == [[1, 8, 8]] * 3
    torch.testing.assert_close(patches_of(images), cut["pixel_values"], atol=1e-6, rtol=0)


def test_cells_say_where_the_centres_are() -> None:
    targets = cell_targets([scene(("circle", "red", 20.0, 3.0), ("cross", "white", 50.0, 60.0))])[0]
    # x 20, y 3: patch column 2, row 0 -> token 1, its cell 0; x 50, y 60: column 6, row 7 -> token 15, cell 2
    assert targets[1, 0].tolist() == [1, 0, 0, 0] and targets[15, 2].tolist() == [1, 3, 6, 0]
    assert int(targets[..., 0].sum()) == 2 and set(targets[0, :, 1].tolist()) == {-100}


def answer_logits(model: Any, rows: list[list[Question]], features: torch.Tensor) -> list[torch.Tensor]:
    """[V] logits of the answer's first token, for each question in turn."""
    packed = pack_questions(TOKENIZER, rows, features.shape[1] // TOKENS, TOKENS)
    first = (packed.labels != -100) & (packed.labels.roll(1, 1) == -100)
    return list(model.lm_head(answer_states(model, packed, features)[first]))


def test_a_packed_question_is_what_it_is_alone(model: Any) -> None:
    scenes = [WORLD.scene(n) for n in range(2)]
    rows = [WORLD.about(scenes[n], n, 6) for n in range(2)]
    with torch.no_grad():
        features = see(model, render_many(scenes))
        packed = answer_logits(model, rows, features)
        single = [answer_logits(model, [[question]], features[n : n + 1])[0] for n in range(2) for question in rows[n]]
    torch.testing.assert_close(torch.stack(packed), torch.stack(single), atol=2e-4, rtol=1e-4)
    assert torch.stack(single).std(0).max() > 1e-2


def test_packing_gives_what_the_library_computes_from_processor_inputs(model: Any) -> None:
    samples = 2
    scenes = [WORLD.scene(n) for n in range(samples)]
    arrays, question = (render_many(scenes), Question(text=BETTER.replace("{prompt}", "a red cross"), answer="yes"))
    content = [{"type": "image"}] * samples + [{"type": "text", "text": question.text}]
    processor: Any = AutoProcessor.from_pretrained(packaged("shapes-vlm"))
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    images = [Image.fromarray(image) for image in arrays]
    with torch.no_grad():
        theirs = model(**processor(text=[text], images=images, return_tensors="pt")).logits[0, -1]
        features = see(model, arrays).reshape(1, samples * TOKENS, -1)
        ours = answer_logits(model, [[question]], features)[0]
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_alignment_questions_are_true_and_balanced() -> None:
    answers = []
    for n in range(200):
        picture = WORLD.scene(n)
        for question in WORLD.about(picture, n, 4)[:2]:
            prompt = question.text.removeprefix("Does the picture show ").removesuffix("?")
            record = RECORDS[prompt]  # and so no held-out prompt
            assert (question.answer == "yes") == verify_scene(picture, record).correct
            answers.append(question.answer)
    assert 0.35 < answers.count("yes") / len(answers) < 0.7


def test_parts_looks_and_ratings_are_true() -> None:
    rng = np.random.default_rng(0)
    picture = scene(("circle", "red", 20.0, 20.0), ("circle", "orange", 45.0, 20.0), style="shaded")
    truth = {"Are there two circles?": "yes", "Are there three circles?": "no", "Is there a red circle?": "yes"}
    truth |= {"Is there an orange circle?": "yes", "Is there a red circle left of an orange circle?": "yes"}
    truth |= {"Is there an orange circle left of a red circle?": "no", "Is there a blue circle?": "no"}
    parts = {question.text: question.answer for question in (part(picture, rng) for _ in range(600))}
    assert truth.keys() <= parts.keys() and truth == {text: parts[text] for text in truth}
    appearances = {question.text: question.answer for question in (appearance(picture, rng) for _ in range(200))}
    assert {text for text, answer in appearances.items() if answer == "yes"} == {"Are the shapes shaded?"}
    assert len(appearances) == len(LOOKS) == len(STYLES) + len(DISTORTIONS) - 1
    faint = picture.distorted("blur", 0.1)
    assert "Is the picture blurred?" not in {appearance(faint, rng).text for _ in range(200)}
    ratings = [int(rate(picture.distorted("noise", 0.35), rng).answer[8]) for _ in range(2000)]
    assert set(ratings) == {3, 4} and np.mean(ratings) == pytest.approx(3.6, abs=0.05)


def test_on_a_canvas_the_cells_are_where_the_objects_are_seen() -> None:
    scene = next(s for s in map(WORLD.scene, range(50)) if len(s.objects) == 1)
    for share, x, y in ((0.5, 0.0, 0.0), (0.5, 1.0, 1.0), (1.0, 0.3, 0.3)):
        canvas = Canvas(share=share, x=x, y=y, color=(0, 0, 0))
        placed = replace(scene, canvas=canvas)
        left, top, side = canvas.box()
        (item,) = scene.objects
        row, column = (int((t + v * side / SIZE) // PATCH) for t, v in ((top, item.y), (left, item.x)))
        target = cell_targets([placed]).view(1, 4, 4, 2, 2, 4)
        assert target[0, row // 2, column // 2, row % 2, column % 2, 0] == 1
        assert int(target[..., 0].sum()) == 1


def test_the_whole_loss_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    learner = Learner(new_judge())
    optimizer = torch.optim.AdamW(learner.parameters(), lr=2e-3)
    losses = []
    for _ in range(6):
        loss = question_loss(learner, TOKENIZER, WORLD, 0, 4, 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_solution_labels_are_the_next_tokens_and_a_packed_example_sees_itself_alone() -> None:
    packed = pack([([1, 11, 12, 21, 2], 3), ([1, 13, 22, 23, 24, 2], 2)], row=12, pad=0)
    assert packed.ids.tolist() == [[1, 13, 22, 23, 24, 2, 1, 11, 12, 21, 2, 0]]
    assert packed.labels.tolist() == [[-100, 22, 23, 24, 2, -100, -100, -100, 21, 2, -100, -100]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 0]]

    torch.manual_seed(0)
    model: Any = new_language().eval()
    examples = encode(new_tokenizer(), [task_record(n, seed=0) for n in range(6)])
    with torch.no_grad():
        total, tokens = 0.0, 0
        for ids, prompt in examples:
            logits = model(input_ids=torch.tensor([ids])).logits[0, prompt - 1 : -1]
            total += float(F.cross_entropy(logits, torch.tensor(ids[prompt:]), reduction="sum"))
            tokens += len(ids) - prompt
        loss = float(solution_loss(model, pack(examples, row=256, pad=0)))
    assert loss == pytest.approx(total / tokens, rel=1e-6)


def test_a_share_of_the_corpus_misreads_one_number() -> None:
    rng = np.random.default_rng(0)
    for number in range(2 * len(TASKS)):
        record = task_record(number, seed=2)
        assert misread(record, rng) | {"solution": ""} == record | {"solution": ""}
    corpus = [corpus_record(n, seed=4) for n in range(1900)]
    sums = [record for record in corpus if record["task"] in ("add", "sort", "sum", "two_addends")]
    wrong = np.mean([not check_answer(record["solution"], record)[0] for record in sums])
    assert abs(wrong - MISREAD_SHARE) < 4 * (0.25 / len(sums)) ** 0.5


@pytest.mark.slow
def test_a_small_build_runs_from_end_to_end_and_its_models_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from diffusers import StableDiffusion3Pipeline, StableDiffusionPipeline

    from assets.build import autoencoder, clip, composed, generator, judge, language, unet
    from visalign.rewards.clip.open_clip_folder import load_open_clip

    monkeypatch.setattr(generator, "POOL", 64)
    monkeypatch.setattr(unet, "POOL", 64)
    monkeypatch.setattr(composed, "POOL", 64)
    monkeypatch.setattr(generator.shutil, "which", lambda name: None)
    encode_scenes = autoencoder.encode_scenes
    monkeypatch.setattr(autoencoder, "encode_scenes", lambda model, feed, _: encode_scenes(model, feed, 64))
    monkeypatch.setattr(clip, "retrieval", lambda model, **options: {"image_to_text": 0.5})
    shares = dict.fromkeys(("all", *CATEGORIES), 0.5)
    monkeypatch.setattr(generator, "pipeline_accuracy", lambda pipe, scale, **options: shares)
    monkeypatch.setattr(language, "ANSWER_TOKENS", 2)
    accuracy = judge.answer_accuracy
    monkeypatch.setattr(judge, "answer_accuracy", lambda engine, **_: accuracy(engine, images=4, pairs=4))
    monkeypatch.setattr(torch.optim, "Muon", partial(torch.optim.Muon, ns_steps=1))  # five take a third of the time
    steps = {f"{stage}_steps": 1 for stage in ("autoencoder", "generator", "composed", "unet", "clip", "clip_ground")}
    steps |= {f"{stage}_steps": 1 for stage in ("language", "judge_vision", "judge", "judge_ground", "heie")}
    batches = {f"{stage}_batch": 4 for stage in ("autoencoder", "generator", "unet", "language", "judge")}
    sizes = {"clip_batch": 8, "language_per_task": 1, "judge_check": 4, "heie_images": 8, "heie_check": 12}
    build(tmp_path, list(STAGES), Plan(**steps, **batches, **sizes))
    printed = capsys.readouterr().out
    assert all(f"{stage}: " in printed for stage in STAGES) and "all, guidance 2" in printed

    pipe: Any = StableDiffusion3Pipeline.from_pretrained(tmp_path / "shapes-sd3")
    assert {pipe.transformer.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.float32}
    assert pipe.transformer.config.num_layers == 7 and pipe.scheduler.config.shift == 2.0
    unet_pipe: Any = StableDiffusionPipeline.from_pretrained(tmp_path / "shapes-sd15")
    assert unet_pipe.scheduler.config.prediction_type == "epsilon" and unet_pipe.safety_checker is None
    assert unet_pipe.vae.config.shift_factor is None and pipe.vae.config.shift_factor is not None
    assert load_open_clip(tmp_path / "shapes-clip")[0].logit_scale.isfinite()
    seeing: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "shapes-vlm")
    assert seeing.config.model_type == "qwen2_vl" and seeing.dtype == torch.float16
    writing: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "tasks-qwen3")
    assert writing.dtype == torch.float32 and writing.generation_config.top_k == 0
    base = json.loads((tmp_path / "shapes-heie" / "judge.json").read_text(encoding="utf-8"))["base"]
    assert base == "../shapes-vlm"
    for name in ("shapes-sd3", "shapes-sd3-composed"):
        texts = [(tmp_path / name / file).read_text() for file in ("vae/config.json", "model_index.json")]
        assert not [text for text in texts if "_name_or_path" in text]
