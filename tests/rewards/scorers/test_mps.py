# SPDX-License-Identifier: Apache-2.0
"""MPS: a pickled module is read without its code, words count by their condition; test_official: values."""

import os
import pickle

import pytest
import torch

from tests.support.judges.official import PROMPTS, images, mps
from visalign.rewards import RewardError
from visalign.rewards.scorers.mps import Mps
from visalign.rewards.weights.checkpoint_files import read_module, read_tensors


class Trap:
    """Its unpickling would make a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickled_module_is_read_and_none_of_its_code_runs(tmp_path) -> None:
    mps(tmp_path)
    file = tmp_path / "MPS_overall_checkpoint.pth"
    state = read_module(file)
    assert state["cross_model.layers.1.0.fn.to_kv.weight"].shape == (16, 16) and "model.logit_scale" in state
    with pytest.raises(RewardError, match="store its state dict"):
        read_tensors(file)
    torch.save({"weights": Trap(str(tmp_path / "made"))}, tmp_path / "trap.pth")
    with pytest.raises(RewardError):
        read_module(tmp_path / "trap.pth")
    (tmp_path / "text.pth").write_bytes(pickle.dumps("text"))
    with pytest.raises(RewardError, match=r"without its code .* store module\.state_dict\(\)"):
        read_module(tmp_path / "text.pth")
    assert not (tmp_path / "made").exists()


def test_the_condition_counts_and_other_files_are_refused(tmp_path) -> None:
    judge, _ = mps(tmp_path)
    result = judge.score([*images()[:2], "none.png"], [PROMPTS[0], " ", PROMPTS[0]])
    assert result.valid.tolist() == [True, False, False]
    other = Mps(judge.file, condition="colour", threshold=0.9).score(images()[:1], PROMPTS[:1])
    assert other.valid.all() and other.value[0] != result.value[0]
    single = judge.score(images()[:1], PROMPTS[:1])
    assert single.value[0] == pytest.approx(float(result.value[0]), rel=1e-5), "neighbours do not matter"
    clip = {k: v for k, v in read_module(judge.file).items() if k.startswith("model.")}
    torch.save(clip, tmp_path / "clip.pth")
    with pytest.raises(RewardError, match=r"clip\.pth is no MPS: it has no cross_model"):
        Mps(tmp_path / "clip.pth").score(images()[:1], PROMPTS[:1])
