# SPDX-License-Identifier: Apache-2.0
"""`visalign train ... model.adapter=file.py:Class`: a user's own model trains, or is refused."""

import json

import pytest
from typer.testing import CliRunner

from visalign.config import load_config
from visalign.errors import UserError
from visalign.pipelines.cli.app import app
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, run

OWN = """
from tests.support.training.images import ToyPolicy

class Own(ToyPolicy):
    @classmethod
    def from_pretrained(cls, folder_or_id, *, dtype, device):
        return cls(dtype)

    def save(self, folder):
        folder.mkdir(parents=True)
        (folder / "shift.txt").write_text(str(self.net.shift.tolist()))
"""
CONFIG = """
pipeline: flow_grpo
model: {{path: mine, adapter: "{folder}/own.py:Own"}}
data: {{train: {folder}/prompts.jsonl, heldout: {folder}/prompts.jsonl}}
rewards: {{terms: {{brightness: {{weight: 1}}}}}}
rollout: {{prompts_per_iteration: 2, group_size: 4, steps: 3, batch_size: 8, noise_level: 0.5}}
objective: {{changes: {{kl: 0.0, surrogate_options: {{eps_low: 0.1, eps_high: 0.1}}}}}}
optimizer: {{lr: 0.05, micro_batch: 8}}
evaluation: {{rewards: {{}}, correctness: null, seeds: [0]}}
run: {{iterations: 8, device: cpu}}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": p}) for p in ("bright", "light")))
    (tmp_path / "own.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def test_a_users_own_model_trains_from_the_command_line(folder):
    done = CliRunner().invoke(app, ["train", f"{folder}/own.yaml", "--output", f"{folder}/run"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["ratio_floor"] < 1e-5
    summary = json.loads((folder / "run" / "summary.json").read_text())
    before, after = (summary[when]["rewards"]["brightness"]["mean"] for when in ("before", "after"))
    assert after > before + 0.02
    assert (folder / "run" / "lora" / "shift.txt").is_file()
    page = (folder / "run" / "report.html").read_text()
    assert f"adapter=&#34;{folder}/own.py:Own&#34;)" in page and "StableDiffusion3Pipeline" not in page


@pytest.mark.parametrize(
    "override, message",
    [
        ("model.adapter=sd4", r"There is no adapter 'sd4'\. Did you mean 'sd3'"),
        ("model.guidance=2", r"The adapter Own takes no guidance\. It takes dtype, device"),
    ],
)
def test_refusals(folder, override, message):
    with pytest.raises((UserError, FileNotFoundError), match=message):
        run(load_config(FlowGRPOConfig, folder / "own.yaml", [override]), folder / "run")
    assert not (folder / "run").exists()
