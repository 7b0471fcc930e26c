# SPDX-License-Identifier: Apache-2.0
"""Log-probs of a rollout's tokens in one forward pass over prompt and completion, for training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from visalign.core.tokens.fused_head import squared_mass
from visalign.errors import UserError
from visalign.text import Sampling, TextRollout, TokenOutput, TokenSets
from visalign.text.distribution import chosen_log_prob, log_distribution
from visalign.vision.images import PatchedImage

from .images import ImagePrompts
from .network import CausalNetwork
from .routing import ExpertRouting

LOGIT_NUMBERS = 1 << 24
"""Logits in memory at a time (64 MB of float32) where top-k, top-p or a statistic need them."""


@dataclass(frozen=True)
class Packed:
    """Prompts and completions of b samples as one block without left padding, and the n tokens to score."""

    ids: Tensor  # [b, S] prompt, completion, padding on the right; on the network's device
    mask: Tensor  # [b, S] int64, on the network's device
    row: Tensor  # [n] sample of each token, row by row
    column: Tensor  # [n] its position t in the completion
    before: Tensor  # [n] its predecessor's position in the block: the state there predicts it
    target: Tensor  # [n] its id
    encoded_images: list[list[PatchedImage]] | None  # b lists; None where the rollout has none


def pack(rollout: TextRollout, rows: Tensor, device: torch.device, encoder: ImagePrompts | None = None) -> Packed:
    """Lay out samples [b], up to their last token of loss mask 1, for one pass; mask 0 before it is context."""
    mask = rollout.loss_mask[rows]
    length = (torch.arange(1, mask.shape[1] + 1) * (mask != 0)).amax(1)
    start = rollout.prompt_mask[rows].sum(1).long()
    size = int((start + length).max())
    ids = torch.zeros(len(rows), size, dtype=torch.int64)
    for number, sample in enumerate(rows.tolist()):
        prompt = rollout.prompt_ids[sample, rollout.prompt_mask[sample] != 0]
        completion = rollout.completion_ids[sample, : length[number]]
        ids[number, : len(prompt) + len(completion)] = torch.cat((prompt, completion))
    row, column = (mask != 0).nonzero(as_tuple=True)
    return Packed(
        ids=ids.to(device),
        mask=(torch.arange(size) < (start + length)[:, None]).long().to(device),
        row=row,
        column=column,
        before=start[row] + column - 1,
        target=rollout.completion_ids[rows[row], column],
        encoded_images=_encode_images(rollout, rows, encoder),
    )


def _encode_images(
    rollout: TextRollout, rows: Tensor, encoder: ImagePrompts | None
) -> list[list[PatchedImage]] | None:
    samples = rows.tolist()
    if rollout.images is None or not any(len(rollout.images[sample]) for sample in samples):
        return None
    if encoder is None:  # image tokens would be read as text
        raise UserError("The rollout has images, and this policy reads text. Build it with the model's processor.")
    ids = [rollout.prompt_ids[sample, rollout.prompt_mask[sample] != 0].tolist() for sample in samples]
    return encoder.encoded_images([rollout.images[sample] for sample in samples], ids, samples)


def scored_sampling(rollout: TextRollout, distribution: str) -> Sampling:
    """Return the distribution ("sampled" or "full") of the log-probs; a truncated rollout must have its token sets."""
    if distribution == "full":
        return Sampling(temperature=rollout.sampling.scale)
    if rollout.sampling.truncates and rollout.kept is None:
        raise UserError(
            f"The rollout was sampled with {rollout.sampling} and holds no token sets (`kept`), so its ratio is "
            'unknown. Use distribution="full" with full_log_prob, or sample without top_k and top_p.'
        )
    return rollout.sampling


def token_output(
    network: CausalNetwork,
    rollout: TextRollout,
    chosen: Tensor,
    *,
    sampling: Sampling,
    encoder: ImagePrompts | None,
    value: Callable[[Tensor], Tensor] | None = None,
    statistic: Callable[[Tensor], Tensor] | None = None,
    batch: int | None = None,
    routing: ExpertRouting | None = None,
    recomputed: bool = False,
) -> TokenOutput:
    """Compute log-prob, entropy, value and statistic [b, T] float32 of the tokens of some samples, 0 where the loss
    mask is 0; masked samples cost nothing. `value` maps [n, H] last hidden states to [n], `statistic` [n, V]
    log-probs; `batch` samples go through the model at a time, sorted by length, None takes all together. `routing`
    sends tokens where the rollout's routes say (`recomputed`: see `ExpertRouting.replayed`).
    """
    device = network.model.device
    mask = rollout.loss_mask[chosen] != 0
    live = mask.any(1).nonzero()[:, 0]
    outputs = [torch.zeros(mask.shape, device=device) for _ in range(4)]
    if (critics := getattr(getattr(value, "linear", None), "out_features", 1)) > 1:
        outputs[2] = torch.zeros(*mask.shape, critics, device=device)
    if len(live) == 0:  # so that the caller's backward has a graph
        outputs = [blank.requires_grad_(torch.is_grad_enabled()) for blank in outputs]
    if batch is not None:
        size = rollout.prompt_mask[chosen[live]].sum(1) + mask[live].sum(1)
        live = live[size.argsort()]
    for part in live.split(batch or len(live)) if len(live) else ():
        packed = pack(rollout, chosen[part], device, encoder)
        routes = None if rollout.routes is None else rollout.routes[chosen[part], : packed.ids.shape[1]]
        with nullcontext() if routing is None else routing.replayed(routes, recomputed=recomputed):
            features, _ = network.features(packed.ids, packed.mask, encoded_images=packed.encoded_images)
            states = features[packed.row.to(device), packed.before.to(device)]
            values = None if value is None else value(states)
            if statistic in (None, squared_mass) and not sampling.truncates and network.head is not None:
                squares = {"sum_p2": statistic is not None}  # which the head has without the logits
                terms = network.head.log_prob_entropy(states, packed.target.to(device), sampling.scale, **squares)
                log_prob, entropy, more = terms.log_prob, terms.entropy, [terms.sum_p2]
            else:
                token_sets = rollout.kept.rows(chosen[part]) if rollout.kept and sampling.truncates else None
                log_prob, entropy, *more = _through_logits(network, states, packed, sampling, token_sets, statistic)
        target = part[packed.row].to(device), packed.column.to(device)
        columns = (log_prob, entropy, values, more[0] if more else None)
        outputs = [
            blank if new is None else blank.index_put(target, new.float())
            for blank, new in zip(outputs, columns, strict=True)
        ]
    return TokenOutput(
        log_prob=outputs[0],
        entropy=outputs[1],
        value=outputs[2] if value else None,
        statistic=outputs[3] if statistic else None,
    )


def _through_logits(
    network: CausalNetwork,
    states: Tensor,
    packed: Packed,
    sampling: Sampling,
    token_sets: TokenSets | None,
    statistic: Callable[[Tensor], Tensor] | None,
) -> list[Tensor]:
    """Return log-prob, entropy and statistic, in pieces whose logits are recomputed for the gradient."""

    def piece(state: Tensor, chosen: Tensor, allowed: Tensor | None) -> tuple[Tensor, ...]:
        log_p = log_distribution(network.logits(state), sampling.scale, allowed)
        result = chosen_log_prob(log_p, chosen)
        return (result.log_prob, result.entropy, *(() if statistic is None else (statistic(log_p),)))

    pieces, chunk = [], max(1, LOGIT_NUMBERS // network.vocabulary)
    for start in range(0, len(states), chunk):
        part, allowed = slice(start, start + chunk), None
        if token_sets is not None:
            allowed = token_sets.mask(packed.row[part], packed.column[part], network.vocabulary).to(states.device)
        inputs = states[part], packed.target[part].to(states.device), allowed
        if torch.is_grad_enabled():
            pieces.append(checkpoint(piece, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(piece(*inputs))
    return [torch.cat(columns) for columns in zip(*pieces, strict=True)]


def expert_routes(
    network: CausalNetwork, rollout: TextRollout, routing: ExpertRouting, encoder: ImagePrompts | None, batch: int
) -> Tensor:
    """Return routes [B, S, L, k] int16, see `TextRollout.routes`; `batch` samples pass the model at a time."""
    recorded = []
    live = (rollout.loss_mask != 0).any(1).nonzero()[:, 0]
    for part in live.split(batch) if len(live) else ():
        packed = pack(rollout, part, network.model.device, encoder)
        with routing.recorded(len(part)) as routes:
            network.features(packed.ids, packed.mask, encoded_images=packed.encoded_images)
        recorded.append((part, torch.where(packed.mask[:, :, None, None] != 0, routes[0], -1).cpu()))
    longest = max((routes.shape[1] for _, routes in recorded), default=0)
    size = recorded[0][1].shape[2:] if recorded else (0, 0)
    joined = torch.full((len(rollout), longest, *size), -1, dtype=torch.int16)
    for part, routes in recorded:
        joined[part, : routes.shape[1]] = routes
    return joined
