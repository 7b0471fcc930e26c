# SPDX-License-Identifier: Apache-2.0
"""EMA, metrics table and file, progress display, cost, phases, interrupt flag, settings."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from visalign.errors import UserError
from visalign.training.diffusion.cost import forward_equivalents_per_image
from visalign.training.diffusion.rollout_settings import RolloutSettings, check_sampling
from visalign.training.diffusion.settings import DiffusionObjectiveSettings
from visalign.training.loop.ema import EMA
from visalign.training.loop.metrics import MetricsFile, check_keys, read_metrics
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.progress import TrainingProgress
from visalign.training.text.dpo import DPOSettings
from visalign.training.text.settings import TextObjectiveSettings

NFT = {"algorithm": "diffusion_nft"}
TREE = {"steps": 4, "group_size": 8, "branch": {"at": [0, 2], "children": 2}}


def _parameter(values) -> tuple[str, torch.nn.Parameter]:
    return "w", torch.nn.Parameter(torch.tensor(values))


def _set(parameter, value):
    with torch.no_grad():
        parameter.fill_(value)


def test_ema_is_the_weighted_sum():
    """ē_n = dⁿ θ_0 + (1 − d) Σ_k d^(n−k) θ_k."""
    name, p = _parameter([1.0])
    ema = EMA([(name, p)], decay=0.9, warmup=False)
    thetas = [3.0, -1.0, 2.0, 0.5]
    for n, theta in enumerate(thetas, start=1):
        _set(p, theta)
        ema.update(n)
    expected = 0.9**4 + 0.1 * sum(0.9 ** (4 - k) * theta for k, theta in enumerate(thetas, start=1))
    torch.testing.assert_close(ema.state()["w"], torch.tensor([expected]))


def test_ema_every_and_warmup():
    name, p = _parameter([0.0])
    ema = EMA([(name, p)], decay=0.9, every=2)
    _set(p, 1.0)
    ema.update(1)  # a run below one interval must not be left with its starting weights
    torch.testing.assert_close(ema.state()["w"], torch.tensor([1 - 2 / 11]))
    ema.update(2)
    torch.testing.assert_close(ema.state()["w"], torch.tensor([1 - 2 / 11 * 3 / 12]))
    before = ema.state()["w"].clone()
    ema.update(3)
    assert torch.equal(ema.state()["w"], before)
    assert [ema.decay_at(n) for n in (1, 80, 1000)] == [2 / 11, 0.9, 0.9]


@pytest.mark.parametrize(("decay", "inside"), [(0.5, 0.0), (0.0, 1 / 3)])
def test_ema_applied_gives_back_the_very_same_bits(decay, inside):
    name, p = _parameter([0.0])
    ema = EMA([(name, p)], decay=decay, warmup=False)
    _set(p, 1 / 3)
    if not decay:  # the average is the parameters and stores nothing
        ema.update(1)
        assert ema._average == {} and torch.equal(ema.state()["w"], p.detach())
    own = p.detach().clone()
    with pytest.raises(RuntimeError, match="inside"), ema.applied():
        assert torch.equal(p.detach(), torch.tensor([inside]))
        raise RuntimeError("inside")
    assert torch.equal(p.detach(), own)


def test_unlisted_metrics_are_refused(tmp_path):
    check_keys({"reward_mean": 1.0, "reward_part/anything.at/all": 0.0, "heldout/accuracy": 1})
    for key in ("reward", "gain/extra", "heldout"):
        with pytest.raises(KeyError, match=r"is not in visalign\.training\.loop\.metrics\.METRICS"):
            MetricsFile(tmp_path / "m.jsonl").write({"iteration": 1, key: 0.0})
    assert read_metrics(tmp_path / "m.jsonl") == []


def test_metrics_file_cuts_what_comes_after_a_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    writer = MetricsFile(path)
    for i in range(1, 5):
        writer.write({"iteration": i, "kl": float("nan") if i == 2 else 0.5})
    with path.open("a") as file:
        file.write('{"iteration": 5, "kl"')
    assert [r["iteration"] for r in read_metrics(path)] == [1, 2, 3, 4]
    MetricsFile(path, after=2)
    assert read_metrics(path) == [{"iteration": 1, "kl": 0.5}, {"iteration": 2, "kl": None}]
    assert read_metrics(tmp_path / "absent.jsonl") == []


def test_a_damaged_metrics_file_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"iteration": 1\n{"iteration": 2}\n')
    with pytest.raises(ValueError, match=r"m\.jsonl line 1 is not JSON"):
        MetricsFile(tmp_path / "m.jsonl", after=2)


RECORD = {"iteration": 1, "reward_mean": 0.25, "ratio_std": 2e-4, "clip_low": 0.01, "clip_high": 0.02, "seconds": 30.0}


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_progress_prints_a_line_per_iteration():
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    progress = TrainingProgress(5, console=console)
    progress.update({**RECORD, "heldout/accuracy": 0.5, "heldout/accuracy_low": 0.25, "heldout/accuracy_high": 0.75,
                     "heldout/accuracy.low": 0.1})  # fmt: skip
    progress.update({**RECORD, "iteration": 2, "kl": None})
    progress.note("a [note]")
    progress.update({**RECORD, "iteration": 3, "clip_low": float("nan"), "ratio_std": float("nan")})
    first, second, note, third = _text(console).splitlines()
    assert first.startswith("iteration 1/5: reward 0.250, held-out 0.500 (0.250 to 0.750), ") and first.endswith(
        "2:00 left"
    )
    assert "clipped 3.0%" in first and "ratio spread 2.0e-04" in first
    assert "held-out" not in second and second.endswith("1:30 left")
    assert note == "a [note]"
    assert "nan" not in third and "clipped –" in third and "ratio spread –" in third


def test_time_left_counts_what_the_limit_leaves_and_what_a_resumed_run_has_used():
    progress = TrainingProgress(100, console=Console(file=io.StringIO()), max_seconds=300.0)
    progress.go_on(50, 200.0)
    progress.update({**RECORD, "iteration": 51, "seconds": 30.0})
    assert progress.seconds_left() == 70.0
    progress.update({**RECORD, "iteration": 98, "seconds": 30.0})
    assert progress.seconds_left() == pytest.approx(2 * 60.0 / 48)


def test_cost_is_the_reference_table():
    """Minimum column: Flow-GRPO SD3.5 74; Fast-noCFG 19; Flow-Factory SD3.5 28; MixGRPO 37; DanceGRPO FLUX 43."""
    cost = forward_equivalents_per_image
    assert cost(steps=10, trained=9, guided=True, reference=True) == 74
    assert cost(steps=10, trained=3, guided=False, reference=False) == 19
    assert cost(steps=10, trained=2, guided=True, reference=False) == 28
    assert cost(steps=25, trained=4, guided=False, reference=False) == 37
    assert cost(steps=16, trained=9, guided=False, reference=False) == 43
    assert cost(steps=10, trained=2, guided=False, reference=False, trained_share=0.5) == 13


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (RolloutSettings, {"steps": 0}, r"rollout\.steps is 0\. Input should be greater than or equal to 1"),
        (RolloutSettings, {"step": 1}, r"rollout has no setting 'step'\. Did you mean 'steps'.*Allowed"),
        (RolloutSettings, {"schedule": "cps", "steps": 4, "sde_steps": [0, 3]}, r"\[0, 3\] holds the last.*Take 3"),
        (RolloutSettings, {"sde_window": 10}, "sde_window is 10; with 9 sde_steps it must be 1 to 9"),
        (RolloutSettings, {"image_sizes": [8], "staleness": 1}, r"staleness=1 .* Leave one of the two out"),
        (RolloutSettings, {**TREE, "group_size": 6}, "6, and a tree with 2 children at the steps .0, 2. has 4 images"),
        (RolloutSettings, {**TREE, "branch": {"at": [1], "children": 8}}, "a prompt share step 0.*take 0 out of"),
        (DPOSettings, {"row": "dpo"}, "loss.row is 'dpo'. Input should be 'sigmoid', 'robust'"),
        (DPOSettings, {"row": "ipo", "label_smoothing": 0.1}, "loss.row=ipo does not read it"),
        (DPOSettings, {"row": "robust"}, "loss.row=robust without label_smoothing is sigmoid"),
        (DiffusionObjectiveSettings, {"changes": {"ratio": "gard"}}, r"objective: ratio must be one of log_prob"),
        (
            DiffusionObjectiveSettings,
            {"changes": {"advantage": "steps"}},
            "Take 'flow_grpo' with objective.credit=turning_points",
        ),
        (DiffusionObjectiveSettings, {"credit": "one_step", "algorithm": "gdpo"}, "one_step.*needs advantage='group'"),
        (
            DiffusionObjectiveSettings,
            {**NFT, "ratio_bound": 0.1},
            "ratio_bound is for log-probs .*ratio_bound=null, or",
        ),
        (DiffusionObjectiveSettings, {**NFT, "changes": {"kll": 1}}, "no field 'kll'. Did you mean 'kl'"),
        (DiffusionObjectiveSettings, {"changes_for": {"ram": {"levls": 2}}}, "no field 'levls'. Did you mean 'lev"),
        (DiffusionObjectiveSettings, {"algorithm": "draft", "reset_reference_above": 0.1}, "draft has no reference"),
        (TextObjectiveSettings, {"algorithm": "dapo", "reset_reference_every": 5}, "dapo has no reference. Set .*kl"),
    ],
)
def test_settings_refuse_what_cannot_work(kind, values, message):
    with pytest.raises(UserError, match=message):
        kind(**values)


@pytest.mark.parametrize(
    ("objective", "rollout", "message"),
    [
        (NFT, {"sde_steps": [0, 1]}, r"diffusion_nft samples along the ODE, .*Set rollout.sde_steps=null"),
        ({**NFT, "changes": {"levels": 4}}, {"steps": 3}, "changes.levels is 4, and the sampler has 3 timesteps"),
        ({"credit": "image"}, TREE, "credit is 'image' and rollout.branch is Branch.*Set objective.credit=branches"),
        ({"algorithm": "gmpo", "credit": "branches"}, TREE, "gmpo joins the steps .*Take flow_grpo"),
    ],
)
def test_objectives_refuse_rollouts_that_they_cannot_learn_from(objective, rollout, message):
    with pytest.raises(UserError, match=message):
        check_sampling(DiffusionObjectiveSettings(**objective), RolloutSettings(**rollout))


def test_rates_of_the_schedules():
    warm = OptimizerSettings(lr=1.0, warmup_updates=3)
    assert [warm.lr_at(i) for i in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert OptimizerSettings().lr_at(0) == OptimizerSettings().lr_at(10_000) == 3e-4
    falling = OptimizerSettings(lr=1.0, decay_updates=4, lr_end=0.2)
    assert [falling.lr_at(i) for i in range(6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = OptimizerSettings(lr=1.0, decay_updates=10, decay="cosine", lr_end=0.0)
    assert [cosine.lr_at(n) for n in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
