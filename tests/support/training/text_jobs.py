# SPDX-License-Identifier: Apache-2.0
"""Inputs of the text jobs at tiny size: a random model, prompts, a reward of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.models.language import save_tiny_language_model

QUESTIONS = [{"prompt": f"{letter} {letter}?", "answer": letter, "tag": "copy"} for letter in "abcdefgh"]

REWARD = '''
import torch
from visalign.interfaces import Scores


class Early:
    """Share of letters up to m; a completion with a z cannot be judged."""

    name, unit, range, higher_is_better = "early", "share", (0.0, 1.0), True

    def score(self, completions, prompts, metadata=None):
        value = torch.tensor([sum("a" <= c <= "m" for c in t) / max(1, len(t)) for t in completions])
        valid = torch.tensor(["z" not in text for text in completions])
        return Scores(
            value=torch.where(valid, value, torch.nan),
            valid=valid,
            unit=self.unit,
            reason=[None if ok else "a z in it" for ok in valid.tolist()],
        )
'''


def text_inputs(folder: Path) -> Path:
    """A folder with `model`, `prompts.jsonl`, `demonstrations.jsonl` and `early.py`."""
    save_tiny_language_model(folder / "model", max_position_embeddings=48)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(record) for record in QUESTIONS))
    demonstrations = [{"prompt": record["prompt"], "completion": record["answer"]} for record in QUESTIONS]
    (folder / "demonstrations.jsonl").write_text("\n".join(json.dumps(record) for record in demonstrations))
    (folder / "early.py").write_text(REWARD)
    return folder
