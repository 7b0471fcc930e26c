# SPDX-License-Identifier: Apache-2.0
"""The jobs text_grpo and text_ppo on the packaged model: what they write, resume and refuse."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from visalign.config import list_configs, load_config
from visalign.data.assets import assets_folder, resolve_model
from visalign.errors import ConfigError, UserError
from visalign.evaluation import load_heldout
from visalign.pipelines.cli.show import result_files
from visalign.pipelines.jobs import load_job
from visalign.pipelines.text import job as text_grpo
from visalign.pipelines.text.config import ServerConfig
from visalign.pipelines.text.job import TextGRPOConfig, TextPPOConfig, load_code, plan
from visalign.pipelines.text.parts import prepare, syncing
from visalign.rewards.base.contract import RewardError
from visalign.training.loop.judging import RewardFailure
from visalign.training.loop.metrics import read_metrics

SMALL = ["data.tasks=[add, reverse]", "data.size=40", "data.heldout_per_task=3", "evaluation.seeds=[0, 1]"]
SMALL += ["rollout={prompts_per_iteration: 4, group_size: 4, max_new_tokens: 48}", "optimizer.lr=1e-4"]
SMALL += ["run.iterations=2", "run.device=cpu"]


def _grpo(*more: str) -> TextGRPOConfig:
    return load_config(TextGRPOConfig, None, [*SMALL, *more])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    output = tmp_path_factory.mktemp("text") / "run"
    return output, text_grpo.run(_grpo("evaluation.every=1"), output)


def test_a_run_leaves_numbers_and_a_model_that_transformers_loads(finished):
    output, summary = finished
    assert set(summary["before"]["by_category"]) == {"add", "reverse"}
    assert 0 < summary["before"]["accuracy"] < 1
    names = {"task_answer", "greedy", "length", "token_entropy", "any_of_samples"}
    assert names == set(summary["after"]["rewards"])
    assert summary["samples"] == 32 and summary["iterations"] == 2 and summary["tokens"] > 32
    assert json.loads((output / "summary.json").read_text()) == summary
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    base = AutoModelForCausalLM.from_pretrained(resolve_model("tasks-qwen3"))
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), base.parameters(), strict=True)]
    assert any(moved)
    assert AutoTokenizer.from_pretrained(output / "model").chat_template
    records = read_metrics(output / "metrics.jsonl")
    assert len(records) == 2
    for record in records:
        assert record["heldout/accuracy_low"] <= record["heldout/accuracy"] <= record["heldout/accuracy_high"]


@pytest.mark.parametrize("cycle", [None, ["reverse", "add", "add"]])
def test_kinds_of_prompts_have_as_many_groups_as_the_cycle_says(cycle, tmp_path):
    config = _grpo("data.balance=true", f"data.cycle={json.dumps(cycle)}", "data.size=9")
    algorithm: Any = text_grpo._build(config, tmp_path).trainer.algorithm
    kinds = [algorithm.parts.records[i]["task"] for i in algorithm.sampler.batch(0).prompt_index.tolist()[::4]]
    assert kinds == (["add", "reverse", "add", "reverse"] if cycle is None else ["reverse", "add", "add", "reverse"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.cycle=[add]"], r"set data\.balance=true"),
        (["data.cycle=[mul]", "data.balance=true"], r"cycle names \['mul'\], .* labels are \['add', 'reverse'\]"),
        (["rewards.terms={task_answer: {}, tool_calls: {weight: 0}}"], r"there is no tool. Set rollout.tool=\{\}"),
    ],
)
def test_kinds_and_tool_calls_that_are_not_there_are_refused(changes, message):
    with pytest.raises((ConfigError, UserError), match=message):
        prepare(_grpo(*changes))


def test_a_run_leaves_the_page_of_an_image_run(finished):
    output, summary = finished
    page = html.unescape((output / "report.html").read_text(encoding="utf-8"))
    visible = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)  # the same on every page
    assert "grpo on tasks-qwen3" in page and "Held-out accuracy" in page and "image" not in visible
    after = load_heldout(output / "after.npz")
    assert len(after.completions) == len(after) == 12 and after.completions[0] in page
    assert after.prompts[0] in page and page.count("<svg") >= 6
    assert "over iterations 0 to 2" in page, "the curve starts with the evaluation before training"
    gain = summary["gain"]["estimate"]
    assert f"{100 * gain:+.1f} points".replace("-", "−").replace("+0.0", "0.0") in page
    code = page.split("<pre", 2)[1].split("<code>")[1].split("</code>")[0]
    scope: dict = {}
    exec(code, scope)
    assert [line.split("  (")[1] for line in result_files(output)][:2] == [
        "before and after, opens in a browser)",
        "for from_pretrained, by the code in report.html)",
    ]
    assert scope["model"].config.vocab_size and scope["tokenizer"].chat_template


def test_a_dry_run_names_a_missing_model():
    with pytest.raises(FileNotFoundError, match="There is no model folder nowhere"):
        plan(_grpo("model.path=nowhere"))


def test_a_dry_run_names_a_template_without_tools_and_a_step_that_would_divide_twice():
    with pytest.raises(UserError, match=r"rollout.environment.* describes no tools"):
        plan(_grpo("rollout.environment={tools: ['json:dumps']}"))
    with pytest.raises(ConfigError, match=r"adamw_8bit, and run.sharding divides the moments"):
        load_job("text_grpo", ["optimizer.name=adamw_8bit", "run.sharding=true"])


def test_the_code_loads_adapters_and_models_that_see():
    adapters = load_code(_grpo("model.lora={}"), Path("runs/a"))
    assert 'PeftModel.from_pretrained(base, "runs/a/lora")' in adapters
    seeing = load_code(_grpo(), Path("runs/a"), takes_images=True)
    assert 'processor = AutoProcessor.from_pretrained("runs/a/model")' in seeing
    for code in (adapters, seeing):
        compile(code, "report", "exec")


def test_ppo_with_lora_and_ptx_writes_an_adapter(tmp_path):
    own = ["objective.algorithm=ppo_ptx", "objective.changes={ptx: 0.1}", "data.demonstrations=tasks:train"]
    own += ["data.demonstrations_batch=4", "model.value=shared", "model.lora={rank: 4, alpha: 8}"]
    own += ["rollout.group_size=1"]  # nothing is compared within a group
    text_grpo.run(load_config(TextPPOConfig, None, [*SMALL, *own]), tmp_path / "run")
    names = {path.name for path in (tmp_path / "run" / "lora").iterdir()}
    assert "adapter_config.json" in names and "adapter_model.safetensors" in names
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(record["loss/ptx"] > 0 and "loss/value" in record for record in records)


def test_a_record_without_the_answer_whose_likelihood_is_asked_is_refused_before_the_run(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "What is 1 + 1?", "answer": "2"}\n{"prompt": "What is 2 + 1?", "answer": 3}')
    with pytest.raises(UserError, match=r"'What is 2 \+ 1\?' has no text \"answer\" \(it is 3\).*or use 'grpo'"):
        prepare(_grpo(f"data.train={path}", "objective.algorithm=likelihood"))


def test_a_prompt_that_is_too_long_is_refused_before_the_run(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"prompt": "1 + 1?"}}\n{{"prompt": "{"1 + " * 400}1?"}}')
    config = _grpo(f"data.train={path}", "data.heldout=tasks:heldout")
    with pytest.raises(UserError, match=r"data\.train: Prompt 1 has .* tokens, and at most 255 are allowed"):
        text_grpo._build(config, tmp_path / "run")


@pytest.mark.parametrize("name", [name for name in list_configs() if name.startswith("text_")])
def test_packaged_configurations_are_planned(name, tmp_path):
    path = tmp_path / "judged.jsonl"  # what the config's first command writes
    path.write_text("".join(f'{{"prompt": "{n}", "completion": "1, 2", "reward": 1.0}}\n' for n in range(40)))
    overrides = {
        "text_process": [f"data.train={path}"],
        "text_reward_hh": ["data.train=tasks:train", "data.heldout=0.1"],
        "text_judge_grpo": ["data.train=tasks:train", "model.path=tasks-qwen3", "model.template={}"],
    }
    job = load_job(name, overrides.get(name, []))
    assert job.plan(job.config)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards.terms={length: {options: {rule: linear, scale: 5}}}", "'length' is the name of a measure"),
        ("rewards.terms={accuracy: {name: task_answer}}", "label is 'accuracy', the name .* {my_accuracy: "),
        ("rollout.group_size=1", "a group is compared with itself"),
        ("objective.algorithm=ppo", r"fits a value function, and model\.value is none"),
        ("data.train=tasks:test", "the packaged records are tasks:train and tasks:heldout"),
        ("evaluation.correctness=boxed", "evaluation.correctness is 'boxed'"),
        ("rollout.environment={use: 'builtins:object'}", "builtins:object has no method reset"),
        ("rewards.terms={task_answer: {bound: 0.5}}", "constraints are held in trainings of images alone"),
        ("server={base_url: 'http://x/v1', model: m}", "nothing can be handed over"),
        (
            f"server={{base_url: 'http://x/v1', model: m, model_folder: '{assets_folder()}/tasks-qwen3'}}",
            "the run would write over its start",
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(override, message):
    with pytest.raises((ConfigError, UserError, RewardError), match=message):
        prepare(_grpo(override))


def test_text_ppo_refuses_an_algorithm_without_a_value_function():
    with pytest.raises(ConfigError, match=r"grpo has no value function\. Use ppo, ppo_kl or ppo_ptx"):
        load_config(TextPPOConfig, None, ["objective.algorithm=grpo"])


@pytest.mark.parametrize("first", [True, False])
def test_the_first_process_hands_the_adapters_over_and_all_ask_for_them(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    sync: Any = lambda folder, server_folder: calls.append("sync")  # noqa: E731
    generator = SimpleNamespace(model="base", weights_folder=None, sync=sync)
    policy: Any = SimpleNamespace(save=lambda folder: calls.append("save"), module=nn.Identity())
    monkeypatch.setattr("accelerate.utils.broadcast_object_list", lambda objects: ["visalign-1", "here"])
    config: Any = SimpleNamespace(server=ServerConfig(base_url="http://x/v1", model="base"))
    process: Any = SimpleNamespace(is_main_process=first)
    syncing(config, policy, generator, tmp_path, process)(1)
    assert (generator.model, generator.weights_folder) == ("visalign-1", "here")
    assert calls == (["save", "sync"] if first else [])


def test_a_whole_model_is_handed_over_in_the_folder_of_the_server(tmp_path: Path) -> None:
    calls: list[str] = []
    reload: Any = lambda folder: calls.append(f"reload {folder.name}")  # noqa: E731
    generator = SimpleNamespace(model="base", weights_folder=None, reload=reload)
    model = SimpleNamespace(save_pretrained=lambda folder: (folder / "model.safetensors").touch())
    policy: Any = SimpleNamespace(model=model, module=nn.Identity())
    server = ServerConfig(base_url="http://x/v1", model="base", model_folder=str(tmp_path / "served"))
    config, process = SimpleNamespace(server=server), SimpleNamespace(is_main_process=True)
    with pytest.raises(UserError, match="served, which holds no model"):
        syncing(cast(Any, config), policy, generator, tmp_path, cast(Any, process))
    (tmp_path / "served").mkdir()
    (tmp_path / "served/config.json").touch()
    syncing(cast(Any, config), policy, generator, tmp_path, cast(Any, process))(1)
    assert calls == ["reload served"] and generator.model == "base"
    assert sorted(path.name for path in (tmp_path / "served").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("setting", "name"), [("tool", "search"), ("environment", "Gone")])
def test_a_tool_that_breaks_stops_the_run_and_says_why(tmp_path, setting, name):
    code = "def search(text):\n    raise RuntimeError('no network')\nclass Gone:\n    def reset(self): ...\n"
    (tmp_path / "broken.py").write_text(f"{code}    def step(self, text):\n        search(text)\n")
    config = _grpo(f"rollout.{setting}={{use: '{tmp_path}/broken.py:{name}'}}", "run.iterations=1")
    with pytest.raises(RewardFailure, match=rf"at most 10% may fail .*{name} raised RuntimeError: no network"):
        text_grpo.run(config, tmp_path / "run")
