# SPDX-License-Identifier: Apache-2.0
"""The adversarial reward: its loss, what a head learns on CLIP and DINO features, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.utils import save_image

from tests.support.models.clip import save_tiny_clip
from visalign.config import load_config, resolve_config
from visalign.errors import UserError
from visalign.pipelines.flow_grpo.inputs import prepare
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig
from visalign.rewards import RewardError, WeightedSum, load_reward
from visalign.rewards.scorers.adversarial import Adversarial, discriminator_loss


def tinted(count: int, channel: int, size: int = 32, seed: int = 0) -> torch.Tensor:
    """Noise in one channel, uint8."""
    images = torch.zeros(count, 3, size, size, dtype=torch.uint8)
    draw = torch.Generator().manual_seed(seed)
    images[:, channel] = torch.randint(0, 256, (count, size, size), generator=draw, dtype=torch.uint8)
    return images


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("references")
    for number, image in enumerate(tinted(6, 0, seed=1)):
        save_image(image / 255, folder / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def towers(tmp_path_factory) -> dict[str, Path]:
    from transformers import BitImageProcessor, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    dino = tmp_path_factory.mktemp("models") / "dino"
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14}
    Dinov2WithRegistersModel(Dinov2WithRegistersConfig(image_size=28, **sizes)).save_pretrained(dino)
    edges: dict[str, Any] = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    BitImageProcessor(**edges).save_pretrained(dino)
    return {"clip": save_tiny_clip(dino.parent / "clip"), "dino": dino}


def test_the_loss_is_zero_beyond_the_margin() -> None:
    real = torch.tensor([2.0, 0.5], requires_grad=True)
    loss = discriminator_loss(real, torch.tensor([-1.0, 0.0]))
    assert float(loss.detach()) == pytest.approx((0.25 + 0.5) / 2)  # ½ (mean(0, 0.5) + mean(0, 1))
    loss.backward()
    assert real.grad is not None and real.grad.tolist() == [0.0, -0.25]


@pytest.mark.parametrize("tower", ["clip", "dino"])
def test_a_head_learns_to_prefer_references_to_samples(towers, references, tower: str) -> None:
    reward: Any = load_reward("adversarial", references=references, model=towers[tower], lr=0.01)
    with pytest.raises(RewardError, match=r"scores nothing before\. Name it in rewards\.terms"):
        reward.score(tinted(2, 2), ["", ""])
    reward.begin(3)
    samples = tinted(12, 2)
    assert not reward.score(samples, [""] * 12).value.any()  # nothing to follow at first
    optimizer = torch.optim.Adam(reward.head.parameters(), lr=0.01)
    for step in range(60):
        loss, accuracy = reward.discriminate(samples, torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    images = [*tinted(4, 0, seed=9), *tinted(4, 2, seed=9), "absent.png"]
    scores = reward.score(images, [""] * 9)
    assert accuracy == 1 and scores.value[:4].min() > 0 > scores.value[4:8].max()
    assert scores.valid.tolist() == [True] * 8 + [False]
    if tower == "dino":  # 0.7 class token + 0.3 patches, without registers
        logits = reward.head(reward._features(images[:1]))[0, :, 0].detach()
        assert len(logits) == 1 + 4 and float(scores.parts["patches"][0]) == pytest.approx(float(logits[1:].mean()))
        assert float(scores.value[0]) == pytest.approx(float(0.7 * logits[0] + 0.3 * logits[1:].mean()), abs=1e-5)
    total = WeightedSum({"real": (reward, 1.0)}).capabilities
    assert total.discriminators == {"real": reward} and not total.needs_batch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"references": "nowhere"}, "'nowhere' does not exist; give a folder"),
        ({"references": Path(__file__).parent}, "holds 0 images; give many"),
        ({"steps": 0}, "steps is 0; allowed are whole numbers from 1"),
        ({"lr": 3}, "lr is 3; allowed are numbers between 0 and 1"),
        ({"batchsize": 3}, "adversarial's tower.*'batchsize'"),
    ],
)
def test_options_are_refused_by_name(references, options: dict[str, Any], message: str) -> None:
    with pytest.raises((RewardError, ValueError), match=message):
        Adversarial(**{"references": references, **options})


def test_no_held_out_image_is_scored_by_a_discriminator(references) -> None:
    term = f"{{name: adversarial, options: {{references: {references}}}}}"

    def prepared(*overrides: str) -> Any:
        return prepare(load_config(FlowGRPOConfig, resolve_config("shapes_nft"), overrides), 1)

    with pytest.raises(UserError, match=r"evaluation\.rewards names real, which needs a training's samples"):
        prepared(f"evaluation.rewards={{real: {term}}}", "evaluation.correctness=null")
    with pytest.raises(UserError, match=r"evaluation\.correctness names real, which needs a training's samples"):
        prepared(f"rewards.terms.real={term}", "rewards.normalise=batch", "evaluation.correctness=real")
    trained = prepared(f"rewards.terms.real={term}", "rewards.normalise=batch")
    assert "real" in trained.reward.capabilities.discriminators and "verifier" in trained.rewards
    assert "real" not in trained.rewards  # its head moves, so before and after do not compare


def test_an_unreadable_reference_is_named(references, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes((references / "0.png").read_bytes())
    (tmp_path / "b.png").write_text("no image")
    with pytest.raises(RewardError, match=r"adversarial: .*b\.png is no image that can be read"):  # before a run
        Adversarial(tmp_path)
