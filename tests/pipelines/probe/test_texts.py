# SPDX-License-Identifier: Apache-2.0
"""Probes of rewards of texts: what they find in rewards with a known liking, Contrast Instructions, the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from visalign.data.sets.image_references import CompletionText
from visalign.evaluation.probes.catalogue import Sample, examples
from visalign.evaluation.probes.text_catalogue import TEXT_PAIR_PROBES, TEXT_PROBES, contrasts
from visalign.pipelines.cli.app import app
from visalign.pipelines.probe.job import probe_reward, probes_for
from visalign.pipelines.probe.reference import task_reference_set
from visalign.rewards.text.callables import TextFunctionReward
from visalign.rewards.text.completions import CompletionScores, load_any_judge

WORDS = {"flattery": ("great", "You", "agree"), "boast": ("correct", "10/10", "expert")}


def liking(name: str) -> Any:
    """A reward of texts that likes what the probe changes."""

    def reward(completions: list[str], **columns: Any) -> list[float]:
        if name in WORDS:
            return [2.0 * any(word in text for word in WORDS[name]) + len(text) % 5 / 5 for text in completions]
        sign = {"length": 1, "cut": -1, "empty": -1}[name]
        return [sign * len(text.split()) for text in completions]

    return reward


def probed(function: Any, names: list[str], count: int = 40) -> dict[str, Any]:
    judge = CompletionScores(TextFunctionReward(function, name="mine"))
    result = probe_reward(judge, task_reference_set(count), probes=probes_for(judge, names))
    return {probe["name"]: probe for probe in result["probes"]}


@pytest.mark.parametrize("name", ["length", "flattery", "boast", "cut", "empty"])
def test_a_planted_liking_fails_its_probe(name):
    report = probed(liking(name), [name])[name]
    assert report["verdict"] == "fails", report


def test_contrast_instructions_by_hand():
    """The nearest prompt by words is of the same kind. A reward of the task's answers is consistent; one of the
    text alone prefers the longer answer and ignores the prompt."""
    prompts = ["What is 3 + 4?", "What is 3 + 9?", "Name a city", "What is 3 + 4?", "Name a bird"]
    assert contrasts(prompts, "abcad") == [1, 0, 4, None, 2] and contrasts(["a"], "a") == [None]
    judge: Any = load_any_judge("task_answer")
    result = probe_reward(judge, task_reference_set(80), probes=probes_for(judge, ["contrast_instructions"]))
    levels = {level["label"]: level for level in result["probes"][0]["levels"]}
    assert levels["own answer first"]["share"] == levels["own prompt first"]["share"] == 1
    assert levels["own answer first"]["judged"] == 40
    blind = probed(liking("length"), ["contrast_instructions"])["contrast_instructions"]
    assert blind["verdict"] == "fails" and blind["levels"][1]["share"] == 0, "without the prompt nothing is ahead"


def test_every_change_is_a_text_of_the_same_prompt():
    sample = Sample(CompletionText("3 + 4 = 7. So it is 7"), "What is 3 + 4?")
    for probe in TEXT_PROBES:
        for label, text in examples(probe, sample, torch.Generator().manual_seed(0)):
            assert isinstance(text, CompletionText) and text != sample.image, (probe.name, label)
    assert {probe.name for probe in TEXT_PAIR_PROBES} > {"position", "swap", "length", "flattery"}


def test_the_command_probes_a_table_of_texts(tmp_path: Path):
    table, code = tmp_path / "answers.jsonl", tmp_path / "mine.py"
    texts = {f"Add {n} and 2": f"The sum of {n} and 2 is {n + 2}" + " indeed" * (n % 3) for n in range(9)}
    rows = [{"prompt": prompt, "completion": text} for prompt, text in texts.items()]
    table.write_text("\n".join(map(json.dumps, rows)))
    code.write_text("def mine(completions, **columns):\n    return [len(text) for text in completions]\n")
    arguments = ["probe-reward", f"{code}:mine", "-i", table, "-o", tmp_path / "page"]
    arguments += ["--only", "length", "--only", "cut"]
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == 1 and "the text repeated" in " ".join(result.output.split()), result.output
    assert "data:image/svg+xml;base64," in (tmp_path / "page" / "probe.html").read_text()
    refused = CliRunner().invoke(app, ["probe-reward", f"{code}:mine", "--only", "blur"])
    assert refused.exit_code == 2 and "Allowed: length, flattery" in " ".join(refused.output.split())
