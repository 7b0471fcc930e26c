# SPDX-License-Identifier: Apache-2.0
"""A set of edits by the job of `visalign train`: one instruction for several sources, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

from tests.support.models.pipelines import tiny_folder
from visalign.config import load_config
from visalign.errors import UserError
from visalign.evaluation import load_heldout
from visalign.pipelines.cli.app import app
from visalign.pipelines.collect.tasks import read_tasks
from visalign.pipelines.flow_grpo.inputs import prepare
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, run
from visalign.training.loop.checkpoint import CheckpointError
from visalign.training.loop.metrics import read_metrics

REWARD = """
import numpy as np
from PIL import Image

def likeness(images, prompts, metadata):
    sources = [np.asarray(Image.open(record["source"])).mean() / 255 for record in metadata]
    return [1 - abs(float(image.mean()) - source) for image, source in zip(images, sources)]
"""
CHANGES = (
    "model={image_size: [16, 8], options: {call: {_auto_resize: false}}, lora: {rank: 2, alpha: 4}}",
    "rollout={prompts_per_iteration: 2, group_size: 3, steps: 2, batch_size: 6}",
    "optimizer={lr: 1e-3, updates_per_iteration: 1, micro_batch: 6, ema_every: 1}",
    "evaluation={seeds: [0], every: 1, grid: 2, correctness: null, rewards: {}}",
    "monitor.features=shapes-clip",
    "run={iterations: 2, device: cpu}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny FLUX.1-Kontext, a reward that opens the sources, and one instruction for two of them."""
    folder = tmp_path_factory.mktemp("edits")
    tiny_folder("flux_kontext", folder / "model")
    (folder / "mine.py").write_text(REWARD)
    for name, level in (("dark", 20), ("light", 230)):
        Image.new("RGB", (8, 16), (level, level // 2, 255 - level)).save(folder / f"{name}.png")
    _write(folder / "edits.jsonl", folder, ("dark", "light"))
    return folder


def _write(path: Path, folder: Path, names: Any) -> Path:
    records = [{"prompt": "make it blue", "source": f"{folder}/{name}.png"} for name in names]
    path.write_text("\n".join(json.dumps(record) for record in records))
    return path


def _config(folder: Path, *changes: str) -> FlowGRPOConfig:
    files = (f"data.{name}={folder}/edits.jsonl" for name in ("train", "heldout"))
    own = (f"model.path={folder}/model", f"rewards.terms={{likeness: {{name: '{folder}/mine.py:likeness'}}}}")
    return load_config(FlowGRPOConfig, None, [*CHANGES, *own, *files, *changes])


def test_one_instruction_for_two_sources_is_trained(folder, tmp_path):
    output = tmp_path / "run"
    summary = run(_config(folder), output)
    rows = read_metrics(output / "metrics.jsonl")
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    adapters = load_file(output / "lora" / "pytorch_lora_weights.safetensors")
    assert all(weight.any() for name, weight in adapters.items() if "lora_B" in name)
    assert summary["before"]["prompts"] == 2 and summary["heldout_prompts_trained_on"] == 2
    assert all(row["heldout/feature_drift"] >= 0 for row in rows), "two images are told apart"
    before = load_heldout(output / "before.npz")
    assert before.keys == [("make it blue", f"{folder}/{name}.png") for name in ("dark", "light")]
    assert not np.array_equal(*before.images)
    grid = np.asarray(Image.open(output / "samples" / "000000.png"))
    assert np.array_equal(grid, np.concatenate([*before.images], axis=1))
    assert [path.name for path in sorted((output / "samples").iterdir())] == [f"{n:06}.png" for n in range(3)]
    page = (output / "report.html").read_text()
    assert "make it blue (dark.png)" in page and "make it blue (light.png)" in page


def test_edits_of_several_sizes_are_trained_and_changed_sources_noticed(folder, tmp_path):
    """Trained at two, evaluated at the model's own."""
    sizes = "rollout.image_sizes=[[8, 16], 16]", "monitor.window=2"
    config, output = _config(folder, *sizes), tmp_path / "run"
    run(config, output)
    assert load_heldout(output / "after.npz").images.shape[1:3] == (16, 8)
    (folder / "dark.png").write_bytes((folder / "dark.png").read_bytes() + b"0")  # as another image has
    with pytest.raises(CheckpointError, match=r"keys: images of data\.heldout: .*; images of data\.train: "):
        run(config, output, resume=True)


def test_a_source_that_cannot_be_read_is_refused_before_the_model_is_loaded(folder, tmp_path):
    cut = tmp_path / "cut.png"
    Image.effect_noise((64, 64), 50).save(cut)
    cut.write_bytes(cut.read_bytes()[:-200])
    file = tmp_path / "edits.jsonl"
    for source, reason in (
        (f"{tmp_path}/absent.png", "there is no such file"),
        (str(cut), "truncated"),
        (None, "has no 'source', the image that the model edits"),
        (["a.png", "b.png"], r"the source is \['a.png', 'b.png'\].* the model edits one image"),
        (5, r"the source is 5; give the path of an image"),
    ):
        first = {"prompt": "make it blue", "source": f"{folder}/dark.png"}
        second = {"prompt": "make it red"} | ({} if source is None else {"source": source})
        file.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
        with pytest.raises(UserError, match=rf"data\.heldout: prompt file {file} line 2.*{reason}"):
            prepare(_config(folder, f"data.heldout={file}"), 1)
    with pytest.raises(UserError, match=r"data\.train: shapes:train has no images.*a \.jsonl file of"):
        prepare(_config(folder, "data.train=shapes:train"), 1)


def test_an_edit_is_known_by_its_source(folder, tmp_path):
    """A held-out edit is trained on where prompt and source are."""
    heldout = _write(tmp_path / "held.jsonl", folder, ["light"])
    trained = _write(tmp_path / "trained.jsonl", folder, ["dark"])
    config = _config(folder, f"data.train={trained}", "rollout.prompts_per_iteration=1")
    assert prepare(config, 1).heldout_trained_on == 1
    separate = _config(folder, f"data.train={trained}", f"data.heldout={heldout}", "rollout.prompts_per_iteration=1")
    assert prepare(separate, 1).heldout_trained_on == 0
    plain = load_config(FlowGRPOConfig, None, [f"data.heldout={folder}/edits.jsonl"])
    with pytest.raises(UserError, match="lines 1 and 2 give the prompt 'make it blue' two"):
        prepare(plain, 1)  # the model edits nothing, and the field means what its user wants


def test_edits_are_sampled_and_paired_by_source(folder, tmp_path):
    options = ("--option", "image_size=[16, 8]", "--option", "call={_auto_resize: false}")
    options += ("--steps", "1", "--seeds", "0,1")
    arguments = ["sample", f"{folder}/edits.jsonl", "-m", f"{folder}/model", *options, "-o", f"{tmp_path}/made"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "made" / "images.jsonl").read_text().splitlines()]
    assert [row["metadata"]["source"] for row in rows] == [f"{folder}/{n}.png" for n in ["dark"] * 2 + ["light"] * 2]
    tasks = read_tasks([str(tmp_path / "made")], single=False)
    assert sorted(Path(task.images[0]).name[:4] == Path(task.images[1]).name[:4] for task in tasks) == [True, True]
