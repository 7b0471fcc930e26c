# SPDX-License-Identifier: Apache-2.0
"""Two updates of each algorithm on kinds of family: on-policy, adapters alone, finite; a video on all its frames."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from tests.support.models.pipelines import tiny_pipeline
from tests.support.models.sd3 import tiny_sd3_pipeline
from tests.support.training.images import Brightness
from visalign.adapters import LoraSettings, PipelinePolicy, SD3Policy
from visalign.config import load_config
from visalign.core import REGRESSIONS
from visalign.evaluation.heldout.images import evaluate
from visalign.flow.rollout import rollout
from visalign.pipelines.flow_grpo.config import FlowGRPOConfig
from visalign.pipelines.flow_grpo.plan import planned_cost
from visalign.rewards import Frames, FunctionReward, WeightedSum
from visalign.rewards.pairs.as_pairwise import as_pairwise
from visalign.rewards.pairs.as_pointwise import GroupWinRate
from visalign.seeds import sample_seed
from visalign.training import FewStepDistillation, FlowGRPO, RewardGradient, RunSettings, Trainer, VelocityRegression
from visalign.training.diffusion.rollout_settings import RolloutSettings
from visalign.training.loop.optimizer import OptimizerSettings

FAMILIES = {
    "sd3": "concatenated guidance, the adapter written for it",
    "flux": "packed latents, embedded guidance",
    "z_image": "lists of latents and of prompts",
    "qwen_image": "packed latents, two calls, prompts of one length in each",
    "sd15": "a U-Net that predicts noise",
}
RECORDS = [{"prompt": text} for text in ("a red circle", "two blue squares", "a star")]
BASE = (
    "rewards.terms={jpeg_size: {}}",
    "rollout={prompts_per_iteration: 2, group_size: 4, steps: 3, batch_size: 8}",
    "optimizer={lr: 1e-3, updates_per_iteration: 1, micro_batch: 16}",
    "run={iterations: 2, device: cpu}",
)
IMPORTANCE = "{kl: 0, importance_sampling: {level: token, mode: truncate, high: 2.0}}"
TREE = "rollout.branch={at: [0], children: 2}"
DEEP = "rollout.branch={at: [0, 1], children: 2}"
LEVELS = ("diffusion_nft", "ram", "diffusion_dpo")
NFT = "objective={algorithm: diffusion_nft, changes: {levels: 2, kl: 0.1}}"
KINDS: dict[str, tuple[str, ...]] = {
    "flow_grpo": (),
    "kl_in_reward": ("objective.algorithm=reinforce_pp",),
    "stale": (f"objective.changes={IMPORTANCE}", "rollout.staleness=1"),
    "tree": (TREE, "objective.credit=branches"),
    **{name: (f"objective={{algorithm: {name}, changes: {{levels: 2}}}}",) for name in LEVELS},
    **{name: (f"objective.credit={name}",) for name in ("turning_points", "one_step")},
    "draft": ("objective={algorithm: draft, changes: {last: 2, kl: 0.1}}",),
    "draft_lv": ("objective={algorithm: draft_lv}",),
    "refl": ("objective={algorithm: refl, changes: {stop_range: [0.3, 1.0]}}",),
    **{n: (f"objective={{algorithm: {n}, changes: {{critic_updates: 2}}}}",) for n in ("dmd2", "tdm_r1")},
    "replay": (NFT, "self_imitation={warmup: 1, batch: 3}"),
    "window": ("rollout.sde_window=1",),
    "shared_noise": ("rollout.shared_noise=true",),
    "epochs": ("objective.epochs=2",),
    "deep_tree": (DEEP, "objective={credit: branches, algorithm: grpo_guard}"),
    "canon": ("objective={algorithm: canon, metric: level}",),
    "rollout_guidance": (NFT, "rollout.guidance=3.0"),
    "fdfo": ("objective.algorithm=fdfo", "rollout.group_size=2", "rollout.shared_noise=true"),
    "scout": (NFT, "rollout.scout={pool: 6, steps: 2}"),
    "flash": ("objective.changes.step_weight=inverse_gradient", "rollout.schedule=linear", "rollout.sde_window=1"),
    "dynamic": ("dynamic={enabled: true, max_rounds: 2}",),
    "flowrl": ("objective={algorithm: flowrl, changes: {surrogate_options: {beta: 0.01}}}",),
    "riskpo": ("objective={algorithm: riskpo, changes: {advantage_options: {bundle: 2}}}",),
    "entrocraft": ("objective={algorithm: entrocraft, changes: {selection_options: {low: 0.0, high: 2.0}}}",),
}
"""Settings of a kind; algorithms that need none are added below."""
_SEEN = {*KINDS, "reinforce_pp"}
KINDS |= {
    name: (f"objective={{algorithm: {name}, changes: {{levels: 2}}}}",)
    for name, row in REGRESSIONS.items()
    if name not in _SEEN and row.anchor != "expert" and not row.learns_alike
}
KINDS |= {name: (f"objective.algorithm={name}",) for name in ("flow_gspo", "gdpo", "par", "pref_grpo")}
"""Other rows differ from `flow_grpo` in the loss alone: see tests/training/policy/test_algorithms.py."""
EVERYWHERE = ("flow_grpo", "tree", "turning_points", "diffusion_nft", "draft", "dmd2")
"""On every family, as the table in docs/concepts/algorithms.md says: one kind of each way to ask the model."""
FAST = {("sd3", "flow_grpo"), ("flux", "tree"), ("z_image", "diffusion_nft"), ("sd15", "turning_points")}
"""In the fast set too."""
CASES = [
    pytest.param(family, name, marks=() if (family, name) in FAST else pytest.mark.slow)
    for number, name in enumerate(KINDS)
    for family in (FAMILIES if name in EVERYWHERE else [[*FAMILIES][number % (5 if name in REGRESSIONS else 2)]])
]
"""The other kinds on one family in turn; those that ask as `flow_grpo` does on the two that are fastest."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """One torch thread: small networks lose by more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def _policy(family: str) -> tuple[Any, list[torch.Tensor]]:
    """The policy of a tiny pipeline under its guidance, and its adapters as they begin."""
    lora = LoraSettings(rank=4, alpha=8, seed=0)
    if family == "sd3":
        policy: Any = SD3Policy(tiny_sd3_pipeline(), lora=lora, guidance=2.0)
    else:
        pipe, options = tiny_pipeline(family)
        policy = PipelinePolicy(pipe, **options, lora=lora)
    return policy, [p.detach().clone() for _, p in policy.trainable_parameters()]


def _begun(family: str) -> Any:
    """With its first adapters."""
    policy, adapters = _policy(family)
    with torch.no_grad():
        for (_, p), first in zip(policy.trainable_parameters(), adapters, strict=True):
            p.copy_(first)
            p.grad = None
    return policy


def _reward(config: FlowGRPOConfig) -> Any:
    """Of images, without ties."""
    if config.objective.algorithm == "pref_grpo":
        return GroupWinRate(as_pairwise(Brightness()))
    if config.objective.algorithm != "gdpo":
        return Brightness()
    order = FunctionReward(lambda images, prompts: [float(i) for i in range(len(images))], name="places")
    return WeightedSum({"places": (order, 1.0), "light": (Brightness(), 1.0)}, allow_mixed_units=True)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_two_updates(family: str, name: str, tmp_path: Path) -> None:
    policy, initial = _begun(family), _policy(family)[1]
    config = _config(policy, KINDS[name], tmp_path / "model")
    objective = config.objective
    kind = VelocityRegression if objective.regression else RewardGradient if objective.ascent else FlowGRPO
    kind = FewStepDistillation if objective.few_step else kind
    algorithm: Any = kind(
        policy,
        _reward(config),
        RECORDS,
        rollout=config.rollout,
        objective=objective,
        accelerator=Accelerator(cpu=True),
        dynamic=config.dynamic,
        self_imitation=config.self_imitation,
        features=(lambda images: images.flatten(2).mean(2)) if name == "entrocraft" else None,
    )
    if objective.regression is not None and objective.regression.weighting == "prediction":
        assert algorithm.row.weighting == ("epsilon" if family == "sd15" else "uniform")
    run = RunSettings(folder=tmp_path, iterations=2)
    trainer: Trainer[Any] = Trainer(algorithm, run=run, optimizer=config.optimizer)
    records = [trainer.iterate() for _ in range(2)]
    phases = 1 if objective.few_step is None else 3 + objective.few_step.surrogate
    assert trainer.counters.updates == 2 * objective.epochs * phases and trainer.counters.skipped == 0
    assert all(math.isfinite(v) for record in records for v in record.values() if isinstance(v, float))
    assert records[0]["grad_norm"] > 0
    if kind is FlowGRPO:
        assert all(record["ratio_floor"] <= 1e-5 for record in records)
    trained = policy.trainable_parameters()
    assert all("lora" in name and bool(p.isfinite().all()) for name, p in trained)
    moved = [not torch.equal(p, first) for (_, p), first in zip(trained, initial, strict=True)]
    assert sum(moved) > len(moved) / 2
    own = {id(p) for _, p in trained}
    networks = [part for part in policy.pipe.components.values() if isinstance(part, torch.nn.Module)]
    assert all(p.grad is None for part in networks for p in part.parameters() if id(p) not in own)
    references = 3 / 16 if name == "par" else 0.0  # three prompts come in 16 images
    shares = [record.get("trained_share", 1.0) for record in records]
    replayed = [record.get("replay/samples", 0) / 8 for record in records]
    pairs = zip(shares, replayed, strict=True)
    planned = sum(planned_cost(config, share, references=references, replayed=again) for share, again in pairs)
    counted = sum(record["forward_equivalents_per_image"] for record in records)
    assert counted == pytest.approx(planned, rel=1e-12)


def _config(policy: Any, overrides: tuple[str, ...], folder: Path) -> FlowGRPOConfig:
    """Of a model whose index is all that a plan reads."""
    folder.mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": type(policy.pipe).__name__}))
    model = {"path": str(folder), "guidance": policy.guidance, "lora": {"rank": 4}}
    return load_config(FlowGRPOConfig, None, [*BASE, f"model={json.dumps(model)}", *overrides])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gradient_goes_through_the_velocity_and_the_decoder(family: str) -> None:
    """So that an earlier step is reached through the latents."""
    policy = _begun(family)
    x = torch.randn(1, *policy.latent_shape, requires_grad=True)
    for output in (policy.velocity(x, torch.tensor([0.5]), policy.encode(["a cat"])), policy.decode(x)):
        assert torch.autograd.grad(output.square().sum(), x)[0].any()


def test_a_video_is_trained_and_evaluated_on_all_its_frames(tmp_path):
    pipe, options = tiny_pipeline("wan")
    policy = PipelinePolicy(pipe, lora=LoraSettings(rank=2, alpha=4), **options)
    scored: list[int] = []

    class Watched(Brightness):
        def score(self, images, prompts, metadata=None):
            scored.append(len(images))
            return super().score(images, prompts, metadata)

    records = [{"prompt": "a red circle"}, {"prompt": "two blue squares!"}]
    settings, reward = RolloutSettings(prompts_per_iteration=2, group_size=2, steps=3), Frames(Watched(), 3)
    algorithm = FlowGRPO(policy, WeightedSum({"light": (reward, 1.0)}), records, rollout=settings)
    before = [p.clone() for _, p in policy.trainable_parameters()]
    optimizer = OptimizerSettings(lr=1e-3, updates_per_iteration=1)
    result = Trainer(algorithm, optimizer=optimizer, run=RunSettings(folder=tmp_path, iterations=2)).train()
    assert result.counters.updates == 2 and result.counters.skipped == 0 and scored == [4 * 3] * 2
    assert any(not torch.equal(a, b) for a, (_, b) in zip(before, policy.trainable_parameters(), strict=True))
    rewards = {"all": Frames(Brightness(), 5), "middle": Brightness()}
    sigmas, prompts = policy.sigmas(3), [record["prompt"] for record in records]
    heldout = evaluate(policy, rewards, records, seeds=[0], sigmas=sigmas, batch_size=2, correctness=None)
    seeds = [sample_seed("heldout", prompt, 0) for prompt in prompts]
    latents = rollout(policy, policy.encode(prompts), sigmas=sigmas, seeds=seeds).latents
    light = policy.decode_frames(latents).mean((2, 3, 4))
    assert heldout.scores["all"].tolist() == pytest.approx(light.mean(1).tolist(), abs=2e-3)
    assert heldout.scores["middle"].tolist() == pytest.approx(light[:, 2].tolist(), abs=2e-3)
