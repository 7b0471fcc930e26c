# SPDX-License-Identifier: Apache-2.0
"""Code that comes with a model's weights is not run, whatever is answered to the library's question."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from visalign.adapters.causal_lm.loading import load_causal_lm
from visalign.errors import UserError
from visalign.rewards import RewardError
from visalign.rewards.text.reward_model import RewardModel
from visalign.rewards.verifiers.geneval_detectors import TransformersDetector
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.loading import load_processor

KINDS = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoProcessor", "AutoTokenizer")
OPENINGS: list[Callable[[Path], Any]] = [
    lambda folder: load_causal_lm(folder, dtype=torch.float32),
    lambda folder: RewardModel(str(folder)),
    lambda folder: VisionLanguageEngine.from_pretrained(folder),
    load_processor,
    lambda folder: TransformersDetector(str(folder))._parts,
]


@pytest.mark.parametrize("load", OPENINGS)
def test_no_code_of_a_folder_runs(load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"model_type": "own", "auto_map": {kind: "own_code.Own" for kind in KINDS}}
    for name in ("config.json", "processor_config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps(own))
    (tmp_path / "own_code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    with pytest.raises((RewardError, UserError, OSError), match=r"cannot be loaded|cannot load|no processor|own code"):
        load(tmp_path)
    assert not (tmp_path / "ran").exists()
