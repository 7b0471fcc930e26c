# SPDX-License-Identifier: Apache-2.0
"""The packaged models: complete, small, loadable by their own libraries, and as good as their cards say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from assets.build.stage import size_of
from visalign.data.assets import PACKAGED, assets_folder, resolve_model
from visalign.data.shapes.preferences import ShapesPreferences
from visalign.data.shapes.prompts import CATEGORIES, heldout_prompts
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import sample_scene
from visalign.data.shapes.surroundings import GROUNDS, is_visible, with_specks
from visalign.data.shapes.verifier import verify
from visalign.rewards import load_reward


def card(name: str) -> str:
    return (Path(resolve_model(name)) / "README.md").read_text(encoding="utf-8")


def test_every_packaged_model_is_there_with_its_card_and_together_they_are_small() -> None:
    folders = [Path(resolve_model(name)) for name in PACKAGED]
    assert all((folder / "README.md").is_file() for folder in folders)
    sizes = {folder.name: size_of(folder) for folder in folders}
    assert sizes["shapes-sd3-composed"] == pytest.approx(sizes["shapes-sd3"], abs=0.1)
    assert sizes["shapes-sd3"] + sizes["shapes-clip"] <= 20.0
    assert sizes["shapes-sd15"] <= 8.0
    assert sizes["tasks-qwen3"] < 4.0 and sizes["shapes-vlm"] < 6.0 and sum(sizes.values()) <= 55.0
    assert not [f for f in assets_folder().rglob("*") if f.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"}]


def test_no_packaged_file_names_a_place_on_a_machine() -> None:
    texts = [f for f in assets_folder().rglob("*") if f.suffix in {".json", ".md", ".jinja", ".txt"}]
    absolute = re.compile(r"""["'`( ](?:/[\w.-]+){2,}|[A-Za-z]:\\\\""")
    paths = {
        f.name: hit[0]
        for f in texts
        if f.name not in {"tokenizer.json", "vocab.json"} and (hit := absolute.search(f.read_text()))
    }
    assert len(texts) > 20 and paths == {}


def test_the_autoencoder_keeps_scenes_verifiably_the_same() -> None:
    from diffusers import AutoencoderKL

    model: Any = AutoencoderKL.from_pretrained(Path(resolve_model("shapes-sd3")) / "vae", dtype=torch.float32)
    rng = np.random.default_rng(1)
    records = heldout_prompts()[::5]
    images = render_many([sample_scene(record, rng, style="flat") for record in records])
    with torch.no_grad():
        inputs = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
        outputs = model.decode(model.encode(inputs).latent_dist.mean).sample
    verdicts = verify((outputs.clamp(-1, 1) + 1) / 2, records)
    assert np.mean([verdict.correct for verdict in verdicts]) >= 0.95


@pytest.mark.parametrize("name", ["shapes-sd3", "shapes-sd3-composed", "shapes-sd15"])
def test_diffusers_loads_and_runs_the_pipeline_as_it_is(name: str) -> None:
    from diffusers import DiffusionPipeline

    pipe: Any = DiffusionPipeline.from_pretrained(str(resolve_model(name)))
    pipe.set_progress_bar_config(disable=True)
    image = pipe("a red circle", num_inference_steps=4, guidance_scale=1.0, height=64, width=64).images[0]
    assert image.size == (64, 64)


def test_the_small_unet_predicts_epsilon_and_is_a_policy() -> None:
    from visalign.adapters import LoraSettings, check_adapter, load_policy

    policy: Any = load_policy(resolve_model("shapes-sd15"), lora=LoraSettings(rank=2))
    assert policy.latent_shape == (8, 8, 8)
    assert len(check_adapter(policy, prompts=["a red circle", "two blue squares"])) == 13


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("shapes-sd3", 0.45, 0.75), ("shapes-sd3-composed", 0.55, 0.75), ("shapes-sd15", 0.1, 0.2)],
)
def test_the_generator_is_as_good_as_its_card_says(name: str, low: float, high: float) -> None:
    from diffusers import DiffusionPipeline

    from assets.build.generator import SEEDS, pipeline_accuracy

    pipe = DiffusionPipeline.from_pretrained(str(resolve_model(name)), dtype=torch.float32)
    stated = {name: float(value) for name, value in re.findall(r"^\| (\w+) \| ([\d.]+) \|", card(name), re.MULTILINE)}
    assert set(stated) >= {"all", *CATEGORIES} and low <= stated["all"] <= high
    every = 5
    measured = pipeline_accuracy(pipe, 1.0, seeds=SEEDS[:1], every=every)
    images = len(heldout_prompts()[::every])
    spread = (stated["all"] * (1 - stated["all"]) / images) ** 0.5
    assert 0 < measured["all"] and abs(measured["all"] - stated["all"]) < 3 * spread


def test_clip_is_as_good_as_its_card_says() -> None:
    from assets.build.clip import retrieval
    from visalign.rewards.clip.open_clip_folder import load_open_clip

    model, _, _ = load_open_clip("shapes-clip")
    measured = retrieval(model, captions=64, draws=4, seed=3)
    text = card("shapes-clip")
    for name, words in (("image_to_text", "image to text"), ("text_to_image", "text to image")):
        stated = re.search(rf"- {words}: ([\d.]+)", text)
        assert stated is not None
        assert abs(measured[name] - float(stated[1])) < 0.04
        assert measured[name] >= 0.95


def test_clip_is_right_on_grounds_that_are_not_its_worlds() -> None:
    ground, judge = GROUNDS["teal"], load_reward("clip_score")
    rng, worlds = np.random.default_rng(9), ShapesPreferences(9, split="heldout", kinds=["alignment"])
    pairs = [pair for pair in map(worlds.pair, range(200)) if pair.is_clear]
    pairs = [p for p in pairs if is_visible(p.left, ground) and is_visible(p.right, ground)][:60]
    sides = [
        render_many([with_specks(replace(scene, background=ground), rng) for scene in side])
        for side in zip(*((pair.left, pair.right) for pair in pairs), strict=True)
    ]
    left, right = (judge.score(side, [pair.prompt for pair in pairs]).value for side in sides)
    truth = torch.tensor([pair.utility[0] > pair.utility[1] for pair in pairs])
    assert len(pairs) == 60 and float(((left > right) == truth).float().mean()) >= 0.93


def stated(text: str, pattern: str) -> float:
    match = re.search(pattern, text, re.DOTALL)
    assert match is not None, pattern
    return float(match[1])


def test_the_vision_language_model_is_as_good_as_its_card_says() -> None:
    from assets.build.judge_measures import answer_accuracy
    from visalign.rewards.vlm.engine import VisionLanguageEngine

    text = card("shapes-vlm")
    engine = VisionLanguageEngine.from_pretrained("shapes-vlm")
    measured = answer_accuracy(engine, images=100, pairs=60, seed=3)
    assert abs(measured["yes/no"] - stated(text, r"right answers, ([\d.]+) in all")) < 0.03
    assert abs(measured["pair"] - stated(text, r"log-odds averaged:\n([\d.]+) right")) < 0.08
    assert abs(measured["rating error"] - stated(text, r"mean absolute error\s+([\d.]+\d)")) < 0.1
    assert abs(measured["rating order"] - stated(text, r"the ratings\s+order ([\d.]+\d)")) < 0.03
    assert measured["rating order"] >= 0.95


def test_the_trained_judges_order_clear_pairs_as_their_cards_say() -> None:
    for name, kinds in (
        ("hpsv3", ("alignment", "quality", "richness", "mixed")),
        ("hp", ("quality", "richness")),
        ("ict", ("alignment",)),
    ):
        world = ShapesPreferences(11, split="heldout", kinds=kinds)
        pairs = [pair for pair in (world.pair(n) for n in range(120)) if pair.is_clear]
        images = np.stack([image for pair in pairs for image in pair.images()])
        prompts = [pair.prompt for pair in pairs for _ in range(2)]
        values = load_reward(name).score(images, prompts).value.view(-1, 2)
        better = torch.tensor([pair.utility[0] > pair.utility[1] for pair in pairs])
        right = ((values[:, 0] > values[:, 1]) == better).float().mean().item()
        assert right >= 0.9, f"{name}: {right:.3f}"
        assert right == pytest.approx(
            stated(card(f"shapes-{name}"), r"truth is clear \| [\d.]+ \| ([\d.]+)"), abs=0.06
        )


def test_the_heatmap_heads_are_as_good_as_their_card_says() -> None:
    from assets.build.heie import heie_measures, shapes_faults
    from visalign.rewards.heie.judge import Heie

    text = card("shapes-heie")
    assert size_of(Path(resolve_model("shapes-heie"))) <= 0.4
    judge = Heie(write_reasons=False)
    measured = heie_measures(judge, shapes_faults(80, split="heldout", seed=11))
    row = r"weighted by their deviations \|"
    assert measured["correlation"] == pytest.approx(stated(text, row + r" ([\d.]+)"), abs=0.06)
    assert measured["auc"] == pytest.approx(stated(text, row + r" [\d.]+ \| ([\d.]+)"), abs=0.02)
    assert measured["iou"] == pytest.approx(stated(text, row + r"(?: [\d.]+ \|){2} ([\d.]+)"), abs=0.08)
    assert measured["srcc"] == pytest.approx(stated(text, r"of score and truth: ([\d.]+)"), abs=0.06)
    assert measured["auc right"] == pytest.approx(stated(text, r"undistorted: ([\d.]+)"), abs=0.03)
    for name, number in (("coverage 0.9", 1), ("wrong coverage 0.9", 2)):
        column = rf"\| 0\.9 (?:\| [\d.]+ ){{{number - 1}}}\| ([\d.]+)"
        assert measured[name] == pytest.approx(stated(text, column), abs=0.05)
    assert measured["correlation"] > 0.8 and measured["srcc"] > 0.8 and measured["auc right"] > 0.95


def test_the_judge_of_pairs_names_the_better_one_as_its_card_says() -> None:
    from visalign.rewards.questions.reward_dance import RewardDancePairs

    world = ShapesPreferences(11, split="heldout")
    pairs = [pair for pair in (world.pair(n) for n in range(200)) if pair.is_clear]
    left, right = (np.stack([pair.images()[side] for pair in pairs]) for side in (0, 1))
    preferences = RewardDancePairs().compare(left, right, [pair.prompt for pair in pairs])
    better = torch.tensor([pair.utility[0] > pair.utility[1] for pair in pairs])
    share = ((preferences.prob > 0.5) == better).float().mean().item()
    assert bool(preferences.valid.all()) and share >= 0.9
    expected = stated(card("shapes-pairs"), r"truth is clear \| [\d.]+ \| ([\d.]+)")
    assert expected >= 0.95 and share == pytest.approx(expected, abs=0.05)


def test_the_language_model_is_as_good_as_its_card_says() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from assets.build.language import accuracy
    from visalign.data.text_tasks.tasks import heldout_tasks

    folder = resolve_model("tasks-qwen3")
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    measured = accuracy(model.eval(), AutoTokenizer.from_pretrained(folder), heldout_tasks(5), samples=1, seed=7)
    greedy, sampled = (stated(card("tasks-qwen3"), rf"\| all \|{column} ([0-9.]+)") for column in ("", r" [0-9.]+ \|"))
    assert 0.3 <= sampled <= 0.6, "reinforcement learning starts from a model that is half right"
    assert measured.greedy == pytest.approx(greedy, abs=0.08)
    assert measured.sampled == pytest.approx(sampled, abs=0.08)


def test_the_language_tokenizer_keeps_any_text_and_knows_the_tasks_words() -> None:
    from assets.build.language import new_tokenizer
    from visalign.data.text_tasks.tasks import heldout_tasks

    tokenizer: Any = new_tokenizer()
    letters = {tokenizer.convert_tokens_to_ids(letter) for letter in "abcdefghijklmnopqrstuvwxyz"}
    for record in heldout_tasks(5):
        text = record["prompt"] + "\n" + record["solution"]
        assert not letters & set(tokenizer(text, add_special_tokens=False).input_ids)
    odd = "Ünïcorn 🦄 \n"
    assert tokenizer.decode(tokenizer(odd, add_special_tokens=False).input_ids) == odd
    chat = [{"role": "user", "content": "Sort 3, 1."}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == tokenizer("Sort 3, 1.\n").input_ids
