# SPDX-License-Identifier: Apache-2.0
"""M HPSv3-type judges on one vision-language model as one module: one pass, M means and deviations.

The batch is repeated M times and each adapted layer adds its member's x Aᵀ Bᵀ by one grouped product, so the
frozen weights are read once for all members, and launches do not grow with M (peft's mixed batches loop over
the adapters: equal numbers, no less time, and no training). The vision tower, which has no adapters, runs
once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visalign.core.preference.uncertainty import soft_clamp
from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm.engine import TokenRow, VisionLanguageEngine
from visalign.rewards.vlm.packing import Batch
from visalign.rewards.vlm.template import Template
from visalign.rewards.weights.checkpoint_files import check_fit

from .head import LAYERS, RanknetHead
from .model import REWARD_TOKEN, HPSv3Model

TOKEN = "reward_token"
"""Key of the members' embeddings of the reward token, [M, H]."""
STRETCH = "stretch"
"""Key of the factors on the members' scales, [M], at least 1; all 1 where it is missing."""


class StackedLora(nn.Module):
    """y = W x + b + s · B_m A_m x for the rows of M members in sequence, s = α/r; A and B start at 0."""

    def __init__(self, base: nn.Linear, members: int, rank: int, scaling: float) -> None:
        super().__init__()
        self.base, self.scaling = base, scaling
        options: Any = {"device": base.weight.device, "dtype": torch.float32}
        self.lora_a = nn.Parameter(torch.zeros(members, rank, base.in_features, **options))
        self.lora_b = nn.Parameter(torch.zeros(members, base.out_features, rank, **options))

    def forward(self, x: Tensor) -> Tensor:
        """Map [M·B, ..., in] to [M·B, ..., out]; row m·B + i belongs to member m."""
        members, dtype = self.lora_a.shape[0], self.lora_a.dtype
        y = self.base(x)
        narrow = torch.bmm(x.reshape(members, -1, x.shape[-1]).to(dtype), self.lora_a.mT)  # A_m x
        by_member = y.reshape(members, -1, y.shape[-1]).to(dtype)
        return torch.baddbmm(by_member, narrow, self.lora_b.mT, alpha=self.scaling).view_as(y).to(y.dtype)


def stack_adapters(
    backbone: nn.Module, names: Sequence[str], members: int, rank: int, scaling: float
) -> dict[str, StackedLora]:
    """Put stacked adapters around the linear layers of these full names, in place."""
    layers = {name: module for name, module in backbone.named_modules() if isinstance(module, nn.Linear)}
    if missing := sorted(set(names) - set(layers)):
        raise RewardError(
            f"The model lacks linear layers that the members adapt: {', '.join(missing[:3])}. Give their base."
        )
    adapters = {name: StackedLora(layers[name], members, rank, scaling) for name in names}
    for name, adapter in adapters.items():
        backbone.set_submodule(name, adapter)
    return adapters


class RanknetHeads(nn.Module):
    """Heads of M members, of tensors `rm_head.{0,3,5}.{weight,bias}` [M, ...]; a batched product a layer."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        weights, biases = (
            [nn.Parameter(tensors[f"rm_head.{layer}.{part}"].float()) for layer in LAYERS]
            for part in ("weight", "bias")
        )
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute [M, N, 2] float32 of hidden states [M, N, H]."""
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            inputs = hidden.relu() if layer else hidden.float()
            hidden = torch.baddbmm(bias[:, None], inputs, weight.mT)  # h_m W_mᵀ + b_m
        return hidden

    def tensors(self) -> dict[str, Tensor]:
        """Return the current tensors under their keys."""
        layers = zip(LAYERS, self.weights, self.biases, strict=True)
        return {f"rm_head.{n}.{k}": v for n, w, b in layers for k, v in (("weight", w), ("bias", b))}


class LoraEnsembleModel(nn.Module):
    """(mean, log-deviation) [M, N] of N rows: the vision tower and the embeddings run once for all members.

    From the first layer of the language part on, every row is repeated M times, since the members differ in
    the embedding of the reward token and in their adapters. Each member has its own head.

    Args:
        engine: the vision-language model, whose layers get the adapters in place; it serves nothing else afterwards.
        tensors: of all members: `<layer>.lora_A` [M, r, in], `<layer>.lora_B` [M, out, r],
            `rm_head.{0,3,5}.{weight,bias}` [M, ...], `reward_token` [M, H], and perhaps `stretch` [M].
        template: with `REWARD_TOKEN` once.
        scaling: of the adapters, α/r.
        clamp: bounds of the log-deviation (soft), or None.
    """

    def __init__(
        self,
        engine: VisionLanguageEngine,
        tensors: Mapping[str, Tensor],
        *,
        template: Template | None,
        scaling: float,
        clamp: tuple[float, float] | None,
    ) -> None:
        super().__init__()
        heads = {key: value for key, value in tensors.items() if key.startswith("rm_head.")}
        layers = [key.removesuffix(".lora_A") for key in tensors if key.endswith(".lora_A")]
        sizes = sorted({value.shape[0] if value.ndim else 0 for value in tensors.values()})
        if TOKEN not in tensors or len(sizes) != 1:
            raise RewardError(
                f"The members' tensors do not belong together ({sizes}, {TOKEN}: {TOKEN in tensors}). Join them again."
            )
        members = sizes[0]
        tensors = {STRETCH: torch.ones(members), **tensors}
        weights = engine.weights
        first = RanknetHead.from_state_dict({key: value[0] for key, value in heads.items()})
        single = HPSv3Model(engine, first, template=template, clamp=clamp)
        single.add_token()
        self.engine, self.template, self.clamp, self.scaling = engine, single.template, clamp, scaling
        self.members = members
        language_model = engine.network.language
        prefix = next(name for name, part in engine.model.named_modules() if part is language_model)
        if outside := [name for name in layers if not name.startswith(f"{prefix}.")]:
            raise RewardError(
                f"The members adapt {', '.join(outside[:3])}, outside the language part, which is all that may differ."
            )
        rank = tensors[f"{layers[0]}.lora_A"].shape[1] if layers else 0
        self.adapters = stack_adapters(engine.model, layers, members, rank, scaling)
        device = engine.network.device
        self.heads = RanknetHeads(heads).to(device)
        size = engine.model.config.get_text_config().hidden_size
        self.tokens = nn.Parameter(torch.zeros(members, size, device=device))
        self.stretch = nn.Parameter(torch.ones(members, device=device))
        check_fit(self.tensors(), tensors, "the members")
        with torch.no_grad():
            for key, parameter in self.tensors().items():
                parameter.copy_(tensors[key])
        self.backbone: nn.Module = engine.model
        self._token_id = engine.rows.specials[REWARD_TOKEN]
        self.requires_grad_(False)
        engine.set_fingerprint(weights)  # of the base; the members' own are part of the judge's identity

    def tensors(self) -> dict[str, Tensor]:
        """Return the members' current weights under the keys of the class."""
        tensors = dict(self.heads.tensors())
        for name, layer in self.adapters.items():
            tensors |= {f"{name}.lora_A": layer.lora_a, f"{name}.lora_B": layer.lora_b}
        return tensors | {TOKEN: self.tokens, STRETCH: self.stretch}

    def forward(self, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
        """(mean [M, N], log-deviation [M, N]) float32 of N encoded rows."""
        states = self.engine.network.states(rows, self._run)
        outputs = self.heads(states.view(len(rows), self.members, -1).transpose(0, 1))
        mean, log_std = outputs.unbind(-1)
        if self.clamp is not None:
            log_std = soft_clamp(log_std, *self.clamp)
        return stretch_scale(mean, log_std, self.stretch[:, None])

    def _run(self, batch: Batch) -> Tensor:
        """Compute the hidden states of all members, concatenated: [b, S, M·H]."""
        hidden = self.engine.network.hidden(batch, lambda inputs: self._repeat_inputs(inputs, batch.ids))
        return hidden.view(self.members, *batch.ids.shape, -1).permute(1, 2, 0, 3).flatten(2)

    def _repeat_inputs(self, inputs: dict[str, Any], ids: Tensor) -> dict[str, Any]:
        """Repeat the language part's inputs M times, member by member, with each member's reward token."""
        repeated = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                axis = 1 if name == "position_ids" and value.ndim == 3 else 0  # three axes of positions come first
                repeated[name] = torch.cat([value] * self.members, axis)
        embeds, deepstack = inputs["inputs_embeds"], inputs.get("deepstack_visual_embeds")
        is_token = (ids == self._token_id).to(embeds.device)[None, ..., None]
        with_token = torch.where(is_token, self.tokens[:, None, None].to(embeds.dtype), embeds[None])
        repeated["inputs_embeds"] = with_token.flatten(0, 1)
        if deepstack is not None:
            repeated["deepstack_visual_embeds"] = [layer.repeat(self.members, 1) for layer in deepstack]
        return repeated


def stretch_scale(mean: Tensor, log_std: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Stretch a scale c times and keep the judgement of every pair: c·μ and √(c²σ² + (c² − 1)·4/π).

    With E[σ(z)] ≈ σ(Δ / √(1 + π s²/8)) for z ~ N(Δ, s²), the lead c·Δ and c²(1 + π s²/8) = 1 + π s'²/8 give
    the probability that Δ and s give, and s'² is shared by the two images of a pair.

    `mean` μ and `log_std` ln σ are [M, N]; `factor` c ≥ 1 is broadcast to them.

    MacKay, "The evidence framework applied to classification networks", Neural Computation 4(5), 1992, for
    the approximation.
    """
    added = (factor.square() - 1).clamp(min=0) * (4 / math.pi)
    stretched = 0.5 * torch.log((2 * (log_std + factor.log())).exp() + added)
    return factor * mean, torch.where(factor == 1, log_std, stretched)
