# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Inside verl: every registered row in verl's own loss and advantage call equals `Objective`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verl.trainer.config
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoTokenizer
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils import tensordict_utils as tu
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from visalign.core import NAMED, PolicyOutput, Trajectories
from visalign.data.assets import assets_folder
from visalign.integrations.verl import no_advantage, no_loss, settings
from visalign.rewards.base.contract import RewardError

B, T, RANKS = 24, 9, 4
LOSSES = [name for name, row in NAMED.items() if no_loss(row) is None]
ADVANTAGES = [name for name, row in NAMED.items() if no_advantage(row) is None]
LENGTH = 16


def step(seed: int = 0) -> dict[str, Tensor]:
    """A step of 24 responses of many lengths, masked in the middle, away from the old policy."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, T + 1, (B,), generator=g)
    lengths[0] = T
    valid = torch.arange(T) < lengths[:, None]
    mask = valid & ((torch.rand(B, T, generator=g) > 0.1) | (torch.arange(T) == 0))
    old = -torch.rand(B, T, generator=g, dtype=torch.float64) * 3
    new = old + 0.3 * torch.randn(B, T, generator=g, dtype=torch.float64)
    return {
        "lengths": lengths,
        "response_mask": mask.long(),
        "old_log_probs": old,
        "log_prob": new,
        "ref_log_prob": old + 0.2 * torch.randn(B, T, generator=g, dtype=torch.float64),
        "advantages": torch.randn(B, 1, generator=g, dtype=torch.float64) * mask,
        "rollout_is_weights": torch.rand(B, T, generator=g, dtype=torch.float64) + 0.5,
    }


def in_verl(config: ActorConfig, data: dict[str, Tensor], *, corrected: bool) -> tuple[float, Tensor]:
    """Loss and gradient [B, T] of verl's own `ppo_loss` over 4 ranks with uneven micro-batches."""
    leaf = data["log_prob"].clone().requires_grad_()
    total = 0.0
    for rank in range(RANKS):
        mine = torch.arange(rank, B, RANKS)
        for rows in mine.split([1, 3, 2]):
            total += float(_micro_batch(config, data, leaf, rows, corrected=corrected)) / RANKS
    assert leaf.grad is not None
    return total, leaf.grad / RANKS  # FSDP averages over ranks


def _micro_batch(
    config: ActorConfig, data: dict[str, Tensor], leaf: Tensor, rows: Tensor, *, corrected: bool
) -> Tensor:
    fields = ["response_mask", "old_log_probs", "advantages", "ref_log_prob"]
    fields += ["rollout_is_weights"] if corrected else []
    lengths = data["lengths"][rows]
    batch = TensorDict(
        {name: data[name][rows] for name in fields}
        | {
            "prompts": torch.ones(len(rows), 1, dtype=torch.long),
            "responses": torch.ones(len(rows), T, dtype=torch.long),
            "attention_mask": (torch.arange(T + 1) <= lengths[:, None]).long(),
        },
        batch_size=[len(rows)],
    )
    tokens = int(data["response_mask"].sum())
    for key, value in {"dp_size": RANKS, "batch_num_tokens": tokens, "global_batch_size": B}.items():
        tu.assign_non_tensor_data(batch, key, value)
    packed = torch.cat([torch.cat([leaf[i, :n], leaf.new_zeros(1)]) for i, n in zip(rows, lengths, strict=True)])
    loss, metrics = ppo_loss(config, {"log_probs": packed}, batch)
    assert {"actor/pg_loss", "actor/ppo_kl", "actor/log_ratio_max"} <= metrics.keys()
    loss.backward()
    return loss.detach()


def actor(**options: Any) -> ActorConfig:
    return ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, **options)


def far(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_in_verl_are_those_of_the_objective(name: str, corrected: bool) -> None:
    data = step()
    row = replace(NAMED[name], length=LENGTH) if NAMED[name].aggregation == "dr_grpo" else NAMED[name]
    changed = replace(
        row, advantage="given", advantage_options={}, kl_in_reward=0.0, value=0.0, drop_zero_signal=False
    )
    prepared = changed.prepare(
        Trajectories(
            weight=data["response_mask"].double(),
            old_log_prob=data["old_log_probs"],
            group=range(B),
            advantage=data["advantages"],
            ref_log_prob=data["ref_log_prob"],
        )
    )
    if corrected:
        prepared = replace(prepared, importance_weight=data["rollout_is_weights"])
    leaf = data["log_prob"].clone().requires_grad_()
    expected = changed.loss(prepared, PolicyOutput(log_prob=leaf)).total
    expected.backward()
    assert leaf.grad is not None and float(leaf.grad.norm()) > 1e-3

    values = dict(line.split("=", 1) for line in settings_of(name))
    prefix = "actor_rollout_ref.actor."
    options: dict[str, Any] = {
        "loss_agg_mode": values[f"{prefix}loss_agg_mode"],
        "policy_loss": PolicyLossConfig(loss_mode=values[f"{prefix}policy_loss.loss_mode"]),
        "use_kl_loss": values.get(f"{prefix}use_kl_loss") == "True",
        "kl_loss_coef": float(values.get(f"{prefix}kl_loss_coef", 0)),
        "kl_loss_type": values.get(f"{prefix}kl_loss_type", "low_var_kl"),
    }
    if f"{prefix}loss_scale_factor" in values:
        options["loss_scale_factor"] = int(values[f"{prefix}loss_scale_factor"])
    loss, gradient = in_verl(actor(**options), data, corrected=corrected)
    assert abs(loss - float(expected)) <= 1e-6 * max(1.0, abs(float(expected)))
    assert far(gradient, leaf.grad) <= 1e-6


def settings_of(name: str) -> list[str]:
    """A row's settings; only its loss's where verl lacks its advantages."""
    try:
        return settings(name, length=LENGTH)
    except ValueError:
        lent = replace(NAMED[name], advantage="group", advantage_options={})
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(NAMED, name, lent)
            return settings(name, length=LENGTH)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_in_verl_are_those_of_the_objective(name: str, per_token: bool) -> None:
    data, g = step(), torch.Generator().manual_seed(1)
    mask, groups = data["response_mask"], np.array([f"p{i // 4}" for i in range(B)], dtype=object)
    reward = torch.randint(0, 3, (B,), generator=g).float()
    reward[5] = torch.nan  # a judge that failed
    last = mask.sum(1).clamp(min=1) - 1
    positions = torch.stack([mask[i].nonzero()[last[i], 0] for i in range(B)])
    rewards = torch.zeros(B, T).scatter(1, positions[:, None], reward[:, None])
    process = 0.1 * torch.randn(B, T, generator=g) * mask if per_token else None
    batch = DataProto.from_dict(
        tensors={"token_level_rewards": rewards if process is None else rewards + process, "response_mask": mask},
        non_tensors={"uid": groups},
    )
    output = compute_advantage(batch, adv_estimator=f"visalign:{name}", config=AlgoConfig()).batch
    row = replace(NAMED[name], kl=0.0, kl_in_reward=0.0, drop_zero_signal=False, selection=None)
    row = replace(row, selection_options={}, surrogate="reinforce", surrogate_options={}, entropy=0.0)
    expected = row.prepare(
        Trajectories(
            weight=mask.float(),
            old_log_prob=torch.zeros(B, T),
            group=list(groups),
            reward=reward,
            process_reward=process,
        )
    ).advantage
    assert float(expected.abs().max()) > 0.1 and bool((expected[5] == 0).all())
    assert far(output["advantages"], expected) <= 1e-6 and torch.equal(output["advantages"], output["returns"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("clip_cov", "visalign:clip_cov cannot be a loss in verl: selection='clip_cov' needs thres"),
        ("flow_grpo", "it is a row of denoising steps"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        get_policy_loss_fn(f"visalign:{name}")(torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(ValueError, match=why):
        settings(name)


def test_a_fixed_length_is_asked_for() -> None:
    with pytest.raises(ValueError, match="give length=, the longest response"):
        settings("dr_grpo")
    config = actor(policy_loss=PolicyLossConfig(loss_mode="visalign:dr_grpo"))
    with pytest.raises(ValueError, match=r"Set actor_rollout_ref\.actor\.loss_scale_factor"):
        in_verl(config, step(), corrected=False)


@pytest.mark.parametrize("name", [name for name in LOSSES if name in ADVANTAGES])
def test_verl_knows_its_own_settings(name: str) -> None:
    folder = str(Path(verl.trainer.config.__file__).parent)
    with initialize_config_dir(folder, version_base=None):
        config = compose("ppo_trainer", overrides=settings(name, length=LENGTH))
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == f"visalign:{name}"


def judged(answer: str, **options: Any) -> Any:
    """verl's own reward manager, loaded by its configuration, on one response."""
    tokenizer = AutoTokenizer.from_pretrained(assets_folder() / "tasks-qwen3")
    config = OmegaConf.create(
        {
            "reward": {
                "custom_reward_function": {
                    "path": "pkg://visalign.integrations.verl",
                    "name": "compute_score",
                    "reward_kwargs": options,
                },
                "reward_manager": {
                    "source": "importlib",
                    "name": "JudgeManager",
                    "module": {"path": "pkg://visalign.integrations.verl_rewards"},
                },
            }
        }
    )
    ids = torch.tensor([tokenizer(answer)["input_ids"]])
    batch = DataProto.from_dict(
        tensors={"responses": ids, "attention_mask": torch.ones(1, ids.shape[1] + 1, dtype=torch.long)},
        non_tensors={
            "data_source": np.array(["sums"], dtype=object),
            "reward_model": np.array([{"ground_truth": "4"}], dtype=object),
            "extra_info": np.array([{"answer": "2 + 2 = <<2+2=4>>4 #### 4", "split": "train"}], dtype=object),
            "raw_prompt": np.array([None], dtype=object),
        },
    )
    batch.non_tensor_batch["raw_prompt"][0] = [{"role": "user", "content": "What is 2 + 2?"}]

    async def scored() -> Any:
        return await load_reward_manager(config, tokenizer).run_single(batch)

    return asyncio.run(scored())["reward_score"]


def test_judges_are_reward_functions() -> None:
    assert judged("It is \\boxed{4}", judge="boxed_answer") == 1.0
    assert judged("It is \\boxed{5}", judge="boxed_answer") == 0.0


def never(completions: list[str], prompts: list[Any]) -> list[None]:
    """A judge that fails."""
    assert prompts == [[{"role": "user", "content": "What is 2 + 2?"}]]
    return [None]


def test_a_failed_judge_is_no_score() -> None:
    own = f"{__file__}:never"
    with pytest.raises(RewardError, match=r"could not judge 1 of 1 samples.*Mend the judge"):
        judged("4", judge=own)
    assert np.isnan(judged("4", judge=own, on_failure="nan"))


def test_an_image_of_verl_omni_is_scored() -> None:
    from visalign.integrations.verl import compute_score
    from visalign.rewards.catalogue import load_reward

    image = torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    got = compute_score(data_source="x", solution_image=image, ground_truth="a cat", extra_info={}, judge="jpeg_size")
    judge = load_reward("jpeg_size")
    expected = float(judge.score(image[None].numpy(), ["a cat"]).value[0])
    assert got == (expected if judge.higher_is_better else -expected)
