# SPDX-License-Identifier: Apache-2.0
"""The checklist in `visalign train-reward`: the closed-form fit, each image asked once, signs, resume."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from scipy.optimize import minimize

from tests.support.models.language import LETTERS
from tests.support.models.vision_language import save_tiny_seeing_model
from visalign.config import load_config
from visalign.errors import UserError
from visalign.pipelines.train_reward.checklist_judge import ChecklistJudge
from visalign.pipelines.train_reward.examples import Examples, shapes_pairs
from visalign.pipelines.train_reward.inputs import prepare_reward
from visalign.pipelines.train_reward.job import TrainRewardConfig, build_judge, run
from visalign.rewards import load_judge
from visalign.rewards.questions.checklist import Checklist
from visalign.training.loop.metrics import read_metrics
from visalign.training.loop.trainer import RunSettings, Trainer
from visalign.training.reward.batch import RewardBatch
from visalign.training.reward.settings import ChecklistSettings, RewardOptimizerSettings
from visalign.training.reward.trainer import RewardModeling

CHECKLIST: dict[str, Any] = {
    "questions": ["is it seen", "is it red", "is it bad"],
    "coef": [0.5, 0.5, 0.25, -1.0],
    "intercept": 0.5,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees; half of its letters mean yes."""
    folder = tmp_path_factory.mktemp("model") / "vlm"
    save_tiny_seeing_model(folder)
    words = {"yes": list(LETTERS[:24]), "no": list(LETTERS[24:])}  # nearly all that can be said
    text = {name: {"type": "text", "text": f"{{{name}}}"} for name in ("question", "prompt")}
    templates = {
        name: {"messages": [{"role": "user", "content": [{"type": "image"}, text[field]]}], **words}
        for name, field in (("checklist", "question"), ("yes_no", "prompt"))
    }
    (folder / "judge.json").write_text(json.dumps({"templates": templates}))
    return folder


def _config(model: Path, folder: Path, *more: str, train: str = "head") -> TrainRewardConfig:
    file = folder / "questions.json"
    if not file.exists():
        file.write_text(json.dumps(CHECKLIST))
    settings = {
        "model": {"kind": "checklist", "path": str(model), "train": train, "checklist": str(file)},
        "data": {"size": 8, "heldout_size": 4, "batch": 4},
        "objective": {"task": "checklist"},
        "optimizer": {"lr": 1e-2, "updates_per_iteration": 3},
        "evaluation": {"every": 1},
        "run": {"iterations": 3, "checkpoint_every": 1, "device": "cpu"},
    }
    overrides = [f"{s}.{key}={json.dumps(value)}" for s, keys in settings.items() for key, value in keys.items()]
    return load_config(TrainRewardConfig, None, [*overrides, *more])


def _bare(coef: list[float]) -> ChecklistJudge:
    """A frozen judge without a model, of as many features as weights."""
    judge = ChecklistJudge.__new__(ChecklistJudge)
    judge.frozen, judge.engine = True, SimpleNamespace(model=torch.nn.Identity())  # type: ignore[assignment]
    judge.checklist = Checklist.from_dict(
        {"questions": [f"q{n}" for n in range(len(coef))], "coef": coef, "has_alignment": False}
    )
    judge.sign = torch.where(torch.tensor(coef) < 0, -1.0, 1.0)
    judge.module = torch.nn.ModuleDict()
    judge.module.register_parameter("weights", torch.nn.Parameter(torch.tensor(coef).abs()))
    return judge


def test_updates_of_the_trainer_go_to_the_closed_form_fit(tmp_path, penalty=0.1):
    """Features 0 and 1 help, 2 says nothing, 3 speaks against its sign: its weight ends at exactly 0."""
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.rand(2, 400, 4, generator=generator) * 2 - 1).unbind()
    truth = torch.tensor([2.0, -1.0, 0.0, -0.8])
    votes = torch.binomial(torch.full((400,), 9.0), ((left - right) @ truth).sigmoid(), generator=generator)
    counted = torch.stack([votes, 9 - votes, torch.zeros(400)], 1)
    judge = _bare([1.0, -1.0, 1.0, 1.0])

    class All:
        def batch(self, number: int, part: tuple[int, int] = (0, 1)) -> Any:
            sides: Any = {"left": torch.arange(400), "right": torch.arange(400, 800)}
            yield RewardBatch(inputs=torch.cat([left, right]), size=400, **sides, label=votes / 9, votes=counted)

    algorithm = RewardModeling(
        judge, All(), objective=ChecklistSettings(penalty=penalty, smoothing=0.0), accelerator=Accelerator(cpu=True)
    )
    optimizer = RewardOptimizerSettings(lr=0.05, updates_per_iteration=200, decay_updates=600)
    trainer = Trainer(algorithm, optimizer=optimizer, run=RunSettings(folder=tmp_path, iterations=3, config={}))
    trainer.train()
    sign = torch.tensor([1.0, -1.0, 1.0, 1.0])
    delta, label = ((left - right) * sign).double().numpy(), (votes / 9).double().numpy()

    def penalised(w: np.ndarray) -> float:
        z = delta @ w
        return float(np.mean(np.logaddexp(0, -z) + (1 - label) * z) + penalty / 2 * (w @ w))

    fit = minimize(penalised, np.zeros(4), method="L-BFGS-B", bounds=[(0, None)] * 4, options={"ftol": 1e-14})
    np.testing.assert_allclose(judge.weights.detach(), fit.x, rtol=1e-3, atol=1e-3)
    assert float(judge.weights[3].detach()) == fit.x[3] == 0.0
    loss = read_metrics(tmp_path / "metrics.jsonl")[-1]["loss"]
    assert loss == pytest.approx(fit.fun, abs=1e-4)
    assert judge.learnt().rule.weights[1] < -0.4


def test_a_run_saves_what_the_judge_reads(model, tmp_path):
    config = _config(model, tmp_path, "optimizer.lr=0.3")
    summary = run(config, tmp_path / "run")
    assert summary["trainable_parameters"] == 4
    assert {"accuracy", "accuracy_low", "accuracy_high", "accuracy_all", "nll", "ece"} == set(summary["after"])
    folder = tmp_path / "run" / "judge"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.yaml", "judge.json"]
    saved = json.loads((folder / "judge.json").read_text())
    assert saved["checklist"]["questions"] == CHECKLIST["questions"]
    coef = saved["checklist"]["coef"]
    assert coef != CHECKLIST["coef"] and min(coef[0], coef[1], coef[2], -coef[3]) >= 0
    card = (folder / "README.md").read_text()
    assert "`visalign.rewards.questions.vision_reward.VisionReward`" in card and f"bad | {coef[3]:.3f} |" in card
    judge: Any = load_judge("vision_reward", model=str(folder))
    examples = prepare_reward(config).heldout
    assert examples is not None and judge.checklist == Checklist.from_dict(saved["checklist"])
    pairs = [examples[n] for n in range(4)]
    left, right = (
        judge.score([pair.images[side] for pair in pairs], [pair.prompt for pair in pairs]).value for side in range(2)
    )
    share = torch.tensor([pair.votes[0] / 9 for pair in pairs if pair.votes is not None])
    nll = -(share * (left - right).sigmoid().log() + (1 - share) * (right - left).sigmoid().log())
    assert float(nll.mean()) == pytest.approx(summary["after"]["nll"], rel=1e-4)


def test_a_prompt_in_the_template_is_asked_about_each_time(model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    text = (folder / "judge.json").read_text().replace("{question}", "{question} {prompt}")
    (folder / "judge.json").write_text(text)
    (tmp_path / "questions.json").write_text(json.dumps({**CHECKLIST, "coef": [1, 1, 1], "has_alignment": False}))
    judge = build_judge(_config(folder, tmp_path), torch.device("cpu"))
    pair = shapes_pairs(0, 1)[0]
    assert not torch.equal(judge.features(pair), judge.features(replace(pair, prompt="z")))


def test_an_image_is_asked_once_and_by_itself(model, tmp_path, monkeypatch):
    judge = build_judge(_config(model, tmp_path), torch.device("cpu"))
    prompts = []
    ask = ChecklistJudge._ask
    monkeypatch.setattr(
        ChecklistJudge, "_ask", lambda self, image, prompt: prompts.append(prompt) or ask(self, image, prompt)
    )
    source = shapes_pairs(0, 4)
    pairs = [source[n] for n in range(3)]
    listed = Examples(count=4, example=[*pairs, pairs[0]].__getitem__, prompts=source.prompts)
    again = judge.remember(listed)
    rows = [again[n] for n in (0, 1, 2, 3, 0)]
    assert len(prompts) == len({image.numpy().tobytes() for pair in pairs for image in pair.images})
    assert all(row.images == () for row in rows) and rows[0].features is rows[4].features
    inputs = judge.encode(rows[:2]).inputs
    torch.testing.assert_close(inputs, judge.encode(pairs[:2]).inputs, rtol=0, atol=0)
    values = judge(inputs)["value"].detach()
    reader: Any = load_judge("vision_reward", model=str(model), checklist=CHECKLIST)
    expected = reader.score([pairs[1].images[0]], [pairs[1].prompt]).value
    torch.testing.assert_close(values[1:2], expected, rtol=1e-5, atol=1e-5)


def test_wrong_checklists_by_message(model, tmp_path):
    (tmp_path / "questions.json").write_text(json.dumps({**CHECKLIST, "coef": [1.0]}))
    with pytest.raises(UserError, match=r"model\.checklist: There are 1 weights for 3 features; give 4"):
        run(_config(model, tmp_path), tmp_path / "run")
    with pytest.raises(UserError, match=r"model\.checklist: none\.json cannot be read"):
        prepare_reward(_config(model, tmp_path, "model.checklist=none.json"))
    with pytest.raises(UserError, match=r"Unknown key 'model\.checklist' .* read where model.kind is checklist"):
        load_config(TrainRewardConfig, None, ["model.checklist=x.json"])
    assert not (tmp_path / "run").exists()
