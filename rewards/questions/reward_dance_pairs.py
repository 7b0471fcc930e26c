# SPDX-License-Identifier: Apache-2.0
"""RewardDance on pairs: a picture against a reference, in both orders; see `reward_dance` for the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visalign.core import both_orders
from visalign.interfaces import Metadata, Preferences
from visalign.rewards.base.contract import Request, prompt_problem, read_request, scatter
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import load_images
from visalign.rewards.vlm.requests import check_fields, engine_of
from visalign.rewards.vlm.template import Template
from visalign.rewards.vlm.yes_no import MIN_MASS, Odds, YesNoReader

from .reward_dance_questions import PAIR, PAIR_EXPLAIN, check_options, reasons_behind


class RewardDancePairs:
    """Whether one of two pictures is better: the question with a reference, in both orders.

    With ℓ(a, b) the log-odds of yes to "is b better than the reference a", the left picture's log-odds are
    ½ (ℓ(right, left) − ℓ(left, right)): a liking for one place cancels. Parts: "left_second", ℓ(right, left),
    "left_first", −ℓ(left, right), "second_bias", half of their difference, and "mass", the smaller one of
    both orders.
    """

    name = "reward_dance_pairs"

    def __init__(
        self,
        model: Any = "shapes-pairs",
        *,
        both_orders: bool = True,
        instruction: str = "",
        decision_first: bool = False,
        write_reasons: bool = False,
        template: Template | None = None,
        yes: Sequence[str] | None = None,
        no: Sequence[str] | None = None,
        min_mass: float = MIN_MASS,
        max_new_tokens: int = 128,
        device: str | torch.device = "cpu",
        precision: str = "fp32",
    ) -> None:
        """Load the model and choose the question; see `RewardDance` for what is not said here.

        Args:
            model: as for `RewardDance`.
            both_orders: ask in both orders; otherwise once, with the right picture as the reference, as the
                paper does.
            instruction: task-specific criteria.
            decision_first: ask for reasons behind the decision (template "pair_explain").
            write_reasons: have them written, into `Preferences.text`, for the order with the left one second.
            template: instead of the folder's "pair" or "pair_explain", or ours; two image slots, the first
                for the reference.
            yes: spellings of yes.
            no: spellings of no.
            min_mass: smallest probability of yes and no together, in each order.
            max_new_tokens: of a reason.
            device: where the model runs.
            precision: of its weights.

        Raises:
            ValueError: as for `RewardDance`.
            RewardError: as for `RewardDance`.
        """
        check_options(self.name, "log_odds", decision_first, write_reasons)
        self.engine = engine_of(model, device=device, precision=precision)
        kind = ("pair_explain", PAIR_EXPLAIN) if decision_first else ("pair", PAIR)
        self.template = template or self.engine.template(*kind)
        self._fields = check_fields(self.template, instruction=instruction)
        self._read = YesNoReader(self.engine, self.template, yes=yes, no=no, min_mass=min_mass)
        self.both_orders = both_orders
        self._tokens = max_new_tokens if write_reasons else 0
        self._options = {
            "both_orders": both_orders,
            "instruction": instruction,
            "min_mass": min_mass,
            **self._read.spellings,
        }

    @property
    def identity(self) -> Identity:
        """What the scores depend on."""
        return Identity(judge=self.name, **self.engine.identity_fields(self.template, **self._options))

    def compare(
        self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare B pairs of images; metadata is not looked at.

        Raises:
            ValueError: the lengths differ.
        """
        one = read_request(self.name, left, prompts, metadata)
        two = load_images(right)
        if len(two) != len(one):
            raise ValueError(f"{self.name}: {len(one)} left and {len(two)} right images; give pairs.")
        numbers = torch.arange(len(one))
        joined = type(two)(one.images.images + two.images, one.images.reasons + two.reasons)
        request = Request(joined, one.prompts * 2, one.metadata * 2)
        return self._compare(request, torch.stack([numbers, numbers + len(one)], 1))

    def compare_pairs(
        self, images: Any, pairs: Tensor, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare numbered images: n images with n prompts, pairs [N, 2] (left, right) of one prompt each."""
        return self._compare(read_request(self.name, images, prompts, metadata), pairs.cpu())

    def _compare(self, request: Request, pairs: Tensor) -> Preferences:
        from visalign.rewards.vlm.engine import Ask

        reasons: list[str | None] = [self._pair_reason(request, i, j) for i, j in pairs.tolist()]
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        asks = []
        for i, j in pairs[rows].tolist():
            for first, second in ((j, i), (i, j))[: 1 + self.both_orders]:
                shown = [request.images.images[first], request.images.images[second]]
                asks.append(Ask(images=shown, prompt=request.prompts[i], fields=self._fields))  # type: ignore[arg-type]  # unreadable ones have a reason
        odds, step = self._read(asks), 1 + self.both_orders
        for place, row in enumerate(rows):
            reasons[row] = next(filter(None, odds.reasons[place * step : (place + 1) * step]), None)
        second = odds.log_odds[::step]
        other = odds.log_odds[1::step] if self.both_orders else torch.full_like(second, torch.nan)
        log_odds, bias = both_orders(second, other)
        columns = {
            "left_second": second,
            "left_first": -other,
            "second_bias": bias,
            "mass": odds.mass.view(-1, step).amin(1) if rows else odds.mass,
        }
        valid = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
        chosen = log_odds if self.both_orders else second
        full = torch.where(valid, scatter(chosen, rows, len(pairs)), torch.nan)
        parts = {k: torch.where(valid, scatter(v, rows, len(pairs)), torch.nan) for k, v in columns.items()}
        text = None
        if self._tokens:
            told = Odds(second, odds.mass[::step], odds.decision[::step], odds.reasons[::step])
            said = reasons_behind(self.engine, self.template, asks[::step], told, self._tokens)
            text = [""] * len(pairs)
            for row, reason in zip(rows, said, strict=True):
                text[row] = reason
        return Preferences(
            prob=full.sigmoid(), valid=valid, log_odds=full, parts=parts, text=text, reason=reasons
        )

    def _pair_reason(self, request: Request, left: int, right: int) -> str | None:
        """Why a pair cannot be asked about; the prompt counts where the template asks for it."""
        for side, row in (("left", left), ("right", right)):
            if request.images.reasons[row] is not None:
                return f"{side}: {request.images.reasons[row]}"
        if "prompt" not in self.template.fields:
            return None
        if request.prompts[left] != request.prompts[right]:
            return "the two images have different prompts"
        return prompt_problem(request.prompts[left])
