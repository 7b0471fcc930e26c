# SPDX-License-Identifier: Apache-2.0
"""RewardDance: a vision-language model's log-odds of "yes" to one question about an image, or about two.

Source: Wu et al., "RewardDance: Reward Scaling in Visual Generation", arXiv 2509.08826; no code is out.
The reward is P("yes") where the answer begins, after one prefill; a reason, where one is wanted, is written
behind the decision and is not needed for the score. Choices of ours, because the paper leaves them open or
because a reward needs them: log-odds over all spellings of yes and no instead of the probability of one token
(a probability saturates, its left-over mass is reported beside it); a pair asked in both orders; the wording
of the questions. A model folder's `judge.json` replaces the wording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core import both_orders
from visalign.interfaces import Metadata, Preferences, RewardCapabilities, Scores
from visalign.rewards.base.contract import (
    Request,
    make_scores,
    prompt_problem,
    read_pairs,
    read_request,
    scatter,
)
from visalign.rewards.base.identity import Identity
from visalign.rewards.vlm.engine import engine_of
from visalign.rewards.vlm.requests import Query, check_fields, requests
from visalign.rewards.vlm.template import Template, question
from visalign.rewards.vlm.yes_no import MIN_MASS, Odds, YesNoReader

Value = Literal["log_odds", "prob"]
UNITS: dict[str, tuple[str, tuple[float, float]]] = {
    "log_odds": ("log-odds of yes", (float("-inf"), float("inf"))),
    "prob": ("probability of yes", (0.0, 1.0)),
}


_ONE = (
    "A text-to-image model made this picture for the caption below.\nCaption: {prompt}{instruction}\n"
    "Judge whether it shows all that the caption asks for, and nothing that contradicts it. "
)
_TWO = (
    "A text-to-image model made both pictures for the caption below. The first one is the reference.\n"
    "Caption: {prompt}{instruction}\nJudge whether the second picture is better than the first. "
)
_WORD, _REASON = "Answer yes or no.", "Answer yes or no first, then give your reasons in a few sentences."
YES_NO = question("yes_no", _ONE + _WORD)
EXPLAIN = question("explain", _ONE + _REASON)
PAIR = question("pair", _TWO + _WORD, images=("", ""))
PAIR_EXPLAIN = question("pair_explain", _TWO + _REASON, images=("", ""))


class _YesNoJudge:
    """What both judges share: a model, a question, and how its answer is read."""

    name: str

    def __init__(
        self,
        model: Any,
        *,
        short: Template,
        long: Template,
        instruction: str = "",
        decision_first: bool = False,
        write_reasons: bool = False,
        template: Template | None = None,
        yes: Sequence[str] | None = None,
        no: Sequence[str] | None = None,
        min_mass: float = MIN_MASS,
        max_new_tokens: int = 128,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        options: Mapping[str, Any],
        **loading: Any,
    ) -> None:
        """Load the model and choose the question.

        Args:
            model: folder, hub id or packaged name of a Qwen2-VL, Qwen2.5-VL, Qwen3-VL or InternVL model; or a
                loaded `rewards.vlm.VisionLanguageEngine`.
            short: our question, where the folder has none of its name.
            long: the same, asking for reasons behind the decision.
            instruction: task-specific criteria, put where the template has {instruction}.
            decision_first: ask for reasons behind the decision; the score is read at the decision all the
                same.
            write_reasons: also have them written, into `text`; needs decision_first.
            template: instead of the folder's, or ours.
            yes: spellings of yes instead of the template's, each one token of the model.
            no: spellings of no.
            min_mass: smallest probability of yes and no together that counts as an answer.
            max_new_tokens: of a reason.
            device: where the model runs.
            precision: of its weights, as in `engine_of`.
            options: of the judge itself, for the identity.
            **loading: of `engine_of`: attention, device_map, quantization, max_tokens_per_batch, ...

        Raises:
            ValueError: options that are not allowed, or an instruction that the template has no place for.
            RewardError: the model or its answer tokens cannot be used.
        """
        if write_reasons and not decision_first:
            raise ValueError(
                f"{self.name}: write_reasons without decision_first: the question then asks for one word. "
                "Set both."
            )
        self.engine = engine_of(model, self.name, device=device, precision=precision, **loading)
        ours = long if decision_first else short
        self.template = template or self.engine.template(ours.name, ours)
        self._fields = check_fields(self.template, instruction=instruction)
        self._read = YesNoReader(self.engine, self.template, yes=yes, no=no, min_mass=min_mass)
        self._tokens = max_new_tokens if write_reasons else 0
        fixed = {**options, "instruction": instruction, "min_mass": min_mass}
        self._options = {**fixed, **self._read.spellings}

    @property
    def identity(self) -> Identity:
        """What the scores depend on."""
        return Identity(judge=self.name, **self.engine.identity_fields(self.template, **self._options))

    def _texts(self, rows: list[int], size: int, queries: Sequence[Any], odds: Odds) -> list[str] | None:
        """What the model writes behind its decision, decision included, without chance; "" where it made
        none, None where reasons are not asked for."""
        if not self._tokens:
            return None
        text = [""] * size
        made = [place for place, reason in enumerate(odds.reasons) if reason is None]
        decided = [replace(queries[place], continuation=odds.decision[place]) for place in made]
        reply = self.engine.generate(
            self.template, decided, answers=1, temperature=0.0, max_new_tokens=self._tokens
        )
        for place, answers in zip(made, reply.texts, strict=True):
            text[rows[place]] = odds.decision[place] + (answers[0] if answers else "")
        return text


class RewardDance(_YesNoJudge):
    """Log-odds (or probability) that the answer to a yes/no question about one image is yes.

    Parts of the scores: "log_odds", "prob" (σ of it), "mass" (what yes and no have of the whole vocabulary's
    probability) and "prob_vocabulary" (what yes alone has of it).
    """

    name = "reward_dance"
    higher_is_better = True

    def __init__(
        self,
        model: Any = "shapes-vlm",
        *,
        value: Value = "log_odds",
        device: str | torch.device = "cpu",
        **asking: Any,
    ) -> None:
        """Load the model and choose the question (template "yes_no", or "explain").

        Args:
            model: as `_YesNoJudge.__init__` says, with the other options.
            value: "log_odds", or "prob" as in the paper, over yes and no.
            device: where the model runs.
            **asking: instruction, decision_first, write_reasons, template, yes, no, min_mass, max_new_tokens,
                precision, and those of `engine_of`.
        """
        if value not in UNITS:
            raise ValueError(f"{self.name}: value is {value!r}; allowed are {', '.join(UNITS)}.")
        self.value, self.unit, self.range = value, *UNITS[value]
        super().__init__(model, short=YES_NO, long=EXPLAIN, device=device, options={"value": value}, **asking)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score per (image, prompt); metadata is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons, self._fields)
        odds = self._read(queries)
        for row, reason in zip(rows, odds.reasons, strict=True):
            reasons[row] = reason
        prob = odds.log_odds.sigmoid()
        columns = {
            "log_odds": odds.log_odds,
            "prob": prob,
            "mass": odds.mass,
            "prob_vocabulary": prob * odds.mass,
        }
        parts = {key: scatter(column, rows, len(request)) for key, column in columns.items()}
        text = self._texts(rows, len(request), queries, odds)
        return make_scores(parts[self.value], reasons, self.unit, parts=parts, text=text)


class RewardDancePairs(_YesNoJudge):
    """Whether one of two images is better: the question with a reference, in both orders.

    With ℓ(a, b) the log-odds of yes to "is b better than the reference a", the left image's log-odds are
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
        device: str | torch.device = "cpu",
        **asking: Any,
    ) -> None:
        """Load the model and choose the question (template "pair", or "pair_explain", of two image slots, the
        first for the reference).

        Args:
            model: as for `RewardDance`.
            both_orders: ask in both orders; otherwise once, with the right image as the reference, as the
                paper does.
            device: where the model runs.
            **asking: as for `RewardDance`; `min_mass` counts in each order, and reasons are written for the
                order with the left one second.
        """
        self.both_orders = both_orders
        self.capabilities = RewardCapabilities(both_orders=both_orders)
        options = {"both_orders": both_orders}
        super().__init__(model, short=PAIR, long=PAIR_EXPLAIN, device=device, options=options, **asking)

    def compare(
        self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare B pairs of images; metadata is not looked at."""
        return self._compare(*read_pairs(self.name, left, right, prompts, metadata))

    def compare_pairs(
        self, images: Any, pairs: Tensor, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare numbered images: n images with n prompts, pairs [N, 2] (left, right) of one prompt each."""
        return self._compare(read_request(self.name, images, prompts, metadata), pairs.cpu())

    def _compare(self, request: Request, pairs: Tensor) -> Preferences:
        reasons: list[str | None] = [self._pair_reason(request, i, j) for i, j in pairs.tolist()]
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        queries = []
        for i, j in pairs[rows].tolist():
            for first, second in ((j, i), (i, j))[: 1 + self.both_orders]:
                shown = [request.images.images[first], request.images.images[second]]
                queries.append(Query(images=shown, prompt=request.prompts[i], fields=self._fields))  # type: ignore[arg-type]  # unreadable ones have a reason
        odds, step = self._read(queries), 1 + self.both_orders
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
        told = Odds(second, odds.mass[::step], odds.decision[::step], odds.reasons[::step])
        text = self._texts(rows, len(pairs), queries[::step], told)
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
