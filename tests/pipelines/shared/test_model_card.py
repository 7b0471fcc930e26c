# SPDX-License-Identifier: Apache-2.0
"""Model cards of runs, and their upload to a hub that answers, or does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard
from PIL import Image
from typer.testing import CliRunner

from tests.support.evaluation_samples import make_result, make_text_result
from visalign.evaluation import write_summary
from visalign.pipelines.cli.app import app
from visalign.pipelines.shared import model_card as hub
from visalign.pipelines.shared.model_card import base_model, write_card


def run_folder(folder: Path, *, model: Path, text: bool = False, license: str | None = None) -> Path:
    """A run that has ended, without its training."""
    (folder / "lora").mkdir(parents=True)
    (folder / "lora" / "pytorch_lora_weights.safetensors").touch()
    (folder / "config.yaml").write_text(f"model: {{path: {model}}}")
    results = [(make_text_result if text else make_result)(share) for share in (0.4, 0.9)]
    for name, result in zip(("before", "after"), results, strict=True):
        result.save(folder / f"{name}.npz")
    rows = [{"iteration": i, "reward_mean": i / 4, "heldout/accuracy": 0.4 + i / 10} for i in range(1, 5)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    terms = {"mine": {"weight": 1.0, "name": "/tmp/me/mine.py:redness"}, "seen": {"weight": 0}}
    terms["fading"] = {"weight": {"start": 1.0, "end": 0.0, "iterations": 3, "shape": "linear"}}
    config = {"model": {"path": str(model)}, "run": {"license": license}, "rewards": {"terms": terms}}
    config |= {"data": {"train": "/tmp/me/prompts.txt", "heldout": None}, "objective": {"algorithm": "grpo"}}
    code = f"""pipe.load_lora_weights("{folder}/lora")\n\nsettings = {{'guidance_scale': 1.0}}"""
    costs = {"load_code": code, "seconds": 120.0, "iterations": 4}
    entries: dict[str, Any] = {"config": config, "versions": {"torch": "2.9"}, "costs": costs}
    write_summary(folder / "summary.json", before=results[0], after=results[1], **entries)
    return folder


def base_folder(folder: Path, header: str = "") -> Path:
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "FluxPipeline", "_name_or_path": "maker/flux"}')
    if header:
        (folder / "README.md").write_text(f"---\n{header}\n---\n# FLUX\n")
    return folder


@pytest.mark.parametrize(
    ("header", "own", "expected", "sentence"),
    [
        ("license: mit", None, {"license": "mit"}, "mit, the licence of the base model."),
        ("license: mit", "apache-2.0", {"license": "apache-2.0"}, "apache-2.0, stated for this model."),
        ("license: other\nlicense_name: flux", None, {"license": "other", "license_name": "flux"}, "flux, the lic"),
        ("license: other\nlicense_name: flux", "mit", {"license": "mit"}, "mit, stated for this model."),
        ("a: [b", None, {}, "No licence is stated"),
        ("", None, {}, "No licence is stated (run.license, visalign push --license)"),
    ],
)  # fmt: skip
def test_the_card_is_what_the_hub_reads(header, own, expected, sentence, tmp_path):
    run = run_folder(tmp_path / "first", model=base_folder(tmp_path / "base", header), license=own)
    folder = write_card(run)
    card = ModelCard.load(folder / "README.md")
    data = card.data.to_dict()
    assert data.pop("tags") == ["visalign", "grpo", "lora"] and sentence in card.text
    assert data.pop("widget")[0] == {"text": "prompt 0", "output": {"url": "images/after_0.png"}}
    header_fields = {"base_model": "maker/flux", "library_name": "diffusers", "pipeline_tag": "text-to-image"}
    assert data == header_fields | expected
    assert "A LoRA of maker/flux, trained with grpo of visalign on mine, fading." in card.text
    assert re.search(r"\| accuracy \| 0.4\d+ \| 0.9\d+ \| \+0.5 \(\+", card.text)
    assert f"\"{folder}\")\n\nsettings = {{'guidance_scale': 1.0}}\n" in card.text
    assert '\nimage = pipe("prompt 0", **settings).images[0]' in card.text
    assert "| prompts | prompts.txt; held out: None |" in card.text and "/tmp/me" not in card.text
    for number in range(4):
        with Image.open(folder / f"images/before_{number}.png") as image:
            assert image.size == (8, 8)
        assert f"![image](images/after_{number}.png)" in card.text
    assert (folder / "curve.svg").read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "![Held-out accuracy](curve.svg)" in card.text
    assert "| reward fading | fading, weight 1 to 0 over 3 iterations, linear |" in card.text


def test_the_base_model_of_any_path(tmp_path):
    (tmp_path / "file.safetensors").touch()
    cached = tmp_path / "models--maker--flux" / "snapshots" / "0a1b"
    cached.mkdir(parents=True)
    for path, expected in (
        ("maker/flux", {"base_model": "maker/flux"}),
        (tmp_path / "file.safetensors", {}),
        (cached, {"base_model": "maker/flux"}),
        ("shapes-sd3", {"license": "apache-2.0"}),
        ("anything of my own", {}),
    ):
        assert base_model(str(path)) == expected


def test_the_card_of_a_text_run_has_no_images(tmp_path):
    folder = write_card(run_folder(tmp_path / "first", model=base_folder(tmp_path / "base"), text=True))
    data: Any = ModelCard.load(folder / "README.md").data
    assert (data.library_name, data.pipeline_tag) == ("peft", "text-generation") and not (folder / "images").exists()


def push(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["push", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_a_push_uploads_the_folder_with_its_card(tmp_path, monkeypatch):
    run, calls = run_folder(tmp_path / "first", model=base_folder(tmp_path / "base")), []

    class Api:
        def create_repo(self, name, **options):
            calls.append((name, options))
            return SimpleNamespace(repo_id=name, __str__=lambda self: name)

        def upload_folder(self, **options):
            calls.append(options)

    for name, stand_in in (("HfApi", Api), ("get_token", lambda: "token"), ("go_offline_if_unreachable", lambda: "")):
        monkeypatch.setattr(hub, name, stand_in)
    code, output = push(run, "me/first", "--private", "--license", "mit")
    assert code == 0 and "Uploaded to" in output, output
    assert calls[0] == ("me/first", {"private": True, "exist_ok": True}) and calls[1]["folder_path"] == run / "lora"
    assert 'load_lora_weights("me/first")' in (run / "lora/README.md").read_text()

    def refuse(self, **options):
        raise OSError("403 Forbidden\nand more")

    monkeypatch.setattr(Api, "upload_folder", refuse)
    assert "me/first was not uploaded (403 Forbidden). Check that the token may write" in push(run, "me/first")[1]


def test_what_cannot_be_pushed_is_named(tmp_path, monkeypatch):
    run = run_folder(tmp_path / "first", model=base_folder(tmp_path / "base"))
    code, output = push(run, "me/first", "--dry-run")
    assert code == 0 and "Would be uploaded to me/first" in output and f"{run}/lora/README.md" in output
    code, output = push(run, "me/first", "--license", "foo", "--dry-run")
    assert code == 2 and "The licence is 'foo'. Give one of: apache-2.0, mit," in output
    monkeypatch.setattr(hub, "get_token", lambda: None)
    assert "No token for https://huggingface.co is stored. Run `hf auth login`" in push(run, "me/first")[1]
    monkeypatch.setattr(hub, "get_token", lambda: "token")
    monkeypatch.setattr(hub, "go_offline_if_unreachable", lambda: "no answer within 3 s")
    assert "cannot be reached (no answer within 3 s). Connect to the network." in push(run, "me/first")[1]
    assert "The name on the hub is 'me/a/b'. Give owner/name" in push(run, "me/a/b")[1]
    assert "is no run folder: it has no config.yaml" in push(tmp_path, "me/first")[1]
    (run / "summary.json").unlink()
    assert "has not ended, so it has no result. Finish it: visalign train" in push(run, "me/first")[1]


def test_the_code_loads_the_hub_s_result_however_the_run_is_named(tmp_path, monkeypatch):
    run_folder(tmp_path / "first", model=base_folder(tmp_path / "base"))
    monkeypatch.chdir(tmp_path)
    text = (write_card(Path("first"), repo="me/lora") / "README.md").read_text()
    assert 'load_lora_weights("me/lora")' in text
