# SPDX-License-Identifier: Apache-2.0
"""HPSv3 from disk, in two layouts.

Ours (`HPSv3Model.save_pretrained`): `judge.json` with a "head", `reward_head.safetensors`, and either the
whole model or the name of its base with a LoRA.

The published one: one file of 736 tensors named `visual.*`, `model.*`, `lm_head.weight`, `rm_head.*` (the
names of transformers 4; 5 nests tower and language model in `model`), in which the vocabulary holds the
reward token (151 658 for the 7B model). Its config and processor are those of the model that it was trained
from (`BASE`, of which only the small files are fetched). Its instruction is built in (`vlm.published`); a
`judge.json` next to the file ({"templates": {"hpsv3": ...}}, see `vlm.template`) or `template` replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.data.assets import resolve_model
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.identity import fingerprint
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.loading import ADAPTER, PLACING, base_of, find_model, load_processor, placed, placing_options
from visalign.rewards.vlm.published import published_prompt
from visalign.rewards.vlm.template import SETTINGS, JudgeSettings, Template, question
from visalign.rewards.weights.checkpoint_files import check_fit, quiet_loading, read_tensors
from visalign.rewards.weights.hub import SMALL_FILES, local_folder, revision_of

from .head import ConditionedHead, RanknetHead
from .model import HEAD_FILE, REWARD_TOKEN, HPSv3Model, add_reward_tokens, read_clamp

PIXELS = 448 * 448
"""Smallest and largest size of a resized image in the published model."""
_FILES = ("*.safetensors", "*.pt", "*.pth", "*.bin")
HEADS = ("rm_head.", "cap_encoder.", "cond_encoder.", "film_gen.")  # Those of HPSv3++ among them
BASE = "Qwen/Qwen2-VL-7B-Instruct"
"""Hub id of the config and processor that the published weights need."""

PUBLISHED_TEMPLATE = question("hpsv3", published_prompt("hpsv3"))
"""Question that the published weights were trained with."""


def load_hpsv3(
    path_or_id: str | Path, *, base: str | Path | None = None, template: Template | None = None, **options: Any
) -> HPSv3Model:
    """Load either layout, in evaluation mode and without gradients.

    The model is a folder, packaged name, hub id, or the published file itself. `base` has config and processor for the
    published layout (`BASE` where its folder has none); in our layout it replaces what judge.json names. `options` are
    those of `VisionLanguageEngine.from_pretrained`; the head is always float32.
    """
    path = find_weights(path_or_id)
    if path.is_dir() and "head" in JudgeSettings.read(path).rest:
        return _load_ours(path, base, template, **options).eval().requires_grad_(False)
    engine, tensors = published_engine(path, base, default_base=BASE, heads=HEADS, **options)
    head = RanknetHead.from_state_dict(tensors).to(engine.network.device)
    if isinstance(head, ConditionedHead) and engine.positions == "1d":
        raise RewardError("HPSv3++ was trained with three-axis positions. Give positions='mrope'.")
    model = HPSv3Model(engine, head, template=template or engine.template("hpsv3", PUBLISHED_TEMPLATE), clamp=None)
    return model.eval().requires_grad_(False)


def _load_ours(folder: Path, base: str | Path | None, template: Template | None, **options: Any) -> HPSv3Model:
    settings = JudgeSettings.read(folder)
    head = settings.rest["head"]
    if not isinstance(head, Mapping) or head.get("type") != "ranknet":
        raise RewardError(
            f"The head of {folder.name}/{SETTINGS} is {head!r}; HPSv3's is 'ranknet' ('ranknet members': ensemble)."
        )
    options = {"name": folder.name, "settings": settings, "positions": settings.positions, **options}
    if (folder / ADAPTER).is_file():
        options["adapter"] = folder
    engine = VisionLanguageEngine.from_pretrained(base or base_of(folder, settings), **options)
    weights = engine.weights + "+" + fingerprint(folder / HEAD_FILE)
    tensors = read_tensors(folder / HEAD_FILE)
    token = tensors.pop("reward_token", None)
    module = RanknetHead.from_state_dict(tensors).to(engine.network.device)
    model = HPSv3Model(engine, module, template=template, clamp=read_clamp(head))
    model.add_token(None if token is None else token.to(engine.network.device))
    engine.set_fingerprint(weights)
    return model


def published_engine(
    path: Path, base: str | Path | None, *, default_base: str | Path | None, heads: str | tuple, **options: Any
) -> tuple[VisionLanguageEngine, dict[str, Tensor]]:
    """Load one weight file or its folder: (model, tensors under the prefixes `heads`); adds the reward token.

    Config and processor are those of `base`, else of the folder, else of `default_base`.
    """
    folder, files = path.parent, [path]
    if path.is_dir():
        folder, files = path, sorted({file for pattern in _FILES for file in path.glob(pattern)})
    if len(files) != 1:
        raise FileNotFoundError(
            f"{folder} holds {len(files)} weight files and no {SETTINGS} with a head; name the file."
        )
    file = files[0]
    settings = JudgeSettings.read(folder)
    base = base or (folder if (folder / "config.json").is_file() else default_base)
    if base is None:
        raise RewardError(f"{folder} holds no config.json; give as base the model that the weights were trained from.")
    state = read_tensors(file, "model" if file.suffix in (".pt", ".pth") else None, optional=True)
    head_tensors = {key: state.pop(key) for key in list(state) if key.startswith(heads)}
    options = {"min_pixels": PIXELS, "max_pixels": PIXELS, **settings.rest.get("pixels", {}), **options}
    options = {"name": folder.name, "settings": settings, **options}
    engine = engine_of_tensors(state, find_model(base, SMALL_FILES), tokens=[REWARD_TOKEN], **options)
    engine.set_fingerprint(fingerprint(file))
    engine.revision = revision_of(folder)
    return engine, head_tensors


def engine_of_tensors(
    state: Mapping[str, Tensor],
    source: Path,
    *,
    tokens: Sequence[str],
    settings: JudgeSettings,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> VisionLanguageEngine:
    """Build a model of weights under the names of transformers 4 or 5; its vocabulary ends with `tokens`.

    Config and processor come from the folder `source`; positions are plain unless the options, of
    `VisionLanguageEngine` and `PLACING`, say otherwise.
    """
    if options.pop("adapter", None) is not None:
        raise RewardError("A published file of weights takes no adapter; leave adapter out.")
    processor = load_processor(source)
    placing = {name: options.pop(name) for name in PLACING if name in options}
    current = {current_key(key): value for key, value in state.items()}
    model = _build_backbone(source, current, placing_options(dtype, device, **placing))
    options.setdefault("positions", settings.positions or "1d")
    engine = VisionLanguageEngine(placed(model, device, **placing), processor, settings=settings, **options)
    add_reward_tokens(engine, tokens)
    vocabulary, ids = len(model.get_input_embeddings().weight), [engine.rows.specials[t] for t in tokens]
    if ids != list(range(vocabulary - len(tokens), vocabulary)):
        raise RewardError(
            f"The base gives {', '.join(tokens)} the id {', '.join(map(str, ids))}, the weights the last of "
            f"{vocabulary}. Give the base that they were trained from."
        )
    return engine


def _build_backbone(source: str | Path, state: dict[str, Tensor], options: dict[str, Any]) -> Any:
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoModelForImageTextToText

    config: Any = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
    embeddings = state.get("model.language_model.embed_tokens.weight")
    if embeddings is not None:
        config.get_text_config().vocab_size = len(embeddings)
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    with torch.device("meta"):
        expected = AutoModelForImageTextToText.from_config(config, trust_remote_code=False).state_dict()
    check_fit(expected, state, "the file")
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    with quiet_loading():
        return kind.from_pretrained(None, config=config, state_dict=state, **options)


def find_weights(path_or_id: str | Path) -> Path:
    """Return an existing file or folder; hub ids are fetched."""
    path = Path(path_or_id) if Path(path_or_id).exists() else resolve_model(path_or_id)
    return path if isinstance(path, Path) else local_folder(path, ("*",))


def current_key(key: str) -> str:
    """Return the name in transformers 5 of a weight that transformers 4 saved; others, heads included, stay.

    >>> current_key("visual.merger.ln_q.weight")
    'model.visual.merger.ln_q.weight'
    """
    if key.startswith(("model.visual.", "model.language_model.")):
        return key
    if key.startswith("visual."):
        return f"model.{key}"
    return f"model.language_model.{key.removeprefix('model.')}" if key.startswith("model.") else key
