# SPDX-License-Identifier: Apache-2.0
"""HPSv3 as a module: a vision-language model, read at one token by a head that gives mean and log-deviation.

Source: Ma et al., "HPSv3", arXiv 2508.03789, and its released code for the head and the token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.core.preference.uncertainty import soft_clamp
from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm.engine import Query, TokenRow, VisionLanguageEngine
from visalign.rewards.vlm.loading import name_base
from visalign.rewards.vlm.template import JudgeSettings, Template, question

from .head import RanknetHead

REWARD_TOKEN = "<|Reward|>"
HEAD_FILE = "reward_head.safetensors"
CLAMP = (-7.0, 3.0)
"""Bounds of the log-deviation of a head that is trained here."""

TEMPLATE = question("hpsv3", "Quality, and match with the caption: {prompt} " + REWARD_TOKEN)
"""Question for heads that are trained here; the published head needs the published text."""


@dataclass(frozen=True)
class HPSv3Batch:
    """Tokenised images and prompts, before any forward pass."""

    rows: list[TokenRow]  # N valid rows
    index: list[int]  # Index of each row among the B given ones
    reasons: list[str | None]  # Reason why one of the B cannot be judged; None for the others
    iteration: Tensor | float = 0.0  # RL iteration in [0, 1], or one of each row, for HPSv3++'s head

    def __len__(self) -> int:
        return len(self.rows)


class HPSv3Model(nn.Module):
    """(mean, log-deviation) of images and prompts, float32, with gradients where parameters require them.

    The caller chooses what is trained: `backbone` whole, a LoRA in it (`backbone.add_adapter(config)`), or only
    `head`. A tower without trainable parameters runs once per image; its features are cached.

    The engine's tokenizer needs `REWARD_TOKEN` before rows are encoded, and the template has it once (that of the
    engine's folder, or `TEMPLATE`, when None). `clamp` bounds the log-deviation softly; None for heads that were
    trained without.
    """

    _no_split_modules = ("RanknetHead", "ConditionedHead")  # of another dtype than the backbone

    def __init__(
        self,
        engine: VisionLanguageEngine,
        head: RanknetHead,
        *,
        template: Template | None = None,
        clamp: tuple[float, float] | None = CLAMP,
    ) -> None:
        super().__init__()
        self.engine, self.clamp = engine, clamp
        self.backbone: nn.Module = engine.model
        self.head = head
        self.template = template or engine.template("hpsv3", TEMPLATE)
        count = self.template.text.count(REWARD_TOKEN)
        if count != 1 or self.template.images != 1:
            raise RewardError(
                f"The template {self.template.name!r} needs one image, one {REWARD_TOKEN}; it has {count} of these."
            )
        width, outputs = head.rm_head[0].in_features, head.rm_head[5].out_features
        size = engine.model.config.get_text_config().hidden_size
        if width != size or outputs != 2:
            raise RewardError(
                f"The head maps {width} numbers to {outputs}; needed are {size} and 2, mean and log-deviation."
            )

    @classmethod
    def new(cls, engine: VisionLanguageEngine, *, seed: int = 0, **options: Any) -> HPSv3Model:
        """Create a model with a new head, initialised from the seed; adds a missing token."""
        size = engine.model.config.get_text_config().hidden_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = RanknetHead(size)
        model = cls(engine, head.to(engine.network.device), **options)
        model.add_token()
        return model

    def add_token(self, embedding: Tensor | None = None) -> None:
        """Add the reward token if it is missing; None as embedding takes the mean of all others."""
        is_new = add_reward_tokens(self.engine, [REWARD_TOKEN])
        model: Any = self.engine.model
        token_id, weight = self._token_id, model.get_input_embeddings().weight
        requires_grad = weight.requires_grad
        if token_id >= len(weight):
            model.resize_token_embeddings(token_id + 1, mean_resizing=False)
        weight = model.get_input_embeddings().weight
        if is_new or embedding is not None:
            with torch.no_grad():
                weight[token_id] = weight[:token_id].float().mean(0) if embedding is None else embedding.to(weight)
        weight.requires_grad_(requires_grad)

    @property
    def _token_id(self) -> int:
        return self.engine.processor.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)

    def encode(self, images: Sequence[Tensor], prompts: Sequence[str]) -> HPSv3Batch:
        """Tokenise B images [3, H, W], float in [0, 1] or uint8, with their prompts."""
        pairs = zip(images, prompts, strict=True)
        queries = [Query(images=[image], prompt=prompt) for image, prompt in pairs]
        rows, reasons = self.engine.encode(self.template, queries, at=REWARD_TOKEN)
        valid = [(index, row) for index, row in enumerate(rows) if row is not None]
        return HPSv3Batch([row for _, row in valid], [index for index, _ in valid], reasons)

    def features(self, batch: HPSv3Batch) -> Tensor:
        """Compute hidden states [N, H] float32 at the reward tokens: all that training the head needs."""
        return self.engine.states(batch.rows)

    def read(self, features: Tensor, iteration: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        """(mean [N], log-deviation [N]) float32 of hidden states [N, H]."""
        mean, log_std = self.head(features, iteration).unbind(1)
        return mean, log_std if self.clamp is None else soft_clamp(log_std, *self.clamp)

    def forward(self, batch: HPSv3Batch) -> tuple[Tensor, Tensor]:
        """(mean [N], log-deviation [N]) float32, in the order of `batch.rows`."""
        return self.read(self.features(batch), batch.iteration)

    def save_pretrained(self, folder: str | Path, *, base: str | None = None) -> None:
        """Write what `HPSv3` reads.

        With `base` (packaged name, hub id, or folder relative to this one) the vision-language model's weights are not
        written; only a LoRA in it, the head, and the embedding of the token. None writes the whole model and its
        processor.
        """
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = self.engine.model
        has_adapter = getattr(model, "_hf_peft_config_loaded", False)
        if base is None and has_adapter:
            raise RewardError("The model holds a LoRA; name its base: save_pretrained(folder, base=...).")
        if base is None or has_adapter:
            model.save_pretrained(folder)
        if has_adapter:
            name_base(folder, str(base))
        if base is None:
            self.engine.processor.save_pretrained(folder)
        tensors = {key: value.detach().cpu().contiguous() for key, value in self.head.state_dict().items()}
        tensors["reward_token"] = model.get_input_embeddings().weight[self._token_id].detach().cpu().clone()
        save_file(tensors, folder / HEAD_FILE)
        settings = self.engine.settings
        rest = {
            **settings.rest,
            "head": {"type": "ranknet", "clamp": None if self.clamp is None else list(self.clamp)},
            "pixels": pixel_settings(self.engine),
            **({} if base is None else {"base": base}),
        }
        templates = {**settings.templates, "hpsv3": self.template}
        JudgeSettings(templates=templates, positions=self.engine.positions, rest=rest).write(folder)
        (folder / HEAD_FILE).chmod((folder / "judge.json").stat().st_mode)


def add_reward_tokens(engine: VisionLanguageEngine, tokens: Sequence[str]) -> bool:
    """Add missing reward tokens to the tokenizer, in their order; return True if one was missing."""
    from transformers import AddedToken

    missing = [token for token in tokens if token not in engine.rows.specials]
    if missing:
        added = [AddedToken(token, special=True, normalized=False) for token in missing]
        engine.processor.tokenizer.add_tokens(added, special_tokens=True)
        engine.rows.refresh()
    return bool(missing)


def pixel_settings(engine: VisionLanguageEngine) -> dict[str, Any]:
    """Return "pixels" of a judge.json: the sizes to which images are resized or cropped."""
    settings = engine.network.images.settings()
    return {name: settings[name] for name in ("min_pixels", "max_pixels", "window") if name in settings}


def read_clamp(head: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the bounds of the log-deviation in the "head" of a judge.json."""
    clamp = head.get("clamp", CLAMP)
    return None if clamp is None else (float(clamp[0]), float(clamp[1]))


def mark_not_finite(rows: Sequence[int], value: Tensor, std: Tensor, reasons: list[str | None]) -> None:
    """Give each of the rows without finite mean and deviation its reason."""
    for row in rows:
        mean, deviation = float(value[row]), float(std[row])
        if reasons[row] is None and not (math.isfinite(mean) and math.isfinite(deviation)):
            reasons[row] = f"the model gave mean {mean} and deviation {deviation}"
