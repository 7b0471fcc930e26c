# SPDX-License-Identifier: Apache-2.0
"""Bad input of `visalign train-reward`: named by row before anything is written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from tests.support.models.clip import tiny_config, tiny_tokenizer
from visalign.config import load_config
from visalign.data.sets.records import QualitySet
from visalign.data.sets.sources import load_source
from visalign.data.shapes.preferences import KINDS
from visalign.errors import UserError
from visalign.pipelines.cli.app import app
from visalign.pipelines.train_reward.examples import Example, file_ratings, pair_batch
from visalign.pipelines.train_reward.inputs import prepare_reward
from visalign.pipelines.train_reward.job import TrainRewardConfig, build_judge, run
from visalign.rewards.clip.open_clip_folder import save_open_clip
from visalign.training.reward.heldout import score_batch
from visalign.training.reward.tasks import TASKS


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Four pairs of images in a folder."""
    pairs = []
    for n in range(4):
        names = [f"{n}{side}.png" for side in "ab"]
        for number, name in enumerate(names):
            Image.fromarray(np.full((16, 16, 3), 40 * n + 9 * number, np.uint8)).save(tmp_path / name)
        votes = {"votes_left": 3 + n, "votes_right": 2}
        pairs.append({"prompt": f"p {n}", "image_left": names[0], "image_right": names[1], **votes})
    return pairs


def _config(folder: Path, rows: list[dict[str, Any]], *more: str) -> TrainRewardConfig:
    file = folder / "set.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"data.train={file}", "data.heldout=null", "data.size=null", "data.batch=4"]
    return load_config(TrainRewardConfig, None, [*overrides, *more])


def test_rated_images_of_a_file_are_parted_by_their_references(tmp_path, rows):
    rated = [{"image": "0a.png", "mos": 2.5, "std": 0.5}, {"image": "1a.png", "mos": 4.0, "reference": "1b.png"}]
    (tmp_path / "rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rated))
    quality = load_source(str(tmp_path / "rated.jsonl"))
    assert isinstance(quality, QualitySet)
    examples = file_ratings(quality)
    assert [examples[n].target for n in range(2)] == [2.5, 4.0]
    assert {Path(origin).name for origin in examples.prompts} == {"0a.png", "1b.png"}
    grades = file_ratings(replace(quality, higher_is_better=False))  # judges answer 1 to 5, and 5 is best
    assert [grades[n].target for n in range(2)] == [3.5, 2.0]


def test_an_image_that_is_none_is_refused_with_its_row_before_anything_is_written(tmp_path, rows):
    (tmp_path / "2b.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"data\.train: The image '.*2b\.png' in row 3 of 'set' cannot be read"):
        run(_config(tmp_path, rows), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_prompt_of_blanks_is_refused_where_it_is_read(tmp_path, rows):
    rows[1]["prompt"] = " \t "
    with pytest.raises(UserError, match=r"data\.train: the prompt in row 2 of 'set' is ' .t ', and a judge of kind"):
        prepare_reward(_config(tmp_path, rows))
    hp = ["model.kind=hp", "model.train=head", "objective.task=hp"]
    assert len(prepare_reward(_config(tmp_path, rows, *hp)).train) == 4


def test_columns_of_other_names_and_labels_are_read_as_evaluate_reads_them(tmp_path, rows):
    plain = [{**row, "label": 1.0 - n % 2} for n, row in enumerate(rows)]
    for row in plain:
        del row["votes_left"], row["votes_right"]
    theirs = [
        {"text": r["prompt"], "one": r["image_left"], "two": r["image_right"], "choice": 2 - int(r["label"])}
        for r in plain
    ]
    expected = prepare_reward(_config(tmp_path, plain)).train
    names = {"prompt": "text", "image_left": "one", "image_right": "two", "label": "choice"}
    mapped = [f"data.map.{ours}={name}" for ours, name in names.items()]
    examples = prepare_reward(_config(tmp_path, theirs, *mapped, "data.coding='1=left,2=right'")).train
    assert [examples[n].label for n in range(4)] == [expected[n].label for n in range(4)] == [1, 0, 1, 0]
    assert [row[1:] for row in examples.rows] == [row[1:] for row in expected.rows]
    with pytest.raises(UserError, match=r"data\.train: .* has no column 'txt', which --map prompt=txt names"):
        prepare_reward(_config(tmp_path, theirs, *mapped, "data.map.prompt=txt"))
    with pytest.raises(UserError, match=r"data\.map is .* used by files of pairs"):
        load_config(TrainRewardConfig, None, ["data.map.mos=score"])
    options = ["--map", "mos=a score", "--labels", "1=left,2=right", "--dry-run"]
    result = CliRunner().invoke(app, ["train-reward", "shapes_hpsv3", f"data.train={tmp_path}/set.jsonl", *options])
    assert "has no column 'a score', which --map mos=a score names" in " ".join(result.output.split())


def test_a_judge_of_winners_leaves_ties_out(tmp_path, rows):
    rows[0] |= {"label": "tie", "votes_left": 1, "votes_right": 1}
    inputs = prepare_reward(_config(tmp_path, rows, "model.kind=hp", "objective.task=hp"))
    assert len(inputs.train) == len(rows) - 1 and any("1 ties are left out" in note for note in inputs.notes)
    ties = [row | {"label": side, "annotator": side} for row in rows[1:3] for side in ("left", "right")]
    with pytest.raises(UserError, match=r"data\.train: all 2 pairs are ties, and hp learns from pairs with a winner"):
        prepare_reward(_config(tmp_path, ties, "model.kind=hp", "objective.task=hp"))


def test_votes_for_another_side_than_the_label_are_not_learnt(tmp_path, rows):
    labelled = [row | {"label": label} for row, label in zip(rows, (0, 1, 0.5, 1), strict=True)]
    examples = prepare_reward(_config(tmp_path, labelled)).train
    assert [(examples[n].label, examples[n].votes) for n in range(4)] == [
        (0.0, None),
        (1.0, (4, 2, 0)),
        (0.5, None),
        (1.0, (6, 2, 0)),
    ]


def test_calibration_is_measured_against_held_out_shares_with_and_without_votes():
    examples = [Example(prompt="", label=label, truth=1.0, votes=v) for label, v in ((0.7, None), (0.5, (3, 1, 0)))]
    batch = pair_batch(torch.zeros(4), examples, heldout=True)
    pairs = score_batch({"value": batch.inputs}, batch, TASKS["bradley_terry"])
    assert pairs.share.tolist() == pytest.approx([0.7, 0.75]) and pairs.weight.tolist() == [1, 4]
    assert pairs.truth.tolist() == [1, 1]


def test_prompts_with_changed_words_stand_for_the_given_ones(tmp_path, rows):
    for number, row in enumerate(rows):
        row["prompt"] = f"several yellow squares beside circle {number}"
    unchanged = prepare_reward(_config(tmp_path, rows))
    inputs, plain = prepare_reward(_config(tmp_path, rows, "data.convex_da={share: 0.5}")), unchanged.train
    assert inputs.fingerprints["data.train"] != unchanged.fingerprints["data.train"]
    assert f"data.train: 4 pairs become {len(inputs.train)} by ConvexDA." in inputs.notes
    examples = [inputs.train[n] for n in range(len(inputs.train))]
    assert len(inputs.train) == len(inputs.train.rows) > 4 and inputs.train.prompts == plain.prompts
    assert not {example.prompt for example in examples} & {plain[n].prompt for n in range(4)}
    for example, row in zip(examples, inputs.train.rows, strict=True):
        assert row.prompt == example.prompt
        (origin,) = [plain[n] for n in range(4) if plain.rows[n].images == row.images]
        assert example.label == origin.label and torch.equal(example.images[0], origin.images[0])
    (tmp_path / "words.json").write_text("[1]")
    with pytest.raises(UserError, match=r"convex_da\.synonyms: .*words\.json' cannot be read"):
        prepare_reward(_config(tmp_path, rows, f"data.convex_da.synonyms={tmp_path}/words.json"))


def test_old_pairs_weigh_as_the_policy_of_today_makes_them(tmp_path, rows):
    """d = 1/(α + (1 − α)/r) of ratios r; w = (d d')^m over the mean; swapped sides change nothing."""
    ratios = [(0.0, 0.0), (-40.0, -2.0), (3.0, 1.0), (-900.0, -900.0)]
    for row, (left, right) in zip(rows, ratios, strict=True):
        row |= {"log_ratio_left": left, "log_ratio_right": right}
    off_policy = ["data.off_policy.alpha=0.2", "data.off_policy.multiplier=0.1"]
    inputs = prepare_reward(_config(tmp_path, rows, *off_policy))
    dense = [[1 / (0.2 + 0.8 * math.exp(-min(r, 700))) if r > -700 else 0.0 for r in pair] for pair in ratios]
    raw = [(left * right) ** 0.1 for left, right in dense]
    weights = [inputs.train[n].weight for n in range(4)]
    assert weights == pytest.approx([4 * w / sum(raw) for w in raw])
    effective = sum(weights) ** 2 / sum(w * w for w in weights)
    assert f"data.train: {effective:.1f} of 4 pairs count for the policy of today." in inputs.notes
    rows[2]["log_ratio_right"] = math.nan
    with pytest.raises(UserError, match=r"data\.train: row 3 has log_ratio_left 3\.0 and log_ratio_right nan"):
        prepare_reward(_config(tmp_path, rows, *off_policy))
    del rows[1]["log_ratio_left"]
    with pytest.raises(UserError, match=r"row 2 has log_ratio_left None"):
        prepare_reward(_config(tmp_path, rows, *off_policy))
    with pytest.raises(UserError, match=r"data\.off_policy is .* it is used by tasks that compare"):
        load_config(TrainRewardConfig, None, off_policy)


def test_a_setting_that_own_data_do_not_read_names_what_sets_it_back() -> None:
    own = ["data.train=p.csv", "data.heldout=p.csv", 'data.kinds=["quality"]']
    with pytest.raises(UserError, match=r"Leave it out, or add '(data\.kinds=.*)'\.") as refused:
        load_config(TrainRewardConfig, "shapes_hp", own)
    load_config(TrainRewardConfig, "shapes_hp", [*own, str(refused.value).rpartition("add '")[2].removesuffix("'.")])


@pytest.mark.parametrize(
    ("name", "train", "heldout"),
    [("shapes_ict", list(KINDS), ["alignment"]), ("shapes_hp", ["quality", "richness"], ["quality", "richness"])],
)
def test_kinds_of_generated_pairs_follow_from_the_judge_and_need_no_key_for_own_data(name, train, heldout) -> None:
    config = load_config(TrainRewardConfig, name, ["data.train=FILE", "data.heldout=null"])
    assert config.pair_kinds("train") == train and config.pair_kinds("heldout") == heldout
    config = load_config(TrainRewardConfig, name, ['data.heldout_kinds=["mixed"]'])
    assert config.pair_kinds("heldout") == ["mixed"]


@pytest.mark.parametrize("own", [["objective.task=ict_hp"], ["model.ict=shapes-ict"]])
def test_the_joint_task_and_its_ict_come_together(own) -> None:
    with pytest.raises(UserError, match=r"the task ict_hp multiplies by\. Give both, or neither"):
        load_config(TrainRewardConfig, None, ["model.kind=hp", "model.path=shapes-clip", "objective.task=hp", *own])


@pytest.fixture(scope="module")
def residual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny contrastive model whose image tower normalises batches, as shapes-clip's does."""
    import open_clip

    folder = tmp_path_factory.mktemp("residual")
    config = tiny_config()
    vision = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 32}
    config = {**config, "vision_cfg": vision}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = open_clip.CLIP(**config)
    save_open_clip(folder, model, config, tiny_tokenizer(), dtype=torch.float32)
    return folder


def test_batch_statistics_stay(residual):
    overrides = ["model.kind=ict", "model.train=full", "objective.task=ict", f"model.path={residual}"]
    judge: Any = build_judge(load_config(TrainRewardConfig, None, overrides), torch.device("cpu"))
    judge.train(True)
    layers = [part for part in judge.module.modules() if isinstance(part, nn.BatchNorm2d)]
    assert layers and not any(layer.training for layer in layers) and judge.module.training
