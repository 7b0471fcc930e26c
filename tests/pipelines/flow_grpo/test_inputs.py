# SPDX-License-Identifier: Apache-2.0
"""What can be known without the model is known before anything is written, by the plan as by the run."""

from __future__ import annotations

import importlib
import inspect
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from tests.support.models.pipelines import tiny_folder, trained_weights
from tests.support.models.sd3 import build_tiny_sd3
from tests.support.models.single_files import save_single_file
from visalign.adapters.pipeline.families import FAMILIES
from visalign.config import load_config
from visalign.data.assets import resolve_model
from visalign.errors import UserError
from visalign.pipelines.flow_grpo.inputs import prepare
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, load_code, plan, run, sample_command
from visalign.pipelines.flow_grpo.parts import build_policy
from visalign.pipelines.shared.job import result_folder
from visalign.pipelines.shared.parts import code_fingerprints
from visalign.pipelines.shared.run_folder import FINGERPRINTS, check_unchanged, write_once
from visalign.pipelines.text.config import TextConfig
from visalign.training.loop.checkpoint import CheckpointError

SMALL = (
    "rollout={prompts_per_iteration: 3, group_size: 4, steps: 3}",
    "run={iterations: 2, device: cpu}",
    "data.balance=true",
)


CAPTIONED = "data.images=. data.balance=false objective.algorithm=sft rollout.group_size=1"


def config(*overrides: str) -> FlowGRPOConfig:
    return load_config(FlowGRPOConfig, None, [*SMALL, *overrides])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards.terms={jpeg_size: {}, sharpness: {}}", "would add different units: jpeg_size in 'kB'"),
        ("data.cycle=[nope]", r"cycle names \['nope'\], which no prompt is labelled with"),
        ("evaluation.correctness=sharpness", r"'sharpness' cannot say correct or wrong"),
    ],
)
def test_what_the_run_refuses_the_plan_refuses(tmp_path: Path, override: str, message: str) -> None:
    configuration = config(override)
    for attempt in (lambda: plan(configuration, measure=False), lambda: run(configuration, tmp_path / "run")):
        with pytest.raises((ValueError, RuntimeError), match=message):
            attempt()
    assert not (tmp_path / "run").exists()


def test_one_process_is_refused_before_a_divided_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visalign.pipelines.flow_grpo.job.build_policy", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UserError, match="sharding divides a model among processes, and one was started"):
        run(config("run.sharding=true"), tmp_path / "run")


def test_batch_scales_are_refused_with_several_processes() -> None:
    configuration = config("rewards.normalise=batch")
    assert prepare(configuration, 1).reward.unit == "batch standard deviations"
    with pytest.raises(UserError, match="weighted_sum compares all samples of an iteration, and each of 2"):
        prepare(configuration, 2)
    configuration = config("rewards.terms={hpsv3: {uncertainty: bhattacharyya}}")
    with pytest.raises(UserError, match="all samples of an iteration, and each of 2"):
        prepare(configuration, 2)


def test_a_bound_is_refused_where_no_sum_is_learnt_from() -> None:
    override = "rewards={terms: {shapes_verifier: {}, clip_score: {bound: 0.7}}, allow_mixed_units: true}"
    reward: Any = prepare(config(override), 1).reward
    assert reward.capabilities.constraints == {"clip_score": 0.7}
    with pytest.raises(UserError, match=r"gdpo takes each reward by itself"):  # before the model is there
        prepare(config(override, "objective.algorithm=gdpo"), 1)


def test_rewards_of_sets_want_whole_sets_and_stay_out_of_the_evaluation() -> None:
    configuration = config("rewards.terms={vendi_gain: {}}")
    reward: Any = prepare(configuration, 3).reward
    assert reward.capabilities.needs_group and "vendi_gain" not in prepare(configuration, 1).rewards
    with pytest.raises(UserError, match=r"3 and there are 2 processes: some group would be spread"):
        prepare(configuration, 2)
    for over in ("batch", "sets"):
        configuration = config(f"rewards.terms={{variety: {{name: vendi_gain, options: {{over: {over}}}}}}}")
        with pytest.raises(UserError, match="all samples of an iteration, and each of 3"):
            prepare(configuration, 3)
        assert "variety" not in prepare(configuration, 1).rewards
    for change in ("objective.algorithm=draft", "data.pairs=shapes:pairs"):
        overrides = "rollout={keep_images: true, group_size: 2}", "objective.algorithm=diffusion_dpo", change
        with pytest.raises(UserError, match=r"keep_images keeps samples as they are scored, and .*keep_images=false"):
            config(*overrides)
    near = "{frechet_gain: {options: {over: image, reference: [a red circle, a blue square]}}}"
    assert "frechet_gain" in prepare(config(f"evaluation.rewards={near}", "evaluation.correctness=null"), 1).rewards
    with pytest.raises(UserError, match=r"evaluation\.rewards names vendi_gain, which needs a training"):
        prepare(config("evaluation.rewards={vendi_gain: {}, shapes_verifier: {}}"), 1)


def test_prompts_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a red circle\na blue square\na cross")
    (tmp_path / "b.txt").write_text("A  Red circle\na green square")
    configuration = config("data.balance=false", f"data.train={tmp_path}/a.txt", f"data.heldout={tmp_path}/b.txt")
    assert prepare(configuration, 1).heldout_trained_on == 1
    assert plan(configuration, measure=False)["evaluation"]["heldout_prompts_trained_on"] == 1
    assert prepare(config(), 1).heldout_trained_on == 0


def test_changed_prompts_are_noticed(tmp_path: Path) -> None:
    prompts, output = tmp_path / "a.txt", tmp_path / "run"
    prompts.write_text("a red circle\na cross")
    configuration = config("data.balance=false", f"data.train={prompts}")
    first = prepare(configuration, 1).fingerprints
    assert set(first) == {"data.train", "data.heldout"}
    check_unchanged(output, first)  # a run of a version that kept no fingerprints
    write_once(output / FINGERPRINTS, json.dumps(first))
    check_unchanged(output, prepare(configuration, 1).fingerprints)
    prompts.write_text("a red circle\na square")
    with pytest.raises(CheckpointError, match=r"Differing keys: data\.train: '\w{64}' there"):
        check_unchanged(output, prepare(configuration, 1).fingerprints)


def test_changed_code_and_files_of_options_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rewards, adapters and tools alike, by file or by module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    module, tool, words = (tmp_path / name for name in ("own_module_of_a_test.py", "tool.py", "words.txt"))
    for path in (module, tool, words):
        path.write_text("def f(text):\n    return text\n")
    importlib.import_module(module.stem)  # as loading the reward does
    terms = f"rewards.terms={{mine: {{name: '{module.stem}:f', options: {{words: {words}}}}}, '{tool}:f': {{}}}}"
    text = load_config(TextConfig, None, [terms, f"rollout.tool.use={tool}:f"])
    images = config(f"model.adapter={tool}:f", f"evaluation.rewards={{mine: {{name: '{tool}:f'}}}}")
    keys = {"rewards.terms.mine.name", "rewards.terms.mine.options.words", "rollout.tool.use"}
    keys.add(f"rewards.terms.{tool}:f")
    first, adapter = code_fingerprints(text), code_fingerprints(images)
    assert set(first) == keys and set(adapter) == {"model.adapter", "evaluation.rewards.mine.name"}
    for path in (module, tool, words):
        path.write_text(path.read_text() + "# changed\n")
    changed, changed_adapter = code_fingerprints(text), code_fingerprints(images)
    assert not set(first.values()) & set(changed.values()) and adapter.keys() == changed_adapter.keys()
    assert adapter["model.adapter"] != changed_adapter["model.adapter"]


def test_the_code_that_loads_the_result_has_its_path() -> None:
    adapters = load_code(config("model.path=shapes-sd3"), Path("runs/first"))
    assert 'resolve_model("shapes-sd3")' in adapters and 'load_lora_weights("runs/first/lora")' in adapters
    full = load_code(config("model.lora=null"), Path("runs/first"))
    large = load_code(config("model={lora: null, image_size: [64, 96]}"), Path("runs/first"))
    assert 'from_pretrained("runs/first/model")' in full and "lora" not in full
    steps = {"num_inference_steps": 3}
    for code, size in ((adapters, {}), (full, {}), (large, {"height": 64, "width": 96})):
        assert code.endswith(f"\nsettings = { ({**steps, 'guidance_scale': 1.0, **size}) }")  # off, as trained
        compile(code, "report", "exec")
    guided = load_code(
        config(
            "model.path=shapes-sd3", "evaluation={guidance: 3.5, steps: 28}", "model.options.negative_prompt=ugly ☹"
        ),
        Path("runs/first"),
    )
    settings = {"num_inference_steps": 28, "guidance_scale": 3.5, "negative_prompt": "ugly ☹"}
    assert guided.endswith(f"# of the run's evaluation, for pipe(prompt, **settings)\nsettings = {settings}")


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("qwen_image", "evaluation.guidance=4", {"true_cfg_scale": 4.0, "negative_prompt": " "}),
        ("qwen_image", "evaluation.guidance=1", {"true_cfg_scale": 1.0}),
        ("flux", "evaluation={}", {"guidance_scale": 3.5}),
        ("pixart", "model.image_size=64", {"guidance_scale": 1.0, "use_resolution_binning": False, "height": 64}),
        ("flux_kontext", "model.image_size=64", {"guidance_scale": 2.5, "max_area": 64 * 64}),
        ("flux_kontext", f"{CAPTIONED} model.image_size=64", {"num_inference_steps": 3, "guidance_scale": 2.5}),
        ("qwen_image", CAPTIONED, {"negative_prompt": " "}),  # its call does not guide without
    ],
)
def test_the_settings_of_a_call_are_the_familys(name: str, change: str, expected: dict[str, Any], tmp_path: Path):
    code = load_code(config(f"model.path={tiny_folder(name, tmp_path / 'model')}", *change.split()), tmp_path)
    names: dict[str, Any] = {}
    exec(code[code.index("\nsettings = ") :], names)
    assert expected.items() <= names["settings"].items() and ("negative_prompt" in names["settings"]) == (
        "negative_prompt" in expected
    )


@pytest.mark.parametrize(
    ("change", "settings", "options"),
    [
        ("", {}, ["--dtype", "float32"]),
        (
            "evaluation.guidance=4",
            {"num_inference_steps": 3, "guidance_scale": 4.0},
            ["--steps", "3", "--dtype", "float32", "--option", "guidance=4.0"],
        ),
    ],
)
def test_a_model_that_learns_captions_is_used_with_its_own_guidance(change, settings, options, tmp_path: Path) -> None:
    captioned = config(f"model.path={build_tiny_sd3(tmp_path / 'model')}", *CAPTIONED.split(), *change.split())
    assert load_code(captioned, tmp_path).endswith(f"settings = {settings}")
    command = sample_command(captioned, tmp_path)
    assert command[command.index("--dtype") - 2 * (len(options) > 2) : -2] == options


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (
            "shapes-sd3",
            "evaluation.guidance=0",
            r"evaluation\.guidance is 0, and .* guided by at least 1, which switches",
        ),
        ("shapes-sd3", "rollout.guidance=0.5", r"rollout\.guidance is 0\.5, and .* guided by at least 1"),
        ("z_image", "evaluation.guidance=0", None),
        ("flux2_klein", "evaluation.guidance=4", r"evaluation\.guidance is 4, and .* takes no guidance"),
        ("flux2_klein", "evaluation.guidance=1", None),
    ],
)
def test_guidance_that_a_model_does_not_take_is_refused(model: str, change: str, message: str | None, tmp_path: Path):
    path = Path(model)
    if model != "shapes-sd3":
        (path := tmp_path / "model").mkdir()
        index = {"_class_name": FAMILIES[model].pipelines[0], "is_distilled": model == "flux2_klein"}
        (path / "model_index.json").write_text(json.dumps(index))
    configuration = config(f"model.path={path}", change, "objective.algorithm=diffusion_nft")
    with pytest.raises(UserError, match=message) if message else nullcontext():
        prepare(configuration, 1)


@pytest.mark.parametrize("network_only", [False, True])
def test_the_code_that_loads_the_result_of_a_file(tmp_path, network_only):
    pipe = DiffusionPipeline.from_pretrained(str(resolve_model("shapes-sd15")))
    pipe.unet.conv_in.bias.data += 1
    file = save_single_file(pipe, tmp_path / "civit.safetensors", network_only=network_only)
    overrides = [f"model.path={file}", "model.config=shapes-sd15"]
    code, names = load_code(config(*overrides), tmp_path), dict[str, Any]()
    exec(code.partition("\npipe.load_lora")[0], names)
    assert torch.equal(names["pipe"].unet.conv_in.bias, pipe.unet.conv_in.bias)
    command = sample_command(config(*overrides), tmp_path)
    assert command[4:8] == [str(file), "--config", "shapes-sd15", "--lora"]
    assert "--config" not in sample_command(config(*overrides, "model.lora=null"), tmp_path)


@pytest.mark.parametrize(("name", "lora"), [("wan", "{rank: 2}"), ("sd3 without T5", "{rank: 2}"), ("sd3", "null")])
def test_the_code_that_loads_the_result_loads_what_was_trained(name: str, lora: str, tmp_path: Path) -> None:
    model = tmp_path / "a model"
    if name.startswith("sd3"):
        build_tiny_sd3(model, t5=name == "sd3")
    else:
        tiny_folder(name, model)
    configuration = config(f"model={{path: {model}, lora: {lora}, image_size: {64 if name == 'wan' else 'null'}}}")
    policy: Any = build_policy(configuration.model, torch.device("cpu"), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, weight in policy.trainable_parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    policy.save(result_folder(configuration, tmp_path))
    names: dict[str, Any] = {}
    exec(load_code(configuration, tmp_path), names)
    settings, call = names["settings"], inspect.signature(type(names["pipe"]).__call__).parameters
    assert settings.keys() <= call.keys() and ("num_frames" in settings) == (name == "wan")
    for part in ("transformer", "transformer_2") if name == "wan" else ("transformer",):
        expected = trained_weights(getattr(policy.pipe, part))
        loaded = trained_weights(getattr(names["pipe"], part))
        assert expected and expected.keys() == loaded.keys()
        for layer, weight in expected.items():
            torch.testing.assert_close(loaded[layer], weight, rtol=0, atol=1e-7)


PAIRS = "name: 'tests.support.judges.brightness:BrightnessPairs'"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rewards.terms={sharpness: {references: {}}}", "sharpness compares with no reference"),
        (f"rewards.terms={{j: {{{PAIRS}, references: {{count: 2, keep: 3}}}}}}", "keep is 3 and references.count"),
        (f"rewards.terms={{j: {{{PAIRS}, references: {{count: 1}}}}}}", r"references\.count.*got 1.*or equal to 2"),
        (f"rewards.terms={{j: {{{PAIRS}, references: {{every: 0}}}}}}", r"references\.every.*got 0.*or equal to 1"),
        (
            f"rewards.terms={{j: {{{PAIRS}, references: {{}}, where: {{tag: counting}}}}, brightness: {{}}}}",
            "drawn for all prompts, and j.where",
        ),
        (
            f"rewards.terms={{j: {{{PAIRS}, references: {{}}}}, k: {{{PAIRS}, references: {{}}}}}}",
            "j and k have references, and one term can",
        ),
        (f"evaluation.rewards={{j: {{{PAIRS}, references: {{}}}}}}", r"evaluation\.rewards\.j\.references are of"),
        (f"rewards.terms={{j: {{{PAIRS}}}}}", r"or rewards\.terms\.LABEL\.references"),
    ],
)
def test_references_that_cannot_be_are_refused(change: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(config(change), 1)


def test_references_are_of_the_training_alone(tmp_path: Path) -> None:
    table = tmp_path / "prompts.jsonl"
    table.write_text('{"prompt": "a cat", "references": ["cat.png"]}\n{"prompt": "a dog"}\n')
    overrides = (f"rewards.terms={{j: {{{PAIRS}, references: {{}}}}}}", f"data={{train: {table}, balance: false}}")
    inputs = prepare(config(*overrides), 1)
    assert inputs.references is not None and inputs.references.own == {"a cat"} and "j" not in inputs.rewards
    assert (inputs.references.count, inputs.references.keep, inputs.references.every) == (16, 2, None)
