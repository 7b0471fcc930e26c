# SPDX-License-Identifier: Apache-2.0
"""An identity follows what a judge's numbers depend on: weights changed in memory, heads, links, options."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.judges.brightness import Brightness, BrightnessPairs
from tests.support.judges.vision_language import noise, tiny_judge
from tests.support.models.clip import save_tiny_hp, save_tiny_transformers_clip
from visalign.rewards.base.identity import Identity
from visalign.rewards.hpsv3.judge import HPSv3
from visalign.rewards.hpsv3.model import HPSv3Model
from visalign.rewards.pairs.as_pairwise import as_pairwise
from visalign.rewards.questions.reward_dance_reference import ReferenceReward
from visalign.rewards.scorers.clip_score import ClipScore
from visalign.rewards.scorers.hp import Hp
from visalign.rewards.weights.fingerprints import WeightPrint, tensor_print, weights_of

LETTERS: dict[str, Any] = {"yes": ["y", "s"], "no": ["n"], "min_mass": 0.0}


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory) -> Path:
    return save_tiny_transformers_clip(tmp_path_factory.mktemp("models") / "clip")


@pytest.fixture(scope="module")
def hp_folder(tmp_path_factory) -> Path:
    return save_tiny_hp(tmp_path_factory.mktemp("models") / "hp")


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(2, 3, 36, 50, generator=torch.Generator().manual_seed(2))


def change(module: torch.nn.Module) -> None:
    with torch.no_grad():
        next(iter(module.parameters())).mul_(1.5)


def test_weights_that_were_changed_in_memory_are_another_identity(clip_folder) -> None:
    judge, other = ClipScore(clip_folder), ClipScore(clip_folder)
    before = judge.identity
    assert before == other.identity and len(before.weights) == 32
    change(judge.towers.encoder)
    once = judge.identity
    assert once.differences(before) == ["weights"] and judge.identity == once
    change(judge.towers.encoder)
    assert judge.identity.differences(once) == ["weights"]


def test_the_head_of_hp_is_part_of_its_identity(hp_folder, tmp_path) -> None:
    before = Hp(hp_folder).identity
    judge = Hp(hp_folder)
    change(judge.head)
    assert judge.identity.differences(before) == ["weights"]
    new = [Hp.untrained(hp_folder / "hp_backbone", widths=(4, 4, 4, 4, 1)) for _ in range(2)]
    assert new[0].identity.differences(new[1].identity) == ["weights"]
    other = Path(shutil.copytree(hp_folder, tmp_path / "hp")) / "hp_scorer" / "mlp_pytorch_model.bin"
    state = torch.load(other, weights_only=True)
    torch.save({key: value * 2 for key, value in state.items()}, other)
    assert Hp(tmp_path / "hp").identity.differences(before) == ["model", "weights"]
    assert Hp(tmp_path / "hp").identity.weights != before.weights


@pytest.mark.parametrize("kind", [ClipScore, Hp])
def test_a_model_that_is_loaded_in_inference_mode_scores_alike(kind, clip_folder, hp_folder, images) -> None:
    folder = clip_folder if kind is ClipScore else hp_folder
    prompts, reference = ["a red circle", "two circles"], kind(folder)
    with torch.inference_mode():
        judge = kind(folder)
        value = judge.score(images, prompts).value
    torch.testing.assert_close(value, reference.score(images, prompts).value)
    torch.testing.assert_close(judge.score(images, prompts).value, value)


def test_the_identity_of_hpsv3_follows_backbone_and_head(tmp_path) -> None:
    HPSv3Model.new(tiny_judge(positions="1d")).save_pretrained(tmp_path)
    judge, files = HPSv3(tmp_path), HPSv3(tmp_path).identity
    assert judge.identity == files and files.weights.count("+") == 1
    change(judge.model.head)
    head = judge.identity
    assert head.differences(files) == ["weights"]
    change(judge.model.backbone)
    assert judge.identity.differences(head) == ["weights"]


def test_scoring_leaves_hpsv3_in_training_as_it_was() -> None:
    model = HPSv3Model.new(tiny_judge(positions="1d"))
    model.train()
    model.backbone.eval()
    value = HPSv3(model).score([noise(16, 24)], ["a cat"]).value
    assert model.training and model.head.training and not model.backbone.training
    assert torch.equal(value, HPSv3(model).score([noise(16, 24)], ["a cat"]).value)


class Known(Brightness):
    """A reward with an identity that must not be asked for before it is needed."""

    calls = 0

    @property
    def identity(self) -> Identity:
        type(self).calls += 1
        return Identity(judge="brightness", model="mean")


def test_links_and_references_are_part_of_an_identity() -> None:
    reward = Known()
    pairs = [as_pairwise(reward, link=link) for link in ("logistic", "normal")]
    assert Known.calls == 0
    identities: list[Any] = [pair.identity for pair in pairs]  # type: ignore[attr-defined]
    assert identities[0].differences(identities[1]) == ["options"] and identities[0] != reward.identity

    class Pairs(BrightnessPairs):
        identity = Identity(judge="pairs", model="mean")

    bright, dark = torch.full((1, 3, 8, 8), 0.9), torch.full((1, 3, 8, 8), 0.1)
    against = [
        ReferenceReward(Pairs(), {"p": bright}),
        ReferenceReward(Pairs(), {"p": dark}),
        ReferenceReward(Pairs(), {"p": bright}, value="prob"),
    ]
    digests = {judge.identity.digest for judge in against if judge.identity is not None}
    assert len(digests) == 3 and Pairs.identity.digest not in digests
    assert ReferenceReward(Pairs(), {"p": bright}).identity == against[0].identity


ODD = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", ODD)
def test_a_fingerprint_sees_every_bit_and_every_place(dtype) -> None:
    tensor = torch.arange(3 * 37).view(3, 37).remainder(7).to(dtype)
    if dtype is torch.bool:
        tensor = torch.rand(3, 37, generator=torch.Generator().manual_seed(0)) > 0.5
    prints = {tensor_print(tensor), tensor_print(tensor[[1, 0, 2]]), tensor_print(tensor.T), ""}
    for row, column in ((0, 0), (2, 36), (1, 18)):
        other = tensor.clone()
        other[row, column] = not other[row, column] if dtype is torch.bool else other[row, column] + 1
        prints.add(tensor_print(other))
    assert len(prints) == 7
    assert tensor_print(tensor.T.contiguous().T) == tensor_print(tensor) == tensor_print(tensor.clone())
    assert tensor_print(tensor.flatten()[1:]) == tensor_print(tensor.flatten()[1:].clone())
    assert len(tensor_print(tensor[:0])) == 32 and len(tensor_print(tensor[0, 0])) == 32


def test_swapped_rows_of_many_blocks_are_seen(monkeypatch) -> None:
    from visalign.rewards.weights import fingerprints as weights_in_memory

    monkeypatch.setattr(weights_in_memory, "_BLOCK", 16)
    weights_in_memory._factors.cache_clear()
    tensor = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    order = torch.arange(40)
    order[[3, 31]] = order[[31, 3]]  # from one block to the same place in another
    assert tensor_print(tensor) != tensor_print(tensor[order])
    weights_in_memory._factors.cache_clear()


def test_in_training_only_what_changed_is_read_again(monkeypatch) -> None:
    from visalign.rewards.weights import fingerprints as weights_in_memory

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    net[0].requires_grad_(False)
    shapes, real = [], weights_in_memory.tensor_print
    monkeypatch.setattr(weights_in_memory, "tensor_print", lambda x: shapes.append(tuple(x.shape)) or real(x))
    print_of = WeightPrint(net, None)
    prints = [str(print_of), str(print_of)]
    assert len(shapes) == 4
    step = torch.optim.SGD([parameter for parameter in net.parameters() if parameter.requires_grad], lr=0.1)
    for _ in range(2):
        net(torch.ones(2, 4)).sum().backward()
        step.step()
        prints.append(str(print_of))
    assert shapes[4:] == [(1, 4), (1,)] * 2
    assert len(set(prints)) == 3 and prints[-1] == weights_of(net)
