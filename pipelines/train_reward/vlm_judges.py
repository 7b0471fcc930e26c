# SPDX-License-Identifier: Apache-2.0
"""Judges on a vision-language model, to be trained: HPSv3's head, yes/no answers, ratings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.errors import UserError
from visalign.rewards.hpsv3.head import RanknetHead
from visalign.rewards.hpsv3.model import REWARD_TOKEN, HPSv3Model
from visalign.rewards.questions.reward_dance_questions import PAIR, YES_NO
from visalign.rewards.questions.visual_quality_r1 import RATING
from visalign.rewards.vlm.bases import name_base
from visalign.rewards.vlm.engine import Ask, VisionLanguageJudge
from visalign.rewards.vlm.requests import check_fields
from visalign.rewards.vlm.template import SETTINGS, JudgeSettings, Template
from visalign.rewards.vlm.yes_no import NO, YES, token_set
from visalign.training.reward.batch import Outputs, RewardBatch

from .batches import pair_images, pair_labels, pair_rows
from .clip_judges import base_name, freeze, precision
from .config import TrainRewardConfig
from .examples import Example

LANGUAGE = r"(.*\.)?language_model\..*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""Where adapters go when none are named: the language part; the tower's features are then computed once."""
_TOKENS = 1 << 16
"""Tokens of one pass while training; data.micro_batch is what limits memory."""


def load_engine(config: TrainRewardConfig, device: torch.device) -> VisionLanguageJudge:
    """The vision-language model, nothing of it trainable yet."""
    return VisionLanguageJudge.from_pretrained(
        config.model.path,
        device=device,
        dtype=getattr(torch, config.model.dtype),
        max_tokens_per_batch=_TOKENS,
    )


def add_lora(model: Any, config: TrainRewardConfig) -> None:
    """Put new adapters into a model; their start comes from torch's global generator.

    Raises:
        UserError: model.lora does not fit the model.
    """
    from peft import LoraConfig

    lora = config.model.lora
    targets = LANGUAGE if lora.target_modules is None else list(lora.target_modules)
    alpha: Any = lora.alpha  # peft divides by the rank; fractions are fine
    given = LoraConfig(r=lora.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    try:
        model.add_adapter(given)
    except ValueError as error:
        raise UserError(
            f"model.lora cannot be added to {config.model.path!r}: {error} Name linear layers of this model "
            "in model.lora.target_modules, or leave it out."
        ) from error


class Hpsv3Judge:
    """Mean and log-deviation, read at the reward token by a new head.

    The token's embedding is trained with every setting but head; it is a parameter of its own, put in place
    of the model's row where the token is read.

    Args:
        config: of the job.
        device: where it is trained.
    """

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        self.config, self.engine = config, load_engine(config, device)
        size = self.engine.model.config.get_text_config().hidden_size
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            widths = config.model.head
            head = RanknetHead(size) if widths is None else RanknetHead(size, hidden=(widths[0], widths[1]))
            self.module = HPSv3Model(self.engine, head.to(device))
            self.module.add_token()
            model = self.engine.model
            if config.model.train == "lora":
                add_lora(model, config)
            elif config.model.train == "full":
                model.requires_grad_(True)
                freeze(model, config.model.frozen)
        self.module.head.requires_grad_(True)
        self.token: nn.Parameter | None = None
        if config.model.train == "lora":
            self.token = self._own_token()

    def _own_token(self) -> nn.Parameter:
        embedding = self.engine.model.get_input_embeddings()
        place = self.engine.processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        token = nn.Parameter(embedding.weight[place].detach().clone())

        def put(_: nn.Module, given: tuple[Tensor, ...], found: Tensor) -> Tensor:
            return torch.where((given[0] == place)[..., None], token.to(found), found)

        embedding.register_forward_hook(put)
        return token

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        own = [(f"backbone.{n}", p) for n, p in self.engine.model.named_parameters() if p.requires_grad]
        own += [(f"head.{name}", p) for name, p in self.module.head.named_parameters()]
        return own if self.token is None else [*own, ("reward_token", self.token)]

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        """Pairs: all left pictures, then all right ones."""
        prompts = [example.prompt for example in examples]
        batch = self.module.encode(pair_images(examples), [*prompts, *prompts])
        refuse(batch.reasons, [*prompts, *prompts])
        return RewardBatch(
            inputs=batch,
            size=len(examples),
            **pair_rows(len(examples)),  # type: ignore[arg-type]
            **pair_labels(examples, heldout=heldout),  # type: ignore[arg-type]
        )

    def __call__(self, inputs: Any) -> Outputs:
        with precision(self.engine.network.device, self.config.model.autocast):
            mean, log_std = self.module(inputs)
        return {"value": mean, "log_std": log_std}

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """What `HPSv3.from_pretrained` reads: adapters and head beside the base, or the whole model."""
        self.module.eval()
        model, path = self.engine.model, self.config.model.path
        if self.token is not None:
            place = self.engine.processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
            model.get_input_embeddings().weight[place] = self.token.to(model.dtype)
        full = self.config.model.train == "full"
        if full:
            model.to(getattr(torch, self.config.model.save_dtype))
        self.module.save_pretrained(folder, base=None if full else base_name(path, folder))
        shrink(folder, getattr(torch, self.config.model.save_dtype))


class AnswerJudge:
    """A judge that is read where its answer begins: yes/no on one picture or on two, or a rating.

    Args:
        config: of the job.
        device: where it is trained.
    """

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        self.config, self.engine = config, load_engine(config, device)
        self.kind = config.model.kind
        name, default = {"yes_no": ("yes_no", YES_NO), "pair": ("pair", PAIR), "rating": ("rating", RATING)}[
            self.kind
        ]
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
            yes, no = (
                token_set(self.engine, self.template.words.get(key), usual)  # type: ignore[arg-type]
                for key, usual in (("yes", YES), ("no", NO))
            )
            self.split, self.ids = len(yes), [*yes, *no]
        if config.model.train == "lora":
            with torch.random.fork_rng():
                torch.manual_seed(config.seed)
                add_lora(self.engine.model, config)
        else:
            self.engine.model.requires_grad_(True)
            freeze(self.engine.model, config.model.frozen)

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.engine.model.named_parameters() if p.requires_grad]

    def train(self, mode: bool = True) -> None:
        self.engine.model.train(mode)

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        """Pictures of pairs one by one, pairs in both orders, or rated pictures."""
        count, prompts = len(examples), [example.prompt for example in examples]
        if self.kind == "rating":
            rows = self._rows([Ask(images=[e.images[0]], prompt="-") for e in examples])
            target = torch.tensor([example.target for example in examples])
            return RewardBatch(inputs=(rows, 1.0), size=count, target=target)
        labels = pair_labels(examples, heldout=heldout)
        if self.kind == "yes_no":
            images = pair_images(examples)
            asks = [Ask(images=[i], prompt=p) for i, p in zip(images, [*prompts, *prompts], strict=True)]
            return RewardBatch(inputs=(self._rows(asks), 1.0), size=count, **pair_rows(count), **labels)  # type: ignore[arg-type]
        asks = [Ask(images=[e.images[1], e.images[0]], prompt=e.prompt) for e in examples]
        asks += [Ask(images=[e.images[0], e.images[1]], prompt=e.prompt) for e in examples]
        rows = self._rows(asks)
        if heldout:  # half the difference of both orders
            return RewardBatch(inputs=(rows, 0.5), size=count, **pair_rows(count), **labels)  # type: ignore[arg-type]
        first = torch.tensor([example.label for example in examples])
        return RewardBatch(inputs=(rows, 1.0), size=count, target=torch.cat([first, 1 - first]))

    def _rows(self, asks: list[Ask]) -> list[Any]:
        asks = [replace(ask, fields=self._fields) for ask in asks]  # as the judge that is saved asks
        rows, reasons = self.engine.encode(self.template, asks)
        refuse(reasons, [ask.prompt for ask in asks])
        return rows

    def __call__(self, inputs: Any) -> Outputs:
        rows, scale = inputs
        with precision(self.engine.network.device, self.config.model.autocast):
            states = self.engine.states(rows)
        logits = self.engine.head_logits(states, self.ids)
        log_mass = (logits.logsumexp(-1) - self.engine.log_total(states)).clamp(max=0.0)
        if self.kind != "rating":
            odds = logits[:, : self.split].logsumexp(-1) - logits[:, self.split :].logsumexp(-1)
            return {"value": scale * odds, "log_mass": log_mass}
        prob = logits.softmax(-1)
        scores = self.scores.to(prob)
        mean = prob @ scores
        spread = (prob * (scores - mean[:, None]).square()).sum(-1)
        return {"value": mean, "log_std": 0.5 * spread.clamp(min=1e-12).log(), "log_mass": log_mass}

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """What the judges' `from_pretrained` reads: `judge.json` with the LoRA, or with the whole model."""
        model = self.engine.model.eval()
        dtype = getattr(torch, self.config.model.save_dtype)
        settings = self.engine.settings
        rest = dict(settings.rest)
        if self.config.model.train == "lora":
            rest["base"] = base_name(self.config.model.path, folder)
            model.save_pretrained(folder)
            name_base(folder, rest["base"])
        else:
            rest.pop("base", None)
            model.to(dtype).save_pretrained(folder)
            self.engine.processor.save_pretrained(folder)
        templates = {**settings.templates, self.template.name: self.template}
        JudgeSettings(templates=templates, positions=self.engine.positions, rest=rest).write(folder)
        shrink(folder, dtype)


def refuse(reasons: Sequence[str | None], prompts: Sequence[str]) -> None:
    """Refuse examples that the model cannot read, by UserError."""
    for prompt, reason in zip(prompts, reasons, strict=True):
        if reason is not None:
            shown = prompt if len(prompt) <= 80 else f"{prompt[:80]}… ({len(prompt):,} characters)"
            raise UserError(
                f"An example with the prompt {shown!r} cannot be learnt: {reason}. Take it out of the set."
            )


def shrink(folder: Path, dtype: torch.dtype) -> None:
    """Rewrite the adapters and the head of a folder in another dtype."""
    from safetensors.torch import load_file, save_file

    for name in ("adapter_model.safetensors", "reward_head.safetensors"):
        file = folder / name
        if file.is_file():
            save_file({key: value.to(dtype) for key, value in load_file(file).items()}, file)
    readable(folder)


def readable(folder: Path) -> None:
    """Give weights the mode of the settings beside them: safetensors makes its files readable by one
    alone."""
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / SETTINGS).stat().st_mode)
