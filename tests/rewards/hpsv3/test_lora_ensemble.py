# SPDX-License-Identifier: Apache-2.0
"""Stacked adapters against peft's, one after another and mixed; gradients, missing layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen2Config, Qwen2Model

from visalign.rewards import RewardError
from visalign.rewards.hpsv3.ensemble_model import StackedLora, stack_adapters

M, B, D = 3, 4, 32
TARGETS = ["q_proj", "v_proj"]


def _backbone() -> Qwen2Model:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50,
        hidden_size=D,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return Qwen2Model(config).eval()


def _inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (B, 9), generator=generator)
    mask = torch.ones(B, 9, dtype=torch.long)
    mask[1, 6:], mask[2, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _peft(backbone: Qwen2Model) -> Any:
    """M peft adapters with B away from 0."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS)
    model: Any = get_peft_model(copy.deepcopy(backbone), config, adapter_name="m0")  # type: ignore[arg-type]
    for m in range(1, M):
        model.add_adapter(f"m{m}", config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def _stacked(peft: Any, backbone: Qwen2Model) -> Qwen2Model:
    """The backbone with the adapters of `_peft`, stacked."""
    states = [get_peft_model_state_dict(peft, adapter_name=f"m{m}") for m in range(M)]
    names = sorted({key.partition(".lora_")[0].removeprefix("base_model.model.") for key in states[0]})
    with torch.no_grad():
        for name, layer in stack_adapters(backbone, names, M, 4, 8 / 4).items():
            for part, target in (("lora_A", layer.lora_a), ("lora_B", layer.lora_b)):
                target.copy_(torch.stack([state[f"base_model.model.{name}.{part}.weight"] for state in states]))
    return backbone


def _repeated(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.repeat(M, 1) for name, value in inputs.items()}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_one_pass_equals_pefts_sequential_passes_and_its_mixed_batch() -> None:
    backbone, inputs = _backbone(), _inputs()
    peft = _peft(backbone)
    expected = []
    with torch.no_grad():
        for m in range(M):
            peft.set_adapter(f"m{m}")
            expected.append(peft(**inputs).last_hidden_state)
        names = [f"m{m}" for m in range(M) for _ in range(B)]
        mixed = peft(**_repeated(inputs), adapter_names=names).last_hidden_state
        stacked = _stacked(peft, copy.deepcopy(backbone))(**_repeated(inputs)).last_hidden_state
    real = inputs["attention_mask"].bool().repeat(M, 1)
    torch.testing.assert_close(stacked[real], torch.cat(expected)[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stacked[real], mixed[real], rtol=1e-5, atol=1e-5)
    assert float((stacked[:B] - stacked[B : 2 * B])[real[:B]].abs().max()) > 1e-2


def test_gradients_of_the_grouped_product() -> None:
    layer = StackedLora(torch.nn.Linear(3, 4), 2, 2, 0.5).double()
    torch.nn.init.normal_(layer.lora_a)
    torch.nn.init.normal_(layer.lora_b)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"lora_a": a, "lora_b": b}, (x,))

    assert torch.autograd.gradcheck(run, (x, layer.lora_a, layer.lora_b))
    by_hand = layer.base(x[2]) + 0.5 * x[2] @ layer.lora_a[1].T @ layer.lora_b[1].T
    torch.testing.assert_close(layer(x)[2], by_hand)


def test_layers_that_the_base_lacks_are_refused() -> None:
    with pytest.raises(RewardError, match=r"lacks linear layers that the members adapt: norm\. Give"):
        stack_adapters(_backbone(), ["norm", "layers.0.self_attn.q_proj"], 2, 2, 1.0)
