# SPDX-License-Identifier: Apache-2.0
"""EditReward: the published words and layout, failures that are no scores; test_official has its values."""

import hashlib

import pandas
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.judges.official import PIXELS, images
from tests.support.judges.published_vlm import edit_reward
from tests.support.models.vision_language import save_tiny_seeing_model, tiny_seeing_model, tiny_seeing_tokenizer
from visalign.data.sets.image_references import parquet_reference
from visalign.rewards import RewardError, check_reward, load_reward
from visalign.rewards.hpsv3.edit_reward import QUESTIONS

RECORDS = [{"source": images()[3]}] * 4


def test_the_published_words() -> None:
    digests = [hashlib.sha256(q.messages[0]["content"][2]["text"].encode()).hexdigest()[:12] for q in QUESTIONS]
    assert digests == ["9b25bbc2775f", "c9f328f27cfc"]


def test_an_edit_needs_its_source_and_heads_are_two(tmp_path) -> None:
    judge, _ = edit_reward(tmp_path)
    scores = judge.score(images(), ["a", "a", "a", " "], [{}, {"source": "none.png"}, *RECORDS[2:]])
    assert scores.valid.tolist() == [False, False, True, False] and scores.reason is not None
    assert 'no "source"' in str(scores.reason[0]) and "no such image file" in str(scores.reason[1])
    both = (scores.parts["following"][2] + scores.parts["quality"][2]) / 2
    assert scores.value[2] == pytest.approx(float(both)) and scores.std is not None and scores.std[2] > 0
    other = judge.score(images()[2:3], ["a"], [{"source": images()[0]}])
    assert other.value[0] != scores.value[2], "the source is seen"
    images()[0].save(file := tmp_path / "source.png")
    pandas.DataFrame({"source": [{"bytes": file.read_bytes(), "path": file.name}]}).to_parquet(tmp_path / "t.parquet")
    inside = {"source": parquet_reference(tmp_path / "t.parquet", "source", 0)}  # as a table's rows hold it
    assert judge.score(images()[2:3], ["a"], [inside]).value[0] == other.value[0]
    lost = judge.score(images()[2:3], ["a"], [{"source": "tar://gone.tar#a.png"}])
    assert lost.reason and "source image: [Errno 2]" in str(lost.reason[0])
    check_reward(judge, images=torch.rand(3, 3, 16, 16), prompts=["a", "b", "c"], metadata=RECORDS[:3], tolerance=1e-4)
    (tmp_path / "one").mkdir()
    state = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in state.items() if "head_1" not in k}, tmp_path / "one" / "model.safetensors")
    with pytest.raises(RewardError, match="are no HPSv3 head"):
        load_reward("edit_reward", model=str(tmp_path / "one"), base=tmp_path / "base", **PIXELS).score(
            images()[:1], ["a"], RECORDS[:1]
        )
    with pytest.raises(RewardError, match=r"holds no config\.json; give as base the model"):
        load_reward("edit_reward", model=str(tmp_path / "one")).score(images()[:1], ["a"], RECORDS[:1])


def test_a_base_that_the_released_code_reads_otherwise_is_refused(tmp_path) -> None:
    base = save_tiny_seeing_model(tmp_path / "base", "qwen3_vl")
    (tmp_path / "weights").mkdir()
    model = tiny_seeing_model("qwen3_vl", vocab_size=len(tiny_seeing_tokenizer()) + 1)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    save_file(state | {"rm_heads.head_0.0.weight": torch.zeros(2, 2)}, tmp_path / "weights" / "model.safetensors")
    judge = load_reward("edit_reward", model=str(tmp_path / "weights"), base=base)
    with pytest.raises(RewardError, match=r"base is a Qwen3-VL.* give positions='mrope'"):
        judge.score(images()[:1], ["a"], RECORDS[:1])
