# SPDX-License-Identifier: Apache-2.0
"""`check_adapter` passes the SD3 policy and names each way of breaking the contract."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from tests.support.models.sd3 import tiny_sd3_pipeline
from visalign.adapters import AdapterError, LoraSettings, SD3Policy, check_adapter

LORA = LoraSettings(rank=2, alpha=4)
ALL = [
    *"protocol latents sigmas encode velocity condition neighbours".split(),
    *"gradients reference decode encode_images forward_count save".split(),
]


@pytest.mark.parametrize(
    "guidance, lora", [(1.0, LORA), (2.0, LORA), (1.0, None)], ids=["lora", "guided", "full"]
)
def test_the_sd3_policy_keeps_the_contract(guidance, lora):
    policy = SD3Policy(tiny_sd3_pipeline(), guidance=guidance, lora=lora)
    before = [p.detach().clone() for p in policy.module.parameters()]
    grads = [torch.ones_like(p) for _, p in policy.trainable_parameters()]
    for (_, p), g in zip(policy.trainable_parameters(), grads, strict=True):
        p.grad = g
    assert check_adapter(policy) == ALL
    assert all(torch.equal(a, b) for a, b in zip(before, policy.module.parameters(), strict=True))
    assert all(p.grad is g for (_, p), g in zip(policy.trainable_parameters(), grads, strict=True))


class FlatLatents(SD3Policy):
    @property
    def latent_shape(self):
        return (8, 0)

    @latent_shape.setter
    def latent_shape(self, value): ...


class IntegerStorage(SD3Policy):
    @property
    def storage_dtype(self):
        return torch.uint8

    @storage_dtype.setter
    def storage_dtype(self, value): ...


class UnknownPrediction(SD3Policy):
    prediction = "score"  # type: ignore[assignment]


class NoComputeDtype(SD3Policy):
    compute_dtype = "bfloat16"  # type: ignore[assignment]


class ShortTimes(SD3Policy):
    def times(self, sigmas):
        return super().times(sigmas)[:-1]


class OtherPathWithGradient(SD3Policy):
    def velocity(self, x, sigma, condition, time=None):
        v = super().velocity(x, sigma, condition, time)
        return v * (1 + 3e-6) if torch.is_grad_enabled() else v


class ShortGrid(SD3Policy):
    def sigmas(self, steps, *, timestep_schedule="diffusers"):
        return super().sigmas(steps, timestep_schedule=timestep_schedule)[:-1]


class RisingGrid(SD3Policy):
    def sigmas(self, steps, *, timestep_schedule="diffusers"):
        return super().sigmas(steps, timestep_schedule=timestep_schedule).flip(0)


class DoubleVelocity(SD3Policy):
    def velocity(self, x, sigma, condition, time=None):
        return super().velocity(x, sigma, condition, time).double()


class NanVelocity(SD3Policy):
    def velocity(self, x, sigma, condition, time=None):
        return super().velocity(x, sigma, condition, time) * float("nan")


class UniqueLength(SD3Policy):
    def encode(self, prompts):
        return super().encode(list(dict.fromkeys(prompts)))


class WrongSelect(SD3Policy):
    def encode(self, prompts):
        condition = super().encode(prompts)
        if len(prompts) == 2:
            return replace(condition, index=condition.index.flip(0))
        return condition


class Deaf(SD3Policy):
    def encode(self, prompts):
        return super().encode(["same"] * len(prompts))


class Neighbours(SD3Policy):
    def velocity(self, x, sigma, condition, time=None):
        v = super().velocity(x, sigma, condition, time)
        return v + (len(x) == 1)


class NoGradient(SD3Policy):
    def velocity(self, x, sigma, condition, time=None):
        return super().velocity(x, sigma, condition, time) + 0 * self._any()

    def _any(self):
        weight = self.trainable_parameters()[0][1]
        return weight.sum()

    def _forward(self, *args):
        with torch.no_grad():
            return super()._forward(*args)


class Frozen(SD3Policy):
    def trainable_parameters(self):
        return list(self.module.named_parameters())


class Nothing(SD3Policy):
    def trainable_parameters(self):
        return []


class Leaking(SD3Policy):
    def trainable_parameters(self):
        return super().trainable_parameters()[:3]


class NoReference(SD3Policy):
    def reference(self):
        return nullcontext()


class FlatReference(SD3Policy):
    @contextmanager
    def reference(self):
        for layer in self._lora_layers or []:
            layer.enable_adapters(False)
        yield
        for layer in self._lora_layers or []:
            layer.enable_adapters(True)


class StuckReference(SD3Policy):
    @contextmanager
    def reference(self):
        kept = [p.detach().clone() for _, p in self.trainable_parameters()]
        for _, p in self.trainable_parameters():
            p.data.zero_()
        yield
        if not any(p.any() for p in kept[1::2]):
            for (_, p), value in zip(self.trainable_parameters(), kept, strict=True):
                p.data.copy_(value)


class Grey(SD3Policy):
    def decode(self, latents):
        return super().decode(latents)[:, :1]


class RawDecode(SD3Policy):
    def decode(self, latents):
        return super().decode(latents) * 2 - 1


class BatchDecode(SD3Policy):
    def decode(self, latents):
        return super().decode(latents) * (len(latents) / 3)


class FlatEncoded(SD3Policy):
    def encode_images(self, images):
        return super().encode_images(images).flatten(1)


class SampledEncoded(SD3Policy):
    def encode_images(self, images):
        return super().encode_images(images) * (len(images) / 2)


class NoCount(SD3Policy):
    @property
    def forward_count(self):
        return type(self._forward_count)()


class SavesNothing(SD3Policy):
    def save(self, folder):
        folder.mkdir()


class LoadsNothing(SD3Policy):
    def load(self, folder): ...


@pytest.mark.parametrize(
    "broken, message",
    [
        (FlatLatents, r"latents: latent_shape is \(8, 0\)\. Make it a tuple"),
        (IntegerStorage, r"latents: storage_dtype is torch.uint8"),
        (UnknownPrediction, r"protocol: prediction is 'score'; allowed: velocity, epsilon, v, x0"),
        (NoComputeDtype, r"protocol: compute_dtype is 'bfloat16'"),
        (ShortTimes, r"sigmas: times of 2 noise levels is torch.float32 \(1,\)"),
        (OtherPathWithGradient, r"velocity: velocity with gradient differs by 2.9e-06 \(relative\)"),
        (ShortGrid, r"sigmas: .*Return float32 \[steps \+ 1\]"),
        (RisingGrid, r"sigmas: .*It must fall strictly from 1 to 0"),
        (DoubleVelocity, r"velocity: velocity is torch.float64 .*call .float\(\)"),
        (NanVelocity, r"velocity: velocity under no_grad is not finite"),
        (UniqueLength, r"encode: encode of 3 prompts has length 2.*Let __len__ count samples"),
        (WrongSelect, r"condition: a sample's velocity changes with select"),
        (Deaf, r"condition: the prompts .* give the same velocity"),
        (Neighbours, r"neighbours: the velocity of sample 0 depends on its neighbours"),
        (Nothing, r"gradients: trainable_parameters\(\) gives 0 names"),
        (Frozen, r"gradients: .*is listed as trainable but frozen"),
        (NoGradient, r"gradients: no gradient reaches transformer_blocks"),
        (Leaking, r"gradients: .* gets a gradient but is not listed as trainable"),
        (NoReference, r"reference: inside reference\(\), also after a nested one"),
        (FlatReference, r"reference: inside reference\(\), also after a nested one"),
        (StuckReference, r"reference: reference\(\) did not restore the policy"),
        (Grey, r"decode: decode of 3 latents is torch.float32 \(3, 1, 64, 64\)"),
        (RawDecode, r"decode: decoded values reach from -1 to .*clamp\(0, 1\)"),
        (BatchDecode, r"decode: a decoded image depends on its neighbours"),
        (FlatEncoded, r"encode_images: encode_images of 2 images is torch.float32 \(2, 512\)"),
        (SampledEncoded, r"encode_images: the latents of an image depend on its neighbours"),
        (NoCount, r"forward_count: 3 latents without and then with gradient counted"),
        (SavesNothing, r"save: save\(folder\) wrote nothing"),
        (LoadsNothing, r"save: load\(folder\) does not restore"),
    ],
)
def test_each_break_is_named(broken, message):
    with pytest.raises(AdapterError, match=message):
        check_adapter(broken(tiny_sd3_pipeline(), lora=LORA))


def test_a_missing_member_and_a_velocity_that_ignores_its_weights():
    with pytest.raises(
        AdapterError, match="protocol: object has no latent_shape, storage_dtype, compute_dtype"
    ):
        check_adapter(object())  # type: ignore[arg-type]

    class Untrained(SD3Policy):
        def velocity(self, x, sigma, condition, time=None):
            with nullcontext() if torch.is_grad_enabled() else self.reference():
                return super().velocity(x, sigma, condition, time)

    with pytest.raises(AdapterError, match="reference: changing the trainable parameters does not change"):
        check_adapter(Untrained(tiny_sd3_pipeline(), lora=LORA))
    assert "save" not in check_adapter(SD3Policy(tiny_sd3_pipeline(), lora=LORA), save=False)
