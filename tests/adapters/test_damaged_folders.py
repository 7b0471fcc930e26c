# SPDX-License-Identifier: Apache-2.0
"""Model folders whose files are cut short, of other models, or edited by hand are refused by a message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.models.language import tiny_model, tiny_tokenizer
from visalign.adapters.causal_lm.loading import load_causal_lm
from visalign.adapters.causal_lm.lora import load_text_lora
from visalign.adapters.model_folder import stored_dtype
from visalign.errors import UserError


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "HeaderTooSmall|too small"), (b"\xff" * 8, "too ?large"), (b"\2" + b"\0" * 7 + b"[]", "deserializ")],
)
def test_damaged_weights_are_refused_by_name(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=rf"(?i)a\.safetensors is no whole safetensors file \(.*({problem})"):
        stored_dtype(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"adapter_model\.safetensors is no whole safetensors file"):
        load_text_lora(nn.Linear(1, 1), tmp_path)  # pyright: ignore[reportArgumentType]  # fails before it is used


def test_a_language_model_without_all_its_weights_is_refused(tmp_path: Path) -> None:
    """transformers draws missing weights at random."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state.pop(next(name for name in state if "q_proj" in name))
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"lack weights of its config\.json.*q_proj.*Copy all files"):
        load_causal_lm(tmp_path, dtype=torch.float32)
