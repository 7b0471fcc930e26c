# SPDX-License-Identifier: Apache-2.0
"""Rewards by name and users' own functions: every call form works, every mistake has its message."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from visalign.interfaces import PointwiseReward
from visalign.rewards import FunctionReward, RewardError, check_reward, load_reward, load_text_reward

IMAGES = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a", "bb", "ccc"]
METADATA = [{"answer": 1}, {"answer": 2}, {"other": 3}]


class Constant:
    name, unit, range, higher_is_better = "constant", "1", (0.0, 2.0), True

    def __init__(self, level: float = 1.0) -> None:
        self.level = level

    def score(self, images, prompts, metadata=None):
        return FunctionReward(lambda images: [self.level] * len(images)).score(images, prompts, metadata)


class Hollow:
    name = "hollow"

    def score(self, images, prompts):
        return None


an_object = Constant(0.5)


def flow_grpo_style(images, prompts, metadata):
    return [float(len(p)) for p in prompts], {}


def flow_grpo_factory(device):
    assert device == "cpu"
    return lambda images, prompts, metadata: ({"avg": [1.0, 2.0, 3.0], "ocr": [0.0, None, 1.0]}, {})


def trl_style(prompts, completions, **kwargs):
    return [len(p) + (a or 0) for p, a in zip(prompts, kwargs["answer"], strict=True)]


def here(name: str) -> str:
    return f"{__name__}:{name}"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


def value(function, **options) -> list[float]:
    return FunctionReward(function, **options).score(IMAGES, PROMPTS, METADATA).value.tolist()


def test_catalogue_names_load_lazily():
    code = (
        "import sys, visalign.rewards; assert 'torch' not in sys.modules; "
        "from visalign.rewards import load_reward; "
        "load_reward('sharpness'); load_reward('jpeg_size'); load_reward('shapes_verifier'); "
        "assert not {'open_clip', 'transformers', 'diffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in ("shapes_verifier", "jpeg_size", "sharpness"):
        assert isinstance(load_reward(name), PointwiseReward) and load_reward(name).name == name


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sharpnes", {}, r"no reward 'sharpnes'. Did you mean 'sharpness'\? Allowed: shapes_verifier"),
        ("no_such_module:f", {}, "module 'no_such_module' cannot be imported. Is it installed, or on"),
        ("nowhere.py:f", {}, "nowhere.py does not exist"),
        ("visalign.rewards.statistics:JpegSiz", {}, r"has no 'JpegSiz'. Did you mean 'JpegSize'\?"),
        ("jpeg_size", {"qualty": 3}, r"argument 'qualty'. Did you mean 'quality'\? Its options: quality"),
        (here("an_object"), {"level": 1}, r"is an object, without options \(level\)\. Name"),
        (here("Hollow"), {}, "without unit, range, higher_is_better, so it is no reward"),
    ],
)
def test_refused_names(name, options, message):
    with pytest.raises(RewardError, match=message):
        load_reward(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("random", {"share": "lots"}, "Reward 'random': share is 'lots'; it must be of type float"),
        ("text_format", {"tags": "think"}, r"tags is 'think'; it must be of type Sequence\[str\]"),
        ("length", {"target": [10]}, r"target is \[10\]; it must be of type float \| None"),
    ],
)
def test_options_of_another_kind_are_refused(name, options, message):
    with pytest.raises(RewardError, match=message):
        load_text_reward(name, **options)


class OnDevice(Constant):
    def __init__(self, device: str = "cpu"):
        super().__init__()
        self.device = device


def factory(device: str):
    return lambda images: [float(device == "cuda:7")] * len(images)


def test_judges_follow_the_device_of_the_run():
    reward: Any = load_reward(here("OnDevice"), run_device="cuda:7")
    own: Any = load_reward(here("OnDevice"), run_device="cuda:7", device="cpu:0")
    assert (reward.device, own.device) == ("cuda:7", "cpu:0")
    plain: Any = load_reward(here("OnDevice"))
    assert plain.device == "cpu"
    assert load_reward(here("factory"), run_device="cuda:7").score(IMAGES, PROMPTS).value.tolist() == [1] * 3
    assert load_reward("sharpness", run_device="cuda:7").name == "sharpness", "it runs no network"
    with pytest.raises(RewardError, match=r"Reward 'sharpness': .* argument 'device'. Its options: "):
        load_reward("sharpness", device="cuda:7")


def test_a_file_may_hold_a_dataclass(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n"
        "@dataclass\nclass Box:\n    level: float = 7.0\n\n"
        "def f(images):\n    return [Box().level] * len(images)\n"
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text("def f(images):\n    return [8.0] * len(images)\n")
    before = set(sys.modules)
    rewards = [load_reward(f"{tmp_path}/{path}:f") for path in ("mine.py", "other/mine.py")]
    assert [reward.score(IMAGES, PROMPTS).value[0].item() for reward in rewards] == [7.0, 8.0]
    (tmp_path / "mine.py").write_text("import no_such_thing\n")
    with pytest.raises(RewardError, match="no_such_thing"):
        load_reward(f"{tmp_path}/mine.py:f")
    added = set(sys.modules) - before
    assert len(added) == 1 and "mine" not in added
    for name in added:
        del sys.modules[name]


def test_call_forms():
    assert value(flow_grpo_style) == [1, 2, 3]
    assert value(trl_style) == [2, 4, 3]
    assert value(lambda x, p, m: [len(p), x.shape[0], m[1]["answer"]]) == [3, 3, 2]
    assert value(lambda images: images.mean((1, 2, 3)) * 0 + 4) == [4, 4, 4]
    assert value(lambda prompts, images: [len(prompts)] * len(images)) == [3, 3, 3]
    assert value(lambda *, completions, answer, extra=5: [a if a else extra for a in answer]) == [1, 2, 5]
    assert value(lambda images, metadata: np.array([m.get("answer", 0) for m in metadata])) == [1, 2, 0]
    assert value(lambda **kwargs: [len(kwargs["images"])] * 3) == [3, 3, 3]


def test_factory_and_mapping():
    scores = FunctionReward(flow_grpo_factory).score(IMAGES, PROMPTS)
    assert scores.value.tolist() == [1, 2, 3]
    torch.testing.assert_close(scores.parts["ocr"], torch.tensor([0, torch.nan, 1]), equal_nan=True)
    assert value(lambda images: {"only": [1, 2, 3]}) == [1, 2, 3]


def test_image_forms():
    assert value(lambda images: [i.size[0] for i in images], images_as="pil") == [8, 8, 8]
    assert value(lambda images: [int(i.dtype == np.uint8) + i.shape[2] for i in images], images_as="uint8") == [4] * 3
    mixed = [torch.zeros(3, 4, 4), torch.zeros(3, 5, 5)]
    assert FunctionReward(lambda images: [i.shape[1] for i in images]).score(mixed, ["", ""]).value.tolist() == [4, 5]


def test_none_and_nan_are_invalid_with_a_reason():
    scores = FunctionReward(lambda images: [None, float("nan"), 3], name="mine").score(IMAGES, PROMPTS)
    assert scores.valid.tolist() == [False, False, True] and scores.value[:2].isnan().all()
    assert scores.reason == ["mine returned None: not for this sample", "mine returned NaN for it", None]
    for number, text in ((math.inf, "inf"), (1e300, "1e+300"), (10**400, "inf")):  # scores are float32
        scores = FunctionReward(lambda images: [1, number, 3], name="mine").score(IMAGES, PROMPTS)  # noqa: B023
        assert scores.reason is not None and scores.reason[1] == f"mine returned {text} for it"


def test_bad_image_is_not_shown_to_the_function():
    reward = FunctionReward(lambda images, prompts: [len(p) for p in prompts])
    scores = reward.score([IMAGES[0], "missing.png", IMAGES[2]], PROMPTS)
    assert scores.valid.tolist() == [True, False, True] and scores.value[2] == 3
    assert not reward.score(["missing.png"], ["a"]).valid.any()


def test_exception_is_named_and_chained():
    def broken(images):
        raise KeyError("brightness")

    with pytest.raises(
        RewardError, match=r"Reward 'broken' raised KeyError: 'brightness' \(.*test_catalogue\.py, line \d+\)"
    ) as caught:
        value(broken)
    assert isinstance(caught.value.__cause__, KeyError) and "return NaN" in str(caught.value)


def test_a_reward_that_ends_the_program_does_not():
    """A run that ended with code 0 and without a word would look finished."""
    with pytest.raises(RewardError, match=r"'leaves' raised sys\.exit\(\.\.\.\): 0 \(.*py, line"):
        value(lambda images: sys.exit(0), name="leaves")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(images:", r"it raised SyntaxError: '\(' was never closed \(.*torn\.py, line 1\)\."),
        ("import sys\nsys.exit(0)", r"it raised sys\.exit\(\.\.\.\): 0 \(.*torn\.py, line 2\)\."),
        ("import no_such_package", "It imports 'no_such_package', which is not installed: python -m pip"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_its_line(tmp_path, monkeypatch, source, message):
    (tmp_path / "torn.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for location in (f"{tmp_path}/torn.py:f", "torn:f"):
        with pytest.raises(RewardError, match=rf"torn.* cannot be imported[.:] {message}"):
            load_reward(location)
        assert not [name for name in sys.modules if "visalign_user_torn" in name]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1, 2], "returned 2 scores for 3 images; return a list of one number per image"),
        (np.zeros((3, 2)), r"returned the shape \[3, 2\] for 3 images"),
        (["1", "2", "3"], r"returned '1' \(str\) for image 0; give a number, or None"),
        ("abc", "returned a str"),
        ({"a": [1, 2, 3], "b": [1, 2, 3]}, "keys a, b; call the reward"),
    ],
)
def test_wrong_answers(answer, message):
    with pytest.raises(RewardError, match=f"Reward 'mine' .*{message}"):
        value(lambda images: answer, name="mine")


def test_value_outside_the_declared_range():
    with pytest.raises(RewardError, match=r"returned 3, outside its declared range \(0, 1\)"):
        value(lambda images: [0, 1, 3], range=(0, 1))


def test_unmatched_parameters():
    with pytest.raises(ValueError, match=r"which of samples, texts are the images\? Use "):
        FunctionReward(lambda samples, texts: [])
    with pytest.raises(RewardError, match=r"asks for colour; offered .*keys \(answer, other\)"):
        value(lambda images, colour: [])
    with pytest.raises(ValueError, match="images_as is 'jpg'; allowed are tensor, pil, uint8"):
        FunctionReward(flow_grpo_style, images_as="jpg")
    with pytest.raises(TypeError, match="is a int, not a function"):
        FunctionReward(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is a int, not a function"):
        FunctionReward(lambda: 3)

    async def later(images):
        return []

    with pytest.raises(TypeError, match="coroutine function; wrap it"):
        FunctionReward(later)
    with pytest.raises(TypeError, match="no readable signature"):
        FunctionReward(max)


def test_a_plain_function_passes_the_contract():
    assert len(check_reward(lambda images, prompts: images.mean((1, 2, 3)))) == 11
    assert len(check_reward(FunctionReward(trl_style), metadata=[{"answer": 1}] * 4)) == 11
