# SPDX-License-Identifier: Apache-2.0
"""`check_adapter` passes the SD3 policy and names each way of breaking the contract."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters import AdapterError, LoraSettings, SD3Policy, check_adapter
from visalign.interfaces import ForwardCount

LORA = LoraSettings(rank=2, alpha=4)
ALL = [
    *"protocol latents sigmas encode velocity condition neighbours".split(),
    *"gradients reference decode encode_images forward_count save".split(),
]


@pytest.mark.parametrize("guidance, lora", [(1.0, LORA), (2.0, LORA), (1.0, None)], ids=["lora", "guided", "full"])
def test_the_sd3_policy_keeps_the_contract(guidance, lora):
    policy = SD3Policy(tiny_sd3_pipeline(), guidance=guidance, lora=lora)
    before = [p.detach().clone() for p in policy.module.parameters()]
    grads = [torch.ones_like(p) for _, p in policy.trainable_parameters()]
    for (_, p), g in zip(policy.trainable_parameters(), grads, strict=True):
        p.grad = g
    assert check_adapter(policy) == ALL
    assert all(torch.equal(a, b) for a, b in zip(before, policy.module.parameters(), strict=True))
    assert all(p.grad is g for (_, p), g in zip(policy.trainable_parameters(), grads, strict=True))


def fixed(value: Any) -> property:
    """A member that the constructor cannot set."""
    return property(lambda _: value, lambda *_: None)


def changed(method: str, change: Callable[..., Any]) -> dict[str, Any]:
    """A method whose result is changed, `change(result, *arguments)`."""
    own = getattr(SD3Policy, method)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(own(self, *args, **kwargs), *args)

    return {method: call}


def wrong_select(condition: Any, prompts: Any) -> Any:
    return replace(condition, index=condition.index.flip(0)) if len(prompts) == 2 else condition


def no_gradient(self: Any, *args: Any) -> Any:
    with torch.no_grad():
        v = SD3Policy._forward(self, *args)
    return v + 0 * self.trainable_parameters()[0][1].sum()


@contextmanager
def flat_reference(self: Any) -> Iterator[None]:
    for on in (False, True):
        for layer in self._lora_layers or []:
            layer.enable_adapters(on)
        if not on:
            yield


@contextmanager
def stuck_reference(self: Any) -> Iterator[None]:
    saved = [p.detach().clone() for _, p in self.trainable_parameters()]
    for _, p in self.trainable_parameters():
        p.data.zero_()
    yield
    if not any(p.any() for p in saved[1::2]):
        for (_, p), value in zip(self.trainable_parameters(), saved, strict=True):
            p.data.copy_(value)


def untrained(self: Any, *args: Any) -> Any:
    with nullcontext() if torch.is_grad_enabled() else self.reference():
        return SD3Policy.velocity(self, *args)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"latent_shape": fixed((8, 0))}, r"latents: latent_shape is \(8, 0\)\. Make it a tuple"),
    ({"prediction": "score"}, r"protocol: prediction is 'score'; allowed: velocity, epsilon, v, x0"),
    (changed("times", lambda t, *_: t[:-1]), r"sigmas: times of noise levels is torch.float32 \(1,\)"),
    (
        changed("velocity", lambda v, *_: v * (1 + 3e-6) if torch.is_grad_enabled() else v),
        r"velocity: velocity with gradient differs by 2.9e-06 \(relative\)",
    ),
    (changed("sigmas", lambda s, *_: s[:-1]), r"sigmas: .*Return float32 \(2,\), the final 0 included"),
    (changed("velocity", lambda v, *_: v.double()), r"velocity: velocity is torch.float64 .*call .float\(\)"),
    (
        {"encode": lambda self, prompts: SD3Policy.encode(self, list(dict.fromkeys(prompts)))},
        r"encode: encode of 3 prompts has length 2.*Let __len__ count samples",
    ),
    (changed("encode", wrong_select), r"condition: a sample's velocity changes with select"),
    ({"encode": lambda self, prompts: SD3Policy.encode(self, ["same"] * len(prompts))}, r"condition: .*same velocity"),
    (changed("velocity", lambda v, x, *_: v + (len(x) == 1)), r"neighbours: the velocity of sample 0 depends"),
    ({"trainable_parameters": lambda self: list(self.module.named_parameters())}, r"gradients: .*but frozen"),
    ({"_forward": no_gradient}, r"gradients: no gradient reaches transformer_blocks"),
    (changed("trainable_parameters", lambda p: p[:3]), r"gradients: .* gets a gradient but is not listed"),
    ({"reference": flat_reference}, r"reference: inside reference\(\), also after a nested one"),
    ({"reference": stuck_reference}, r"reference: reference\(\) did not restore the policy"),
    ({"velocity": untrained}, r"reference: changing the trainable parameters does not change"),
    (changed("decode", lambda i, *_: i[:, :1]), r"decode: decode of 3 latents .* is torch.float32 \(3, 1, 64, 64\)"),
    (changed("decode", lambda i, *_: i * 2 - 1), r"decode: decoded values reach from -1 to .*clamp\(0, 1\)"),
    (changed("encode_images", lambda z, *_: z.flatten(1)), r"encode_images: .* of 2 images is torch"),
    ({"forward_count": property(lambda _: ForwardCount(), lambda *_: None)}, r"forward_count: 3 latents without"),
    ({"save": lambda _, folder: folder.mkdir()}, r"save: save\(folder\) wrote nothing"),
    ({"load": lambda *_: None}, r"save: load\(folder\) does not restore"),
]


@pytest.mark.parametrize(("members", "message"), BROKEN, ids=[message.split()[0] for _, message in BROKEN])
def test_each_break_is_named_and_weights_are_restored(members: dict[str, Any], message: str):
    policy = type("Broken", (SD3Policy,), members)(tiny_sd3_pipeline(), lora=LORA)
    before = [p.detach().clone() for p in policy.module.parameters()]
    with pytest.raises(AdapterError, match=message):
        check_adapter(policy)
    if members.get("reference") is not stuck_reference:
        assert all(torch.equal(a, b) for a, b in zip(before, policy.module.parameters(), strict=True))


def test_a_missing_member_is_named():
    with pytest.raises(AdapterError, match="protocol: object has no latent_shape, storage_dtype"):
        check_adapter(object())  # type: ignore[arg-type]
    assert "save" not in check_adapter(SD3Policy(tiny_sd3_pipeline(), lora=LORA), save=False)
