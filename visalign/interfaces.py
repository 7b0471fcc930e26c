# SPDX-License-Identifier: Apache-2.0
"""The contracts between the wings: what a reward returns, what a policy offers."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from visalign.errors import Naming, RewardError, UserError

Metadata = Sequence[Mapping[str, Any] | None]
"""One mapping per sample (GenEval's layout for the shapes world), or None where a prompt has none."""
NOT_FOR_SAMPLE = "not for this sample"
"""End of the reason where a reward does not apply to a sample: a sum leaves the term out, and nothing has failed."""
Message = Mapping[str, Any]  # One turn of a conversation: {role, content}, or {role, tool_calls}
Prompt = str | Sequence[Message]
"""Plain text, or a conversation of {role, content} messages that ends where the answer begins."""


class ToolCompletion(str):
    """Completion with answers of a tool in it."""

    answers: Sequence[tuple[int, int]]
    """(begin, end) characters that the tool wrote."""
    outcome: float | None
    """Reward that an environment gave; None without one."""

    calls: int | None
    """Calls that a tool answered, without those in a wrong form; None without tools."""

    def __new__(
        cls, text: str, answers: Sequence[tuple[int, int]] = (), outcome: float | None = None, calls: int | None = None
    ) -> ToolCompletion:
        """Keep the spans beside the text."""
        completion = super().__new__(cls, text)
        completion.answers, completion.outcome, completion.calls = answers, outcome, calls
        return completion


def policy_text(completion: str) -> str:
    """Return what the policy wrote of a completion, without a tool's answers: these earn it nothing.

    >>> policy_text(ToolCompletion("6 * 7 = 42, so 42", [(8, 10)]))
    '6 * 7 = , so 42'
    """
    if not isinstance(completion, ToolCompletion):
        return completion
    edges = [0, *(edge for span in completion.answers for edge in span), len(completion)]
    text = "".join(completion[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    return ToolCompletion(text, (), completion.outcome, completion.calls)


def is_message(message: Any) -> bool:
    """Check for a message: a role, and a content or (of an assistant) tool calls."""
    return (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and (message.get("content") is not None or bool(message.get("tool_calls")))
    )


def _check_form(answer: Any, **numbers: Any) -> None:
    """Raise unless `valid` and all numbers are tensors [B], which else broadcast, and each text has B entries."""
    numbers |= {name: x for name in ("std", "log_odds") if (x := getattr(answer, name, None)) is not None}
    numbers |= {"valid": answer.valid} | {f"part {name}": part for name, part in answer.parts.items()}
    forms = {name: list(x.shape) if isinstance(x, Tensor) else type(x).__name__ for name, x in numbers.items()}
    forms |= {name: [len(text)] for name in ("text", "reason") if (text := getattr(answer, name)) is not None}
    dtype, size = getattr(answer.valid, "dtype", None), forms["valid"]
    if dtype is not torch.bool or len(size) != 1 or any(form != size for form in forms.values()):
        form = "valid is torch.bool [B], numbers are tensors [B], texts are B"
        raise ValueError(f"{form}; got {forms}, valid of dtype {dtype}.")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of B images; one that could not be scored has `valid` False, a `reason`, and NaN as value."""

    value: Tensor
    """[B] float32, in `unit`; NaN where `valid` is False."""
    valid: Tensor
    """[B] bool."""
    unit: str
    """Unit of `value`, e.g. "cosine × 100"."""
    std: Tensor | None = None
    """[B] float32 standard deviation in the same unit, or None when the judge gives none; NaN where unknown.
    Its judge says whether it is the spread of one judgement or the standard error of a mean."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [B] float32, the terms that `value` was made of."""
    text: Sequence[str] | None = None
    """Explanation per sample, if the judge writes one."""
    reason: Sequence[str | None] | None = None
    """Why a sample is invalid; None for the valid ones."""

    def __post_init__(self) -> None:
        _check_form(self, value=self.value)

    def __len__(self) -> int:
        return self.value.shape[0]


@dataclass(frozen=True, kw_only=True)
class Preferences:
    """Preferences of a pairwise judge for B pairs: the probability that the left image is better."""

    prob: Tensor
    """[B] float32 in [0, 1]; NaN where `valid` is False."""
    valid: Tensor
    """[B] bool."""
    std: Tensor | None = None
    """[B] float32 standard deviation of `prob`, or None when the judge gives none."""
    log_odds: Tensor | None = None
    """[B] float32, ln(p / (1 − p)) where the judge knows it finer than `prob` can say; NaN as `prob`."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """name -> [B] float32: the log-odds of each order, the mass left over, the scores of both images."""
    text: Sequence[str] | None = None
    reason: Sequence[str | None] | None = None
    """As in `Scores`, per pair."""

    def __post_init__(self) -> None:
        _check_form(self, prob=self.prob)

    def __len__(self) -> int:
        return self.prob.shape[0]


@dataclass(frozen=True, kw_only=True)
class RewardCapabilities:
    """Inputs that a reward needs besides images or texts, and what it offers besides scores: its `capabilities`."""

    needs_group: bool = False
    """A score depends on the samples of the same group, which the metadata must name ("group_id")."""
    needs_batch: bool = False
    """A score depends on all samples of the same call."""
    needs_prompt: bool = True
    """The prompt changes the score; without it, images can be scored without prompts."""
    takes_clips: bool = False
    """`score` takes videos [F, 3, H, W] instead of images."""
    takes_gpu_images: bool = False
    """`score` works on images where they are on a GPU; a trainer moves them to the CPU for other rewards."""
    both_orders: bool = False
    """A pairwise judge that asks about each pair in both orders itself."""
    term_weights: Mapping[str, float] = field(default_factory=dict)
    """label -> weight of the terms of a sum; each term is its part "LABEL.weighted"."""
    recorded_terms: Mapping[str, float] = field(default_factory=dict)
    """label -> 1, or -1 where lower is better, of the terms of weight 0."""
    constraints: Mapping[str, float] = field(default_factory=dict)
    """label -> bound at which a trainer holds the mean of the part "LABEL.weighted"."""
    discriminators: Mapping[str, Any] = field(default_factory=dict)
    """label -> term whose `head` a trainer of images moves to tell samples from references: `rewards.Adversarial`."""
    advantage_weights: Mapping[str, float] = field(default_factory=dict)
    """label -> strength λ with which a trainer scales advantages by the part "LABEL.std"."""
    at_iteration: Callable[[int], Any] | None = None
    """Function of the iterations finished that returns the reward, or the sum with its weights, of then; None: they
    never change."""
    read_answer: Callable[[str, Mapping[str, Any]], str | None] | None = None
    """Function of a completion and its metadata that reads the answer which is judged; None: the reward names none."""

    @property
    def compares_samples(self) -> bool:
        """True where a score depends on other samples of the call."""
        return self.needs_group or self.needs_batch

    @classmethod
    def of(cls, rewards: Collection[Any], **fields: Any) -> RewardCapabilities:
        """Declare the inputs that rewards need together, for a reward made of them, and further fields."""
        names = ("needs_group", "needs_batch", "needs_prompt", "takes_clips")
        needs = {name: any(getattr(reward.capabilities, name) for reward in rewards) for name in names}
        return cls(**{**needs, **fields})


def is_logit(unit: str) -> bool:
    """Return True for a Bradley-Terry unit, in which a difference of 1 is odds of e.

    >>> is_logit("logit / 26"), is_logit("log-odds (yes / no)")
    (False, True)
    """
    is_scaled = unit.startswith("mixed") or re.search(r"/ \d", unit) is not None
    return not is_scaled and any(word in unit.lower() for word in ("bradley-terry", "log-odds", "logit"))


def with_capabilities(reward: Any) -> Any:
    """Give a reward without declarations the default `capabilities` and the `identity` None; return it."""
    try:  # object's setter works for frozen dataclasses, too
        if not hasattr(reward, "capabilities"):
            object.__setattr__(reward, "capabilities", RewardCapabilities())
        # looked up in the class first, since an identity may be a property that reads weights
        if not (hasattr(type(reward), "identity") or hasattr(reward, "identity")):
            object.__setattr__(reward, "identity", None)
    except (AttributeError, TypeError) as error:
        raise UserError(
            f"Reward {type(reward).__name__} takes no attributes (slots?). Declare capabilities = "
            "RewardCapabilities() and identity = None in its class."
        ) from error
    return reward


def copy_records(values: Any) -> Any:
    """Copy records, or columns of them, with the mappings and lists inside, for a reward that may change them."""
    if isinstance(values, Mapping):
        return {key: copy_records(value) for key, value in values.items()}
    return [*map(copy_records, values)] if isinstance(values, list) else values


@contextmanager
def unchanged(name: str, samples: Any) -> Iterator[None]:
    """Raise if the reward `name` changes tensors in place that later rewards get."""
    items = samples if isinstance(samples, list | tuple) else [samples]
    tensors = [x for x in items if isinstance(x, Tensor) and x.ndim > 1]  # what is no image, the reward refuses

    def state() -> list[tuple[int, bytes]]:  # some pixels too: what is written through NumPy has no version
        pixels = [tensor[..., ::16, ::16].detach().float().cpu().numpy().tobytes() for tensor in tensors]
        return [(0 if x.is_inference() else x._version, levels) for x, levels in zip(tensors, pixels, strict=True)]

    before = state()
    yield
    if state() != before:
        raise UserError(f"Reward {name!r} changes its images in place. Have it work on images.clone().")


def score_named(reward: Any, samples: Any, prompts: Sequence[Any], metadata: Any = None, *, name: str) -> Scores:
    """Score samples by a reward, one score for each, no finite number a failure; errors name reward and sample."""

    def score_rows(start: int, stop: int | None) -> Any:
        rows = slice(start, stop)
        return reward.score(samples[rows], *copy_records([list(prompts[rows]), metadata and list(metadata[rows])]))

    with unchanged(name, samples), Naming(name, score_rows, len(prompts)):
        answer = score_rows(0, None)
    if isinstance(answer, Scores) and len(answer) == len(prompts):
        claimed = answer.valid.to(answer.value.device)
        valid, reasons = claimed & answer.value.isfinite(), list(answer.reason or [None] * len(answer))
        for row in (claimed & ~valid).nonzero().flatten().tolist():
            reasons[row] = f"the reward returned {float(answer.value[row]):g}, which is no score"
        return replace(answer, value=torch.where(valid, answer.value, torch.nan), valid=valid, reason=reasons)
    returned = f"{len(answer)} scores" if isinstance(answer, Scores) else f"a {type(answer).__name__}"
    raise RewardError(
        f"Reward {name!r} returned {returned} for {len(prompts)} samples; it must return visalign.interfaces.Scores, "
        "one for each, or be a plain function that returns numbers. visalign.rewards.check_reward(reward), or of "
        "texts check_text_reward, finds the fault."
    )


@runtime_checkable
class PointwiseReward(Protocol):
    """Scores one image at a time; may declare `capabilities` and `identity` (`visalign.rewards.Identity`)."""

    name: str
    unit: str
    range: tuple[float, float]
    """Smallest and largest possible value; infinities allowed."""
    higher_is_better: bool

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images against B prompts; a score does not depend on its neighbours in the batch."""
        ...


@runtime_checkable
class TextReward(Protocol):
    """Judges one completion at a time."""

    name: str
    unit: str
    range: tuple[float, float]
    higher_is_better: bool

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Score B completions of B prompts; a score does not depend on its neighbours in the batch."""
        ...


@runtime_checkable
class PairwiseReward(Protocol):
    """Judges two images of one prompt against each other."""

    name: str

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        """Compare B pairs of images; a preference does not depend on its neighbours in the batch."""
        ...


@runtime_checkable
class DifferentiableReward(Protocol):
    """A pointwise reward with a gradient in the pixels."""

    def score_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Score images [B, 3, H, W] in [0, 1] -> [B] float32, differentiable in the pixels."""
        ...


class ReferencedReward(Protocol):
    """A pointwise reward against reference images of the prompt, which a trainer may draw."""

    references: dict[str, Any]
    """Prompt -> its reference images."""

    def rank(self, images: Tensor, prompt: str, record: Mapping[str, Any]) -> list[int]:
        """Order images uint8 [n, 3, H, W] of a prompt, best first."""
        ...


@runtime_checkable
class DifferentiableSum(Protocol):
    """A sum of rewards whose gradient is the sum of its terms' gradients."""

    def gradient_terms(self) -> Iterator[tuple[str, Any, float, float]]:
        """(label, reward r, weight w, mean m) of the terms w (r − m)."""
        ...


@runtime_checkable
class Condition(Protocol):
    """Encoded prompts of B samples; unique prompts are stored once and indexed."""

    def __len__(self) -> int: ...

    def select(self, index: Tensor) -> Condition:
        """The condition of the samples `index` [N] (repeats allowed)."""
        ...


Prediction = Literal["velocity", "epsilon", "v", "x0"]
"""What a network is trained to give: dx/dσ, the noise, v of arXiv 2202.00512, or the clean latent."""


@runtime_checkable
class DiffusionPolicy(Protocol):
    """A text-to-image or text-to-video model as the algorithms see it.

    The algorithms work on the flow x_σ = (1 − σ) x0 + σ ε with the velocity v = dx/dσ = ε − x0. A model trained on
    another path declares its `prediction`, and its `velocity` converts by `visalign.flow.parametrization`.

    Optional members: `encode_images(images)`, the inverse of `decode`, for learning from stored images: clean
    latents [B, ...] in the storage dtype of B images [3, h, w] in [0, 1] of any size. `image_size` in pixels
    (one side, (height, width), or None), settable, for several sizes: `latent_shape`, `encode`, `sigmas`,
    `times`, `decode` and `encode_images` follow.
    """

    latent_shape: tuple[int, ...]
    """Shape of one latent, any: (C, H, W), packed (L, C), channels last (H, W, C), video (C, F, H, W)."""
    storage_dtype: torch.dtype
    """Dtype in which latents are stored and fed to the model."""
    prediction: Prediction
    """What the network itself predicts; `velocity` always returns the velocity."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the network's matrix products: that of its weights, or of its autocast."""
        ...

    @property
    def module(self) -> torch.nn.Module:
        """The network that is trained (DDP wraps this)."""
        ...

    @property
    def device(self) -> torch.device: ...

    def encode(self, prompts: Sequence[str]) -> Condition:
        """Encode prompts, each unique prompt once, without gradient."""
        ...

    def velocity(self, x: Tensor, sigma: Tensor, condition: Condition, time: Tensor | None = None) -> Tensor:
        """Guided velocity dx/dσ, float32 [B, ...], of latents x [B, ...] at noise levels sigma [B] in [0, 1].

        It takes the same path with gradient and without, pass by pass, so that a replay gives the numbers of
        its rollout. `time` [B] is the network's time as of `times`; None is `times(sigma)`.
        """
        ...

    def times(self, sigmas: Tensor) -> Tensor:
        """The network's time, float32, at each noise level: not 1000 σ everywhere, so it is stored for the replay."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Images [B, 3, H, W] float32 in [0, 1]."""
        ...

    def sigmas(self, steps: int, *, timestep_schedule: str = "diffusers") -> Tensor:
        """The timestep schedule [steps + 1], float32, from 1 (or the model's largest level) down to 0."""
        ...

    def reference(self) -> AbstractContextManager[None]:
        """A context in which the policy is the reference (LoRA off, or the stored original weights)."""
        ...

    def trainable_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that the optimizer moves, in a fixed order."""
        ...

    def save(self, folder: Path) -> None:
        """Write the trained weights in the format of the model's library (`pipe.load_lora_weights`)."""
        ...

    @property
    def forward_count(self) -> ForwardCount: ...


@dataclass
class ForwardCount:
    """Transformer passes on one latent each, counted where they happen."""

    forward: int = 0
    """Forward passes without gradient."""
    forward_backward: int = 0
    """Forward passes that were followed by a backward."""

    @property
    def equivalents(self) -> int:
        """Forward-equivalents: one per forward, two more for each backward."""
        return self.forward + 3 * self.forward_backward
