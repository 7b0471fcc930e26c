# SPDX-License-Identifier: Apache-2.0
"""M LoRA members of one backbone in one forward pass: per-row adapters, stacked matrices, shared towers once.

The batch is repeated M times and each linear layer adds its member's x Aᵀ Bᵀ by one grouped product, so the
frozen weights are read once for all members, and launches do not grow with M. What stands before the first
adapter, such as a vision tower, runs once on B rows: give its output (`inputs_embeds`) as input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from visalign.rewards.base.contract import RewardError

Pool = Callable[[Any, Mapping[str, Tensor]], Tensor]
"""From the backbone's output and its (repeated) inputs to one feature per row [M·B, D]."""


class StackedLora(nn.Module):
    """y = W x + b + s · B_m A_m x for rows of M members that lie one after another.

    Args:
        base: the frozen linear layer.
        members: M.
        rank: r.
        scaling: s, LoRA's α/r.
        generator: for A ~ U(−1/√in, 1/√in) (LoRA's Kaiming start); B starts at 0.
    """

    def __init__(
        self, base: nn.Linear, members: int, rank: int, scaling: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.base, self.scaling = base, scaling
        bound = 1 / math.sqrt(base.in_features)
        start = (2 * torch.rand(members, rank, base.in_features, generator=generator) - 1) * bound
        where: Any = {"device": base.weight.device, "dtype": torch.float32}
        self.lora_a = nn.Parameter(start.to(**where))
        self.lora_b = nn.Parameter(torch.zeros(members, base.out_features, rank, **where))

    def forward(self, x: Tensor) -> Tensor:
        """[M·B, ..., in] -> [M·B, ..., out]; row m·B + i belongs to member m."""
        members, own = self.lora_a.shape[0], self.lora_a.dtype
        if x.shape[0] % members:
            raise ValueError(f"{x.shape[0]} rows for {members} members; repeat the batch with `repeat_rows`.")
        found = self.base(x)
        narrow = torch.bmm(x.reshape(members, -1, x.shape[-1]).to(own), self.lora_a.mT)
        whole = found.reshape(members, -1, found.shape[-1]).to(own)
        return torch.baddbmm(whole, narrow, self.lora_b.mT, alpha=self.scaling).view_as(found).to(found.dtype)


class LoraEnsemble(nn.Module):
    """A frozen backbone with M LoRA members, each with its head of 1 (score) or 2 (mean, log-std) outputs.

    Args:
        backbone: any model of transformers; its linear layers named in `targets` get adapters, in place.
        members: M ≥ 1.
        hidden_size: D, of the pooled feature.
        pool: picks the feature of a row; the last token's by the attention mask when None.
        targets: ends of the layers' names.
        rank: r.
        alpha: α; the change is scaled by α/r.
        outputs: 1 or 2.
        seed: of A and of the heads; each member starts elsewhere.

    Raises:
        ValueError: no layer has such a name, or a number out of range.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        members: int,
        hidden_size: int,
        pool: Pool | None = None,
        targets: Sequence[str] = ("q_proj", "v_proj"),
        rank: int = 8,
        alpha: float = 16.0,
        outputs: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if members < 1 or rank < 1 or outputs not in (1, 2):
            raise ValueError(
                f"members is {members}, rank {rank}, outputs {outputs}; allowed are members and rank from 1, "
                "and outputs 1 (score) or 2 (mean and log-std)."
            )
        generator = torch.Generator().manual_seed(seed)
        for parameter in backbone.parameters():
            parameter.requires_grad_(False)
        found = [
            name
            for name, module in backbone.named_modules()
            if isinstance(module, nn.Linear) and name.split(".")[-1] in targets
        ]
        if not found:
            raise ValueError(
                f"no linear layer of the backbone is named {' or '.join(targets)}; see named_modules()."
            )
        self.adapters = stack_adapters(backbone, found, members, rank, alpha / rank, generator)
        self.backbone, self.members, self.rank = backbone, members, rank
        self.head = nn.Parameter(
            torch.randn(members, outputs, hidden_size, generator=generator) / hidden_size**0.5
        )
        self.bias = nn.Parameter(torch.zeros(members, outputs))
        self._pool = pool or last_token

    def forward(self, **inputs: Any) -> Tensor:
        """Raw outputs [M, B, outputs], float32, of B rows; tensors are repeated, the rest is passed on.

        Args:
            **inputs: what the backbone takes, for B rows: `input_ids` or `inputs_embeds`, `attention_mask`.
        """
        repeated = repeat_rows(inputs, self.members)
        feature = self._pool(self.backbone(**repeated), repeated)
        return head_outputs(feature.view(self.members, -1, feature.shape[-1]), self.head, self.bias)

    def load_member(self, member: int, state: Mapping[str, Tensor]) -> None:
        """Take one member's matrices from a state dict of peft.

        Args:
            member: its number.
            state: `...<layer>.lora_A.weight` [r, in] and `...<layer>.lora_B.weight` [out, r], a name of the
                adapter before `.weight` allowed.

        Raises:
            RewardError: keys that are missing, left over, or of another shape.
        """
        rest = dict(state)
        for name, layer in self.adapters.items():
            for part, target in (("lora_A", layer.lora_a), ("lora_B", layer.lora_b)):
                keys = [key for key in rest if f".{name}.{part}." in f".{key}"]
                if len(keys) != 1:
                    raise RewardError(
                        f"member {member}: {len(keys)} keys for {name}.{part}.weight; needed is one."
                    )
                value = rest.pop(keys[0])
                if value.shape != target[member].shape:
                    raise RewardError(
                        f"member {member}: {keys[0]} has shape {tuple(value.shape)}; needed is "
                        f"{tuple(target[member].shape)}."
                    )
                with torch.no_grad():
                    target[member].copy_(value)
        if rest:
            raise RewardError(f"member {member}: unexpected keys {', '.join(sorted(rest)[:5])}.")

    def diversity(self) -> Tensor:
        """`nuclear_diversity` summed over the adapted layers; add −λ times it to the members' loss."""
        layers = self.adapters.values()
        return torch.stack([nuclear_diversity(layer.lora_a, layer.lora_b) for layer in layers]).sum()


def stack_adapters(
    backbone: nn.Module,
    names: Sequence[str],
    members: int,
    rank: int,
    scaling: float,
    generator: torch.Generator,
) -> dict[str, StackedLora]:
    """Put stacked adapters around linear layers, in place.

    Args:
        backbone: holds the layers.
        names: full names of linear layers.
        members: M.
        rank: r.
        scaling: α/r.
        generator: of the start; see `StackedLora`.

    Returns:
        name -> the adapted layer.

    Raises:
        RewardError: the backbone has no linear layer of such a name.
    """
    layers = {name: module for name, module in backbone.named_modules() if isinstance(module, nn.Linear)}
    lacking = sorted(set(names) - set(layers))
    if lacking:
        raise RewardError(
            f"The model lacks {len(lacking)} linear layers that the members adapt: {', '.join(lacking[:3])}. "
            "Give the base that they were trained from."
        )
    adapters: dict[str, StackedLora] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        adapters[name] = StackedLora(layers[name], members, rank, scaling, generator)
        setattr(backbone.get_submodule(parent), leaf, adapters[name])
    return adapters


def head_outputs(feature: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """h_m(f) = W_m f + b_m in float32.

    Args:
        feature: [M, B, D] of the members, or [B, D] shared by all: a head-only ensemble, one matmul.
        weight: [M, K, D].
        bias: [M, K].

    Returns:
        [M, B, K].
    """
    weight, bias = weight.float(), bias.float()
    if feature.ndim == 3:
        return torch.baddbmm(bias[:, None], feature.float(), weight.mT)
    members, outputs, width = weight.shape
    flat = torch.addmm(bias.reshape(-1), feature.float(), weight.reshape(-1, width).T)
    return flat.view(-1, members, outputs).transpose(0, 1)


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


def repeat_rows(inputs: Mapping[str, Any], members: int) -> dict[str, Any]:
    """The inputs with every tensor repeated M times along its rows, member by member.

    Raises:
        ValueError: tensors with different numbers of rows.
    """
    rows = {
        name: value.shape[0] for name, value in inputs.items() if isinstance(value, Tensor) and value.ndim
    }
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{name}: {size}" for name, size in rows.items())
        raise ValueError(f"the inputs have different numbers of rows ({listed}); give B rows of each.")
    return {
        name: value.repeat(members, *(1 for _ in value.shape[1:])) if name in rows else value
        for name, value in inputs.items()
    }


def last_token(output: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """[N, D] last hidden state at the last position of the attention mask, whichever side is padded."""
    hidden = output.last_hidden_state
    mask = inputs.get("attention_mask")
    if mask is None:
        return hidden[:, -1]
    places = torch.arange(mask.shape[1], device=mask.device)
    at = torch.where(mask.bool(), places, -1).amax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), at]
