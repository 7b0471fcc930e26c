# SPDX-License-Identifier: Apache-2.0
"""The job text_process at tiny size: from judged completions to the process reward of a policy."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models.language import save_tiny_language_model
from tests.support.training.images import check_resume
from tests.support.training.text import Letters, toy_policy, toy_text_trainer
from visalign.adapters.causal_lm.lora import text_lora
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.config import load_config
from visalign.errors import UserError
from visalign.pipelines.text.config import TextGRPOConfig
from visalign.pipelines.text.parts import build_process
from visalign.pipelines.text.process import TextProcessConfig, estimate, plan, read_steps, run
from visalign.rewards import ProcessRewardModel
from visalign.text import StoppingCriteria
from visalign.text.policy_protocol import model_log_prob
from visalign.training.loop.metrics import read_metrics
from visalign.training.process.implicit import ImplicitTexts

TEXTS = ["a", "b", "a\nb", "b\na", "a\na", "b\nb", "a\nb\na", "b\nb\na"]
JUDGED = [{"prompt": f"q{n}", "completion": t, "reward": float(t.count("a"))} for n in range(12) for t in TEXTS]
NOT_JUDGED = [{"prompt": "q0", "completion": "\n", "reward": 1.0}, {**JUDGED[0], "reward": None}]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    save_tiny_language_model(folder / "model", max_position_embeddings=48)
    lines = [json.dumps(record) for record in [*NOT_JUDGED, *JUDGED]]
    (folder / "judged.jsonl").write_text("\n".join(lines))
    return folder


def _config(inputs: Path, *more: str) -> TextProcessConfig:
    base = [f"model.path={inputs}/model", f"data.train={inputs}/judged.jsonl", "run.device=cpu", "data.batch=8"]
    base += ["optimizer.lr=5e-3", "run.iterations=10", "evaluation.every=5"]
    return load_config(TextProcessConfig, None, [*base, *more])


@pytest.fixture(scope="module")
def finished(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    output = tmp_path_factory.mktemp("runs") / "finished"
    return output, run(_config(inputs), output)


def test_judged_completions_become_a_progress_estimator(finished: tuple[Path, dict[str, Any]]) -> None:
    output, summary = finished
    assert summary["after"]["loss"] < 0.2 * summary["before"]["loss"]
    assert (summary["records"], summary["records_left_out"]) == (88, 2), "of 12 prompts 1 is held out"
    assert summary["after"]["labels"] == 8 and summary["samples"] == 10 * 88
    rows = read_metrics(output / "metrics.jsonl")
    assert [row["iteration"] for row in rows if "heldout/loss" in row] == [5, 10]
    assert rows[-1]["heldout/loss"] == pytest.approx(summary["after"]["loss"])
    judge = ProcessRewardModel(output / "judge")
    (probs,) = judge.steps(["a\nb\na"], ["q3"]).prob
    assert probs.tolist() == pytest.approx([1, 0, 1], abs=0.4)


def test_a_stopped_run_ends_in_the_same_weights(inputs: Path, tmp_path: Path, finished: tuple[Path, Any]) -> None:
    """Order and dropout are functions of the update."""
    run(_config(inputs, "run.iterations=4"), tmp_path / "run")
    run(_config(inputs), tmp_path / "run", resume=True)
    one, other = (load_file(folder / "judge/model.safetensors") for folder in (tmp_path / "run", finished[0]))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_estimator_pays_a_policy_by_the_step_in_place_of_the_outcome(
    tmp_path: Path, finished: tuple[Path, dict[str, Any]]
) -> None:
    keys = [f"process.model={finished[0]}/judge", "process.separator=e", "process.coefficient=2.0"]
    trajectories = {}
    for replaces in ("true", "false"):
        overrides = ["objective.algorithm=reinforce_pp", *keys, f"process.replaces={replaces}"]
        config = load_config(TextGRPOConfig, None, overrides)
        policy = toy_policy()
        process = build_process(config, policy)
        trainer = toy_text_trainer(tmp_path / replaces, "reinforce_pp", policy=policy, process=process)
        with torch.random.fork_rng():
            collected = trainer.algorithm.collect(trainer.context)
        trajectories[replaces] = collected.experience.trajectories
        assert collected.metrics["reward_mean"] > 0, "the outcome is still reported"
        assert trainer.iterate()["updates"] == 2
    paid, added = trajectories["true"], trajectories["false"]
    assert paid.reward[paid.valid].eq(0).all() and not added.reward[added.valid].eq(0).all()
    assert torch.equal(paid.process_reward, added.process_reward)
    policy = toy_policy()
    process = build_process(load_config(TextGRPOConfig, None, keys), policy)
    trainer = toy_text_trainer(tmp_path / "grpo", "grpo_process", policy=policy, process=process)
    t = trainer.algorithm.collect(trainer.context).experience.trajectories
    steps = process.score_rollout(trainer.algorithm.collect(trainer.context).experience.rollout)
    assert torch.equal(t.step, steps.step) and t.step.max() > 0
    judge = ProcessRewardModel(finished[0] / "judge", separator="e")
    policy = toy_policy()
    trainer = toy_text_trainer(tmp_path / "plain", "reinforce_pp", policy=policy, process=judge)
    unscaled = trainer.algorithm.collect(trainer.context).experience.trajectories.process_reward
    torch.testing.assert_close(paid.process_reward, 2 * unscaled)


def test_labels_of_steps_train_the_other_kind(inputs: Path, tmp_path: Path) -> None:
    records = [
        {"prompt": f"q{n}", "steps": list(steps), "labels": [step == "a" for step in steps]}
        for n in range(8)
        for steps in ("ab", "ba", "a", "b")
    ]
    file = tmp_path / "labelled.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    summary = run(
        _config(inputs, "learns=labels", f"data.train={file}", "model.train=head", "data.heldout=0"), tmp_path / "run"
    )
    assert summary["before"] == summary["after"] == {} and summary["records"] == 32
    assert ProcessRewardModel(tmp_path / "run/judge").unit == "probability"
    begun, ended = (load_file(f / "model.safetensors") for f in (inputs / "model", tmp_path / "run/judge"))
    same = [name for name, value in ended.items() if name in begun and torch.equal(value, begun[name])]
    assert set(ended) - set(same) == {"score.weight", "score.bias"}


def test_prompts_are_changed_where_they_are_learnt_from_alone(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "words.json").write_text(json.dumps({f"q{n}": [f"Q{n}", f"question {n}"] for n in range(12)}))
    changed = _config(inputs, f"data.convex_da={{synonyms: {tmp_path}/words.json}}")
    learnt, measured = ([r for _, r in side] for side in read_steps(changed))
    plain, same = ([r for _, r in side] for side in read_steps(_config(inputs)))
    assert measured == same and {r["prompt"] for r in plain}.isdisjoint(r["prompt"] for r in learnt)
    assert len(plain) < len(learnt) <= 2 * len(plain) and {r["completion"] for r in learnt} >= {*TEXTS}
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({**JUDGED[0], "prompt": [{"role": "user", "content": "q"}]}))
    with pytest.raises(UserError, match="convex_da changes words of prompts, and a prompt is a conversation"):
        plan(_config(inputs, f"data.train={file}", "data.convex_da={}"))


def test_what_it_would_do_and_what_it_refuses(inputs: Path, tmp_path: Path) -> None:
    planned = estimate(_config(inputs))
    memory = planned["memory_in_GB"]
    assert memory["in_all"] > memory["adamw_moments"] == 2 * memory["trained_weights"] > 0
    assert planned["hours"]["H100 SXM"] > 0 and planned["model"]["longest_text"] <= 48
    assert estimate(_config(inputs, "model.train=head"))["memory_in_GB"]["in_all"] < memory["in_all"]
    assert planned["records"] == {"train": 90, "heldout": 8, "per_update": 8}
    assert planned["length"]["updates_at_most"] == 10 * 12
    for overrides, message in (
        (["data.heldout=1.0"], "data.heldout.*got 1.0"),
        (["data.separator=''"], "data.separator.*at least 1 character"),
        (["optimizer.updates_per_iteration=2"], "updates_per_iteration is 2; an iteration is"),
    ):
        with pytest.raises((UserError, ValueError), match=message):
            _config(inputs, *overrides)
    with pytest.raises((UserError, ValueError), match=r"process.coefficient.*got 0"):
        load_config(TextGRPOConfig, None, ["process.model=x", "process.coefficient=0"])
    for lines, message in (
        ([], "has no record"),
        ([{"prompt": "q", "completion": "a"}] * 2, "data.train: Record 1 has no reward; its keys are"),
        ([{**JUDGED[0], "reward": None}], "none of the 1 records has a step and a finite reward"),
    ):
        file = tmp_path / "bad.jsonl"
        file.write_text("\n".join(map(json.dumps, lines)))
        with pytest.raises(UserError, match=message):
            run(_config(inputs, f"data.train={file}"), tmp_path / "bad")
    with pytest.raises(FileNotFoundError, match=r"There is no model folder .*nothing\. Give a folder that holds"):
        run(_config(inputs, f"model.path={tmp_path}/nothing"), tmp_path / "bad")


def _implicit(inputs: Path, *more: str, rewards: tuple[float | None, ...] = (1.0, 0.0)) -> TextProcessConfig:
    """A run on completions of "a", right, and of "b", wrong."""
    lines = [{"prompt": f"q{n}", "completion": "ab"[k], "reward": rewards[k]} for n in range(6) for k in (0, 1)]
    (inputs / "outcomes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return _config(inputs, "learns=implicit", "beta=0.5", f"data.train={inputs}/outcomes.jsonl", *more)


def test_outcomes_train_a_language_model_whose_log_ratio_pays_a_policy(inputs: Path, tmp_path: Path) -> None:
    summary = run(_implicit(inputs), tmp_path / "run")
    assert summary["before"]["loss"] == pytest.approx(math.log(2)) and summary["after"]["loss"] < 0.35
    assert summary["after"]["accuracy"] == 1 and summary["records"] == 10

    overrides = [f"process.model={tmp_path}/run/judge", f"process.reference={inputs}/model", "process.separator=e"]
    config = load_config(TextGRPOConfig, None, ["objective.algorithm=grpo_process", "process.beta=0.5", *overrides])
    policy = CausalLMPolicy.from_pretrained(inputs / "model")
    trainer = toy_text_trainer(tmp_path / "rl", "grpo_process", policy=policy, process=build_process(config, policy))
    experience = trainer.algorithm.collect(trainer.context).experience
    judge, start = (CausalLMPolicy.from_pretrained(f) for f in (tmp_path / "run/judge", inputs / "model"))
    ratio = model_log_prob(judge, experience.rollout) - model_log_prob(start, experience.rollout)
    paid = experience.trajectories.process_reward.sum(1)
    valid = experience.trajectories.valid
    torch.testing.assert_close(paid[valid], 0.5 * ratio.detach().sum(1)[valid], rtol=1e-4, atol=1e-5)
    assert valid.any() and trainer.iterate()["updates"] == 2


def test_what_a_tool_wrote_is_learnt_as_it_is_scored(inputs: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A language model is trained on the policy's tokens alone, a classifier on its steps."""
    file, weights = tmp_path / "called.jsonl", list[torch.Tensor]()
    lines = [{"prompt": f"q{n}", "completion": "a\n\nb", "reward": n % 2, "tool_answers": [[1, 2]]} for n in range(8)]
    file.write_text("\n".join(map(json.dumps, lines)))

    class Seen(ImplicitTexts):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            weights.append(self.weight)

    monkeypatch.setattr("visalign.pipelines.text.process.ImplicitTexts", Seen)
    source = [f"data.train={file}", "run.iterations=1"]
    run(_implicit(inputs, *source), tmp_path / "run")
    assert torch.cat(weights).unique(dim=0).tolist() == [[1, 0, 1, 1, 1]]
    assert {record["completion"] for _, record in read_steps(_config(inputs, *source))[0]} == {"a\nb"}
    file.write_text(json.dumps({**lines[0], "tool_answers": [[1]]}))
    with pytest.raises(UserError, match=r"data.train: Record 1 has tool_answers \[\[1\]\]"):
        read_steps(_config(inputs, *source))


def test_an_adapter_is_an_implicit_reward_and_another_vocabulary_none(inputs: Path, tmp_path: Path) -> None:
    policy = CausalLMPolicy.from_pretrained(inputs / "model", lora=text_lora(rank=2, alpha=4, seed=1))
    policy.save(tmp_path / "lora")
    keys = [f"process.model={tmp_path}", f"process.reference={inputs}/model"]
    process = build_process(load_config(TextGRPOConfig, None, keys), policy)
    rollout = policy.generate(["q"], seeds=0, stopping=StoppingCriteria(max_new_tokens=4))
    assert process.score_rollout(rollout).tokens("last").abs().max() == 0, "new adapters change nothing"
    with pytest.raises(UserError, match=r"process\.reference: tasks-qwen3 has another vocabulary than model.path"):
        overrides = [f"process.model={inputs}/model", "process.reference=tasks-qwen3"]
        build_process(load_config(TextGRPOConfig, None, overrides), policy)


def test_what_the_implicit_kind_refuses(inputs: Path, tmp_path: Path) -> None:
    for overrides, message in (
        (["model.train=head"], "learns=implicit trains a whole language model .* without model.train=head"),
        (["run.sharding=true"], "without run.sharding. Drop it"),
        (["beta=0"], r"beta.*got 0"),
    ):
        with pytest.raises((UserError, ValueError), match=message):
            _implicit(inputs, *overrides)
    with pytest.raises(UserError, match=r"data\.train: Record 1 has the reward 3\.0; learns=implicit reads 0"):
        run(_implicit(inputs, rewards=(3.0, 0.0)), tmp_path / "bad")
    with pytest.raises(UserError, match="none of the 10 records has a step and a finite reward"):
        run(_implicit(inputs, rewards=(None, None)), tmp_path / "bad")
    with pytest.raises(UserError, match=r"process\.options min_steps are of a classifier"):
        load_config(TextGRPOConfig, None, ["process.model=x", "process.reference=y", "process.options={min_steps: 2}"])
    config = load_config(TextGRPOConfig, None, [f"process.model={inputs}/model"])
    with pytest.raises(UserError, match=r"process\.model: .* has no weights for score.*with process\.reference, the"):
        build_process(config, toy_policy())
    assert not (tmp_path / "bad").exists() and estimate(_implicit(inputs))["model"]["longest_text"] <= 48


def _online(folder: Path, inputs: Path, run: dict[str, Any], dtype: str = "float32", **online: Any) -> Any:
    keys = ["objective.algorithm=prime", "process.beta=0.5", "process.unit=token", "process.separator=e"]
    overrides = [*keys, f"process.model={inputs}/model", f"process.reference={inputs}/model"]
    overrides += [f"model.dtype={dtype}", f"process.online={json.dumps(online)}"]
    config = load_config(TextGRPOConfig, None, overrides)
    policy = CausalLMPolicy.from_pretrained(inputs / "model")
    process = build_process(config, policy)
    options: Any = {"policy": policy, "process": process, "reward": Letters("a"), "run": run}
    return toy_text_trainer(folder, "prime", **options)


def test_the_process_reward_learns_from_the_policys_own_outcomes(inputs: Path, tmp_path: Path) -> None:
    """PRIME: the first iteration has the loss ln 2 and moves the reward, which pays the second by its log-ratios."""
    trainer = _online(tmp_path, inputs, {}, right_at=0.05, lr=1e-2, batch=100)
    learner = trainer.algorithm.learner
    start = [parameter.detach().clone() for parameter in learner.named.values()]
    first = trainer.iterate()
    assert first["process_reward/loss"] == pytest.approx(math.log(2)) and first["process_reward/accuracy"] < 1
    experience = trainer.algorithm.collect(trainer.context).experience
    reward, t = experience.trajectories.process_reward, experience.trajectories
    ratio = model_log_prob(learner.model, experience.rollout) - model_log_prob(learner.reference, experience.rollout)
    torch.testing.assert_close(reward, 0.5 * ratio.detach() * (t.weight != 0), rtol=1e-4, atol=1e-5)
    assert reward.any() and any(not torch.equal(a, p) for a, p in zip(start, learner.named.values(), strict=True))
    second = trainer.iterate()
    assert second["process_reward/loss"] != first["process_reward/loss"]


def test_small_steps_add_up_below_bfloat16_and_what_is_not_finite_is_no_step(inputs: Path, tmp_path: Path) -> None:
    trainer = _online(tmp_path, inputs, {}, dtype="bfloat16", right_at=0.05, lr=1e-4, batch=4)
    learner = trainer.algorithm.learner
    start = [parameter.detach().clone() for parameter in learner.named.values()]
    rollout = trainer.algorithm.collect(trainer.context).experience.rollout
    outcome = (torch.arange(len(rollout)) % 2).float()
    for iteration in range(8):
        learner.learn(rollout, outcome, iteration)
    matrices = [(a, p) for a, p in zip(start, learner.named.values(), strict=True) if a.ndim == 2]
    moved = torch.stack([(a != p).float().mean() for a, p in matrices])
    assert start[0].dtype == torch.bfloat16 and moved.median() > 0.5, moved
    assert learner.metrics()["process_reward/skipped"] == 0
    start = [parameter.detach().clone() for parameter in learner.named.values()]
    with torch.no_grad():
        start[-1][0] = [*learner.named.values()][-1][0] = math.nan
    learner.learn(rollout, outcome, 8)
    assert learner.metrics() == {"process_reward/skipped": math.ceil(len(rollout) / 4)}
    assert all(a.equal(b) or a is start[-1] for a, b in zip(start, learner.named.values(), strict=True))


def test_a_resumed_prime_is_the_uninterrupted_one(inputs: Path, tmp_path: Path) -> None:
    outcome, _ = check_resume(partial(_online, inputs=inputs, right_at=0.05, lr=1e-3, batch=5), tmp_path, 1, 3)
    assert "process_reward.safetensors" in outcome[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["process.model=x", "process.online={}"], r"process.reference, which is null. Name the model .* both the"),
        (["process.model=x", "process.unit=token"], "process.reference, which is null"),
        (["process={model: x, reference: y, online: {}, replaces: true}"], "process.replaces leaves out. Drop one"),
        (["process={model: x, reference: y, online: {lr: 0}}"], "process.online.lr"),
        (["process={model: x, reference: y, unit: token, delta: true}"], "delta=true compares steps.*unit=step"),
    ],
)
def test_what_prime_refuses(changes: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(TextGRPOConfig, None, ["objective.algorithm=prime", *changes])


@pytest.mark.parametrize("form", ["nca", "kto"])
def test_other_losses_of_outcomes_learn_too(form: str, inputs: Path, tmp_path: Path) -> None:
    summary = run(_implicit(inputs, f"loss={form}"), tmp_path / "run")
    assert summary["after"]["loss"] < summary["before"]["loss"] and summary["after"]["accuracy"] == 1
    with pytest.raises(UserError, match=f"loss={form} goes with learns=implicit, and learns is labels"):
        _config(inputs, "learns=labels", f"loss={form}", f"data.train={inputs}/outcomes.jsonl")
    with pytest.raises(UserError, match=r"beta=0\.5 goes with learns=implicit, and learns is labels"):
        _config(inputs, "learns=labels", "beta=0.5", f"data.train={inputs}/outcomes.jsonl")


def test_a_plan_leaves_dropped_records_out(inputs: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "q" * length, "completion": "a", "reward": 1.0} for length in (8, 9, 60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "long.jsonl").write_text(json.dumps(rows[-1]))
    for more in (["learns=implicit"], []):
        options = [*more, "data.too_long=drop", "data.heldout=0"]
        read = estimate(_config(inputs, *options, f"data.train={tmp_path}/rows.jsonl"))["model"]["longest_text"]
        assert 10 < read <= 48
        with pytest.raises(UserError, match="each of 1 records is longer than the model reads"):
            estimate(_config(inputs, *options, f"data.train={tmp_path}/long.jsonl"))


def test_long_records_with_labels_are_cut(inputs: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}q" * 30, "steps": ["a", "b"], "labels": [1, 0]} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = (f"data.train={tmp_path}/rows.jsonl", "learns=labels", "run.iterations=1")
    with pytest.raises(UserError, match=r"64 tokens; the model reads at most 48.*too_long=drop.*cut\.max_length=48"):
        run(_config(inputs, *overrides), tmp_path / "refused")
    cut = ("data.cut={max_prompt_length: 8, max_length: 11}", "data.heldout=0")
    assert run(_config(inputs, *overrides, *cut), tmp_path / "cut")["records"] == 4
    with pytest.raises(UserError, match="none of the 4 records has a step"):
        run(_config(inputs, *overrides, "data.cut.max_length=9", "data.heldout=0"), tmp_path / "none")
    with pytest.raises(UserError, match=r"data\.cut keeps the labels.*learns=outcomes.*too_long=drop"):
        _config(inputs, *cut)
