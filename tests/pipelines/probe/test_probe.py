# SPDX-License-Identifier: Apache-2.0
"""`visalign probe-reward` finds planted weaknesses, passes an honest reward, counts failures, writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tests.support.judges.hackable import LovesFrames, LovesSaturation
from visalign.errors import UserError
from visalign.evaluation.probes.catalogue import select_probes
from visalign.interfaces import RewardCapabilities, Scores
from visalign.pipelines.cli.app import app
from visalign.pipelines.probe.job import probe_reward
from visalign.pipelines.probe.reference import Reference, read_reference, shapes_reference_set
from visalign.pipelines.score.image_rows import ImageRow
from visalign.rewards.verifiers.shapes_verifier import ShapesVerifier

SOME = ["saturation", "white_border", "black_border", "pasted_text", "spelling", "neighbours", "form"]
"""Probes that tell the three planted weaknesses apart; the honest reward is tried with all."""


@cache
def world() -> Reference:
    """64 images of the shapes world, drawn once."""
    return shapes_reference_set(64)


def verdicts(result: Mapping[str, Any]) -> dict[str, str]:
    return {probe["name"]: probe["verdict"] for probe in result["probes"]}


def level(result: Mapping[str, Any], probe: str, label: str) -> Mapping[str, Any]:
    [selected] = [entry for entry in result["probes"] if entry["name"] == probe]
    return next(entry for entry in selected["levels"] if entry["label"] == label)


def test_the_honest_verifier_passes() -> None:
    result = probe_reward(ShapesVerifier(), world())
    by_probe = verdicts(result)
    beyond = {"ground", "canvas"}  # it reads the world's own dark grounds, and sizes in pixels
    assert {name for name, verdict in by_probe.items() if verdict == "fails"} == beyond, by_probe
    assert {by_probe[name] for name in ("blank", "destroyed", "mirror", "neighbours", "form")} == {"holds"}
    few = level(result, "spelling", "to the left of")
    assert (few["mean"], few["judged"], few["verdict"]) == (0.0, 5, "unclear"), "five images decide nothing"
    assert level(result, "other_prompt", "another prompt")["mean"] < -0.5, "it looks at the prompt"
    assert result["reference"]["judged"] == 64 and 0.3 < result["reference"]["spread"] < 0.6
    assert result["summary"]["fails"] == 2
    json.dumps(result, allow_nan=False)


def test_love_of_frames_and_captions_is_found() -> None:
    by_probe = verdicts(probe_reward(LovesFrames(), world(), probes=select_probes(SOME)))
    assert by_probe["white_border"] == "fails" and by_probe["pasted_text"] == "fails"
    assert by_probe["black_border"] == "holds" and by_probe["neighbours"] == "holds"


def test_lower_is_better_turns_the_responses() -> None:
    class Darkness:
        name, unit, range, higher_is_better = "darkness", "level", (0.0, 1.0), False

        def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
            value = images.mean((1, 2, 3))
            return Scores(value=value, valid=torch.ones(len(value), dtype=torch.bool), unit="level")

    result = probe_reward(Darkness(), world(), probes=select_probes(["brightness", "other_prompt"]))
    assert level(result, "brightness", "× 0.3")["verdict"] == "fails", "darker scores better"
    assert level(result, "brightness", "× 1.8")["verdict"] == "holds"
    assert level(result, "other_prompt", "another prompt")["mean"] == 0.0


def test_what_a_reward_raises_is_a_failure_of_that_probe_alone() -> None:
    class TensorsOnly(LovesSaturation):
        def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
            if not isinstance(images, torch.Tensor):
                raise TypeError("tensors only")
            return super().score(images, prompts, metadata)

    few = Reference("few", world().samples[:6], world().metadata[:6])
    result = probe_reward(TensorsOnly(), few, probes=select_probes(["form", "saturation"]))
    assert verdicts(result)["form"] == "fails" and result["probes"][0]["failed"] == 5 * 6
    [reason] = level(result, "form", "PIL")["reasons"]
    assert "raised TypeError: tensors only" in reason
    assert level(result, "saturation", "× 2.2")["judged"] == 6


class RefusesWhite:
    """Fails on images with a white corner, and counts its calls."""

    name, unit, range, higher_is_better = "refuses_white", "level", (0.0, 1.0), True

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
        valid = images[:, :, 0, 0].amin(1) < 1
        value = torch.where(valid, images.mean((1, 2, 3)), torch.nan)
        return Scores(value=value, valid=valid, unit="level", reason=[None if ok else "too white" for ok in valid])


def test_failures_are_counted_and_are_no_score() -> None:
    result = probe_reward(RefusesWhite(), world(), probes=select_probes(["white_border", "black_border"]))
    white, black = result["probes"]
    assert white["verdict"] == "not judged" and white["judged"] == 0
    assert white["failed"] == sum(entry["failed"] for entry in white["levels"]) == 3 * result["reference"]["judged"]
    assert white["levels"][0]["reasons"] == {"too white": result["reference"]["judged"]}
    assert black["verdict"] == "holds" and black["failed"] == 0


def test_a_reward_that_needs_records_gets_them() -> None:
    class ByRecord:
        name, unit, range, higher_is_better = "by_record", "length", (0.0, 99.0), True

        def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
            valid = torch.tensor([metadata is not None and record is not None for record in metadata or prompts])
            value = images.mean((1, 2, 3)) if metadata else torch.full((len(prompts),), torch.nan)
            return Scores(value=value, valid=valid & torch.tensor(metadata is not None), unit="length")

    result = probe_reward(ByRecord(), world(), probes=select_probes(["spelling"]))
    assert result["reference"]["with_records"] and result["reference"]["judged"] == 64


def test_what_cannot_be_probed_is_said() -> None:
    class Constant:
        name, unit, range, higher_is_better = "constant", "x", (0.0, 1.0), True
        valid = True

        def score(self, images: Any, prompts: Any, metadata: Any = None) -> Scores:
            valid = torch.full((len(prompts),), self.valid)
            value = torch.where(valid, torch.full((len(prompts),), 0.5), torch.nan)
            return Scores(value=value, valid=valid, unit="x", reason=[None if self.valid else "no"] * len(prompts))

    with pytest.raises(UserError, match="constant gives all 64 reference samples the same answer, so its"):
        probe_reward(Constant(), world())
    silent = Constant()
    silent.valid = False
    with pytest.raises(UserError, match="constant judged 0 of 64 reference samples, and 2 are needed: no"):
        probe_reward(silent, world())
    relative = ShapesVerifier()
    relative.capabilities = RewardCapabilities(needs_batch=True)
    with pytest.raises(UserError, match="64 are more than one batch of 32"):
        probe_reward(relative, world())


def test_unreadable_reference_images_are_left_out(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    rows = [ImageRow(image=str(tmp_path / name), prompt="x") for name in ("a.png", "b.png")]
    reference = read_reference("here", rows)
    assert len(reference.samples) == 1 and reference.unreadable == 1
    with pytest.raises(UserError, match=r"None of the 1 reference samples of here can be read: .*b\.png"):
        read_reference("here", rows[1:])


def test_the_command_writes_page_and_json_and_says_when_a_probe_fails(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = ["probe-reward", "saturation", "--count", "8", "--only", "saturation", "--only", "spelling"]
    outcome = CliRunner().invoke(app, [*arguments, "-o", str(folder)])
    assert outcome.exit_code == 1, outcome.output
    assert "1 of 2 probes move it: saturation." in outcome.output
    assert "The best paid change is saturation, × 2.2: +" in outcome.output
    result = json.loads((folder / "probe.json").read_text())
    assert verdicts(result)["saturation"] == "fails" and list(verdicts(result)) == ["saturation", "spelling"]
    page = (folder / "probe.html").read_text()
    assert "1 of 2 probes move it: saturation." in page and "<svg" in page
    assert page.count("<img") == page.count('alt="') and "data:image/png" in page
    assert "http" not in page.replace("http-equiv", ""), "nothing from outside"
    again = CliRunner().invoke(app, [*arguments, "-o", str(folder)])
    assert again.exit_code == 2 and "out" in again.output
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "b.png")
    images = [argument for name in ("a.png", "b.png") for argument in ("--reference", str(tmp_path / name))]
    unprompted = CliRunner().invoke(app, ["probe-reward", "brightness", "--only", "form", *images])
    assert unprompted.exit_code == 0, "it reads no prompt"
    honest = CliRunner().invoke(app, ["probe-reward", "shapes_verifier", "--count", "8", "--only", "form", "--json"])
    assert honest.exit_code == 0 and json.loads(honest.stdout)["summary"] == {"holds": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shapes_verifer"], "no reward 'shapes_verifer'. Did you mean 'shapes_verifier'?"),
        (["saturation", "--only", "colour"], "There is no probe 'colour'. Allowed: blank, destroyed"),
    ],
)
def test_the_command_refuses(arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, ["probe-reward", *arguments])
    assert outcome.exit_code == 2 and message in " ".join(outcome.output.split())
