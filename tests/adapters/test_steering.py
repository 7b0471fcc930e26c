# SPDX-License-Identifier: Apache-2.0
"""Steering as a callback of a plain pipeline: what it sees, what it draws, what it refuses."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from tests.support.flow_policies import GaussianPolicy, Shift
from tests.support.models.pipelines import tiny_pipeline, tiny_policy, tiny_prompts
from visalign.adapters import SteeringCallback
from visalign.errors import UserError
from visalign.flow.parametrization import preserving_scale

diffusers: Any = importlib.import_module("diffusers")
MEAN, DEVIATION, STEPS = 0.5, 0.3, 40

pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated"),
    pytest.mark.filterwarnings("ignore:__array__ implementation"),  # diffusers' Euler sampler and numpy 2
]


def _noise(**config):
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    return {**betas, "timestep_spacing": "trailing", **config}


SCHEDULERS = {
    "flow": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0),
    "ddim": lambda: diffusers.DDIMScheduler(**_noise(clip_sample=False)),
    "euler": lambda: diffusers.EulerDiscreteScheduler(**_noise()),
}


class Sampler:
    """A pipeline's loop around the exact network of data N(0.5, 0.3²); an image is its latent."""

    def __init__(self, kind):
        self.kind, self.scheduler, self.seen = kind, SCHEDULERS[kind](), []

    def __call__(self, count, callback_on_step_end, *, shape=(1,), steps=STEPS):
        policy, scheduler = GaussianPolicy(MEAN, DEVIATION), self.scheduler
        scheduler.set_timesteps(steps)
        self.num_timesteps = len(scheduler.timesteps)
        noise = torch.randn(count, *shape, generator=torch.Generator().manual_seed(3))
        latents = noise * float(getattr(scheduler, "init_noise_sigma", 1))
        for i, t in enumerate(scheduler.timesteps):
            if self.kind == "flow":
                sigma, x = float(scheduler.sigmas[i]), latents
            else:  # ε of the network, from the flow's velocity
                scheduler.scale_model_input(latents, t)
                alpha = float(scheduler.alphas_cumprod[int(t)])
                s = (1 - alpha) ** 0.5 / alpha**0.5
                s = float(scheduler.sigmas[i]) if self.kind == "euler" else s
                sigma = s / (1 + s)
                scale = 1 / (1 + s) if self.kind == "euler" else float(preserving_scale(torch.tensor(sigma)))
                x = latents * scale
            at = torch.full((count,), sigma, dtype=torch.float64)
            v = policy.velocity(x.double(), at, Shift(torch.zeros(count)))
            self.seen.append((x.double() - sigma * v).float())  # x̂0
            output = v if self.kind == "flow" else x + (1 - sigma) * v
            latents = scheduler.step(output.float(), t, latents, return_dict=False)[0]
            if callback_on_step_end is not None:
                latents = callback_on_step_end(self, i, t, {"latents": latents}).pop("latents", latents)
        return latents


def own(latents):
    return latents


def level(images):
    return images.flatten(1).mean(1)


def blind(images):
    return torch.zeros(len(images))


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_predicted_image_is_the_networks_own(kind):
    sampler, batches = Sampler(kind), []

    def reward(images):
        batches.append(images)
        return torch.zeros(len(images))

    callback = SteeringCallback(sampler, reward, particles=2, resample_after=[1, 20, 38], decode=own)
    sampler(6, callback, shape=(2, 3))
    for images, step in zip(batches, (1, 20, 38), strict=True):
        torch.testing.assert_close(images, sampler.seen[step], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(("kind", "schedule"), [("flow", "flow"), ("ddim", "flow"), ("euler", "dance")])
def test_the_noise_leaves_the_marginal_as_it_is_and_sets_children_apart(kind, schedule):
    """Under a constant reward the images are still N(0.5, 0.3²), though noise was added 12 times."""
    count, after = 2048, range(2, 38, 3)
    sampler = Sampler(kind)
    callback = SteeringCallback(sampler, blind, resample_after=after, decode=own, schedule=schedule, noise_level=0.5)
    plain, steered = sampler(count, None), sampler(count, callback)
    assert steered.mean() == pytest.approx(float(plain.mean()), abs=0.02)
    assert steered.std() == pytest.approx(float(plain.std()), rel=0.06)
    assert torch.corrcoef(torch.stack([steered.flatten(), plain.flatten()]))[0, 1] < 0.9
    greedy = SteeringCallback(sampler, level, resample_after=[38], decode=own, strength=1e6)
    assert len(sampler(64, greedy).unique()) == 64, "all four of a group are children of one"


def test_the_samples_are_those_of_the_tilted_distribution():
    """p(x) exp(λ x) of N(m, s²) is N(m + λ s², s²)."""
    count, after, sampler = 2048, list(range(4, 38, 3)), Sampler("flow")

    def steered(strength):
        callback = SteeringCallback(
            sampler, level, particles=count, resample_after=after, strength=strength, decode=own
        )
        return sampler(count, callback)

    plain, tilted = steered(1e-9), steered(4.0)
    assert tilted.mean() - plain.mean() == pytest.approx(4.0 * float(plain.var()), rel=0.1)
    assert tilted.std() == pytest.approx(float(plain.std()), rel=0.15)


def test_groups_are_apart_and_what_could_not_be_judged_has_no_child():
    sampler = Sampler("flow")

    def reward(images):
        value = images.flatten().clone()
        value[:4] = torch.nan  # a group in which nothing is known
        value[4:8] = torch.tensor([torch.nan, torch.nan, 0.0, torch.nan])
        return value

    callback = SteeringCallback(sampler, reward, resample_after=[20], decode=own, noise_level=1e-6)
    before, steered = sampler(12, None).flatten(), sampler(12, callback).flatten()
    torch.testing.assert_close(steered[:4], before[:4], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(steered[4:8], before[6].expand(4), rtol=1e-3, atol=1e-3)


def test_a_seed_makes_the_call_again():
    sampler = Sampler("flow")

    def made(seed):
        callback = SteeringCallback(sampler, level, resample_after=[5, 30], decode=own, seed=seed)
        first = sampler(8, callback)
        assert torch.equal(sampler(8, callback), first), "a callback keeps nothing from call to call"
        return first

    assert torch.equal(made(1), made(1)) and not torch.equal(made(1), made(2))


FAMILIES = ("sd15", "qwen_image", "wan")  # of noise, packed, a video


@pytest.mark.parametrize("name", FAMILIES)
def test_it_decodes_as_the_family_does_and_leaves_the_pipeline_alone(name):
    """The reward sees the images of the policy, whose velocity is computed the other way."""

    def change(pipe: Any) -> None:
        if name == "wan":  # its own solver takes several steps into account
            pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)

    pipe, options = tiny_pipeline(name)
    change(pipe)
    scheduler, encode = pipe.scheduler, pipe.encode_prompt
    weights = {n: p.clone() for n, p in pipe.components[_network(pipe)].named_parameters()}
    batches: list[torch.Tensor] = []
    sizes = {key: options[key] for key in ("image_size", "num_frames") if key in options}

    def reward(images):
        batches.append(images)
        return level(images)

    callback = SteeringCallback(pipe, reward, particles=2, resample_after=[1], **sizes)
    assert pipe.scheduler is scheduler and pipe.encode_prompt is encode
    assert all(torch.equal(p, weights[n]) for n, p in pipe.components[_network(pipe)].named_parameters())
    call: dict[str, Any] = {"num_inference_steps": 4, "output_type": "latent", "return_dict": False}
    if "image_size" in options:
        call["height"], call["width"] = options["image_size"]
    if "num_frames" in options:
        call["num_frames"] = options["num_frames"]
    policy = tiny_policy(name, change)
    latents = torch.randn(4, *policy.latent_shape, generator=torch.Generator().manual_seed(5))
    condition = policy.encode(tiny_prompts(name, ["a red circle"] * 2 + ["two blue squares!"] * 2))
    call |= {**policy._call.fixed, **policy._call.inputs(condition.rows(), guided=policy.guided)}
    output = pipe(**call, latents=latents.clone(), callback_on_step_end=callback)[0]
    assert torch.as_tensor(output).isfinite().all()
    grid = policy.sigmas(4)
    x = latents * (1 if policy.prediction == "velocity" else preserving_scale(grid[0]))
    with torch.no_grad():
        for k in (0, 1):
            v = policy.velocity(x, grid[k].expand(4), condition)
            clean, x = x - grid[k] * v, x + (grid[k + 1] - grid[k]) * v
        expected = policy.decode(clean)
    assert batches[0].shape == expected.shape
    torch.testing.assert_close(batches[0], expected, rtol=0, atol=2e-3)


def _network(pipe):
    return "unet" if "unet" in pipe.components else "transformer"


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (lambda: diffusers.DPMSolverMultistepScheduler(), "DPMSolverMultistepScheduler, whose steps do not"),
        (lambda: diffusers.FlowMatchHeunDiscreteScheduler(), "scheduler = FlowMatchEuler"),
        (lambda: diffusers.DDIMScheduler(), "DDIMScheduler of clip_sample=True.*pipe.scheduler = DDIM"),
    ],
)
def test_samplers_whose_steps_do_not_say_what_they_were_are_refused(scheduler, message):
    sampler = Sampler("flow")
    sampler.scheduler = scheduler()
    with pytest.raises(UserError, match=message):
        SteeringCallback(sampler, level, resample_after=[2], decode=own)


@pytest.mark.parametrize(("name", "kind"), [("flux3", "Flux3ModularPipeline"), ("pixart", "PixArtSigmaPipeline")])
def test_calls_that_ask_no_callback_are_refused(name, kind):
    pipe, _ = tiny_pipeline(name)
    pipe.scheduler = SCHEDULERS["flow"]()
    with pytest.raises(UserError, match=f"A call of {kind} takes no callback_on_step_end.*steered_rollout"):
        SteeringCallback(pipe, level, resample_after=[2])


def test_calls_that_do_not_fit_are_refused():
    sampler = Sampler("flow")
    for options, message in (({"particles": 1}, "particles is 1; gr"), ({"schedule": "none"}, "draws no noise")):
        with pytest.raises(ValueError, match=message):
            SteeringCallback(sampler, level, **{"resample_after": [2], "noise_level": 0.5, **options}, decode=own)
    late = SteeringCallback(sampler, level, resample_after=[39], decode=own)
    with pytest.raises(UserError, match=r"The call has 40 steps\. .*among 1 to 38"):
        sampler(8, late)
    callback = SteeringCallback(sampler, level, resample_after=[3], decode=own)
    with pytest.raises(UserError, match=r"makes 6 images.*groups of 4: set num_images_per_prompt"):
        sampler(6, callback)
    wrong = SteeringCallback(sampler, lambda images: images.sum(), resample_after=[3], decode=own)
    with pytest.raises(ValueError, match=r"The reward gave \[\] values for 8 images"):
        sampler(8, wrong)
    pipe, _ = tiny_pipeline("sd3")
    sized = SteeringCallback(pipe, level, resample_after=[1], image_size=32)
    with pytest.raises(UserError, match="give SteeringCallback the call's image_size"):
        sized(pipe, 0, 1, {"latents": torch.zeros(4, 4, 8, 4)})
