# SPDX-License-Identifier: Apache-2.0
"""The bridge to pyiqa: direction, references and refusals; with the library itself where it is installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from transformers.models.llama import modeling_llama

from visalign.rewards import RewardError, check_reward
from visalign.rewards.scorers.iqa import Iqa

needs_pyiqa = pytest.mark.skipif(find_spec("pyiqa") is None, reason="the extra `iqa` is not installed")
CONFIGS = {
    "musiq": {"metric_mode": "NR"},
    "niqe": {"metric_mode": "NR", "lower_better": True},
    "psnr": {"metric_mode": "FR"},
    "fid": {"metric_mode": "NR", "lower_better": True},
}


class Made(torch.nn.Module):
    """Mean brightness, or the mean distance to the reference; tiny images are refused, black gives NaN."""

    def __init__(self, name, device, **options) -> None:
        super().__init__()
        if options:
            raise OSError("no network")
        assert device == torch.device("cpu")

    def forward(self, image, reference=None):
        assert image.ndim == 4 and len(image) == 1 and image.shape[-1] > 4, "too small\nfor windows"
        if reference is not None:
            return (image - reference).abs().mean()[None, None]
        return (image.mean() / (image.max() > 0),)


@pytest.fixture
def stub(monkeypatch):
    library, configs = ModuleType("pyiqa"), ModuleType("pyiqa.default_model_configs")
    library.create_metric, configs.DEFAULT_CONFIGS = Made, CONFIGS  # type: ignore[attr-defined]
    monkeypatch.setattr("visalign.rewards.scorers.iqa.version", lambda name: "0.1")
    monkeypatch.setitem(sys.modules, "pyiqa", library)
    monkeypatch.setitem(sys.modules, "pyiqa.default_model_configs", configs)


def test_direction_references_and_refusals(stub) -> None:
    assert [Iqa(name).higher_is_better for name in ("musiq", "niqe", "psnr")] == [True, False, True]
    result = Iqa("musiq").score([torch.full((3, 8, 8), 0.5), torch.ones(3, 4, 4), torch.zeros(3, 8, 8)], ["a"] * 3)
    assert result.valid.tolist() == [True, False, False] and result.value[0] == pytest.approx(0.5, abs=2e-3)
    assert result.unit == "musiq of pyiqa" and result.reason is not None
    assert result.reason[1] == "pyiqa's musiq refuses the image: too small"
    assert result.reason[2] == "pyiqa's musiq gives nan"
    full = Iqa("psnr").score(torch.ones(2, 3, 8, 8), ["a", "a"], [{"source": torch.zeros(3, 8, 8)}, {}])
    listed = [{"source": [torch.zeros(3, 8, 8), torch.ones(3, 8, 8)]}, {"source": []}]
    first = Iqa("psnr").score(torch.ones(2, 3, 8, 8), ["a", "a"], listed)
    assert first.value[0] == 1 and first.valid.tolist() == [True, False], "of several the first"
    assert full.value[0] == 1 and 'no "source"' in str(full.reason)
    for metric, message in (("musik", "no metric 'musik' .* Did you mean 'musiq'"), ("fid", "no metric 'fid'")):
        with pytest.raises(RewardError, match=message):
            Iqa(metric)
    assert Iqa("niqe").identity.model.endswith(": niqe")
    check_reward(Iqa("musiq"))
    with pytest.raises(RewardError, match=r"cannot make 'musiq' \(OSError: no network\)"):
        Iqa("musiq", pretrained_model_path="x").score(torch.ones(1, 3, 8, 8), ["a"])


def test_without_pyiqa_it_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pyiqa", None)
    monkeypatch.setitem(sys.modules, "pyiqa.default_model_configs", None)
    with pytest.raises(RewardError, match=r'pip install "visalign\[iqa\]"'):
        Iqa("musiq")


@needs_pyiqa
@pytest.mark.filterwarnings("ignore")
def test_the_library_itself() -> None:
    """Metrics without weights, and networks of random weights."""
    image = torch.rand(3, 96, 96, generator=torch.Generator().manual_seed(0)).mul(255).round() / 255
    records = [{"source": image.flip(-1)}]
    for metric, options in (
        ("psnr", {}),
        ("ssim", {}),
        ("musiq", {"pretrained": False}),
        ("topiq_nr", {"pretrained": False, "backbone_pretrain": False}),
    ):
        torch.manual_seed(0)
        judge = Iqa(metric, device="cpu", **options)  # type: ignore[arg-type]  # options of many kinds
        result = judge.score(image[None], ["a"], records)
        of_others = (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaModel.forward)
        assert {picture.__module__ for picture in of_others} == {modeling_llama.__name__}, metric
        assert result.valid.all(), (metric, result.reason)
        inputs = [image, records[0]["source"]]
        expected = judge.model(*(picture[None] for picture in inputs[: 1 + judge.has_reference]))
        assert result.value[0] == pytest.approx(float(expected.reshape(-1)[0]), rel=1e-4), metric
