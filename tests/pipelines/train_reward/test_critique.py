# SPDX-License-Identifier: Apache-2.0
"""A meta judge: trained on judged answers about images, saved, and asked by `deepseek_grm`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.vision_language import save_tiny_seeing_model
from visalign.config import load_config
from visalign.data.sets.image_references import shapes_reference
from visalign.errors import UserError
from visalign.pipelines.train_reward.inputs import prepare_reward
from visalign.pipelines.train_reward.job import TrainRewardConfig, build_judge, run
from visalign.rewards.chat import deepseek_grm
from visalign.rewards.chat.deepseek_grm import META, DeepSeekGRM
from visalign.rewards.vlm.requests import Query

SAID = ("good \\boxed{9}", "bad \\boxed{2}")
"""What is right of every image here, and what is wrong."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that sees, with a question of its own about critiques."""
    folder = save_tiny_seeing_model(tmp_path_factory.mktemp("models") / "vlm")
    content = [{"type": "image"}, {"type": "text", "text": "{prompt}: {critique}"}]
    template = {"messages": [{"role": "user", "content": content}], "yes": ["y"], "no": ["n"]}
    (folder / "judge.json").write_text(json.dumps({"templates": {META.name: template}}))
    return folder


def _answers(folder: Path, split: str, count: int = 8, **change: Any) -> Path:
    rows = [
        {
            "prompt": [{"role": "user", "content": "?"}],
            "completion": SAID[number % 2],
            "reward": 1.0 - number % 2,
            "image": shapes_reference(split, 0, "quality", number // 2),
            "caption": f"image {number // 2}",
            **change,
        }
        for number in range(count)
    ]
    file = folder / f"{split}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _config(model: Path, train: Any, heldout: Any, *more: str) -> TrainRewardConfig:
    overrides = [
        "model={kind: critique, lora: {rank: 4, alpha: 8.0}, save_dtype: float32}", f"model.path={model}",
        f"data={{train: '{train}', heldout: {json.dumps(heldout and str(heldout))}, batch: 8}}",
        "objective.task=critique", "optimizer={lr: 1.0e-2, updates_per_iteration: 15}",
        "evaluation.every=0", "run={iterations: 2, device: cpu}",
    ]  # fmt: skip
    return load_config(TrainRewardConfig, None, [*overrides, *more])


def test_it_learns_which_answers_are_right_and_deepseek_grm_keeps_these(model, tmp_path, monkeypatch):
    config = _config(model, _answers(tmp_path, "train"), _answers(tmp_path, "heldout"))
    summary = run(config, tmp_path / "run")
    assert summary["before"]["critique_accuracy"] < summary["after"]["critique_accuracy"] == 1.0
    assert summary["after"]["critique_right"] == 0.5 and summary["after"]["critique_nll"] < 0.4
    card = (tmp_path / "run" / "judge" / "README.md").read_text()
    assert "answers of which it says rightly whether they are" in card and "DeepSeekGRM` as `meta`." in card

    judge = DeepSeekGRM(
        model=str(model), meta=tmp_path / "run" / "judge", answers=4, k_meta=2, min_mass=0.0, max_new_tokens=4
    )
    monkeypatch.setattr(  # the judge that writes cannot: it is random
        judge.server.engine,  # type: ignore[union-attr]  # in this process
        "generate",
        lambda _, queries, **drawing: type(
            "Said", (), {"texts": [[*SAID, *SAID]] * len(queries), "finished": [[True] * 4] * len(queries),
                         "reasons": [None] * len(queries)},
        ),
    )  # fmt: skip
    scores = judge.score(torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)), ["a", "b"])
    assert scores.value.tolist() == [18.0, 18.0], "both votes of 9, and none of 2"
    assert judge.identity.differences(DeepSeekGRM(model=str(model), answers=4, k_meta=2).identity)


def test_its_folder_rates_as_it_did(model, tmp_path, monkeypatch):
    monkeypatch.setattr(deepseek_grm, "TOP_LOGPROBS", 1000)  # a random model says anything
    config = _config(model, _answers(tmp_path, "train"), _answers(tmp_path, "heldout"))
    judge, examples = build_judge(config, torch.device("cpu")), prepare_reward(config).train
    batch = [examples[number] for number in range(4)]
    with torch.no_grad():
        for _, parameter in judge.trainable_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        judge.train(False)
        expected = judge(judge.encode(batch).inputs)["value"]
    judge.save(tmp_path / "judge")
    grm = DeepSeekGRM(model=str(model), meta=tmp_path / "judge", k_meta=1, min_mass=0.0)
    queries = [Query(images=[example.images[0]], prompt=example.prompt) for example in batch]
    rated = grm.meta_judge.rate(queries, [[example.critique] for example in batch])
    torch.testing.assert_close(torch.tensor(rated)[:, 0], expected, rtol=1e-4, atol=1e-4)
    assert judge.encode(batch).target.tolist() == [1, 0, 1, 0]  # type: ignore[union-attr]  # answers have them


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": 0.5}, r"none of the 8 answers of 'train.jsonl' are right by data.right 1.*from 0.5 to 0.5"),
        ({"reward": math.nan}, r"row 1 of 'train.jsonl' has nan under 'reward'; needed are image, caption"),
    ],
)
def test_answers_that_teach_nothing_are_refused(model, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        prepare_reward(_config(model, _answers(tmp_path, "train", **change), None))


def test_other_sources_and_settings_are_refused(model, tmp_path):
    train = _answers(tmp_path, "train")
    with pytest.raises(UserError, match=r"data.train is shapes:pairs.*learns from what another one wrote"):
        _config(model, "shapes:pairs", None)
    with pytest.raises(UserError, match=r"8 prompts|4 prompts \(of rated images: references\)"):
        prepare_reward(_config(model, train, train))
    with pytest.raises(UserError, match=r"no file of demonstrations '.*nowhere.jsonl'"):
        prepare_reward(_config(model, tmp_path / "nowhere.jsonl", None))
