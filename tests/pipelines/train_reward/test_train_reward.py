# SPDX-License-Identifier: Apache-2.0
"""`visalign train-reward`: every kind of judge at tiny size, what is saved, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.models.clip import save_tiny_clip
from tests.support.models.vision_language import save_tiny_seeing_model
from tests.support.training.metric_families import without_times
from visalign.config import load_config, resolve_config
from visalign.core.preference.ict import hp_loss, ict_hp_loss
from visalign.data.sets.trained_images import trained_images
from visalign.data.shapes.preferences import ShapesPreferences
from visalign.errors import UserError
from visalign.interfaces import with_capabilities
from visalign.pipelines.train_reward.examples import shapes_pairs, shapes_ratings, shapes_triples
from visalign.pipelines.train_reward.inputs import prepare_reward
from visalign.pipelines.train_reward.job import TrainRewardConfig, build_judge, plan, run
from visalign.rewards import RewardError, WeightedSum, load_judge
from visalign.rewards.combine.routed import Routed
from visalign.rewards.combine.uncertainty import UncertaintyUsed
from visalign.rewards.hpsv3.judge import HPSv3
from visalign.rewards.questions.reward_dance import RewardDance, RewardDancePairs
from visalign.rewards.questions.vision_reward import VisionReward
from visalign.rewards.questions.visual_quality_r1 import VisualQuality
from visalign.rewards.scorers.hp import Artefact, Hp
from visalign.rewards.scorers.ict import Ict
from visalign.training.loop.checkpoint import CheckpointError
from visalign.training.loop.metrics import read_metrics
from visalign.training.reward.tasks import TASKS

CONFIGS = [f"shapes_{name}" for name in "hp hpsv3 ict reward_dance vision_reward visual_quality".split()]
JUDGES = (
    ("hp", "head", "hp"),
    ("artefact", "head", "bce"),
    ("ict", "full", "ict"),
    ("hpsv3", "lora", "uncertainty"),
    ("hpsv3", "full", "bradley_terry"),
    ("yes_no", "lora", "yes_no"),
    ("pair", "lora", "yes_no"),
    ("rating", "lora", "rating_distribution"),
    ("rating", "lora", "rating"),
    ("checklist", "lora", "checklist"),
)
CLIP = ("hp", "ict", "artefact")
TEXT: dict[str, Any] = {"type": "text", "text": "{prompt}"}
QUESTION: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": "{question}"}]
CHECKLIST: dict[str, Any] = {
    "questions": ["is it seen", "is it red", "is it bad", "has it {prompt}"],
    "coef": [1.5, 0.5, -1.0, 0.25],
    "intercept": 0.5,
    "masked_features": {"0": [1]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A contrastive model in `clip`; a seeing one, with settings, in `vlm`."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_clip(folder / "clip")
    save_tiny_seeing_model(folder / "vlm")

    def template(images: int, **words: Any) -> dict[str, Any]:
        content = [*({"type": "image"} for _ in range(images)), TEXT]
        return {"messages": [{"role": "user", "content": content}], **words}

    answers = {"yes": list("ynabcdefghijkl"), "no": list("mopqrstuvwxz ")}  # most of what can be said
    templates = {
        "yes_no": template(1, **answers),
        "pair": template(2, **answers),
        "rating": template(1, scores=["1", "2", "3", "4", "5"]),
        "checklist": {**template(1, **answers), "messages": [{"role": "user", "content": QUESTION}]},
    }
    settings = {"templates": templates, "checklist": CHECKLIST}
    (folder / "vlm" / "judge.json").write_text(json.dumps(settings))
    return folder


def _config(models: Path, kind: str, train: str = "", task: str = "", **more: Any) -> TrainRewardConfig:
    head = {"head": [8, 4, 4, 4]}
    own: dict[str, Any] = {"hp": head, "artefact": head, "hpsv3": {"head": [8, 4]}}
    defaults = {k: (t, o) for k, t, o in JUDGES}
    rated = "shapes:quality" if kind in ("rating", "artefact") else "shapes:pairs"
    model = {
        "kind": kind,
        "path": str(models / ("clip" if kind in CLIP else "vlm")),
        "train": train or defaults[kind][0],
        "save_dtype": "float32",
        **own.get(kind, {}),
        **({} if kind in CLIP else {"lora": {"rank": 2, "alpha": 4.0}}),
    }
    content: dict[str, Any] = {
        "model": model,
        "data": {"train": rated, "heldout": rated, "size": 12, "heldout_size": 6, "batch": 4, "micro_batch": 2},
        "objective": {"task": task or defaults[kind][1]},
        "optimizer": {"lr": 1e-3, "updates_per_iteration": 2},
        "evaluation": {"every": 1},
        "run": {"iterations": 2, "checkpoint_every": 1, "device": "cpu"},
    }
    for section, changes in more.items():
        content[section] = {**content[section], **changes} if isinstance(changes, dict) else changes
    overrides = [
        f"{section}.{key}={json.dumps(value)}" if isinstance(values, dict) else f"{section}={values}"
        for section, values in content.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", None)])
    ]
    return load_config(TrainRewardConfig, None, overrides)


def _read(kind: str, folder: Path) -> Any:
    readers: Any = {
        "hp": Hp,
        "artefact": Artefact,
        "ict": Ict,
        "hpsv3": HPSv3,
        "yes_no": RewardDance,
        "pair": RewardDancePairs,
    }
    return (readers | {"rating": VisualQuality, "checklist": VisionReward})[kind](folder)


def _examples(config: TrainRewardConfig) -> Any:
    inputs = prepare_reward(config)
    assert inputs.heldout is not None
    return [inputs.heldout[n] for n in range(3)]


@pytest.mark.parametrize(("kind", "train", "task"), JUDGES)
def test_the_saved_judge_scores_as_the_trained_one(models, tmp_path, kind, train, task):
    """Every trained number is moved by hand; what is read from the folder gives the same scores."""
    config = _config(models, kind, train, task)
    judge = build_judge(config, torch.device("cpu"))
    examples = _examples(config)
    untrained = judge(judge.encode(examples, heldout=True).inputs)["value"].detach()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in judge.trainable_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    judge.train(False)
    if hasattr(judge, "engine"):
        judge.engine.clear_features()  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = judge(judge.encode(examples, heldout=True).inputs)["value"]
    assert not torch.allclose(expected, untrained, atol=1e-4)
    folder = tmp_path / "judge"
    folder.mkdir()
    judge.save(folder)
    reader, prompts = _read(kind, folder), [example.prompt for example in examples]
    assert with_capabilities(reader).capabilities.needs_prompt == (kind not in ("hp", "artefact", "rating"))
    if kind in ("yes_no", "pair", "checklist"):
        reader._read.min_mass = 0.0  # a random model says anything
    if kind == "rating":
        reader._digits.min_mass = 0.0
    left = [example.images[0] for example in examples]
    if kind == "pair":
        right = [example.images[1] for example in examples]
        scores = reader.compare(left, right, prompts).log_odds
        expected = expected[:3] - expected[3:]
    else:
        scores, expected = reader.score(left, prompts).value, expected[:3]
    expected = expected.sigmoid() if kind == "artefact" else expected
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    if (adapter := folder / "adapter_config.json").is_file():
        base = json.loads(adapter.read_text())["base_model_name_or_path"]
        assert base == json.loads((folder / "judge.json").read_text())["base"] and not Path(base).is_absolute()


def test_a_conditioned_judge_is_read_at_the_iteration_of_a_run(models, tmp_path):
    rows = [{**row, "iteration": step} for row, step in zip(_pairs("c", 3), (0.5, "0.5", 0.5), strict=True)]
    data = {"train": _set(tmp_path, "t.jsonl", rows), "heldout": None, "size": None}
    config = _config(models, "hpsv3", "lora", "uncertainty", model={"condition": 4}, data=data)
    judge: Any = build_judge(config, torch.device("cpu"))
    examples = [prepare_reward(config).train[n] for n in range(3)]
    batch = judge.encode(examples).inputs
    assert batch.iteration.tolist() == [0.5] * 6
    judge.train(False)
    plain = judge(replace(batch, iteration=1.0))["value"]
    torch.testing.assert_close(judge(batch)["value"], plain)  # at first the condition changes nothing
    with torch.no_grad():
        for _, parameter in judge.trainable_parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        judge.engine.clear_features()
        expected = judge(batch)["value"][:3]
    (tmp_path / "judge").mkdir()
    judge.save(tmp_path / "judge")
    images, prompts = [example.images[0] for example in examples], [example.prompt for example in examples]
    reward = HPSv3(tmp_path / "judge", ramp=7)
    torch.testing.assert_close(
        reward.at(2).score(images, prompts).value, expected, rtol=1e-4, atol=1e-4
    )  # 0.3 + 0.7·2/7
    assert not torch.allclose(reward.score(images, prompts).value, expected, atol=1e-4)  # iteration 0 without a run
    total = WeightedSum({"judge": (reward, 2.0)})
    later = total.at(2)
    torch.testing.assert_close(later.score(images, prompts).value, 2 * expected, rtol=1e-4, atol=1e-4)
    for wrapped in (Routed(reward, {"kind": "a"}), UncertaintyUsed(reward)):
        later = WeightedSum({"judge": (wrapped, 1.0)}).at(2).rewards["judge"][0]
        assert type(later) is type(wrapped) and later.reward.iteration == pytest.approx(0.5)
    assert reward.at(90).iteration == 1 and reward.at(2).identity != reward.identity
    with pytest.raises(UserError, match=r"row 1 .* has iteration 40; needed is a number from 0"):
        data = {**data, "train": _set(tmp_path, "o.jsonl", [{**row, "iteration": 40} for row in rows])}
        prepare_reward(_config(models, "hpsv3", "lora", "uncertainty", model={"condition": 4}, data=data))
    unread = prepare_reward(_config(models, "hpsv3", data=data))
    assert any("only hpsv3 with model.condition reads it" in note for note in unread.notes)
    with pytest.raises(RewardError, match=r"the head of 'shapes-hpsv3' takes no iteration.*model\.condition=256"):
        HPSv3("shapes-hpsv3", ramp=3).score(images, prompts)


def test_a_student_learns_the_distribution_of_mean_and_deviation(models, tmp_path):
    config = _config(models, "rating", "lora", "rating_distribution")
    judge: Any = build_judge(config, torch.device("cpu"))
    inputs = prepare_reward(config)
    batch = judge.encode([inputs.train[n] for n in range(4)])
    targets = torch.tensor([inputs.train[n].target for n in range(4)])
    assert batch.target.shape == (4, 5)
    torch.testing.assert_close(batch.target.sum(1), torch.ones(4))
    assert (batch.target @ torch.arange(1.0, 6.0) - targets).abs().max() < 0.6  # cut to the scale
    outputs = {"log_prob": batch.target.clamp(min=1e-12).log(), "value": targets}
    loss, count = TASKS["rating_distribution"].loss(outputs, batch, config.objective, torch.Generator())
    assert float(loss) == pytest.approx(0, abs=1e-5) and count == 4
    rows = [{"image": f"q{n}.png", "mos": 1 + n % 5} for n in range(4)]
    with pytest.raises(UserError, match=r"row 1 has a mos without its std\. Give the column"):
        data = {"train": _set(tmp_path, "q.jsonl", rows), "heldout": None, "size": None}
        prepare_reward(_config(models, "rating", "lora", "rating_distribution", data=data))
    with pytest.raises(UserError, match=r"Row 1 of .*its score failed \(it is dark\)\. Take it out"):
        failed = [
            {"image": "q0.png", "value": None, "reason": "it is dark"},
            {"image": "q1.png", "value": 2, "std": 1},
        ]
        data = {"train": _set(tmp_path, "f.jsonl", failed), "heldout": None, "size": None, "map": {"mos": "value"}}
        prepare_reward(_config(models, "rating", "lora", "rating_distribution", data=data))
    assert run(_config(models, "artefact"), tmp_path / "run")["after"].keys() >= {"artefact_auroc", "mae"}


def test_a_run_from_start_to_card(models, tmp_path):
    summary = run(_config(models, "rating", "lora", "rating"), tmp_path / "run")
    assert summary["updates"] == 4 and summary["examples"] == 16 and summary["epochs"] == pytest.approx(16 / 12)
    assert set(summary["after"]) >= {"mae", "srcc"}
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["samples"] for record in records] == [8, 16]
    assert any(key.startswith("heldout/") for key in records[0])
    card = (tmp_path / "run" / "judge" / "README.md").read_text()
    assert "Loss: rating; 4 updates of 4 examples." in card and "## How good it is" in card
    assert _read("rating", tmp_path / "run" / "judge").name


def test_a_resumed_run_is_the_run(models, tmp_path):
    def go(folder: str, iterations: int, resume: bool = False) -> dict[str, Any]:
        config = _config(models, "hpsv3", "lora", "uncertainty", run={"iterations": iterations})
        return run(config, tmp_path / folder, resume)

    uncut = go("whole", 3)
    go("cut", 1)
    cut = go("cut", 3, resume=True)
    assert uncut["after"] == cut["after"] and uncut["before"] == cut["before"]
    one, other = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    assert [without_times(record) for record in one] == [without_times(record) for record in other]
    for name in ("adapter_model.safetensors", "reward_head.safetensors"):
        first, second = (tmp_path / folder / "judge" / name for folder in ("whole", "cut"))
        assert first.read_bytes() == second.read_bytes()


def test_the_generated_sets_are_what_they_say():
    pairs = shapes_pairs(0, 40, labels="truth", split="heldout")
    world = ShapesPreferences(0, split="heldout")
    for number in range(40):
        pair, example = world.pair(number), pairs[number]
        left, right = pair.utility
        assert example.truth == (0.5 if left == right else float(left > right)) and example.votes is None
        assert torch.equal((example.images[0] * 255).round().byte().permute(1, 2, 0), torch.tensor(pair.images()[0]))
    triple = shapes_triples(0, 5)[3]
    assert len(triple.images) == 3 and triple.prompt.casefold() in shapes_triples(0, 5).prompts
    rated = shapes_ratings(0, 5)[2]
    assert 1 <= rated.target <= 5 and len(rated.images) == 1
    assert not pairs.prompts & shapes_triples(0, 1).prompts


def _set(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    """A file of rows and the images that they name."""
    folder.mkdir(exist_ok=True)
    for row in rows:
        for key, value in row.items():
            if key.startswith("image") and not value.startswith("no") and not (folder / value).exists():
                level = sum(value.encode()) % 256
                Image.fromarray(np.full((32, 32, 3), level, np.uint8)).save(folder / value)
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _pairs(prompt: str, count: int = 6, **more: Any) -> list[dict[str, Any]]:
    rows = []
    for n in range(count):
        images = {"image_left": f"{prompt}{n}a.png", "image_right": f"{prompt}{n}b.png"}
        votes = {"votes_left": 3 + n % 3, "votes_right": 4 - n % 2}
        rows.append({"prompt": f"{prompt} {n}", **images, **votes, **more})
    return rows


def test_files_of_pairs_train_a_judge(models, tmp_path):
    train, heldout = _set(tmp_path, "t.jsonl", _pairs("t")), _set(tmp_path, "h.jsonl", _pairs("h"))
    config = _config(models, "hpsv3", data={"train": train, "heldout": heldout, "size": None, "heldout_size": None})
    assert plan(config)["examples"] == {"train": 6, "heldout": 6, "per_update": 4}
    assert run(config, tmp_path / "run")["examples"] == 16
    assert trained_images(tmp_path / "run" / "judge"), "by which an evaluation tells pairs of the training"
    _set(tmp_path, "t.jsonl", _pairs("t", votes_tie=1))
    with pytest.raises(CheckpointError, match=r"data\.train"):
        run(config, tmp_path / "run", resume=True)


def test_triples_come_from_pairs_with_a_refined_image(models, tmp_path):
    rows = _pairs("t", image_refined="r.png", prompt_refined="a red circle")
    tied = {"train": _set(tmp_path, "tied.jsonl", rows), "heldout": None, "size": None}
    with pytest.raises(UserError, match=r"row 4 of 'tied' is a tie or lacks image_refined"):
        prepare_reward(_config(models, "ict", data=tied))
    data = {**tied, "train": _set(tmp_path, "t.jsonl", rows[:3])}
    inputs = prepare_reward(_config(models, "ict", data=data))
    example = inputs.train[2]  # 5 votes for the left one, 4 for the right one
    assert len(example.images) == 3 and example.refined == "a red circle"
    right = sum(b"t2b.png") % 256 / 255
    assert float(example.images[0].mean()) == pytest.approx(right, abs=1e-3)
    heldout = {"heldout": _set(tmp_path, "h.jsonl", [dict(_pairs("h")[0], image_left="r.png")]), "heldout_size": None}
    with pytest.raises(UserError, match=r"of data\.heldout are also in data\.train.*r\.png"):
        prepare_reward(_config(models, "ict", data={**data, **heldout}))
    bare = {**data, "train": _set(tmp_path / "bare", "t.jsonl", _pairs("t"))}
    with pytest.raises(UserError, match=r"data.train: row 1 of .* lacks image_refined"):
        prepare_reward(_config(models, "ict", data=bare))


def test_hp_learns_both_inequalities_of_a_triple(models, tmp_path):
    """A row with a refined image gives its pair, and the refined image over the better one; ties leave."""
    train = _set(tmp_path, "t.jsonl", _pairs("t", image_refined="r.png"))
    inputs = prepare_reward(_config(models, "hp", data={"train": train, "heldout": None, "size": None}))
    assert len(inputs.train) == 8 and any("win over the better image" in note for note in inputs.notes)
    extra, means = inputs.train[6], [sum(name) % 256 / 255 for name in (b"r.png", b"t2a.png")]
    assert extra.label == 1.0 and extra.votes is None
    assert [float(image.mean()) for image in extra.images] == pytest.approx(means, abs=1e-3)
    other = prepare_reward(_config(models, "hpsv3", data={"train": train, "heldout": None, "size": None}))
    assert len(other.train) == 6 and any("only ict and hp" in note for note in other.notes)


def test_hp_learns_triples_next_to_a_trained_ict(models, tmp_path):
    """The loss is that of core on HP's scores and ICT's cosines of the three images."""
    model = {"ict": str(models / "clip")}
    with pytest.raises(RewardError, match="There is no folder 'nowhere'"):
        build_judge(_config(models, "hp", "head", "ict_hp", model={"ict": "nowhere"}), torch.device("cpu"))
    config = _config(models, "hp", "head", "ict_hp", model=model, objective={"product": 2.0})
    judge, inputs = build_judge(config, torch.device("cpu")), prepare_reward(config)
    assert {len(inputs.train[n].images) for n in range(12)} == {3} and len(_examples(config)[0].images) == 2
    examples = [inputs.train[n] for n in range(4)]
    batch = judge.encode(examples)
    outputs = judge(batch.inputs)
    ict = Ict(models / "clip")
    prompts = [example.prompt for example in examples]
    cosine = torch.stack([ict.score([e.images[n] for e in examples], prompts).value for n in range(3)])
    torch.testing.assert_close(outputs["cosine"].view(3, 4), cosine)
    total, weight = TASKS["ict_hp"].loss(outputs, batch, config.objective, torch.Generator())
    hp = outputs["value"].view(3, 4)
    torch.testing.assert_close(total / weight, hp_loss(hp) + 2 * ict_hp_loss(cosine, hp))
    assert run(config, tmp_path / "run")["updates"] == 4
    assert "cosines of" not in (tmp_path / "run" / "judge" / "README.md").read_text()
    rows = [{**row, "prompt": " "} for row in _pairs("b", 3, image_refined="r.png")]
    blank = {"train": _set(tmp_path, "b.jsonl", rows), "heldout": None}
    with pytest.raises(UserError, match=r"the prompt in row 1 .* judge of kind hp reads it"):
        prepare_reward(_config(models, "hp", "head", "ict_hp", model=model, data={**blank, "size": None}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"votes_left": 2, "votes_right": 2}, "data.train: All 6 pairs of .* are ties"),
        ({"prompt": "h 1"}, "1 prompts .* of data.heldout are also in data.train: 'h 1'"),
    ],
)
def test_sets_that_cannot_be_used_are_refused(models, tmp_path, change, message):
    train = _set(tmp_path, "t.jsonl", [{**row, **change} for row in _pairs("t")])
    heldout = _set(tmp_path, "h.jsonl", _pairs("h"))
    config = _config(models, "hpsv3", data={"train": train, "heldout": heldout})
    with pytest.raises(UserError, match=message):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_contradictions_and_leaks_between_splits_are_refused(models, tmp_path):
    pair = {"prompt": "t", "image_left": "a.png", "image_right": "b.png"}
    both = [{**pair, "label": side} for side in ("left", "right")]
    data = {"train": _set(tmp_path, "c.jsonl", both), "heldout": None}
    with pytest.raises(UserError, match=r"1 pairs of .* are judged as often one way as the other.*Count them as"):
        prepare_reward(_config(models, "hpsv3", data=data))
    split = [{**row, "prompt": "same", "split": ("train", "test")[n % 2]} for n, row in enumerate(_pairs("t"))]
    data = {"train": _set(tmp_path, "s.jsonl", split), "heldout": None}
    with pytest.raises(UserError, match=r"1 prompts of .* are in more than one split: 'same' \(test and train\)"):
        prepare_reward(_config(models, "hpsv3", data=data))


def test_ratings_have_the_judges_unit(models, tmp_path):
    rows = [{"image": f"q{n}.png", "mos": 10.0 * n} for n in range(1, 5)]
    data = {"train": _set(tmp_path, "q.jsonl", rows), "heldout": None}
    with pytest.raises(UserError, match=r"data.train: mos is 10 in row .*; this judge answers from 1 to 5"):
        prepare_reward(_config(models, "rating", data=data))
    with pytest.raises(UserError, match=r"data.train: the set holds single rated images"):
        prepare_reward(_config(models, "hpsv3", data=data))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.kind=hpsv2"], r"Key 'model.kind' in .* got 'hpsv2' .*'hp', 'artefact'. Did you mean 'hpsv3'"),
        (["model.kind=pair", "objective.task=yes_no", "model.head=[8, 4]"], "Unknown key 'model.head' in"),
        (["objective.task=hp"], "objective.task is 'hp'; a judge of kind hpsv3 learns by uncertainty"),
    ],
)
def test_impossible_configurations_by_message(overrides, message):
    with pytest.raises(UserError, match=message):
        load_config(TrainRewardConfig, None, overrides)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_packaged_configurations_are_planned(name):
    config = load_config(TrainRewardConfig, resolve_config(name))
    planned = plan(config)
    assert planned["length"]["epochs"] > 0.3
    assert config.optimizer.decay_updates == planned["length"]["updates"]


def test_adapters_that_find_no_layer_are_refused():
    overrides = ["model.kind=yes_no", "objective.task=yes_no", "model.lora.target_modules=[nothing]"]
    config = load_config(TrainRewardConfig, None, overrides)
    with pytest.raises(UserError, match=r"model\.lora cannot be added to 'shapes-vlm': .*target_modules, or"):
        build_judge(config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "task", "name"),
    [("pair", "yes_no", "reward_dance_pairs"), ("checklist", "checklist", "vision_reward")],
    ids=["pair", "checklist"],
)
def test_our_own_questions_are_asked_alike_in_training_and_by_the_saved_judge(tmp_path, kind, task, name):
    (tmp_path / "vlm").mkdir()
    (tmp_path / "vlm" / "judge.json").write_text(json.dumps({"base": "shapes-vlm"}))
    config = _config(tmp_path, kind, "lora", task)
    judge: Any = build_judge(config, torch.device("cpu"))
    judge.train(False)
    examples = prepare_reward(config).heldout
    assert examples is not None
    rows = [examples[n] for n in range(4)]
    with torch.no_grad():
        expected = judge(judge.encode(rows, heldout=True).inputs)["value"]
    judge.save(tmp_path / "judge")
    read: Any = load_judge(name, model=str(tmp_path / "judge"), min_mass=0.0)
    prompts = [row.prompt for row in rows]
    images = [[row.images[side] for row in rows] for side in range(len(rows[0].images))]
    if kind == "pair":
        scores, expected = read.compare(*images, prompts).log_odds, expected[:4] - expected[4:]
    else:
        scores = torch.cat([read.score(side, prompts).value for side in images])
    assert expected.std() > 1e-3
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
