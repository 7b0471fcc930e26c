# SPDX-License-Identifier: Apache-2.0
"""The one-pass LoRA ensemble against peft's adapters one after another; heads, gradients, bad input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen2Config, Qwen2Model

from visalign.rewards import RewardError
from visalign.rewards.hpsv3.ensemble_layers import (
    LoraEnsemble,
    StackedLora,
    head_outputs,
    last_token,
    nuclear_diversity,
    repeat_rows,
)

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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_one_pass_equals_pefts_sequential_passes() -> None:
    backbone, inputs = _backbone(), _inputs()
    peft = _peft(backbone)
    ensemble = LoraEnsemble(
        copy.deepcopy(backbone), members=M, hidden_size=D, targets=TARGETS, rank=4, alpha=8
    )
    expected = []
    for m in range(M):
        ensemble.load_member(m, get_peft_model_state_dict(peft, adapter_name=f"m{m}"))
        peft.set_adapter(f"m{m}")
        with torch.no_grad():
            feature = last_token(peft(**inputs), inputs)
            expected.append(feature @ ensemble.head[m].T + ensemble.bias[m])
    calls = []
    handle = ensemble.backbone.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        found = ensemble(**inputs)
    handle.remove()
    assert found.shape == (M, B, 1) and len(calls) == 1
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-5)
    assert float((found[0] - found[1]).abs().max()) > 1e-2


def test_shared_embeddings_run_once() -> None:
    """A tower before the first adapter is run by the caller on B rows; its output is repeated."""
    backbone, inputs = _backbone(), _inputs()
    ensemble = LoraEnsemble(backbone, members=M, hidden_size=D, targets=TARGETS, outputs=2)
    rows = []
    backbone.embed_tokens.register_forward_hook(lambda _, given, out: rows.append(given[0].shape[0]))
    embeds = backbone.embed_tokens(inputs["input_ids"])
    found = ensemble(inputs_embeds=embeds, attention_mask=inputs["attention_mask"])
    assert rows == [B] and found.shape == (M, B, 2)
    torch.testing.assert_close(found, ensemble(**inputs))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    ensemble = LoraEnsemble(_backbone(), members=M, hidden_size=D, targets=TARGETS)
    with torch.no_grad():
        for layer in ensemble.adapters.values():
            layer.lora_b.normal_(generator=torch.Generator().manual_seed(3))
        whole = ensemble(**_inputs())
        for row in range(B):
            alone = ensemble(**{name: value[row : row + 1] for name, value in _inputs().items()})
            torch.testing.assert_close(alone[:, 0], whole[:, row], rtol=1e-5, atol=1e-5)


def test_only_adapters_and_heads_train_and_members_do_not_mix() -> None:
    ensemble = LoraEnsemble(_backbone(), members=M, hidden_size=D, targets=TARGETS)
    trained = {name for name, parameter in ensemble.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name or name in ("head", "bias") for name in trained)
    ensemble(**_inputs())[1].sum().backward()
    for name, parameter in ensemble.named_parameters():
        if name in trained and "lora_a" not in name:  # B is 0, so A has no gradient yet
            assert parameter.grad is not None and float(parameter.grad[1].abs().sum()) > 0, name
            assert float(parameter.grad[[0, 2]].abs().sum()) == 0, name


def test_gradients_of_the_grouped_product() -> None:
    layer = StackedLora(torch.nn.Linear(3, 4), 2, 2, 0.5, torch.Generator().manual_seed(0)).double()
    torch.nn.init.normal_(layer.lora_b)
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"lora_a": a, "lora_b": b}, (x,))

    assert torch.autograd.gradcheck(run, (x, layer.lora_a, layer.lora_b))
    by_hand = layer.base(x[2]) + 0.5 * x[2] @ layer.lora_a[1].T @ layer.lora_b[1].T
    torch.testing.assert_close(layer(x)[2], by_hand)


def test_heads_on_shared_features_are_one_matmul() -> None:
    feature, weight, bias = torch.randn(B, D), torch.randn(M, 2, D), torch.randn(M, 2)
    shared = head_outputs(feature, weight, bias)
    torch.testing.assert_close(shared, head_outputs(feature.expand(M, B, D), weight, bias))
    torch.testing.assert_close(shared[1], feature @ weight[1].T + bias[1])


def test_diversity_is_largest_for_orthogonal_members() -> None:
    eye = torch.eye(4)
    apart, same = eye.view(2, 2, 4), eye[:2].expand(2, 2, 4)
    zero = torch.zeros(2, 3, 2)
    assert float(nuclear_diversity(apart, zero)) == pytest.approx(4)
    assert float(nuclear_diversity(same, zero)) == pytest.approx(2 * 2**0.5)
    a = torch.randn(2, 2, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 6, 2, dtype=torch.float64, requires_grad=True)
    nuclear_diversity(a, b).backward()
    assert a.grad is not None and b.grad is not None
    step = 1e-3 * a.grad
    assert nuclear_diversity(a + step, b) > nuclear_diversity(a, b)
    ensemble = LoraEnsemble(_backbone(), members=M, hidden_size=D, targets=TARGETS)
    assert float(ensemble.diversity().detach()) > 0


def test_the_last_token_with_padding_on_either_side() -> None:
    hidden = torch.arange(12.0).view(3, 4, 1)
    output = type("Output", (), {"last_hidden_state": hidden})
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]])
    assert last_token(output, {"attention_mask": mask}).flatten().tolist() == [1, 7, 11]
    assert last_token(output, {}).flatten().tolist() == [3, 7, 11]


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="no linear layer of the backbone is named c_attn"):
        LoraEnsemble(_backbone(), members=2, hidden_size=D, targets=["c_attn"])
    with pytest.raises(ValueError, match="members is 0"):
        LoraEnsemble(_backbone(), members=0, hidden_size=D)
    with pytest.raises(ValueError, match="outputs 3"):
        LoraEnsemble(_backbone(), members=1, hidden_size=D, outputs=3)
    with pytest.raises(ValueError, match=r"different numbers of rows .a: 2, b: 3"):
        repeat_rows({"a": torch.zeros(2), "b": torch.zeros(3, 1)}, 2)
    layer = StackedLora(torch.nn.Linear(3, 4), 2, 2, 0.5, torch.Generator())
    with pytest.raises(ValueError, match="3 rows for 2 members"):
        layer(torch.zeros(3, 3))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_checkpoints_that_do_not_fit_are_refused_by_key() -> None:
    backbone = _backbone()
    state = get_peft_model_state_dict(_peft(backbone), adapter_name="m0")
    ensemble = LoraEnsemble(backbone, members=M, hidden_size=D, targets=TARGETS, rank=4)
    name = next(iter(state))
    with pytest.raises(RewardError, match=r"0 keys for layers.0.self_attn.q_proj.lora_A.weight"):
        ensemble.load_member(0, {key: value for key, value in state.items() if "0.self_attn.q" not in key})
    with pytest.raises(RewardError, match="unexpected keys other"):
        ensemble.load_member(0, state | {"other": torch.zeros(1)})
    with pytest.raises(RewardError, match=r"has shape \(1, 1\)"):
        ensemble.load_member(0, state | {name: torch.zeros(1, 1)})
