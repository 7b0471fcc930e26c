# SPDX-License-Identifier: Apache-2.0
"""Stored pairs in place of samples: Diffusion-DPO's loss by hand, learning, resumes, and what is refused."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.support.training.images import ToyPolicy, check_resume, toy_trainer
from visalign.errors import UserError
from visalign.training import DiffusionObjectiveSettings, RolloutSettings
from visalign.training.diffusion.rollout_settings import check_sampling
from visalign.training.diffusion.samples import StoredPreference
from visalign.training.loop.algorithm import Context
from visalign.training.loop.metrics import read_metrics

TABLE = torch.randn(12, 4, 4, 4, generator=torch.Generator().manual_seed(3))
TABLE[0::2] += 0.5
"""Latents; those of even number are the lighter ones."""
WORDS = ("bright", "dark", "light", "bright", "dark", "light")


def _records(share: float = 1.0) -> list[dict[str, Any]]:
    """Six pairs, in half of which the second image is the preferred one; "dark" wants the other."""
    records = []
    for number, word in enumerate(WORDS):
        latents = (2 * number, 2 * number + 1) if number % 2 else (2 * number + 1, 2 * number)
        lighter = latents[0] % 2 == 0
        first = share if lighter != (word == "dark") else 1 - share
        candidates = [{"latent": latents[0], "preference": first}]
        candidates.append({"latent": latents[1], "preference": 1 - first})
        records.append({"prompt": word, "candidates": candidates})
    return records


def _stored(dtype: torch.dtype = torch.float32) -> Any:
    return lambda records: TABLE[[record["latent"] for record in records]].to(dtype)


def _trainer(folder: Path, **changes: Any) -> Any:
    defaults: dict[str, Any] = {
        "objective": {"algorithm": "diffusion_dpo"},
        "rollout": {"prompts_per_iteration": 6, "group_size": 2},
        "records": _records(),
        "optimizer": {"lr": 0.002},
    }
    return toy_trainer(folder, reward=StoredPreference(), stored=_stored(), **{**defaults, **changes})


def _of_one_pair(algorithm: Any, run: Context) -> tuple[Any, float, list[tuple[Tensor, Tensor]]]:
    """(experience, loss of the update, the policy's inputs (x, σ))."""
    experience = algorithm.collect(run).experience
    inputs, own = [], algorithm.policy.velocity

    def velocity(x: Tensor, sigma: Tensor, *rest: Any) -> Tensor:
        inputs.append((x.clone(), sigma.clone()))
        return own(x, sigma, *rest)

    algorithm.policy.velocity = velocity
    (step,) = algorithm.prepare(experience, run)
    loss = algorithm.backward(experience, step, run)["loss/policy"]
    algorithm.policy.velocity = own
    return experience, loss, inputs


@pytest.mark.parametrize("soft", [False, True])
def test_the_loss_of_a_flow_is_equation_14(soft: bool, tmp_path):
    """−ln σ(−β/2 [(e_w − e_w^ref) − (e_l − e_l^ref)]), e = mean |v − (ε − x0)|² at one level and noise."""
    policy = ToyPolicy(torch.float64)
    with torch.no_grad():
        policy.net.shift.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.1)
    changes = {"levels": 1, "loss_options": {"beta": 20.0, "soft": soft}}
    trainer = toy_trainer(
        tmp_path,
        policy=policy,
        reward=StoredPreference(),
        stored=_stored(torch.float64),
        records=_records(share=0.75)[:1],
        objective={"algorithm": "diffusion_dpo", "changes": changes},
        rollout={"prompts_per_iteration": 1, "group_size": 2},
        optimizer={"updates_per_iteration": 1},
    )
    algorithm = trainer.algorithm
    experience, loss, inputs = _of_one_pair(algorithm, trainer.context)
    x, sigma = inputs[-1]  # the better image first
    assert sigma[0] == sigma[1]
    x0 = TABLE[[0, 1]].double()
    wide = sigma[:, None, None, None]
    noise = (x - (1 - wide) * x0) / wide
    torch.testing.assert_close(noise[0], noise[1])
    assert abs(float(noise.std()) - 1) < 0.3
    condition = experience.images.condition
    error = (policy.velocity(x, sigma, condition) - (noise - x0)).square().flatten(1).mean(1).detach()
    with torch.no_grad(), policy.reference():
        reference = (policy.velocity(x, sigma, condition) - (noise - x0)).square().flatten(1).mean(1)
    m = -20 / 2 * ((error[0] - reference[0]) - (error[1] - reference[1]))
    expected = -logsigmoid(m)
    if soft:
        expected = -0.75 * logsigmoid(m) - 0.25 * logsigmoid(-m)
    assert abs(float(m)) > 0.01
    assert loss == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("name", ["diffusion_dpo", "diffusion_kto", "rejection"])
def test_a_policy_learns_what_was_preferred(name: str, tmp_path):
    changes = {"loss_options": {"beta": 50.0}} if name != "rejection" else {}
    objective = {"algorithm": name, "changes": changes}
    trainer = _trainer(tmp_path, objective=objective, run={"iterations": 20}, optimizer={"lr": 0.01})
    trainer.train()
    shift = trainer.algorithm.policy.net.shift.detach()
    # v = ε − x0: where light is wanted the velocity falls, and the latents rise
    assert shift[0].mean() < shift[1].mean() - 0.02 and shift[2].mean() < shift[1].mean() - 0.02


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    make = partial(_trainer, rollout={"prompts_per_iteration": 4, "group_size": 2})
    check_resume(make, tmp_path, 2, 4, checkpoint_every=1)


@pytest.mark.parametrize(
    "objective", [{"algorithm": "flow_grpo"}, {"algorithm": "diffusion_dpo", "changes": {"anchor": "old"}}]
)
def test_what_needs_the_policys_own_samples_is_refused(objective: Any):
    settings = DiffusionObjectiveSettings(**objective)
    with pytest.raises(UserError, match=r"learns from samples of the policy itself.*Take diffusion_dpo"):
        check_sampling(settings, RolloutSettings(group_size=2), stored=True)


def test_groups_of_four_learn_the_order_of_their_ratings(tmp_path):
    """GDRO on four stored images a prompt: the lighter two gain likelihood against the darker two."""
    candidates = [{"latent": number, "preference": 5.0 - number % 2} for number in range(4)]
    records = [{"prompt": word, "candidates": candidates} for word in ("bright", "light")]
    changes = {"loss_options": {"beta": 12.0, "gamma": 0.0}}
    trainer = _trainer(
        tmp_path, records=records, rollout={"prompts_per_iteration": 2, "group_size": 4},
        objective={"algorithm": "gdro", "changes": changes}, run={"iterations": 16},
    )  # fmt: skip
    trainer.train()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    losses = [row["loss"] for row in rows]
    assert losses[0] == pytest.approx(math.log(24), rel=0.05), "ln 4 + ln 3 + ln 2 while policy and reference agree"
    assert losses[-1] < 0.8 * losses[0]


def test_votes_without_any_are_refused(tmp_path):
    soft = {"algorithm": "diffusion_dpo", "changes": {"loss_options": {"soft": True}}}
    with pytest.raises(UserError, match=r"soft=true, which takes votes for probabilities.*data.pairs"):
        toy_trainer(tmp_path, objective=soft)
