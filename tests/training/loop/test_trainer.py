# SPDX-License-Identifier: Apache-2.0
"""What the one trainer owns: masters of low weights, float16's loss scale, AdamW's resolution, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from tests.support.training.images import Brightness, ToyPolicy, check_resume, toy_trainer
from visalign.errors import UserError
from visalign.training import FlowGRPO, OptimizerSettings, RolloutSettings, read_metrics
from visalign.training.loop.optimizer import TrainedWeights


class LowPolicy(ToyPolicy):
    """The toy with trained weights in bfloat16 or float16, as a whole model in that dtype has them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net.shift.data = self.net.shift.data.to(dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.net.shift.dtype


def _low(start: float, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((50,), start, dtype=dtype))


def test_steps_too_small_for_bfloat16_add_up_in_its_master():
    """Steps of 3e-5 on weights of 1: bfloat16's next number below 1 is 0.996."""
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        weight = _low(1.0, dtype)
        weights = TrainedWeights([("w", weight)], OptimizerSettings(lr=3e-5, weight_decay=0.0))
        for _ in range(300):
            weights.begin(3e-5)
            (weight.float().sum() * 1e-9).backward()
            weights.gather_gradients(1.0)
            weights.step()
        ends[dtype] = weight.detach().float().mean()
    assert ends[torch.float32] == pytest.approx(1 - 300 * 3e-5, abs=1e-4)
    assert ends[torch.bfloat16] == pytest.approx(float(ends[torch.float32]), abs=2**-8)
    assert ends[torch.bfloat16] < 1, "without a master it would still be 1"


def test_the_fused_step_is_the_plain_one():
    ends = []
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 50))
        weights = TrainedWeights([("w", weight)], OptimizerSettings(weight_decay=0.1, fused=fused))
        for rate in (1e-2, 3e-2):
            weights.begin(rate)
            weight.grad = torch.linspace(-2.0, 3.0, 50) * rate
            weights.step()
        assert weights.optimizer.defaults["fused"] is (fused or None)
        ends.append(weight.detach())
    torch.testing.assert_close(*ends, rtol=1e-6, atol=1e-7)


def test_a_run_with_low_weights_resumes_to_the_bit(tmp_path):
    dtype = torch.float16

    def make(folder: Path, run: dict[str, Any]) -> Any:
        optimizer = {"ema_decay": 0.5, "lr": 1e-3}
        return toy_trainer(
            folder, policy=LowPolicy(dtype), optimizer=optimizer, objective={"ratio_bound": 0.1}, run=run
        )

    _, trainer = check_resume(make, tmp_path, 2, 4)
    assert all(master.dtype == torch.float32 for _, master in trainer.weights.masters)
    low = dict(trainer.weights.named)["shift"]
    own = low.detach().clone()
    assert low.dtype == dtype
    assert torch.equal(own, dict(trainer.weights.masters)["shift"].to(dtype))
    with trainer.averaged():
        assert torch.equal(low, trainer.ema.state()["shift"].to(dtype)) and not torch.equal(low, own)
    assert torch.equal(low, own)


def test_float16_has_its_loss_scaled_and_overflows_halve_the_scale(tmp_path):
    policy = LowPolicy(torch.float16)
    trainer = toy_trainer(tmp_path, policy=policy, objective={"ratio_bound": 0.1}, run={"iterations": 3})
    policy.net.shift.register_hook(lambda grad: grad * 1e3)  # 65536 times this is above float16's largest
    trainer.train()
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert records[0]["updates_skipped"] > 0 and records[0]["loss_scale"] < 2**16
    assert records[-1]["updates"] > records[-1]["updates_skipped"], "it finds a scale that holds"
    assert trainer.counters.loss_scale == records[-1]["loss_scale"]


def test_a_run_without_an_update_says_so(tmp_path):
    class Flat(Brightness):
        def score(self, images, prompts, metadata=None):
            scores = super().score(images, prompts)
            scores.value.fill_(0.5)
            return scores

    notes: list[str] = []
    trainer = toy_trainer(tmp_path, reward=Flat(), run={"iterations": 2})
    trainer.progress.note = notes.append  # type: ignore[method-assign]
    trainer.train()
    (warning,) = notes
    assert warning.startswith("Warning: 2 iterations made no update: the weights are as at the start.")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GRADIENT_ACCUMULATION_STEPS", "4", r"divides every gradient by 4.*ACCELERATE_GRADIENT"),
        ("MIXED_PRECISION", "bf16", r"computes in bf16.*ACCELERATE_MIXED_PRECISION"),
    ],
)
def test_the_environment_changes_no_gradient(name, value, message, tmp_path, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_{name}", value)
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    with pytest.raises(UserError, match=f"accelerate {message}"):
        toy_trainer(tmp_path, accelerator=Accelerator(cpu=True))
    if name == "MIXED_PRECISION":
        monkeypatch.setattr(AcceleratorState, "_shared_state", {})
        records, policy = [{"prompt": "dark"}] * 48, cast(Any, ToyPolicy())
        algorithm = FlowGRPO(policy, Brightness(), records, rollout=RolloutSettings())
        assert algorithm.accelerator.mixed_precision == "no"
