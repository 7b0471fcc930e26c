# SPDX-License-Identifier: Apache-2.0
"""Training on a file of compared images: by the configuration, from votes, and what is refused before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.models.pipelines import tiny_folder
from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters import load_policy
from visalign.adapters.lora import LoraSettings
from visalign.adapters.pipeline.policy import PipelinePolicy
from visalign.config import load_config
from visalign.errors import ConfigError, UserError
from visalign.pipelines.flow_grpo.inputs import prepare
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, plan, run
from visalign.pipelines.flow_grpo.stored_pairs import read_stored, stored_latents
from visalign.training.loop.checkpoint import CheckpointError
from visalign.training.loop.metrics import read_metrics

SMALL = (
    "model.lora.rank=4",
    "objective={algorithm: diffusion_dpo, changes: {levels: 2}}",
    "rollout={prompts_per_iteration: 2, group_size: 2, steps: 4}",
    "optimizer={lr: 1e-3, updates_per_iteration: 1, micro_batch: 3, ema_every: 1}",
    "evaluation={seeds: [0], rewards: {jpeg_size: {}}, correctness: null}",
    "run={iterations: 2, checkpoint_every: 1, device: cpu}",
)


def _file(folder: Path, **changes: Any) -> Path:
    """Four rows in votes: two pairs, a tie, and the first pair again by somebody else."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, colour, size in (("a", "red", (64, 64)), ("b", "blue", (96, 64)), ("c", "green", (20, 30))):
        Image.new("RGB", size, colour).save(folder / f"{name}.png")
    rows = [
        {"prompt": "a red circle", "image_left": "a.png", "image_right": "b.png", "votes": [3, 1, 0]},
        {"prompt": "two circles", "image_left": "a.png", "image_right": "c.png", "label": "right"},
        {"prompt": "two circles", "image_left": "b.png", "image_right": "c.png", "label": "tie"},
        {"prompt": "a red circle", "image_left": "b.png", "image_right": "a.png", "label": "right"},
    ]
    rows[1] |= changes
    path = folder / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def _config(*overrides: str) -> FlowGRPOConfig:
    return load_config(FlowGRPOConfig, None, [*SMALL, *overrides])


def test_a_run_by_the_configuration_and_a_resume_on_other_pairs(tmp_path, capsys):
    tiny_sd3_pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red circle\na square\n")
    overrides = (
        f"model.path={tmp_path}/model",
        f"data={{pairs: {_file(tmp_path / 'set')}, heldout: {tmp_path}/prompts.txt}}",
        "rewards.terms={no_such_reward: {}}",  # is not looked at
    )
    summary = run(_config(*overrides), tmp_path / "whole")
    assert "1 of 3 pairs are ties and left out" in "".join(capsys.readouterr())
    planned = plan(_config(*overrides), measure=False)
    # 2 levels of a forward, a backward and the reference; nothing is sampled
    assert planned["cost"]["forward_equivalents_per_image"] == 2 * (3 + 1)
    assert planned["batch"]["training_prompts"] == 2 and planned["batch"]["pairs_per_iteration"] == 8
    log = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert {row["forward_equivalents_per_image"] for row in log} == {8} and len(log) == 2
    assert [row["reward_mean"] for row in log] == pytest.approx([0.5, 0.5])
    assert summary["heldout_prompts_trained_on"] == 1 and summary["images"] == 8
    assert "<title>diffusion_dpo on" in (tmp_path / "whole" / "report.html").read_text()
    Image.new("RGB", (64, 80), "red").save(tmp_path / "set" / "a.png")
    with pytest.raises(CheckpointError, match=r"keys: images of data\.pairs: '\w+' there, '\w+' now\. Set"):
        run(_config(*overrides, "run.iterations=3"), tmp_path / "whole", resume=True)
    _file(tmp_path / "set", label="left")
    with pytest.raises((UserError, CheckpointError), match=r"data\.pairs"):
        run(_config(*overrides, "run.iterations=3"), tmp_path / "whole", resume=True)


def test_votes_are_summed_ties_left_out_and_sides_told_apart(tmp_path):
    (first, second), notes = read_stored(str(_file(tmp_path)), "none")
    assert [candidate["preference"] for candidate in first["candidates"]] == pytest.approx([0.8, 0.2])  # 4 of 5
    assert [candidate["preference"] for candidate in second["candidates"]] == [0.0, 1.0]
    assert [Path(candidate["image"]).name for candidate in second["candidates"]] == ["a.png", "c.png"]
    assert any("1 of 3 pairs are ties" in note for note in notes)
    assert any("votes on 3 pairs" in note for note in notes)
    generated, _ = read_stored("shapes:pairs", "none", limit=50)
    assert 10 < len({record["prompt"] for record in generated}) <= 50


def test_images_come_in_the_policys_size_and_layout(tmp_path):
    policy = load_policy(_tiny(tmp_path), lora=LoraSettings(rank=2))
    records, _ = read_stored(str(_file(tmp_path / "set")), "none")
    latents = stored_latents(policy)
    encoded = latents([side for record in records for side in record["candidates"]])
    assert encoded.shape == (4, *policy.latent_shape) and torch.equal(encoded[0], encoded[2])  # a.png twice


def _tiny(folder: Path) -> Path:
    tiny_sd3_pipeline().save_pretrained(folder / "model")
    return folder / "model"


def test_an_adapter_without_an_encoder_is_refused():
    with pytest.raises(UserError, match=r"data\.pairs: the adapter object has no encode_images.*Add it"):
        stored_latents(object())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_left": "absent.png"}, r"data\.pairs: The image '.*absent\.png' in row 2 of 'pairs' cannot"),
        ({"label": 7.5}, r"data\.pairs: Row 2 of '.*pairs\.jsonl': .*7\.5"),
    ],
)
def test_a_bad_row_is_named_before_a_model_is_loaded(tmp_path, changes: Any, message: str):
    config = _config(f"data.pairs={_file(tmp_path / 'set', **changes)}", "model.path=shapes-sd3")
    for attempt in (lambda: prepare(config, 1), lambda: run(config, tmp_path / "run")):
        with pytest.raises(UserError, match=message):
            attempt()
    assert not (tmp_path / "run").exists()


def _rated(folder: Path, **changes: Any) -> Path:
    """Five rated images of one prompt and one of another, as `visalign score` leaves them."""
    _file(folder)
    rows = [{"prompt": "a red circle", "image": f"{name}.png", "quality": 5 - n} for n, name in enumerate("abc")]
    for number in range(2):
        Image.new("RGB", (32, 32), (0, 80 * number, 0)).save(folder / f"d{number}.png")
        rows.append({"prompt": "a red circle", "image": f"d{number}.png", "quality": 1.5})
    rows.append({"prompt": "two circles", "image": "c.png", "quality": 9})
    rows[1] |= changes
    path = folder / "rated.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_rated_images_are_groups_of_a_prompt(tmp_path):
    read = {"size": 4, "names": {"mos": "quality"}}
    [record], notes = read_stored(str(_rated(tmp_path)), "none", **read)
    assert [candidate["preference"] for candidate in record["candidates"]] == [5, 4, 3, 1.5]
    assert "2 of 6 images are left out: groups have 4" in "".join(notes)
    assert len(read_stored(str(tmp_path / "rated.jsonl"), "none", size=2, names=read["names"])[0]) == 2
    tiny_sd3_pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red circle\na square\n")
    data = f"data={{pairs: {tmp_path}/rated.jsonl, map: {{mos: quality}}, heldout: {tmp_path}/prompts.txt}}"
    objective = "objective={algorithm: gdro, changes: {levels: 2, loss_options: {beta: 12, gamma: 0.5, tau: 0.05}}}"
    rollout = "rollout={prompts_per_iteration: 1, group_size: 4, steps: 4}"
    run(_config(f"model.path={tmp_path}/model", data, objective, rollout), tmp_path / "run")
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["grad_norm"] > 0 and row["reward_mean"] == pytest.approx(3.375) for row in log)


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (6, {}, r"rollout.group_size is 6, and no prompt has so many rated images: 5 at most"),
        (4, {"prompt": " "}, r"row 2 of 'rated' has no prompt to learn its image for"),
        (4, {"image": "absent.png"}, r"absent\.png' in row 2 of 'rated' cannot"),
        (4, {"quality": "good"}, r"Row 2 of .*'good'"),
        (4, {"image": "a.png"}, r"row 1 of 'rated' and row 2 rate one image of one prompt differently. Keep one"),
    ],
)
def test_rated_images_that_make_no_groups_are_refused(tmp_path, size: int, changes: Any, message: str):
    with pytest.raises(UserError, match=rf"data\.pairs: .*{message}"):
        read_stored(str(_rated(tmp_path, **changes)), "none", size=size, names={"mos": "quality"})


def test_ratings_are_no_probabilities_and_pairs_no_larger_groups(tmp_path):
    with pytest.raises(UserError, match=r"data\.pairs: the set holds rated images, and loss_options soft=true"):
        read_stored(str(_rated(tmp_path)), "none", soft=True, names={"mos": "quality"})
    with pytest.raises(UserError, match=r"rollout.group_size is 4, and a group of data.pairs is a pair"):
        prepare(_config("data.pairs=shapes:pairs", "rollout.group_size=4"), 1)


def test_what_does_not_go_with_pairs_is_refused():
    with pytest.raises((UserError, ConfigError), match="Images are not judged"):
        prepare(_config("data.pairs=shapes:pairs", "monitor.stop.agreement=0.1"), 1)


def _edited(folder: Path, **changes: Any) -> Path:
    """Two pairs of edits of one instruction: of a red image by the column, of a green one by metadata."""
    _file(folder)
    row = {"prompt": "make it blue", "image_left": "a.png", "image_right": "b.png", "label": "right"}
    rows = [
        {**row, "source": f"{folder}/a.png"},
        {**row, "image_left": "c.png", "metadata": json.dumps({"source": f"{folder}/c.png"})},
    ]
    rows[1] |= changes
    path = folder / "edits.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_pairs_of_edits_are_learnt_from_with_what_they_edit(tmp_path, monkeypatch):
    tiny_folder("flux_kontext", tmp_path / "model")
    path, records = _edited(tmp_path / "set"), []
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "x", "source": f"{tmp_path}/set/b.png"}))
    overrides = (
        f"model={{path: {tmp_path}/model, image_size: [16, 8], options: {{call: {{_auto_resize: false}}}}}}",
        f"data={{pairs: {path}, heldout: {tmp_path}/prompts.jsonl}}",
    )
    encode = PipelinePolicy.encode
    monkeypatch.setattr(PipelinePolicy, "encode", lambda it, prompts: records.extend(prompts) or encode(it, prompts))
    run(_config(*overrides), tmp_path / "run")
    sources = [record["source"] for record in records if record["prompt"] == "make it blue"]
    assert {Path(source).name for source in sources} == {"a.png", "c.png"}
    log = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["grad_norm"] > 0 for row in log)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": None}, r"row 2 of 'edits' has no 'source', the image .*Give each pair one in a column"),
        ({"metadata": {"source": "absent.png"}}, r"row 2 of 'edits': the source 'absent\.png' .*no such file"),
        ({"source": ["a.png", "b.png"]}, r"row 2 of 'edits': .* since the model edits one image"),
    ],
)
def test_a_pair_without_a_source_that_can_be_read_is_named(tmp_path, changes, message):
    source = str(_edited(tmp_path, **changes))
    with pytest.raises(UserError, match=rf"data\.pairs: {message}"):
        read_stored(source, "needed", several=False)
    assert len(read_stored(source, "none")[0]) == 2  # a model that edits nothing does not look at them


def test_rows_of_a_pair_are_edits_of_one_image(tmp_path):
    again = {"image_left": "b.png", "image_right": "a.png", "label": "left", "metadata": None}
    [record], _ = read_stored(str(_edited(tmp_path, **again)), "needed")
    assert record["source"] == f"{tmp_path}/a.png", "the row that names it speaks for both"
    assert len(read_stored(str(tmp_path / "edits.jsonl"), "none")[0]) == 1  # whatever the column means to others
