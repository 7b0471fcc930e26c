# SPDX-License-Identifier: Apache-2.0
"""Sides of a bench: models that draw the images of a suite, and folders of images with the same prompts."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from visalign.adapters.catalogue import edits_of, index_source
from visalign.adapters.model_folder import INDEX
from visalign.adapters.pipeline.lora_files import lora_file, parse_lora
from visalign.data.assets import resolve_model
from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.prompt_files import Edits, record_key
from visalign.errors import UserError, excerpt
from visalign.evaluation.heldout.correctness import Tally, record_tags
from visalign.evaluation.heldout.images import evaluate
from visalign.evaluation.heldout.result import HeldoutResult
from visalign.interfaces import score_named
from visalign.pipelines.flow_grpo.job import evaluation_drawing, is_used_as_before, sampling_options
from visalign.pipelines.jobs import load_job
from visalign.pipelines.sample.job import SampleSettings, load_sampler
from visalign.pipelines.score.image_rows import ImageRow, image_rows, require_still
from visalign.pipelines.score.log import score_key
from visalign.pipelines.shared.reward_options import parse_options
from visalign.rewards.base.ahead import decode_ahead, takes_decoded
from visalign.rewards.base.images import to_pil

Parts = Iterable[slice]
Record = Mapping[str, Any]
DRAWING = ("adapter", "steps", "solver", "timestep_schedule", "dtype")  # Settings of `SampleSettings` that a MODEL has


@dataclass(frozen=True, kw_only=True)
class Side:
    label: str  # Name in the tables
    facts: Mapping[str, Any]  # What a resumed bench must share with the one that began
    rows: Sequence[ImageRow]  # Image, prompt, record and seed of each sample
    score: Callable[[Parts], Iterator[HeldoutResult]]  # Score parts of the samples, which a model draws first


def suite_edits(texts: Sequence[str]) -> Edits:
    """Return whether one of the MODELs edits images, so that a prompt of the suite has a source."""
    edits = set[Edits]()
    for text in texts:
        path, options = _split(text)
        if _is_run(path):
            path, _, drawn, own_options = _trained_by(Path(path))
            options = drawn | own_options | options
        adapter = options.get("adapter")
        edits.add(edits_of(index_source(path, adapter, options.get("config")), adapter))
    return "needed" if "needed" in edits else "optional" if "optional" in edits else "none"


def model_side(
    text: str, records: Sequence[Record], seeds: Sequence[int], folder: Path, scoring: Mapping[str, Any], **common: Any
) -> Side:
    """Parse MODEL[,NAME=VALUE ...], whose images go into the folder; a run's folder is the model that it trained.

    The options are `name` for the tables, `lora`, those of `DRAWING`, and those of the model, such as guidance.
    """
    path, options = _split(text)
    label = str(options.pop("name", None) or text.replace(",", ", "))
    lora = [*filter(None, [options.pop("lora", None)])]
    drawing = {name: options.pop(name) for name in DRAWING if name in options}
    drawing = {name: value for name, value in common.items() if value is not None} | drawing
    if _is_run(path):
        path, loras, drawn, own_options = _trained_by(Path(path))
        lora, drawing, options = [*loras, *lora], drawn | drawing, own_options | options
    if unused := [name for name in options if name in SampleSettings.__dataclass_fields__]:
        raise UserError(
            f"'{text}': {unused[0]} is no option of one MODEL; seeds, --batch-size and --device hold for all, and a "
            f"bench takes each draw as it is. Allowed: name, lora, {', '.join(DRAWING)}, and those of the model."
        )
    settings = SampleSettings(model=path, lora=lora, seeds=seeds, options=options, **drawing).with_own_sampling()
    images = folder / (re.sub(r"[^\w.-]+", "-", label)[:80].strip("-.") or "model")  # a name has at most 255 bytes
    rows = [
        ImageRow(image=str(images / f"{number:04d}_{seed}.png"), prompt=record["prompt"], metadata=record, seed=seed)
        for number, record in enumerate(records)
        for seed in seeds
    ]
    facts = {name: getattr(settings, name) for name in ("model", "lora", *DRAWING, "options")}
    weights = [base] if (base := Path(resolve_model(path))).is_file() else sorted(base.rglob("*.safetensors"))
    weights += [lora_file(parse_lora(name)[0]) for name in lora]  # a missing one is refused before others have drawn
    facts["files"] = score_key([*map(str, weights)], "", None)

    def score(parts: Parts) -> Iterator[HeldoutResult]:
        policy = None
        for part in parts:
            policy = policy or load_sampler(settings)  # only if there is something to draw; freed at the end

            def save(batch: slice, samples: Tensor, part: slice = part) -> None:
                for row, image in zip(rows[part][batch], samples, strict=True):
                    to_pil(image).save(row.image)

            images.mkdir(parents=True, exist_ok=True)
            yield evaluate(
                policy,
                records=records[part.start // len(seeds) : part.stop // len(seeds)],
                seeds=seeds,
                sigmas=settings.sigmas(policy),
                batch_size=settings.batch_size,
                max_images=0,
                solver=settings.solver or "euler",
                on_images=save,
                **scoring,
            )

    return Side(label=label, facts=facts, rows=rows, score=score)


def _split(text: str) -> tuple[str, dict[str, Any]]:
    path, *items = re.split(r",(?=[A-Za-z_]+=)", text)
    return path, parse_options(items, f"'{text}'")


def _is_run(path: str) -> bool:
    return (Path(path) / "config.yaml").is_file() and not (Path(path) / INDEX).is_file()


def _trained_by(folder: Path) -> tuple[str, list[str], dict[str, Any], dict[str, Any]]:
    """Read (model, LoRAs, fields of `SampleSettings`, the model's options) of a run, as its evaluation drew.

    A student of four steps is drawn in four, a model without guidance without.
    """
    config = load_job(str(folder / "config.yaml"), pipelines=("flow_grpo", "pref_grpo", "sft_images")).config
    drawing, options = evaluation_drawing(config), {"guidance": None, **sampling_options(config)}
    if is_used_as_before(config):
        del drawing["steps"], options["guidance"]
    drawing |= {name: options.pop(name) for name in ("adapter",) if name in options}
    if (folder / "lora").is_dir():
        return config.model.path, [str(folder)], drawing, options
    if not (folder / "model").is_dir():
        raise UserError(f"'{folder}' is a run without a result: it has no folder lora or model. Let it end first.")
    files = ("config", "variant")  # of the model that the run began with
    return str(folder / "model"), [], drawing, {n: v for n, v in options.items() if n not in files}


def folder_sides(paths: Sequence[str], records: Sequence[Record] | None, scoring: Mapping[str, Any]) -> list[Side]:
    """Read folders or tables of images in one order of prompts; images of one prompt and seed are a pair.

    Where sides lack seeds, or have different ones, the k-th images of a prompt are. With the `records` of a suite the
    prompts must be among its, and get their records; else the first side's tags. The images that a prompt edits tell
    its images apart where all sides name the same.
    """
    tables = [image_rows([Path(path)]) for path in paths]
    counts = [Counter(row.prompt for row in rows) for rows in tables]
    suite: dict[str, Record] = {str(record["prompt"]): record for record in records or ()}
    if any(suite[str(record["prompt"])] != record for record in records or () if str(record["prompt"]) in counts[0]):
        raise UserError("Two items of the suite have one prompt, and images show no item. Give models, not images.")
    for path, count in zip(paths, counts, strict=True):
        if different := [prompt for prompt in counts[0] | count if count[prompt] != counts[0][prompt]]:
            numbers = f"{excerpt(different[0])} with {counts[0][different[0]]} and {count[different[0]]} images"
            raise UserError(
                f"The prompts of '{paths[0]}' and '{path}' do not match: {len(different)} differ, such as {numbers}. "
                "Give folders with equally many images of the same prompts."
            )
    if strange := [prompt for prompt in counts[0] if records is not None and prompt not in suite]:
        raise UserError(
            f"{len(strange)} of {len(counts[0])} prompts are not in the suite, such as {excerpt(strange[0])}. Leave "
            "--suite out, or give images of its prompts."
        )
    items = [[record_key({"prompt": row.prompt, **(row.metadata or {})}) for row in table] for table in tables]
    if any(Counter(keys) != Counter(items[0]) for keys in items):
        items = [[(row.prompt,) for row in table] for table in tables]
    draws = [[(key, _seed(row)) for key, row in zip(*lists, strict=True)] for lists in zip(items, tables, strict=True)]
    has_seeds = all(isinstance(seed, int) and abs(seed) < 2**63 for draw in draws for _, seed in draw)
    are_same = all(Counter(draw) == Counter(draws[0]) for draw in draws)
    by_seed = has_seeds and are_same and len({*draws[0]}) == len(draws[0])
    if has_seeds and not are_same:
        warnings.warn("The sides' seeds differ, so a prompt's images are paired in the order of seeds.", stacklevel=2)
    tags = {key: {"tag": record_tags([row.metadata or {}])[0]} for key, row in zip(items[0], tables[0], strict=True)}
    order, sides = {key: number for number, key in enumerate(tags)}, list[Side]()
    for path, table, draw in zip(paths, tables, draws, strict=True):
        ordinals, rows = Counter[tuple[str, ...]](), list[ImageRow]()
        by_item = sorted(zip(draw, table, strict=True), key=lambda x: (order[x[0][0]], has_seeds and x[0][1]))
        for (key, seed), row in by_item:
            require_still(Path(row.image))
            record = {"prompt": row.prompt, **(row.metadata or {}), **(suite.get(row.prompt) or tags[key])}
            rows.append(replace(row, seed=seed if by_seed else ordinals[key], metadata=record))
            ordinals[key] += 1
        facts = {"images": path, "files": {row.image: score_key([row.image], "", None) for row in rows}}
        score = _scorer(rows, ["".join(key[1:]) for (key, _), _ in by_item], **scoring)
        sides.append(Side(label=path, facts=facts, rows=rows, score=score))
    return sides


def _seed(row: ImageRow) -> Any:
    return int(row.seed) if isinstance(row.seed, str) and row.seed.isdecimal() else row.seed  # a CSV has texts


def _scorer(
    rows: Sequence[ImageRow], sources: Sequence[str], rewards: Mapping[str, Any], correctness: str | None
) -> Callable[[Parts], Iterator[HeldoutResult]]:
    """Return a function that scores parts of stored images as `evaluate` does drawn ones."""

    def score_part(part: slice, decoded: Sequence[Tensor | None]) -> HeldoutResult:
        tally = Tally(correctness=correctness)
        prompts, records = [row.prompt for row in rows[part]], [row.metadata for row in rows[part]]
        images = [_open(row.image) for row in rows[part]]
        pixels = [i if levels is None else levels for i, levels in zip(images, decoded, strict=True)]
        for name, reward in rewards.items():
            scores = score_named(reward, pixels if takes_decoded(reward) else images, prompts, records, name=name)
            tally.add(name, reward, scores, len(prompts))
        return HeldoutResult(
            prompts=tuple(prompts),
            sources=tuple(sources[part]) if any(sources) else (),
            tags=record_tags([record or {} for record in records]),
            seeds=np.array([row.seed for row in rows[part]], dtype=np.int64),
            images=np.zeros((0, 1, 1, 3), np.uint8),
            image_index=np.zeros(0, np.int64),
            **tally.fields(rewards, len(prompts)),
        )

    def score(parts: Parts) -> Iterator[HeldoutResult]:
        chosen = list(parts)
        paths = [row.image for part in chosen for row in rows[part]]
        with closing(decode_ahead(paths, resolve_image, rewards.values())) as ahead:
            for part in chosen:
                yield score_part(part, list(islice(ahead, len(rows[part]))))

    return score


def _open(reference: str) -> Any:
    """Open an image; a reference to none stays, and rewards say that it cannot be read."""
    try:
        return resolve_image(reference)
    except UserError:
        return reference
