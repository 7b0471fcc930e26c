# SPDX-License-Identifier: Apache-2.0
"""Judges on a vision-language model, to be trained: HPSv3's head, yes/no answers, ratings, critics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.rewards.chat.deepseek_grm import META
from visalign.rewards.hpsv3.head import HIDDEN, RanknetHead
from visalign.rewards.hpsv3.model import REWARD_TOKEN, HPSv3Model
from visalign.rewards.questions.reward_dance import PAIR, YES_NO
from visalign.rewards.questions.visual_quality_r1 import RATING
from visalign.rewards.vlm.engine import Query
from visalign.rewards.vlm.requests import check_fields
from visalign.rewards.vlm.template import Template
from visalign.rewards.vlm.yes_no import NO, YES, token_set
from visalign.training.reward.batch import Outputs, RewardBatch

from .config import AnswerModel, Hpsv3Model
from .examples import Example, pair_batch, pair_images
from .judges import SeeingJudge, base_name, cast, freeze, moving, refuse, shrink


class Hpsv3Judge(SeeingJudge):
    """Mean and log-deviation, read at the reward token by a new head.

    The token's embedding is trained with every setting but head; it is a parameter of its own, put in place
    of the model's row where the token is read.
    """

    def __init__(self, model: Hpsv3Model, seed: int, device: torch.device) -> None:
        super().__init__(model, device)
        network = self.engine.model
        size = network.config.get_text_config().hidden_size
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            widths = model.head or HIDDEN
            head = RanknetHead(size, hidden=(widths[0], widths[1]))
            self.judge = HPSv3Model(self.engine, head.to(device))
            self.judge.add_token()
            if model.train == "lora":
                self.add_lora()
            elif model.train == "full":
                network.requires_grad_(True)
                freeze(network, model.frozen)
        self.judge.head.requires_grad_(True)
        self.module = self.judge
        if model.train == "lora":
            self._own_token()

    @property
    def token(self) -> Any:
        """The reward token's embedding, where it is a parameter of its own."""
        return getattr(self.judge, "reward_token", None)

    def _own_token(self) -> None:
        embedding = self.engine.model.get_input_embeddings()
        token_id = self.engine.processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        start = embedding.weight[token_id].detach().clone()
        self.judge.register_parameter("reward_token", nn.Parameter(start))

        def put(_: nn.Module, arguments: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
            return torch.where((arguments[0] == token_id)[..., None], self.token.to(embedded), embedded)

        embedding.register_forward_hook(put)

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        parameters = [(f"backbone.{name}", p) for name, p in moving(self.engine.model)]
        parameters += [(f"head.{name}", p) for name, p in self.judge.head.named_parameters()]
        return parameters if self.token is None else [*parameters, ("reward_token", self.token)]

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        """Pairs: all left images, then all right ones."""
        prompts = [example.prompt for example in examples]
        batch = self.judge.encode(pair_images(examples), [*prompts, *prompts])
        refuse(batch.reasons, [*prompts, *prompts])
        return pair_batch(batch, examples, heldout=heldout)

    def __call__(self, inputs: Any) -> Outputs:
        with self.precision():
            mean, log_std = self.judge(inputs)
        return {"value": mean, "log_std": log_std}

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write what `HPSv3.from_pretrained` reads: adapters and head beside the base, or the whole model."""
        self.judge.eval()
        model, path = self.engine.model, self.settings.path
        if self.token is not None:
            token_id = self.engine.processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
            model.get_input_embeddings().weight[token_id] = self.token.to(model.dtype)
        full = self.settings.train == "full"
        if full:
            cast(model, self.save_dtype)
        self.judge.save_pretrained(folder, base=None if full else base_name(path, folder))
        shrink(folder, self.save_dtype)


class AnswerJudge(SeeingJudge):
    """A judge that is read where its answer begins: yes/no on an image, on two, or on what was written of
    one; or a rating."""

    def __init__(self, model: AnswerModel, seed: int, device: torch.device) -> None:
        super().__init__(model, device)
        self.kind = model.kind
        name, default = {
            "yes_no": ("yes_no", YES_NO),
            "pair": ("pair", PAIR),
            "rating": ("rating", RATING),
            "critique": (META.name, META),
        }[self.kind]
        self.template: Template = self.engine.template(name, default)
        self._fields = check_fields(self.template)
        if self.kind == "rating":
            words = self.template.words["scores"]
            self.template = replace(
                self.template, words={"scores": words}
            )  # whole ratings are what is learnt
            self.scores = torch.tensor([float(str(word)) for word in words])
            self.ids = self.engine.token_ids([str(word) for word in words])
        else:
            self.yes, self.no = yes_and_no(self.engine, self.template)
        if model.train == "lora":
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                self.add_lora()
        else:
            self.engine.model.requires_grad_(True)
            freeze(self.engine.model, model.frozen)

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        """Images of pairs one by one, pairs in both orders, rated images, or answers about images."""
        count, prompts = len(examples), [example.prompt for example in examples]
        if self.kind == "rating":
            rows = self._rows([Query(images=[e.images[0]], prompt="-") for e in examples])
            target = torch.tensor([example.target for example in examples])
            return RewardBatch(inputs=(rows, 1.0), size=count, target=target)
        if self.kind == "critique":
            asks = [
                Query(images=[e.images[0]], prompt=e.prompt, fields={"critique": e.critique})
                for e in examples
            ]
            target = torch.tensor([example.target for example in examples])
            return RewardBatch(inputs=(self._rows(asks), 1.0), size=count, target=target)
        if self.kind == "yes_no":
            images = pair_images(examples)
            asks = [Query(images=[i], prompt=p) for i, p in zip(images, [*prompts, *prompts], strict=True)]
            return pair_batch((self._rows(asks), 1.0), examples, heldout=heldout)
        asks = [Query(images=[e.images[1], e.images[0]], prompt=e.prompt) for e in examples]
        asks += [Query(images=[e.images[0], e.images[1]], prompt=e.prompt) for e in examples]
        rows = self._rows(asks)
        if heldout:  # half the difference of both orders
            return pair_batch((rows, 0.5), examples, heldout=True)
        first = torch.tensor([example.label for example in examples])
        return RewardBatch(inputs=(rows, 1.0), size=count, target=torch.cat([first, 1 - first]))

    def _rows(self, asks: list[Query]) -> list[Any]:
        asks = [
            replace(ask, fields={**ask.fields, **self._fields}) for ask in asks
        ]  # as the judge that is saved asks
        rows, reasons = self.engine.encode(self.template, asks)
        refuse(reasons, [ask.prompt for ask in asks])
        return rows

    def __call__(self, inputs: Any) -> Outputs:
        rows, scale = inputs
        with self.precision():
            states = self.engine.states(rows)
        if self.kind != "rating":
            odds, log_mass = self.odds(states, self.yes, self.no)
            return {"value": scale * odds, "log_mass": log_mass}
        logits, log_mass = self.answers(states, self.ids)
        prob = logits.softmax(-1)
        scores = self.scores.to(prob)
        mean = prob @ scores
        spread = (prob * (scores - mean[:, None]).square()).sum(-1)
        return {"value": mean, "log_std": 0.5 * spread.clamp(min=1e-12).log(), "log_mass": log_mass}

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write what the judges' `from_pretrained` reads: `judge.json` with the LoRA or the whole model."""
        self.write(folder, [self.template])


def yes_and_no(engine: Any, template: Template) -> tuple[list[int], list[int]]:
    """Ids of the first tokens of both answers."""
    yes, no = (
        token_set(engine, template.words.get(key), usual)  # type: ignore[arg-type]
        for key, usual in (("yes", YES), ("no", NO))
    )
    return yes, no
