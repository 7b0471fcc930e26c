# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation with a toy policy and toy rewards: pairing, failures, batches, files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from tests.support.evaluation_samples import make_result
from visalign.errors import RewardError
from visalign.evaluation import HeldoutResult, check_judge, evaluate, joined, load_heldout
from visalign.flow.noise import initial_noise
from visalign.flow.rollout import rollout
from visalign.flow.transitions import SOLVERS
from visalign.interfaces import ForwardCount, Metadata, Prediction, Scores
from visalign.pipelines.flow_grpo.config import EvaluationConfig
from visalign.pipelines.flow_grpo.parts import build_evaluator
from visalign.seeds import sample_seed

SIGMAS = torch.tensor([1.0, 0.5, 0.0])


@dataclass
class ToyCondition:
    level: Tensor

    def __len__(self) -> int:
        return len(self.level)

    def select(self, index: Tensor) -> ToyCondition:
        return ToyCondition(self.level[index])


@dataclass
class ToyPolicy:
    """Pulls the latent towards the number of letters of the prompt; an image is the latent, squashed."""

    shift: float = 0.0
    side: int = 8
    latent_shape: tuple[int, ...] = (3, 4, 4)
    storage_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    prediction: Prediction = "velocity"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    module: nn.Module = field(default_factory=lambda: nn.Dropout(0.5))
    encoded: list[str] = field(default_factory=list)
    modes: list[tuple[bool, bool]] = field(default_factory=list)
    forward_count: ForwardCount = field(default_factory=ForwardCount)

    def encode(self, prompts: Sequence[str]) -> ToyCondition:
        self.encoded.extend(prompts)
        return ToyCondition(torch.tensor([len(prompt) / 20 for prompt in prompts]))

    def times(self, sigmas: Tensor) -> Tensor:
        return 1000 * sigmas

    def velocity(self, x: Tensor, sigma: Tensor, condition: Any, time: Tensor | None = None) -> Tensor:
        self.modes.append((self.module.training, torch.is_grad_enabled()))
        return x - (condition.level + self.shift)[:, None, None, None]

    def decode(self, latents: Tensor) -> Tensor:
        self.modes.append((self.module.training, torch.is_grad_enabled()))
        return torch.sigmoid(latents).repeat(1, 1, self.side // 4, self.side // 4)

    def sigmas(self, steps: int, *, timestep_schedule: str = "diffusers") -> Tensor:
        return torch.linspace(1, 0, steps + 1)

    @contextmanager
    def reference(self) -> Iterator[None]:
        yield

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return []

    def save(self, folder: Path) -> None:
        folder.mkdir()


class Verdicts:
    """Correct where an image is bright; unreadable where its first number is below `blind`."""

    name, unit, range, higher_is_better = "shapes_verifier", "partial credit", (0.0, 1.0), True

    def __init__(self, blind: float = -1.0) -> None:
        self.blind = blind
        self.metadata: list[Any] = []

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        self.metadata.extend(metadata or [])
        mean = images.mean((1, 2, 3))
        valid = images[:, 0, 0, 0] >= self.blind
        return Scores(
            value=torch.where(valid, mean, torch.nan),
            valid=valid,
            unit=self.unit,
            parts={"correct": (mean > 0.56).float()},
            text=["fine" if m > 0.56 else f"too dark for {p}" for m, p in zip(mean, prompts, strict=True)],
            reason=[None if ok else "cannot see" for ok in valid],
        )


class Brightness:
    """No verdict; the red mean."""

    name, unit, range, higher_is_better = "brightness", "share", (-math.inf, math.inf), True

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        value = images[:, 0].mean((1, 2))
        return Scores(value=value, valid=torch.ones(len(value), dtype=torch.bool), unit=self.unit)


@dataclass
class Values:
    """A value by the prompts; with the part `correct` on demand."""

    of: Callable[[Sequence[str]], list[float]]
    range: tuple[float, float] = (0.0, 1.0)
    higher_is_better: bool = True
    correct: bool = False
    valid: bool = True
    name: str = "values"
    unit: str = "share"

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        value = torch.tensor(self.of(prompts))
        parts = {"correct": torch.ones(len(value))} if self.correct else {}
        return Scores(value=value, valid=torch.full((len(value),), self.valid), unit=self.unit, parts=parts)


class Bare(Values):
    """A class that returns no Scores."""

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Metadata | None = None) -> Any:
        return self.of(prompts)


RECORDS = [
    {"prompt": "a red circle", "tag": "colors"},
    {"prompt": "two blue squares", "tag": "counting"},
    {"prompt": "three green crosses", "tag": "counting"},
    {"prompt": "a cross", "tag": "single_object"},
]


def run(policy: ToyPolicy | None = None, **changes: Any) -> HeldoutResult:
    options: dict[str, Any] = {
        "rewards": {"shapes_verifier": Verdicts(), "brightness": Brightness()},
        "records": RECORDS,
        "seeds": [0, 7],
        "sigmas": SIGMAS,
        "batch_size": 3,
    }
    return evaluate(policy or ToyPolicy(), **(options | changes))


def same(first: HeldoutResult, second: HeldoutResult) -> bool:
    try:
        np.testing.assert_equal(vars(first), vars(second))
    except AssertionError:
        return False
    return True


def test_numbers_by_hand() -> None:
    """v = x - m with steps of 1/2 twice: x0 = x/4 + 3m/4, so everything can be worked out from the noise."""
    result = run()
    chosen = [sample_seed("heldout", p, int(s)) for p, s in zip(result.prompts, result.seeds, strict=True)]
    noise = initial_noise(chosen, (3, 4, 4))
    level = torch.tensor([len(prompt) / 20 for prompt in result.prompts])[:, None, None, None]
    images = torch.sigmoid(noise / 4 + 0.75 * level)
    correct = images.mean((1, 2, 3)) > 0.56
    assert 0 < correct.sum() < 8
    assert result.correct.tolist() == correct.tolist()
    assert result.accuracy == correct.double().mean().item()
    assert result.by_category["counting"] == correct[2:6].double().mean().item()
    assert result.counts["counting"] == (int(correct[2:6].sum()), 4)
    np.testing.assert_allclose(result.scores["brightness"], images[:, 0].mean((1, 2)), rtol=1e-5)
    assert result.mean("brightness") == pytest.approx(images[:, 0].mean().item(), rel=1e-5)
    expected = (images * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
    np.testing.assert_array_equal(result.images[:, ::2, ::2][:, :2, :2], expected[:, ::2, ::2])


def test_batch_size_changes_nothing() -> None:
    assert same(run(batch_size=1), run(batch_size=3))


def test_the_images_are_those_of_the_solver() -> None:
    """Also where a configuration asks for it."""
    sigmas = torch.linspace(1, 0, 6)
    results = {name: run(sigmas=sigmas, solver=name) for name in SOLVERS}
    assert not np.array_equal(results["euler"].scores["brightness"], results["dpmpp_2m"].scores["brightness"])
    policy = ToyPolicy()
    for name, result in results.items():
        seeds = [sample_seed("heldout", RECORDS[1]["prompt"], seed) for seed in (0, 7)]
        condition = policy.encode([RECORDS[1]["prompt"]] * 2)
        latents = rollout(policy, condition, sigmas=sigmas, seeds=seeds, solver=name).latents
        expected = policy.decode(latents)[:, 0].mean((1, 2))
        np.testing.assert_allclose(result.scores["brightness"][2:4], expected, rtol=1e-5)
        own: Any = {"solver": name}
        config = EvaluationConfig(steps=5, batch_size=3, **own)
        rewards = {"shapes_verifier": Verdicts(), "brightness": Brightness()}
        measure = build_evaluator(
            config, policy, rewards, steps=2, timestep_schedule="diffusers", accelerator=Accelerator(cpu=True)
        )
        assert same(measure(RECORDS, [0, 7]), result)


def test_same_noise_before_and_after_and_in_any_order() -> None:
    """A policy with other weights starts from the same noise; so do the records in another order."""
    before, after = run(ToyPolicy(0.0)), run(ToyPolicy(0.4))
    logit = lambda score: np.log(score / (1 - score))  # noqa: E731
    assert before.prompts == after.prompts and not same(before, after)
    assert np.all(after.scores["brightness"] > before.scores["brightness"])
    assert np.allclose(logit(after.scores["brightness"]) - logit(before.scores["brightness"]), 0.3, atol=0.03)
    turned = run(records=RECORDS[::-1])
    pairs = dict(zip(zip(turned.prompts, turned.seeds.tolist(), strict=True), turned.images, strict=True))
    for prompt, seed, image in zip(before.prompts, before.seeds.tolist(), before.images, strict=True):
        np.testing.assert_array_equal(pairs[prompt, seed], image)


def test_no_random_state_moves_and_the_mode_comes_back() -> None:
    policy = ToyPolicy()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    run(policy)
    assert torch.equal(state, torch.get_rng_state())
    assert set(policy.modes) == {(False, False)}
    assert policy.module.training
    policy.module.eval()
    run(policy)
    assert not policy.module.training


def test_invalid_scores_are_counted_and_left_out() -> None:
    sighted, result = run(), run(rewards={"shapes_verifier": Verdicts(blind=0.6), "brightness": Brightness()})
    missing = ~result.judged
    assert 0 < missing.sum() < 8
    assert result.invalid("shapes_verifier") == missing.sum()
    assert np.isnan(result.scores["shapes_verifier"][missing]).all()
    assert not result.correct[missing].any()
    assert result.accuracy == sighted.correct[result.judged].mean()
    values = sighted.scores["shapes_verifier"][result.judged]
    assert result.mean("shapes_verifier") == pytest.approx(values.mean(), rel=1e-6)
    assert {result.reasons[row] for row in np.flatnonzero(missing)} == {"cannot see"}
    assert np.array_equal(np.isnan(result.outcome()), missing)
    assert result.to_dict()["without_verdict"] == missing.sum()
    assert result.to_dict()["rewards"]["shapes_verifier"]["invalid"] == missing.sum()


def test_a_reward_without_parts_is_correct_at_its_best_value() -> None:
    binary = Values(lambda prompts: [1.0 if prompt.startswith("a ") else 0.5 for prompt in prompts])
    turned = Values(lambda prompts: [2 * v - 1 for v in binary.of(prompts)], higher_is_better=False)
    result = run(rewards={"binary": binary}, correctness="binary")
    assert result.correct.tolist() == [True, True, False, False, False, False, True, True]
    opposite = run(rewards={"binary": turned}, correctness="binary")
    assert opposite.correct.tolist() == [not entry for entry in result.correct]


def test_a_judge_of_correctness_needs_a_verdict() -> None:
    """A value in [-1, 1] that is never 1 would be an accuracy of 0."""
    wide = Values(lambda prompts: [0.3] * len(prompts), range=(-1.0, 1.0))
    message = r"'wide' cannot say correct or wrong: its range is \(-1\.0, 1\.0\)"
    with pytest.raises(ValueError, match=message):
        check_judge("wide", wide, {"prompt": "x"})
    with pytest.raises(ValueError, match=message):
        run(rewards={"wide": wide}, correctness="wide")
    check_judge("wide", replace(wide, correct=True), {"prompt": "x"})
    check_judge("wide", replace(wide, valid=False), {"prompt": "x"})  # cannot tell: left to the evaluation
    assert run(rewards={"wide": replace(wide, correct=True)}, correctness="wide").accuracy == 1


def test_images_are_bounded_in_number_and_size() -> None:
    result = run(ToyPolicy(side=16), max_images=3, image_side=8)
    assert result.image_index.tolist() == [0, 2, 5]
    assert result.images.shape == (3, 8, 8, 3)
    full = run(ToyPolicy(side=16))
    averaged = full.images[[0, 2, 5]].astype(float).reshape(3, 8, 2, 8, 2, 3).mean((2, 4))
    assert np.abs(result.images - averaged).max() <= 1


def test_saved_and_loaded_is_equal(tmp_path: Path) -> None:
    result = run(rewards={"shapes_verifier": Verdicts(blind=0.6), "brightness": Brightness()})
    path = result.save(tmp_path / "deep" / "before.npz")
    assert same(load_heldout(path), result)
    assert [entry.name for entry in path.parent.iterdir()] == ["before.npz"]


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no held-out result at .*nothing\.npz; evaluate first"):
        load_heldout(tmp_path / "nothing.npz")
    path = run().save(tmp_path / "before.npz")
    content = path.read_bytes()
    for damaged in (content[:200], b"", b"not a file", content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"before\.npz is no held-out result, or was cut short"):
            load_heldout(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"records": []}, "at least one prompt record; got none"),
        ({"records": [{"prompt": "a"}, {"prompt": " "}]}, r"records \[1\] have none"),
        ({"correctness": "shape_verifier"}, "'shape_verifier' is not among.*Did you mean 'shapes_verifier'"),
        (
            {"rewards": {"short": Values(lambda _: [0.0])}, "correctness": None},
            "'short' returned 1 scores for 3 samples",
        ),
        (
            {"rewards": {"bare": Bare(lambda prompts: [0.0] * len(prompts))}, "correctness": None},
            "'bare' returned a list for 3 samples; it must return",
        ),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, RewardError), match=message):
        run(**changes)


@pytest.mark.parametrize(("shares", "max_images"), [(2, 1024), (8, 3)])
def test_the_shares_of_processes_make_the_whole(shares: int, max_images: int) -> None:
    parts = [run(share=(rank, shares), max_images=max_images) for rank in range(shares)]
    assert sum(map(len, parts)) == 8
    assert same(joined(parts), run(max_images=max_images))
    assert same(joined([run()]), run())
    edits = replace(parts[0], sources=("cat.png",) * len(parts[0]))
    assert joined([edits, *parts[1:]]).sources == (*edits.sources, *[""] * (8 - len(edits)))


def test_changes_are_paired_and_in_standard_errors():
    before = make_result(0.5, prompts=4, seeds=2)
    now = replace(
        before,
        prompts=(*before.prompts[:6], "new", "new"),  # absent before: left out
        scores={
            "clip_score": before.scores["clip_score"] + np.array([1, 2, 3, 0, 2, np.nan, 50, 50], np.float32),
            "sharpness": before.scores["sharpness"] + np.float32(3),
            "loss": np.arange(8, dtype=np.float32),
        },
        higher_is_better={"clip_score": True, "loss": False},
        correct=np.array([False] * 8),
        judged=np.array([True] * 5 + [False] * 3),
    )
    then = replace(before, scores={**before.scores, "loss": np.zeros(8, np.float32)})
    away = np.array([1.0, 2, 3, 0, 2])
    expected = away.mean() / (away.std(ddof=1) / math.sqrt(5))
    changes = now.changes(then, range(8), ["clip_score", "sharpness", "loss", "accuracy", "of_sets"])
    lost = -before.correct[:5].astype(float)
    assert changes == pytest.approx(
        {
            "clip_score": expected,
            "sharpness": 6.0,
            "loss": -2.5 / (np.arange(6).std(ddof=1) / math.sqrt(6)),
            "accuracy": lost.mean() / (lost.std(ddof=1) / math.sqrt(5)),
        }
    )
    assert then.changes(then, range(8), ["clip_score"]) == {"clip_score": 0.0}
