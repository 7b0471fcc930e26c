# SPDX-License-Identifier: Apache-2.0
"""Text policies learn under every named algorithm; an update does not depend on how it is cut up."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch

from tests.support.training.images import check_resume
from tests.support.training.metric_families import TEXT_ONLY
from tests.support.training.text import Letters, OtherEngine, toy_policy, toy_text_trainer, weights_of
from visalign.adapters.causal_lm.demonstrations import demonstration_rollout
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.errors import UserError
from visalign.interfaces import RewardCapabilities, Scores, ToolCompletion
from visalign.rewards.text.combine import WeightedTextSum
from visalign.rewards.text.format import TextFormat
from visalign.rewards.text.verifiable import VerifiableAnswer
from visalign.text import ToolTrace
from visalign.training.loop.metrics import METRICS, check_keys
from visalign.training.policy.update import bundle_index
from visalign.training.text.settings import FiltrationSettings, TextObjectiveSettings
from visalign.training.text.trajectories import answer_label, answer_labels, check_answers

TRUNCATE = {"level": "token", "mode": "truncate", "high": 5.0}


@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "kl_cov", "ppo_ptx"])
def test_micro_batches_change_nothing(algorithm, tmp_path):
    ends = []
    for size in (3, 64):
        trainer = toy_text_trainer(tmp_path / str(size), algorithm, optimizer={"micro_batch": size})
        trainer.weights.optimizer = cast(Any, torch.optim.SGD)(
            [p for _, p in trainer.weights.named], lr=1e-2
        )  # Adam blows up zeros
        before = weights_of(trainer)
        trainer.iterate()
        ends.append(weights_of(trainer) - before)
    assert float(ends[0].norm()) > 1e-4
    assert float((ends[0] - ends[1]).norm()) < 1e-4 * float(ends[0].norm())


def test_completions_without_signal_are_not_sent_through_the_model(tmp_path, monkeypatch):
    trainer = toy_text_trainer(tmp_path, "dapo", reward=Letters("?"), optimizer={"updates_per_iteration": 1})
    counts: list[int] = []
    policy = trainer.algorithm.parts.policy
    inner = policy.log_probs

    def counted(rollout, rows=None, **options):
        counts.append(len(rollout) if rows is None else len(torch.arange(len(rollout))[rows]))
        return inner(rollout, rows, **options)

    monkeypatch.setattr(policy, "log_probs", counted)
    record = trainer.iterate()
    live = round((1 - record["frac_reward_zero_std"]) * 24)
    assert 0 < live < 24 and sum(counts) == live


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_failed_completion_counts_nowhere_whatever_its_number(algorithm, tmp_path):
    """A judge that fails on some completions may leave any value there: the update is the same."""

    def fails(text, record):
        return "b" in text or "e" in text

    class Leaves(Letters):
        def __init__(self, value):
            super().__init__("a", fails)
            self.value = value

        def score(self, completions, prompts, metadata=None):
            scores = super().score(completions, prompts, metadata)
            return replace(scores, value=torch.where(scores.valid, scores.value, self.value))

    ends = []
    for value in (math.nan, 50.0):
        trainer = toy_text_trainer(tmp_path, algorithm, reward=Leaves(value), rollout={"max_failure_rate": 0.9})
        start = weights_of(trainer)
        record = trainer.iterate()
        assert 0 < record["valid_share"] < 1 and record["trained_share"] < 1
        ends.append(weights_of(trainer))
    assert not torch.equal(start, ends[0])
    assert torch.equal(ends[0], ends[1])


def test_prompts_that_are_too_long_are_left_out_and_blamed_on_nobody(tmp_path):
    policy = toy_policy(max_prompt_tokens=3, long_prompts="mask")
    prompts: list[Any] = []

    class Parts(Letters):
        def score(self, completions: Any, prompts_: Any, metadata: Any = None) -> Scores:
            prompts.extend(prompts_)
            scores = super().score(completions, prompts_, metadata)
            return replace(scores, parts={"share": scores.value})

    trainer = toy_text_trainer(tmp_path, policy=policy, run={"iterations": 1}, reward=Parts())
    records = [trainer.iterate() for _ in range(3)]
    assert min(record["valid_share"] for record in records) < 1  # "d e f" and "k l m" have five tokens
    assert prompts and not {"d e f", "k l m"} & set(prompts)
    assert all(record["updates"] > 0 for record in records)
    assert all(record["reward_part/share"] == pytest.approx(record["reward_mean"]) for record in records)
    first = records[0]
    assert first["length_mean"] * first["valid_share"] * first["samples"] == pytest.approx(first["tokens"])


def test_remax_compares_with_the_greedy_completion_to_the_same_record(tmp_path):
    """Two records share a prompt and want different letters: each sample meets its own record's judge.

    An environment writes into the prompts, and its tool fails in the greedy completion to the first record.
    """
    calls, asked = list[list[str]](), list[Any]()

    class PerRecord(Letters):
        def score(self, completions: Any, prompts: Any, metadata: Any = None) -> Scores:
            assert set(prompts) == {"g room"}
            calls.append([record["letter"] for record in metadata])
            value = torch.tensor([float(w in text) for w, text in zip(calls[-1], completions, strict=True)])
            return Scores(value=value, valid=value >= 0, unit="share")

    class Environment:
        def generate(self, prompts: Any, **options: Any) -> Any:
            asked.append(list(prompts))
            rollout = trainer.algorithm.policy.generate(prompts, **options)
            rollout = replace(rollout, prompt=[f"{prompt} room" for prompt in rollout.prompt])
            if not options["sampling"].greedy:
                return rollout
            return replace(rollout, stop_reason=["tool failed", "eos"], tools=[ToolTrace(failed="why"), ToolTrace()])

    trainer = toy_text_trainer(tmp_path, "remax", reward=PerRecord(), rollout={"prompts_per_iteration": 2})
    records = [{"prompt": "g", "letter": x} for x in ("a", "b", "a", "b", "a", "b")]
    trainer.algorithm.parts = replace(trainer.algorithm.parts, generator=Environment(), records=records)
    assert trainer.iterate()["trained_share"] <= 0.5
    sampled, greedy = calls
    assert asked == [["g", "g"]] * 2 and sorted(sampled[::6]) == ["a", "b"] and greedy == sampled[6:7]


def test_pars_references_are_what_the_start_policy_makes_of_the_prompt(tmp_path):
    """The same for all samples of a group, from other completions, and not from the current weights."""
    rewards = []
    for moved in (False, True):
        options = {"changes": {"advantage_options": {"references": 3}}}
        trainer = toy_text_trainer(tmp_path / str(moved), "par", objective=options)
        algorithm, start = trainer.algorithm, weights_of(trainer).clone()
        if moved:
            with torch.no_grad():
                for _, parameter in trainer.weights.named:
                    parameter.add_(0.3 * torch.ones_like(parameter))
        t = algorithm.collect(trainer.context).experience.trajectories
        groups = t.reference_reward.view(4, 6, 3)
        assert bool((groups == groups[:, :1]).all()) and len(groups[:, 0].unique()) > 1
        assert torch.equal(start, weights_of(trainer)) != moved
        rewards.append((groups, t.reward))
    assert torch.equal(rewards[0][0], rewards[1][0]) and not torch.equal(rewards[0][1], rewards[1][1])


def test_the_likelihood_of_the_answer_is_that_of_a_text_that_has_it_at_once(tmp_path):
    """From the prefix on, the record's answer takes the place of the completion's text."""
    records = [{"prompt": p, "answer": "ab" if p == "g" else "c"} for p in ("b c", "g", "h i", "n")]
    trainer = toy_text_trainer(tmp_path, "likelihood", rollout={"answer_prefix": "e"})
    algorithm = trainer.algorithm
    algorithm.parts = replace(algorithm.parts, records=[*records, *records[:2]])
    experience = algorithm.collect(trainer.context).experience
    rollout, policy = experience.rollout, cast(CausalLMPolicy, algorithm.parts.policy)
    assert any("e" in text[:-1] for text in rollout.text) and not all("e" in text for text in rollout.text)
    answers = {str(r["prompt"]): r["answer"] for r in records}
    pairs = list(zip(rollout.text, map(str, rollout.prompt), strict=True))
    texts = [text.split("e")[0] + "e" + answers[p] for text, p in pairs]
    demonstrations = demonstration_rollout(policy, list(rollout.prompt), texts)
    with torch.no_grad():
        log_prob = policy.log_probs(demonstrations).log_prob
    length = demonstrations.loss_mask.sum(1).long() - 1  # without the token that ends it
    rows = zip(log_prob, length, pairs, strict=True)
    last = [float(row[n - len(answers[p]) : n].sum()) for row, n, (_, p) in rows]
    torch.testing.assert_close(experience.trajectories.likelihood, torch.tensor(last))
    with pytest.raises(UserError, match=r"prompt 'g' has no text \"answer\" \(it is None\)"):
        check_answers(algorithm.parts.objective, [{"prompt": "g"}])


def test_whoever_writes_is_told_of_the_weights_after_a_resume(tmp_path):
    toy_text_trainer(tmp_path, run={"iterations": 2}).train()
    iterations = []
    trainer = toy_text_trainer(tmp_path, run={"iterations": 2}, after_update=iterations.append)
    assert trainer.resume() and iterations == [2]


@pytest.mark.parametrize(("algorithm", "dynamic"), [("ppo", None), ("dapo", {"max_rounds": 3})])
def test_a_resumed_run_is_the_uninterrupted_one(algorithm, dynamic, tmp_path):
    outcome, trainer = check_resume(partial(toy_text_trainer, algorithm=algorithm, dynamic=dynamic), tmp_path, 2, 4)
    assert len(outcome[2]) == 4
    assert not dynamic or trainer.algorithm.groups.round >= 4


def test_riskpos_bundles_have_one_sample_of_each_prompt() -> None:
    group = [4, 4, 7, 7, 5, 5, 4, 6, 6]
    assert bundle_index(group, 2).tolist() == [0, 1, 0, 1, 9, 10, 2, 9, 10]
    assert bundle_index(group, 9).tolist() == [0, 1, 0, 1, 0, 1, 2, 0, 1]


def test_copos_answers_are_those_that_the_reward_reads(tmp_path):
    """Answers that are wrong differ; 7/2 is 3.5; samples without one share a label."""
    texts = [r"\boxed{3.5}", r"\boxed{\frac{7}{2}}", r"\boxed{4}", r"\boxed{5}", "?", "??"]
    boxed = VerifiableAnswer(extract="boxed", compare="math", normalise="latex")
    parts = {"form": (TextFormat(), 1.0), "boxed": (boxed, 1.0)}
    read = WeightedTextSum(parts, allow_mixed_units=True).capabilities.read_answer
    assert read is not None and len({answer_label(read(text, {})) for text in texts}) == 4
    trainer = toy_text_trainer(tmp_path, "copo")
    assert trainer.algorithm.collect(trainer.context).experience.trajectories.answer is None
    first = RewardCapabilities(read_answer=lambda text, record: text[:1])
    object.__setattr__(trainer.algorithm.parts.reward, "capabilities", first)
    experience = trainer.algorithm.collect(trainer.context).experience
    assert experience.trajectories.answer.tolist() == [answer_label(text[:1]) for text in experience.rollout.text]
    with_tool = replace(experience.rollout.rows(slice(1)), text=[ToolCompletion("4b", [(0, 1)])])  # a tool wrote the 4
    labels: Any = answer_labels(trainer.algorithm.parts.reward, with_tool, [{}])
    assert labels.tolist() == [answer_label("b")]


def test_rewards_of_single_steps_reach_the_objective(tmp_path):
    """A token "z" is worth 1, and completions with a "y" are invalid."""
    policy = toy_policy()
    z, y = (policy.tokenizer.convert_tokens_to_ids(letter) for letter in "zy")

    class Judged:
        def __init__(self, rollout):
            self.valid = ~(rollout.completion_ids == y).any(1)
            self.reward = (rollout.completion_ids == z) * rollout.loss_mask * self.valid[:, None]

        def tokens(self, place="last"):
            return self.reward

    class Judge:
        def score_rollout(self, rollout):
            return Judged(rollout)

    trainer = toy_text_trainer(tmp_path, "reinforce_pp", policy=policy, process=Judge())
    experience = trainer.algorithm.collect(trainer.context).experience
    steps, t = Judged(experience.rollout), experience.trajectories
    assert torch.equal(t.process_reward, steps.reward) and torch.equal(t.valid, steps.valid)
    with pytest.raises(UserError, match="grpo has one advantage per completion"):
        toy_text_trainer(tmp_path, "grpo", process=Judge())


def test_the_token_baseline_reads_the_sums_of_squares_of_the_head(tmp_path, monkeypatch):
    trainer = toy_text_trainer(tmp_path, "optimal_token_baseline")
    experience = trainer.algorithm.collect(trainer.context).experience
    log_p = partial(trainer.algorithm.policy.log_probs, experience.rollout)
    expected = log_p(statistic=lambda p: p.exp().square().sum(-1)).statistic
    assert expected is not None
    assert experience.trajectories.sum_p2.unique().numel() > 2
    assert expected is not None
    torch.testing.assert_close(experience.trajectories.sum_p2, expected.cpu())
    assert math.isfinite(toy_text_trainer(tmp_path / "run", "optimal_token_baseline").iterate()["loss"])


@pytest.mark.parametrize("updates", (1, 2))
def test_filtered_completions_are_drawn_by_their_rewards(updates, tmp_path):
    objective = {"pf_ppo": {"reweight_method": "max_min"}}
    trainer = toy_text_trainer(tmp_path, objective=objective, optimizer={"updates_per_iteration": updates})
    experience = trainer.algorithm.collect(trainer.context).experience
    steps = trainer.algorithm.prepare(experience, trainer.context)
    drawn, reward = torch.cat([step.sample for step in steps]), experience.trajectories.reward
    assert len(drawn) == len(reward) > drawn.unique().numel()
    assert set(reward[drawn].tolist()) <= {float(reward.min()), float(reward.max())}
    check_resume(partial(toy_text_trainer, objective=objective), tmp_path / "resumed", 1, 2)
    assert len(FiltrationSettings().draw(torch.full((3,), math.nan), 0)) == 3


def test_what_does_not_go_with_drawn_completions_is_refused():
    with pytest.raises(UserError, match="weight_pow is 3, and reweight_method=max_min does not read it"):
        FiltrationSettings(reweight_method="max_min", weight_pow=3)
    with pytest.raises(UserError, match=r"online_dpo does not read objective\.pf_ppo, whose draw parts its pairs"):
        TextObjectiveSettings(algorithm="online_dpo", pf_ppo=FiltrationSettings())


def test_the_penalty_of_ppo_kl_follows_its_target(tmp_path):
    """Measured after the update: with one step per iteration the KL before it is 0."""
    used = {}
    for target in (1e-9, 1e3):
        trainer = toy_text_trainer(
            tmp_path, "ppo_kl", objective={"target_kl": target}, optimizer={"updates_per_iteration": 1}
        )
        used[target] = [trainer.iterate()["penalty"] for _ in range(3)]
    assert used[1e-9] == [1.0, 2.0, 4.0] and used[1e3] == [1.0, 0.5, 0.25]


def test_truncated_completions_are_masked_and_counted(tmp_path):
    unmasked = toy_text_trainer(tmp_path)
    masked = toy_text_trainer(tmp_path, rollout={"truncated": "mask"})
    records = [trainer.iterate() for trainer in (unmasked, masked)]
    assert records[0]["truncated_share"] == records[1]["truncated_share"] > 0
    assert records[1]["trained_share"] == pytest.approx(1 - records[1]["truncated_share"])


def test_another_engines_log_probs_are_corrected(tmp_path):
    """An engine's log-probs are lower by 0.1 per token, so each token is weighted by e^0.1. With plain gradient
    steps the update is e^0.1 times as large."""
    moves = []
    for shift in (0.0, 0.1):
        policy = toy_policy()
        trainer = toy_text_trainer(
            tmp_path,
            policy=policy,
            generator=OtherEngine(policy, shift),
            rollout={"recompute": True},
            objective={"changes": {"kl": 0.0, "importance_sampling": TRUNCATE}},
            optimizer={"updates_per_iteration": 1, "max_grad_norm": math.inf},
        )
        parameters = [p for _, p in trainer.weights.named]
        trainer.weights.optimizer = cast(Any, torch.optim.SGD)(parameters, lr=1e-3)
        before = weights_of(trainer)
        record = trainer.iterate()
        assert record["ratio_floor"] < 1e-5
        moves.append(weights_of(trainer) - before)
    ratio = float((moves[0] * moves[1]).sum() / moves[0].square().sum())
    assert ratio == pytest.approx(math.exp(0.1), rel=1e-4)


def test_an_engine_that_is_far_off_stops_the_run(tmp_path):
    policy = toy_policy()
    engine = OtherEngine(policy, 0.7)
    trainer = toy_text_trainer(tmp_path, policy=policy, generator=engine, rollout={"recompute": True})
    with pytest.raises(UserError, match=r"are 0\.7 nats per token away from the policy's, allowed 0\.5"):
        trainer.iterate()


def test_a_separator_is_not_empty(tmp_path):
    with pytest.raises(UserError, match=r"rollout\.separator is ''. "):
        toy_text_trainer(tmp_path, "empg", rollout={"separator": ""}, policy=toy_policy())


def test_the_table_of_metrics_lists_what_a_run_logs(tmp_path):
    record = toy_text_trainer(tmp_path, "ppo_kl", objective={"target_kl": 0.1}, dynamic={}).iterate()
    check_keys(record)
    families = {key.split("/", 1)[0] + "/*" if "/" in key else key for key in record}
    # with another engine; of supervised fine-tuning, direct preference optimisation, self-imitation
    elsewhere = {"engine_gap", "perplexity", "rewards/*", "logps/*", "label_mean", "replay/*", "tools/*"}
    # of a reward that names answers, and of a second iteration
    elsewhere |= {"latent_flow/*", "process_reward/*", "entropy_answer", "entropy_drop", "entropy_drop_foreseen"}
    assert set(TEXT_ONLY) - families == elsewhere and families <= set(METRICS)


@pytest.mark.parametrize(("name", "separator"), [("empg", "a"), ("pear", None)])
def test_completions_are_cut_where_the_row_says(name, separator, tmp_path):
    trainer = toy_text_trainer(tmp_path, name, rollout={"separator": separator, "max_new_tokens": 12})
    experience = trainer.algorithm.collect(trainer.context).experience
    step, texts = experience.trajectories.step, experience.rollout.text
    assert bool((step[experience.trajectories.weight == 0] == -1).all())
    steps = [len([piece for piece in text.split(separator or "</think>") if piece.strip()]) for text in texts]
    assert [int(row.max()) + 1 for row in step] == steps and (max(steps) > 1) == (separator is not None)
