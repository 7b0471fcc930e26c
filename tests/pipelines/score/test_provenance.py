# SPDX-License-Identifier: Apache-2.0
"""Whose numbers are these: named beside each judge, and where a packaged judge does not belong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.support.hub import COMMIT, hub
from tests.support.models.clip import save_tiny_transformers_clip
from visalign.pipelines.cli.app import app
from visalign.pipelines.score.provenance import domain_note, provenance, reward_identity
from visalign.rewards import load_reward
from visalign.rewards.serve.worker import judge_card


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (64, 64), "red").save(tmp_path / "a.png")
    return str(tmp_path / "a.png")


@pytest.mark.parametrize("command", ["score", "compare", "rank"])
def test_a_packaged_judge_says_where_it_does_not_belong(command, image, tmp_path):
    Image.new("RGB", (64, 64), "blue").save(tmp_path / "b.png")
    images = [image] if command == "score" else [image, str(tmp_path / "b.png")]
    options = ["-r", "clip_score", "-o", "model=shapes-clip"]
    if command == "score":
        options = ["-r", "clip_score", "--option", "model=shapes-clip", "--page", str(tmp_path / "p.html")]
        options += ["--format", "jsonl"]
    else:
        options = ["-r", "clip_score", "--option", "model=shapes-clip", "--output", str(tmp_path / "p.html")]
    found = CliRunner().invoke(app, [command, *images, "-p", "a cat on a mat", *options])
    assert found.exit_code == 0, found.output
    identity = reward_identity(load_reward("clip_score", model="shapes-clip"))
    caution = "was trained on: 1 of 1 prompts, such as 'a cat on a mat'. These numbers mean nothing."
    page = (tmp_path / "p.html").read_text()
    assert identity.line in found.stderr and caution in found.stderr and "(packaged: " in found.stderr
    assert "Not of the world of shapes" in page
    assert identity.digest[:12] in page
    if command == "score":
        assert json.loads(found.stdout)["judge"] == identity.line


def test_it_keeps_quiet_at_home_and_of_other_models(tmp_path):
    packaged = load_reward("clip_score", model="shapes-clip")
    assert domain_note(packaged, ["two red circles", "", "a blue square left of a green triangle"]) is None
    other = load_reward("clip_score", model=save_tiny_transformers_clip(tmp_path / "clip"))
    assert domain_note(other, ["a cat on a mat"]) is None and "packaged" not in provenance(other)


def test_the_revision_of_a_hub_model_is_told_and_is_no_part_of_the_digest(tmp_path, monkeypatch):
    folder = save_tiny_transformers_clip(tmp_path / "clip")
    hub(monkeypatch, {"a/b": folder})
    fetched: Any = load_reward("clip_score", model="a/b")
    assert f"a/b, revision {COMMIT[:12]}, identity {fetched.identity.digest[:12]}" in provenance(fetched)
    assert fetched.identity.differences(reward_identity(load_reward("clip_score", model=folder)))[:1] == ["model"]
    card = judge_card(fetched)
    assert (card["model"], card["revision"]) == ("a/b", COMMIT)
