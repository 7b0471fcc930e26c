# SPDX-License-Identifier: Apache-2.0
"""Few-step students: roles on one network, updates in their order, resumes, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models.sd3 import tiny_sd3_pipeline
from tests.support.training.images import Brightness, ToyNet, ToyPolicy, check_resume, policy_weights, toy_trainer
from visalign.adapters import LoraSettings, SD3Policy
from visalign.core.regression.few_step import FewStep, conditional_renoise, preference_weights
from visalign.errors import UserError
from visalign.training.diffusion.few_step import STUDENT, TEACHER, Roles

SMALL = {"prompts_per_iteration": 2, "group_size": 4}
PLAIN = {"teacher_guidance": None, "critic_updates": 2}


def _trainer(folder: Any, name: str = "tdm", policy: Any = None, **more: Any) -> Any:
    objective = {"algorithm": name, "changes": {**PLAIN, **more.pop("changes", {})}}
    return toy_trainer(folder, policy=policy, objective=objective, **more)


class GaussianNet(ToyNet):
    """The exact velocity of data N(0, 1/4), and a shift that is trained."""

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        s = sigma.reshape(-1, 1, 1, 1)
        own = 0 * self.mix.weight.sum() + self.shift[prompt][:, :, None, None]
        return (s - (1 - s) / 4) / ((1 - s) ** 2 / 4 + s**2) * x + own


def _far() -> ToyPolicy:
    """A student whose samples have another mean than its teacher's, 0."""
    policy = ToyPolicy()
    policy.net = GaussianNet(torch.float32)
    with torch.no_grad():
        policy.net.shift.fill_(1.0)
    return policy


@pytest.mark.parametrize("name", ["dmd2", "tdm"])
def test_a_student_goes_back_to_its_teacher(name: str, tmp_path: Any) -> None:
    policy = _far()
    trainer = _trainer(tmp_path, name, policy, optimizer={"lr": 0.1, "ema_decay": 0.0})
    before = policy_weights(policy).norm()
    for _ in range(5):
        record = trainer.iterate()
    assert policy_weights(policy).norm() < 0.2 * before
    assert {"loss", "loss/critic", "match_error", "teacher_distance"} <= record.keys()
    # 4 steps; the critic's two updates and the student's with gradient; teacher and critic
    assert record["forward_equivalents_per_image"] == 4 + 3 * 3 + 2


def test_the_critic_learns_the_student(tmp_path: Any) -> None:
    trainer = _trainer(tmp_path, "dmd2", _far(), changes={"warmup": 100}, optimizer={"lr": 0.1})
    records = [trainer.iterate() for _ in range(8)]
    assert records[-1]["loss/critic"] < 0.7 * records[0]["loss/critic"] and "loss" not in records[0]


def test_the_surrogate_and_with_it_the_student_follow_the_reward(tmp_path: Any) -> None:
    changes = {"guidance_share": 0.0, "clip": 0.0, "threshold": 1e6, "anchor": 0.0}
    trainer = _trainer(tmp_path, "tdm_r1", changes=changes, optimizer={"lr": 0.05, "ema_decay": 0.0})
    records = [trainer.iterate() for _ in range(8)]
    assert records[-1]["reward_mean"] > records[0]["reward_mean"] + 0.01
    assert records[0]["surrogate_stopped"] == 0


class Fails(Brightness):
    """Fails on one sample in four."""

    def score(self, images: torch.Tensor, prompts: Any, metadata: Any = None) -> Any:
        valid = torch.arange(len(images)) % 4 > 0
        return replace(
            super().score(images, prompts), valid=valid, reason=[None if v else "no" for v in valid.tolist()]
        )


def test_what_failed_counts_in_no_group(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def weights(error: torch.Tensor, *rest: Any, **options: Any) -> Any:
        sizes.append(len(error))
        return preference_weights(error, *rest, **options)

    monkeypatch.setattr("visalign.training.diffusion.few_step.preference_weights", weights)
    rollout = {**SMALL, "max_failure_rate": 0.5}
    _trainer(tmp_path, "tdm_r1", reward=Fails(), rollout=rollout, optimizer={"updates_per_iteration": 1}).iterate()
    assert sizes == [6]


@pytest.mark.parametrize("name", ["dmd2", "tdm_r1"])
def test_a_resumed_run_and_micro_batches_change_nothing(name: str, tmp_path: Any) -> None:
    check_resume(lambda folder, run: _trainer(folder, name, run=run, rollout=SMALL), tmp_path, 1, 2)
    weights = []
    for size in (1, 7, 1000):
        trainer = _trainer(
            tmp_path / str(size), name, ToyPolicy(torch.float64), optimizer={"micro_batch": size}, rollout=SMALL
        )
        trainer.iterate()
        weights.append(torch.cat([p.detach().flatten() for _, p in trainer.algorithm.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(weights[0], weights[2], rtol=1e-6, atol=1e-8)


def test_a_step_above_the_compared_range_keeps_its_own_interval() -> None:
    """SD3's second of eight levels is 0.984: a level below it would mix more than unit noise."""
    sigma, after = torch.tensor([1.0, 0.999, 0.984, 0.015]), torch.tensor([0.984, 0.985, 0.9, 0.0])
    for share in (0.01, 0.99):
        mid, level = FewStep(interval=True).levels(sigma, after, torch.full((4,), share, dtype=torch.float64))
        assert ((mid <= level) & (level <= sigma)).all()
        x0, noise = torch.zeros(4, 1, 1, 2, dtype=torch.float64), torch.randn(4, 1, 1, 2, dtype=torch.float64)
        _, mixed, _ = conditional_renoise(x0, noise, noise * 0, mid, level)
        assert (mixed.abs() <= noise.abs() + 1e-12).all()


def _sd3(lora: bool, start: Path | None = None) -> SD3Policy:
    if start is not None:
        _sd3(True).save(start)
    policy = SD3Policy(tiny_sd3_pipeline(), lora=LoraSettings(rank=2, alpha=2) if lora else None, lora_path=start)
    with torch.no_grad():
        for name, weight in policy.trainable_parameters():
            if not lora or ".lora_B." in name:
                weight += 0.1
    return policy


@pytest.mark.parametrize(("lora", "start"), [(True, None), (True, "lora"), (False, None)])
def test_roles_share_a_network_and_leave_it_as_it_was(lora: bool, start: str | None, tmp_path: Path) -> None:
    """The teacher is the model without adapters, also of a student that goes on from some."""
    policy, other = _sd3(lora, None if start is None else tmp_path / start), tiny_sd3_pipeline().transformer
    with torch.no_grad():
        other.proj_out.bias += 1.0
    before = {n: p.detach().clone() for n, p in policy.module.named_parameters()}
    x, sigma = torch.randn(1, *policy.latent_shape), torch.tensor([0.5])
    condition = policy.encode(["a red circle"])

    @torch.no_grad()
    def velocity(roles: Roles, role: str) -> torch.Tensor:
        with roles.acting(role):
            return policy.velocity(x, sigma, condition)

    plain = Roles(policy, ["critic"], None)
    with torch.no_grad():
        reference = SD3Policy(tiny_sd3_pipeline()).velocity(x, sigma, condition)
    assert torch.equal(velocity(plain, TEACHER), reference)
    torch.testing.assert_close(velocity(plain, "critic"), reference)
    assert not torch.allclose(velocity(plain, STUDENT), reference)
    taught = Roles(policy, ["critic"], dict(other.named_parameters()))
    torch.testing.assert_close(velocity(taught, TEACHER), reference + 1.0)
    torch.testing.assert_close(velocity(taught, "critic"), reference + 1.0)
    after = dict(policy.module.named_parameters())
    assert all(torch.equal(after[n], p) for n, p in before.items())
    with pytest.raises(
        UserError, match=r"another network than model.path: proj_out.bias is absent there and \(\d+,\)"
    ):
        Roles(policy, ["critic"], {n: p for n, p in other.named_parameters() if n != "proj_out.bias"})


def test_a_policy_without_guidance_is_refused(tmp_path: Any) -> None:
    with pytest.raises(UserError, match="ToyPolicy has no attribute guidance that can be set"):
        _trainer(tmp_path, changes={"teacher_guidance": 3.5})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"critic_updates": 0}, r"critic_updates must be a whole number in \[1, inf\); got 0"),
        ({"teacher_guidance": 0.5}, r"teacher_guidance must be a number in \[1, inf\) or None; got 0.5"),
        ({"level_low": 0.99}, "level_low must be ≤ level_high; got 0.99 and 0.98"),
        ({"density": "logit_normal", "density_options": {"std": 0}}, r"std must be a number in \(0, inf\); got 0"),
        ({"kl": 0.1}, "few-step algorithm 'tdm' has no field 'kl'"),
        ({"density_options": {"mean": 1.0}}, "density uniform of 'few_step' has no option 'mean'. Its options: shift"),
        ({"guidance_share": 0.5}, "guidance_share is 0.5, and surrogate is False, so nothing uses it"),
        ({"density": "mode"}, "density must be one of uniform, logit_normal; got 'mode'"),
    ],
)
def test_wrong_options_are_refused(changes: dict[str, Any], message: str, tmp_path: Any) -> None:
    with pytest.raises(UserError, match=message):
        _trainer(tmp_path, changes=changes)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rollout": {"solver": "dpmpp_2m"}}, "rollout.solver is dpmpp_2m, and objective.algorithm=tdm trains Euler"),
        ({"rollout": {"noise_level": 0.5}}, "samples along the ODE, without stochastic steps"),
        ({"rollout": {"guidance": 3.0}}, "rollout.guidance and rollout.merge_adapters sample with another policy"),
    ],
)
def test_settings_of_other_algorithms_are_refused(more: dict[str, Any], message: str, tmp_path: Any) -> None:
    with pytest.raises(UserError, match=message):
        _trainer(tmp_path, **more)
