# SPDX-License-Identifier: Apache-2.0
"""A fine-tuned CLIP model kept as its base and what differs from it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.clip import save_tiny_clip
from visalign.errors import UserError
from visalign.pipelines.train_reward.judges import base_name, freeze
from visalign.rewards.base.contract import RewardError
from visalign.rewards.clip.loading import BASE, CHANGES, load_fine_tuned_clip
from visalign.rewards.scorers.hp import Hp

IMAGES = [torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(n)) for n in range(3)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_clip(tmp_path_factory.mktemp("models") / "base")


def moved(folder, seed: int, names: str = "visual.transformer") -> Hp:
    """A judge whose tower was moved below the names that begin so, in steps that float16 holds."""
    torch.manual_seed(seed)
    judge = Hp.untrained(folder, widths=[8, 8, 8, 8, 1])
    with torch.no_grad():
        for name, parameter in judge.module.encoder.model.named_parameters():
            if name.startswith(names):
                parameter.add_(torch.randn(parameter.shape) * 0.1)
                parameter.copy_(parameter.half())
    return judge


def scores(judge: Hp) -> torch.Tensor:
    return judge.score(IMAGES, ["a"] * len(IMAGES)).value


def test_what_is_read_again_is_what_was_saved(base, tmp_path):
    judge = moved(base, 1)
    judge.save(tmp_path / "fine", base=str(base))
    changes = load_file(tmp_path / "fine" / CHANGES)
    assert changes and all(name.startswith("visual.transformer") for name in changes)
    assert {value.dtype for value in changes.values()} == {torch.float16}
    assert sorted(p.name for p in (tmp_path / "fine").iterdir()) == [BASE, CHANGES, "hp_head.safetensors"]
    read = Hp(tmp_path / "fine")
    torch.testing.assert_close(scores(read), scores(judge), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(scores(read), scores(Hp.untrained(base, widths=[8, 8, 8, 8, 1])))


def test_the_base_is_found_from_where_the_folder_is(base, tmp_path):
    shutil.copytree(base, tmp_path / "models" / "base")
    folder = tmp_path / "models" / "fine"
    name = base_name(str(tmp_path / "models" / "base"), folder)
    assert name == "../base" and base_name("shapes-clip", folder) == "shapes-clip"
    judge = moved(base, 2)
    judge.save(folder, base=name)
    shutil.move(tmp_path / "models", tmp_path / "elsewhere")
    torch.testing.assert_close(scores(Hp(tmp_path / "elsewhere" / "fine")), scores(judge), rtol=1e-5, atol=1e-6)


def test_changes_may_be_kept_on_changes(base, tmp_path):
    moved(base, 3).save(tmp_path / "one", base=str(base))
    judge = moved(tmp_path / "one", 4, names="visual.proj")
    judge.save(tmp_path / "two", base="../one")
    assert list(load_file(tmp_path / "two" / CHANGES)) == ["visual.proj"]
    torch.testing.assert_close(scores(Hp(tmp_path / "two")), scores(judge), rtol=1e-5, atol=1e-6)


def test_an_unchanged_tower_is_the_base_alone(base, tmp_path):
    judge = moved(base, 5, names="nothing")
    judge.save(tmp_path / "fine", base=str(base))
    assert json.loads((tmp_path / "fine" / BASE).read_text())["changed"] == 0
    assert not (tmp_path / "fine" / CHANGES).exists()
    torch.testing.assert_close(scores(Hp(tmp_path / "fine")), scores(judge))


def test_what_does_not_fit_is_named(base, tmp_path):
    fine = tmp_path / "fine"
    moved(base, 7).save(fine, base=str(base))
    changes = load_file(fine / CHANGES)
    first = next(iter(changes))
    wrong_sets = {
        r"has no visual\.other": {**changes, "visual.other": torch.zeros(1)},
        rf"has no {first} of that shape": {**changes, first: torch.zeros(2, 2, 2)},
        f"1 of {len(changes)} tensors": {first: changes[first]},
    }
    for message, tensors in wrong_sets.items():
        save_file(tensors, fine / CHANGES)
        with pytest.raises(RewardError, match=message):
            load_fine_tuned_clip(fine)
    (fine / CHANGES).unlink()
    with pytest.raises(FileNotFoundError, match=f"no weight file .*{CHANGES}"):
        load_fine_tuned_clip(fine)
    (fine / BASE).write_text("{}")
    with pytest.raises(RewardError, match=r"is not .*\(KeyError: 'base'\)"):
        load_fine_tuned_clip(fine)
    (fine / BASE).write_text('{"base": ".", "changed": 0}')
    with pytest.raises(RewardError, match="it names its own folder"):
        load_fine_tuned_clip(fine)


def test_another_models_base_is_refused(base, tmp_path):
    judge = moved(base, 8)
    with pytest.raises(RewardError, match=r"does not come from 'shapes-clip': .* differ"):
        judge.save(tmp_path / "fine", base="shapes-clip")


def test_frozen_parts_are_named_as_the_model_names_them(base):
    model = moved(base, 9).module.encoder.model.requires_grad_(True)
    freeze(model, ["visual.proj", "transformer"])
    still = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert still == {name for name, _ in model.named_parameters() if name.startswith(("visual.proj", "transformer"))}
    with pytest.raises(UserError, match=r"'visual.attnpool', and no .*They begin with .*visual\.conv1"):
        freeze(model, ["visual.attnpool"])
    with pytest.raises(UserError, match=r"'transformer', and no name of a trained parameter begins so"):
        freeze(model, ["transformer"])  # stands still already
    freeze(model, [])
    assert any(parameter.requires_grad for parameter in model.parameters())
