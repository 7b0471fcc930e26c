# SPDX-License-Identifier: Apache-2.0
"""The embedded vision-language model's build: true questions, packing, a tiny training, save, load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from visalign.data.assets import resolve_model
from visalign.data.shapes.prompts import train_prompts
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import DISTORTIONS, SIZE, STYLES, Canvas, Scene, SceneObject
from visalign.data.shapes.verifier import verify_scene
from visalign.pipelines.packaged.judge import (
    Learner,
    answer_loss,
    cell_targets,
    new_judge,
    question_loss,
    train_judge,
    widen_judge,
)
from visalign.pipelines.packaged.judge_card import (
    answer_accuracy,
    judge_card,
    judge_engine,
    judge_processor,
    save_judge,
)
from visalign.pipelines.packaged.judge_data import (
    BETTER,
    LOOKS,
    SHOWS,
    Question,
    Questions,
    appearance,
    part,
    rate,
)
from visalign.pipelines.packaged.judge_inputs import (
    PATCH,
    TOKENS,
    answer_states,
    new_judge_tokenizer,
    pack_questions,
    patches_of,
    see,
)
from visalign.pipelines.packaged.stage import Plan

TOKENIZER: Any = new_judge_tokenizer()
WORLD = Questions(3)
RECORDS = {record["prompt"]: record for record in train_prompts()}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    model = new_judge(TOKENIZER).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # so that positions and images show in the logits
    return model


def scene(*objects: tuple[str, str, float, float], style: str = "flat") -> Scene:
    items = tuple(SceneObject(shape=s, color=c, x=x, y=y, radius=7.0) for s, c, x, y in objects)
    return Scene(record={}, objects=items, background=(50, 50, 50), style=style, texture_seed=0)


def test_the_tokenizer_has_one_token_a_word_and_takes_any_text() -> None:
    for record in list(RECORDS.values())[::50]:
        text = SHOWS.replace("{prompt}", record["prompt"])
        assert len(TOKENIZER(text).input_ids) == len(text.split()) + 1, (
            "one token a word and the question mark"
        )
    odd = "Ünïcorn 🦄 {prompt} \n"
    assert TOKENIZER.decode(TOKENIZER(odd).input_ids) == odd
    for word in ("yes", "no", "1", "2", "3", "4", "5", "<answer>", "<|Reward|>"):
        assert len(TOKENIZER(word).input_ids) == 1


def test_patches_are_those_of_the_models_image_processor() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 64, 64, 3), dtype=np.uint8)
    made: Any = judge_processor().image_processor  # type: ignore[attr-defined]
    cut = made(images=[Image.fromarray(image) for image in images], return_tensors="pt")
    assert cut["image_grid_thw"].tolist() == [[1, 8, 8]] * 3
    torch.testing.assert_close(patches_of(images), cut["pixel_values"], atol=1e-6, rtol=0)


def test_cells_say_where_the_centres_are() -> None:
    given = cell_targets([scene(("circle", "red", 20.0, 3.0), ("cross", "white", 50.0, 60.0))])[0]
    # x 20, y 3: patch column 2, row 0 -> token 1, its cell 0; x 50, y 60: column 6, row 7 -> token 15, cell 2
    assert given[1, 0].tolist() == [1, 0, 0, 0] and given[15, 2].tolist() == [1, 3, 6, 0]
    assert int(given[..., 0].sum()) == 2 and set(given[0, :, 1].tolist()) == {-100}


def answer_logits(model: Any, asked: list[list[Question]], features: torch.Tensor) -> list[torch.Tensor]:
    """[V] logits of the answer's first token, for each question in turn."""
    packed = pack_questions(TOKENIZER, asked, features.shape[1] // TOKENS, TOKENS)
    first = (packed.labels != -100) & (packed.labels.roll(1, 1) == -100)
    return list(model.lm_head(answer_states(model, packed, features)[first]))


def test_a_packed_question_is_what_it_is_alone(model: Any) -> None:
    scenes = [WORLD.scene(n) for n in range(2)]
    asked = [WORLD.about(scenes[n], n, 6) for n in range(2)]
    with torch.no_grad():
        features = see(model, render_many(scenes))
        packed = answer_logits(model, asked, features)
        alone = [
            answer_logits(model, [[question]], features[n : n + 1])[0]
            for n in range(2)
            for question in asked[n]
        ]
    torch.testing.assert_close(torch.stack(packed), torch.stack(alone), atol=2e-4, rtol=1e-4)
    assert torch.stack(alone).std(0).max() > 1e-2


@pytest.mark.parametrize("images", [1, 2])
def test_packing_gives_what_the_library_computes_from_processor_inputs(model: Any, samples: int) -> None:
    scenes = [WORLD.scene(n) for n in range(samples)]
    shown, question = (
        render_many(scenes),
        Question(text=BETTER.replace("{prompt}", "a red cross"), answer="yes"),
    )
    content = [{"type": "image"}] * samples + [{"type": "text", "text": question.text}]
    processor: Any = judge_processor()
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    images = [Image.fromarray(image) for image in shown]
    with torch.no_grad():
        theirs = model(**processor(text=[text], images=images, return_tensors="pt")).logits[0, -1]
        features = see(model, shown).reshape(1, samples * TOKENS, -1)
        ours = answer_logits(model, [[question]], features)[0]
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_only_answers_are_learned(model: Any) -> None:
    packed = pack_questions(TOKENIZER, [[Question(text="Are the shapes flat?", answer="no")]], 1, TOKENS)
    learned = packed.labels[packed.labels != -100].tolist()
    assert TOKENIZER.convert_ids_to_tokens(learned) == ["no", "<|im_end|>"]
    with torch.no_grad():
        loss, weight = answer_loss(model, packed, see(model, render_many([WORLD.scene(0)])))
    assert weight.item() == 2 and loss.item() > 0


def test_alignment_questions_are_true_and_balanced() -> None:
    answers = []
    for n in range(200):
        given = WORLD.scene(n)
        for question in WORLD.about(given, n, 4)[:2]:
            prompt = question.text.removeprefix("Does the picture show ").removesuffix("?")
            record = RECORDS[prompt]  # and so no held-out prompt
            assert (question.answer == "yes") == verify_scene(given, record).correct
            answers.append(question.answer)
    assert 0.35 < answers.count("yes") / len(answers) < 0.7


def test_parts_looks_and_ratings_are_true() -> None:
    rng = np.random.default_rng(0)
    given = scene(("circle", "red", 20.0, 20.0), ("circle", "orange", 45.0, 20.0), style="shaded")
    truth = {
        "Are there two circles?": "yes",
        "Are there three circles?": "no",
        "Is there a red circle?": "yes",
    }
    truth |= {"Is there an orange circle?": "yes", "Is there a red circle left of an orange circle?": "yes"}
    truth |= {"Is there an orange circle left of a red circle?": "no", "Is there a blue circle?": "no"}
    seen = {question.text: question.answer for question in (part(given, rng) for _ in range(600))}
    assert truth.keys() <= seen.keys() and truth == {text: seen[text] for text in truth}
    looks = {question.text: question.answer for question in (appearance(given, rng) for _ in range(200))}
    assert {text for text, answer in looks.items() if answer == "yes"} == {"Are the shapes shaded?"}
    assert len(looks) == len(LOOKS) == len(STYLES) + len(DISTORTIONS) - 1
    faint = given.distorted("blur", 0.1)
    assert "Is the picture blurred?" not in {appearance(faint, rng).text for _ in range(200)}
    ratings = [int(rate(given.distorted("noise", 0.35), rng).answer[8]) for _ in range(2000)]
    assert set(ratings) == {3, 4} and np.mean(ratings) == pytest.approx(3.6, abs=0.05)


def test_votes_follow_the_utilities() -> None:
    agreed = []
    for n in range(300):
        left, right, questions = WORLD.pair(n)
        pair = WORLD._world.pair(n)
        assert (left, right) == (pair.left, pair.right)
        if pair.is_clear:
            agreed.append((questions[0].answer == "yes") == (pair.utility[1] > pair.utility[0]))
    assert 0.8 < np.mean(agreed) < 1.0


def test_a_tiny_training_lowers_the_loss_resumes_and_loads_as_the_library_does(tmp_path: Path) -> None:
    plan = Plan(judge_vision_steps=2, judge_steps=2, judge_batch=2, judge_check=4, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("visalign.pipelines.packaged.judge.answer_accuracy", lambda *given, **more: {})
        whole = train_judge(tmp_path / "a", plan, False, questions=4, save_every=1)
        again = train_judge(tmp_path / "a", plan, True, questions=4, save_every=1)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    folder = tmp_path / "shapes-vlm"
    save_judge(whole, folder)
    loaded: Any = AutoModelForImageTextToText.from_pretrained(folder)
    assert loaded.config.model_type == "qwen2_vl" and loaded.dtype == torch.float16
    processor: Any = AutoProcessor.from_pretrained(folder)
    assert processor.tokenizer.get_vocab() == TOKENIZER.get_vocab()
    templates = json.loads((folder / "judge.json").read_text())["templates"]
    assert (
        templates["rating"]["answer_prefix"] == "<answer>"
        and len(templates["pair"]["messages"][0]["content"]) == 3
    )
    card = judge_card(folder, 60.0, plan)
    assert "2 steps of 6 rendered scenes" in card and card.count(" right") == 3


def test_a_trained_judge_goes_on_on_other_grounds_and_resumes(tmp_path: Path) -> None:
    base = resolve_model("shapes-vlm")
    plan = Plan(judge_ground_steps=2, judge_batch=2, seed=0)
    whole = widen_judge(Path(base), tmp_path, plan, False, questions=4, save_every=1).state_dict()
    again = widen_judge(Path(base), tmp_path, plan, True, questions=4, save_every=1).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())
    old: Any = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    moved = [float((whole[name] - value).abs().max()) for name, value in old.state_dict().items()]
    assert 0.0 < max(moved) < 0.1, "it began where the other ended"


def test_on_a_canvas_the_cells_are_where_the_objects_are_seen() -> None:
    scene = next(s for s in map(WORLD.scene, range(50)) if len(s.objects) == 1)
    for share, x, y in ((0.5, 0.0, 0.0), (0.5, 1.0, 1.0), (1.0, 0.3, 0.3)):
        canvas = Canvas(share=share, x=x, y=y, color=(0, 0, 0))
        laid = replace(scene, canvas=canvas)
        left, top, side = canvas.box()
        (item,) = scene.objects
        row, column = (int((t + v * side / SIZE) // PATCH) for t, v in ((top, item.y), (left, item.x)))
        target = cell_targets([laid]).view(1, 4, 4, 2, 2, 4)
        assert target[0, row // 2, column // 2, row % 2, column % 2, 0] == 1
        assert int(target[..., 0].sum()) == 1


def test_the_whole_loss_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    learner = Learner(new_judge(TOKENIZER))
    optimizer = torch.optim.AdamW(learner.parameters(), lr=2e-3)
    losses = []
    for _ in range(12):
        loss = question_loss(learner, TOKENIZER, WORLD, 0, 4, 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_the_check_can_tell_a_blind_model(model: Any) -> None:
    found = answer_accuracy(judge_engine(model), images=40, pairs=20)
    assert 0.3 < found["yes/no"] < 0.7 and 0.2 < found["pair"] < 0.8 and found["rating error"] > 0.6
