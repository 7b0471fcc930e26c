# SPDX-License-Identifier: Apache-2.0
"""`pip install visalign` without the extra `images`: what runs, and what the rest says of the extra."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

from tests.house.test_layout import PROJECT, ROOT
from visalign.versions import IMAGES

BLOCK = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {sorted(IMAGES)}:
            return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""

ALONE = """
import torch
import visalign, visalign.flow, visalign.text
from visalign.core import PolicyOutput, Trajectories, named_objective
from visalign.errors import UserError
from visalign.rewards import RewardError, load_text_reward
from visalign.rewards.serve.client import RemoteReward

log_prob = torch.zeros(4, 3, requires_grad=True)
step = Trajectories(weight=torch.ones(4, 3), old_log_prob=torch.zeros(4, 3), group=[0, 0, 1, 1],
                    reward=torch.tensor([0.0, 1, 0, 1]))
objective = named_objective("dapo")
objective.loss(objective.prepare(step), PolicyOutput(log_prob=log_prob)).total.backward()
judge = load_text_reward("boxed_answer")
print(log_prob.grad.sign()[:, 0].tolist())
print(judge.score(["\\\\boxed{4}"], ["2+2?"], [{"answer": "4"}]).value.tolist())
import importlib, importlib.util
wanted = "visalign.config", "peft"
named = lambda: visalign.load_judge("vision_reward"), lambda: visalign.load_policy("assets/shapes-sd3")
late = lambda: visalign.Trainer, lambda: visalign.training.SFT, lambda: visalign.evaluate
for ask in (*named, *late, *(lambda n=n: importlib.import_module(n) for n in wanted)):
    try:
        ask()
    except (ModuleNotFoundError, RewardError, UserError) as error:
        print(error)
assert importlib.util.find_spec("peft") is None
sys.argv = ["visalign", "quickstart"]
from visalign.__main__ import main
main()
"""


def test_the_core_needs_nothing_of_the_images() -> None:
    run = subprocess.run([sys.executable, "-c", BLOCK + ALONE], cwd=ROOT, capture_output=True, text=True, check=False)
    gradient, score, *messages, foreign = run.stdout.splitlines()
    assert gradient == "[1.0, -1.0, 1.0, -1.0]" and score == "[1.0]"
    mend = "not installed: python -m pip install 'visalign[images]'"
    assert len(messages) == 6 and all(
        re.fullmatch(rf"('.*cannot be imported\. )?This needs \w+, which is {re.escape(mend)}\.?", s) for s in messages
    )
    assert foreign == "No module named 'peft'"  # code outside this package gets Python's message
    assert run.returncode == 1 and run.stderr == f"Error: This needs typer, which is {mend}\n"


def test_the_doctor_examines_what_lacks_the_images() -> None:
    code = "sys.argv = ['visalign', 'doctor']\nfrom visalign.__main__ import main\nmain()"
    run = subprocess.run([sys.executable, "-c", BLOCK + code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1 and not run.stderr
    assert "Run: python -m pip install 'visalign[images]'" in run.stdout
    assert "FAIL  configurations: ModuleNotFoundError: This needs yaml" in run.stdout
    assert "PASS  advantages" in run.stdout


def test_the_extra_is_what_its_modules_come_from() -> None:
    owners = metadata.packages_distributions()
    listed = {re.split("[<>=]", line)[0] for line in PROJECT["project"]["optional-dependencies"]["images"]}
    assert {owners[name][0].lower().replace("_", "-") for name in IMAGES} == listed
