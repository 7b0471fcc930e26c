# SPDX-License-Identifier: Apache-2.0
"""M HPSv3-type judges on one vision-language model as one module: one pass, M means and deviations.

The batch is repeated M times and each adapted layer adds its member's x Aᵀ Bᵀ by one grouped product, so the
frozen weights are read once for all members, and launches do not grow with M (peft's mixed batches loop over
the adapters: equal numbers, no less time, and no training). What stands before the first adapter, the vision
tower, runs once.
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

from .head import PLACES, RanknetHead
from .loading import check_keys
from .model import REWARD_TOKEN, HPSv3Model

TOKEN = "reward_token"
"""Key of the members' embeddings of the reward token, [M, H]."""
STRETCH = "stretch"
"""Key of the factors on the members' scales, [M], at least 1; all 1 where it is missing."""


class StackedLora(nn.Module):
    """y = W x + b + s · B_m A_m x for rows of M members that lie one after another, s = α/r; A and B start at
    0.
    """

    def __init__(self, base: nn.Linear, members: int, rank: int, scaling: float) -> None:
        super().__init__()
        self.base, self.scaling = base, scaling
        where: Any = {"device": base.weight.device, "dtype": torch.float32}
        self.lora_a = nn.Parameter(torch.zeros(members, rank, base.in_features, **where))
        self.lora_b = nn.Parameter(torch.zeros(members, base.out_features, rank, **where))

    def forward(self, x: Tensor) -> Tensor:
        """[M·B, ..., in] -> [M·B, ..., out]; row m·B + i belongs to member m."""
        members, own = self.lora_a.shape[0], self.lora_a.dtype
        if x.shape[0] % members:
            raise ValueError(f"{x.shape[0]} rows for {members} members; give each member's rows.")
        found = self.base(x)
        narrow = torch.bmm(x.reshape(members, -1, x.shape[-1]).to(own), self.lora_a.mT)
        whole = found.reshape(members, -1, found.shape[-1]).to(own)
        return torch.baddbmm(whole, narrow, self.lora_b.mT, alpha=self.scaling).view_as(found).to(found.dtype)


def stack_adapters(
    backbone: nn.Module, names: Sequence[str], members: int, rank: int, scaling: float
) -> dict[str, StackedLora]:
    """Put stacked adapters around the linear layers of these full names, in place."""
    layers = {name: module for name, module in backbone.named_modules() if isinstance(module, nn.Linear)}
    if lacking := sorted(set(names) - set(layers)):
        raise RewardError(
            f"The model lacks {len(lacking)} linear layers that the members adapt: {', '.join(lacking[:3])}. "
            "Give the base that they were trained from."
        )
    adapters = {name: StackedLora(layers[name], members, rank, scaling) for name in names}
    for name, adapter in adapters.items():
        backbone.set_submodule(name, adapter)
    return adapters


class RanknetHeads(nn.Module):
    """The heads of M members, of tensors `rm_head.{0,3,5}.{weight,bias}` [M, ...]; each layer is one batched
    product.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        weights, biases = (
            [nn.Parameter(tensors[f"rm_head.{place}.{part}"].float()) for place in PLACES]
            for part in ("weight", "bias")
        )
        self.weights, self.biases = nn.ParameterList(weights), nn.ParameterList(biases)

    def forward(self, hidden: Tensor) -> Tensor:
        """[M, N, 2] float32 of hidden states [M, N, H]."""
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            before = hidden.relu() if layer else hidden.float()
            hidden = torch.baddbmm(bias[:, None], before, weight.mT)  # h_m W_mᵀ + b_m
        return hidden

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that it was made of, as they are now."""
        layers = zip(PLACES, self.weights, self.biases, strict=True)
        return {f"rm_head.{p}.{k}": v for p, w, b in layers for k, v in (("weight", w), ("bias", b))}


class LoraEnsembleModel(nn.Module):
    """(mean, log-deviation) [M, N] of N rows: the vision tower and the embeddings run once for all members.

    From the first layer of the language part on every row stands there M times, since the members differ in
    the embedding of the reward token and in their adapters. Each member has its own head.

    Args:
        engine: the vision-language model, whose layers get the adapters in place; it serves nothing else
            afterwards.
        tensors: of all members: `<layer>.lora_A` [M, r, in], `<layer>.lora_B` [M, out, r],
            `rm_head.{0,3,5}.{weight,bias}` [M, ...], `reward_token` [M, H], and perhaps `stretch` [M].
        template: with `REWARD_TOKEN` once.
        scaling: of the adapters, α/r.
        clamp: bounds of the log-deviation (soft), or None.

    Raises:
        RewardError: tensors that do not fit the model or one another, named; or adapters of the tower.
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
        tensors = {**tensors, STRETCH: tensors.get(STRETCH, torch.ones(len(tensors.get(TOKEN, ()))))}
        members, heads, layers = _parts(tensors)
        weights = engine.weights
        try:
            first = RanknetHead.from_state_dict({key: value[0] for key, value in heads.items()})
        except ValueError as error:
            raise RewardError(str(error)) from error
        reader = HPSv3Model(engine, first, template=template, clamp=clamp)
        reader.add_token()
        self.engine, self.template, self.clamp, self.scaling = engine, reader.template, clamp, scaling
        self.members = members
        language = next(name for name, part in engine.model.named_modules() if part is _language(engine))
        outside = [name for name in layers if not name.startswith(f"{language}.")]
        if outside:
            raise RewardError(
                f"The members adapt {', '.join(outside[:3])}, outside the language part; one pass shares the "
                "vision tower. Train members whose LoRA is in the language part alone."
            )
        rank = tensors[f"{layers[0]}.lora_A"].shape[1] if layers else 0
        self.adapters = stack_adapters(engine.model, layers, members, rank, scaling)
        self.heads = RanknetHeads(heads).to(engine.network.device)
        size = engine.model.config.get_text_config().hidden_size
        self.tokens = nn.Parameter(torch.zeros(members, size, device=engine.network.device))
        self.stretch = nn.Parameter(torch.ones(members, device=engine.network.device))
        check_keys(self.tensors(), tensors)
        with torch.no_grad():
            for key, own in self.tensors().items():
                own.copy_(tensors[key])
        self.backbone: nn.Module = engine.model
        self._token = engine.rows.specials[REWARD_TOKEN]
        self.requires_grad_(False)
        engine.settle(weights)  # of the base; the members' own are part of the judge's identity

    def tensors(self) -> dict[str, Tensor]:
        """The members' weights by the names of the class, as they are now."""
        found = dict(self.heads.tensors())
        for name, layer in self.adapters.items():
            found |= {f"{name}.lora_A": layer.lora_a, f"{name}.lora_B": layer.lora_b}
        return found | {TOKEN: self.tokens, STRETCH: self.stretch}

    def diversity(self) -> Tensor:
        """`nuclear_diversity` summed over the adapted layers; add −λ times it to the members' loss."""
        layers = self.adapters.values()
        return torch.stack([nuclear_diversity(layer.lora_a, layer.lora_b) for layer in layers]).sum()

    def forward(self, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
        """(mean [M, N], log-deviation [M, N]) float32 of N encoded rows."""
        states = self.engine.network.states(rows, self._run)
        found = self.heads(states.view(len(rows), self.members, -1).transpose(0, 1))
        log_std = found[..., 1]
        if self.clamp is not None:
            log_std = soft_clamp(log_std, *self.clamp)
        return stretched(found[..., 0], log_std, self.stretch[:, None])

    def _run(self, batch: Batch) -> Tensor:
        """[b, S, M·H]: hidden states of all members beside one another."""
        hidden = self.engine.network.hidden(batch, lambda given: self._repeated(given, batch.ids))
        return hidden.view(self.members, *batch.ids.shape, -1).permute(1, 2, 0, 3).flatten(2)

    def _repeated(self, given: dict[str, Any], ids: Tensor) -> dict[str, Any]:
        """What the language part takes, M times member by member, with each member's reward token."""
        embeds, deeper = given["inputs_embeds"], given.get("deepstack_visual_embeds")
        at = (ids == self._token).to(embeds.device)[None, ..., None]
        own = torch.where(at, self.tokens[:, None, None].to(embeds.dtype), embeds[None])
        found = {name: self._repeat(name, value) for name, value in given.items()}
        found["inputs_embeds"] = own.flatten(0, 1)
        if deeper is not None:
            found["deepstack_visual_embeds"] = [layer.repeat(self.members, 1) for layer in deeper]
        return found

    def _repeat(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        axis = 1 if name == "position_ids" and value.ndim == 3 else 0  # three axes of positions stand first
        return torch.cat([value] * self.members, axis)


def stretched(mean: Tensor, log_std: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """The same judgement of every pair on a scale c times as wide: c·μ and √(c²σ² + (c² − 1)·4/π).

    With E[σ(z)] ≈ σ(Δ / √(1 + π s²/8)) for z ~ N(Δ, s²), the lead c·Δ and c²(1 + π s²/8) = 1 + π s'²/8 give
    the probability that Δ and s give, and s'² is shared by the two images of a pair.

    Args:
        mean: μ, [M, N].
        log_std: ln σ, [M, N].
        factor: c ≥ 1, broadcast to [M, N].

    MacKay, "The evidence framework applied to classification networks", Neural Computation 4(5), 1992, for
    the approximation.
    """
    more = (factor.square() - 1).clamp(min=0) * (4 / math.pi)
    wide = 0.5 * torch.log((2 * (log_std + factor.log())).exp() + more)
    return factor * mean, torch.where(factor == 1, log_std, wide)


def _language(engine: VisionLanguageEngine) -> nn.Module:
    return engine.network.trunk.language_model


def _parts(tensors: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor], list[str]]:
    """(members, tensors of the heads, names of the adapted layers)."""
    heads = {key: value for key, value in tensors.items() if key.startswith("rm_head.")}
    layers = [key.removesuffix(".lora_A") for key in tensors if key.endswith(".lora_A")]
    lacking = [name for name in (TOKEN, *(f"{one}.lora_B" for one in layers)) if name not in tensors]
    sizes = {key: value.shape[0] if value.ndim else 0 for key, value in tensors.items()}
    if lacking or not layers or len(set(sizes.values())) != 1:
        raise RewardError(
            f"The members' tensors do not belong together: {len(layers)} adapted layers, missing "
            f"{', '.join(lacking) or 'nothing'}, members by tensor {sorted(set(sizes.values()))}. Write the "
            "folder again: LoraEnsembleReward.from_members([...]).save(folder)."
        )
    return next(iter(sizes.values())), heads, layers


def nuclear_diversity(lora_a: Tensor, lora_b: Tensor) -> Tensor:
    """‖[A_1; …; A_M]‖_* + ‖[B_1 … B_M]‖_*, the nuclear norms of the members' stacked matrices.

    For rows and columns of given lengths it is largest when they are orthogonal, so maximising it
    keeps an ensemble from collapsing into one member. UP-RLHF maximises the nuclear norm of the concatenated
    LoRA matrices; taking A and B apart is our reading.

    Args:
        lora_a: [M, r, in].
        lora_b: [M, out, r].

    Returns:
        A scalar, differentiable.

    Zhai et al., UP-RLHF, arXiv 2401.00243.
    """
    stacked = lora_a.reshape(-1, lora_a.shape[-1])
    beside = lora_b.transpose(0, 1).reshape(lora_b.shape[1], -1)
    return torch.linalg.matrix_norm(stacked.float(), "nuc") + torch.linalg.matrix_norm(beside.float(), "nuc")
