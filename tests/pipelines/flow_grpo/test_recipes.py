# SPDX-License-Identifier: Apache-2.0
"""Recipes of real models: those of a family run on a tiny random pipeline of it, all cost what they say."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.pipelines import tiny_pipeline, tiny_prompts
from tests.support.training.images import Brightness
from visalign.adapters import LoraSettings, PipelinePolicy
from visalign.adapters.pipeline.families import FAMILIES
from visalign.pipelines.cli.show import config_header
from visalign.pipelines.flow_grpo.plan import planned_cost
from visalign.pipelines.jobs import load_job
from visalign.training import FlowGRPO, RunSettings, Trainer

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = {
    "sd35_flow_grpo": "sd3",
    "flux1_flow_grpo": "flux",
    "flux1_kontext_flow_grpo": "flux_kontext",
    "flux2_klein_flow_grpo": "flux2_klein",
    "qwen_image_flow_grpo": "qwen_image",
    "z_image_flow_grpo": "z_image",
    "sdxl_flow_grpo": "sdxl",
    "sd15_ddpo": "sd15",
    "pixart_flow_grpo": "pixart",
    "sana_flow_grpo": "sana",
    "wan_flow_grpo": "wan",
}
"""Of a family, in whose tiny model each trains."""
MODELS = {"sd35": "sd3", "flux1": "flux", "sd15": "sd15", "wan": "wan"}
ALGORITHMS = {
    path.stem: MODELS.get(path.stem.partition("_")[0], "")
    for path in sorted(CONFIGS.glob("*.yaml"))
    if path.stem not in RECIPES and not path.stem.startswith(("sft_images", "shapes_", "text_"))
}
"""Of an algorithm: what each trains by is trained in test_matrix.py."""


def _said(name: str) -> dict[str, str]:
    """word -> the text behind it in a recipe's header, in one line."""
    sections, word = dict[str, str](), ""
    for line in config_header((CONFIGS / f"{name}.yaml").read_text()):
        begins = re.match(r"([A-Z][\w ]+): (.*)", line)
        word, text = begins.groups() if begins else (word, f"{sections.get(word, '')} {line}")
        sections[word] = text
    return sections


def _stated_cost(text: str) -> float:
    """Forward-equivalents an image."""
    return sum(map(float, text.partition(" forward-equivalents")[0].split("+")))


def _on_a_model(config: Any, family: str, folder: Path) -> Any:
    """The configuration with a model folder that names only the kind; its cost needs no more."""
    folder.mkdir(exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": FAMILIES[family].pipelines[0]}))
    return replace(config, model=replace(config.model, path=str(folder)))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_on_a_tiny_model_of_its_family(name, tmp_path):
    config, family = load_job(name, []).config, RECIPES[name]
    pipe, options = tiny_pipeline(family)
    options.pop("guidance", None)
    prompts = tiny_prompts(family, ["a red circle", "two blue squares!"])
    policy = PipelinePolicy(pipe, lora=LoraSettings(rank=2, alpha=4), **{**options, "guidance": config.model.guidance})
    frozen = {n: p.clone() for n, p in policy.module.named_parameters() if not p.requires_grad}
    before = [p.clone() for _, p in policy.trainable_parameters()]
    rollout = replace(config.rollout, prompts_per_iteration=2, group_size=4, steps=min(10, config.rollout.steps))
    records = [prompt if isinstance(prompt, dict) else {"prompt": prompt} for prompt in prompts]
    algorithm = FlowGRPO(policy, Brightness(), records, rollout=rollout, objective=config.objective)
    optimizer = replace(config.optimizer, lr=1e-3, updates_per_iteration=1)
    trainer = Trainer(algorithm, optimizer=optimizer, run=RunSettings(folder=tmp_path, iterations=1))
    start = policy.forward_count.equivalents
    result = trainer.train()
    assert result.counters.updates == 1 and result.counters.skipped == 0
    assert all(torch.equal(p, frozen[n]) for n, p in policy.module.named_parameters() if n in frozen)
    assert any(not torch.equal(a, b) for a, (_, b) in zip(before, policy.trainable_parameters(), strict=True))
    with_model = _on_a_model(config, family, tmp_path / "model")
    planned = planned_cost(replace(with_model, rollout=rollout))
    assert policy.forward_count.equivalents - start == planned * 8
    assert _stated_cost(_said(name)["Duration"]) == pytest.approx(planned_cost(with_model), abs=0.05)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_recipe_says_what_an_algorithm_costs(name, tmp_path):
    sections, family = _said(name), ALGORITHMS[name]
    config = _on_a_model(load_job(name, []).config, family, tmp_path)
    assert _stated_cost(sections["Duration"]) == pytest.approx(planned_cost(config), abs=0.05)
    images = re.search(r"([\d,]+) images an iteration", sections["Duration"])
    count = config.rollout.prompts_per_iteration * config.rollout.group_size
    assert images is not None and int(images[1].replace(",", "")) == count
    for word in sections.keys() - {"Duration"}:
        if word.startswith("Duration of "):
            changed = load_job(name, shlex.split(sections[word.removeprefix("Duration of ")])).config
            cost = planned_cost(_on_a_model(changed, family, tmp_path))
            assert _stated_cost(sections[word]) == pytest.approx(cost, abs=0.05)


@pytest.mark.parametrize("name", [*RECIPES, *ALGORITHMS])
def test_its_twin_on_a_cpu_trains_by_the_same_algorithm(name):
    """The line "On a CPU:" names a configuration with its overrides, or "none" and why."""
    twin, *overrides = shlex.split(_said(name)["On a CPU"])
    if twin == "none,":
        assert name in ("wan_flow_grpo", "flux1_kontext_flow_grpo")
        return
    twin_config, config = load_job(str(CONFIGS / f"{twin}.yaml"), overrides).config, load_job(name, []).config
    assert type(twin_config) is type(config)
    for key in ("algorithm", "credit", "balance_every"):
        assert getattr(twin_config.objective, key) == getattr(config.objective, key)
    assert twin_config.rollout.schedule == config.rollout.schedule
    for key in ("sde_window", "branch"):
        assert (getattr(twin_config.rollout, key) is None) == (getattr(config.rollout, key) is None)


@pytest.mark.parametrize(
    ("name", "filters"),
    [
        *((f"sd35_{name}", True) for name in ("flow_grpo", "flow_grpo_fast", "flow_cps", "grpo_guard", "tp_grpo")),
        ("flux1_kontext_flow_grpo", True),
        ("flux1_flow_grpo", False),
    ],
)
def test_a_recipe_averages_over_what_has_a_signal_as_its_script_does(name, filters):
    assert load_job(name, []).config.objective.build(length=1).drop_zero_signal is filters
