# SPDX-License-Identifier: Apache-2.0
"""Sampling of images or videos into a folder, from a model and its adapters; the best of many by rewards."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from visalign.adapters.pipeline.lora_files import parse_lora
from visalign.atomic import write_atomic
from visalign.config import read_config
from visalign.data.sets.prompt_files import record_key
from visalign.dotted_path import check_options
from visalign.errors import ConfigError, UserError, suggestion
from visalign.evaluation.pages.base import PIXELATED_SIDE
from visalign.evaluation.pages.sample_page import sample_page
from visalign.flow.rollout import decode_images, encoder_inputs, middle_frames, rollout
from visalign.flow.search import PathSearch, ZeroOrderSearch
from visalign.flow.steering import steered_rollout
from visalign.flow.transitions import Solver
from visalign.interfaces import Condition, DiffusionPolicy, PointwiseReward, Scores, score_named, with_capabilities
from visalign.pipelines.shared.model_card import CONFIG
from visalign.pipelines.shared.parts import check_texts, no_loading_bars
from visalign.pipelines.shared.places import place_of, say_places
from visalign.pipelines.shared.run_folder import check_place
from visalign.pipelines.shared.sections import Dtype
from visalign.precision import check_device
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.images import to_pil
from visalign.seeds import sample_seed
from visalign.settings import Count, Positive, Steps, refuse, settings
from visalign.vision.pixels import rounded_levels

TABLE, COST = "images.jsonl", "forward_equivalents"
GRID, PAGE = "grid.png", "index.html"
CLIP = "clip"  # The column of a whole video; its image is the middle frame
IMAGE_PIPELINES = ("flow_grpo", "pref_grpo", "sft_images")
LARGEST_GRID = 64  # Prompts shown in the grid
SEARCHES: dict[str, type[ZeroOrderSearch | PathSearch]] = {"zero_order": ZeroOrderSearch, "paths": PathSearch}


@settings("sample")
class SampleSettings:
    """Model and sampling."""

    model: str = "shapes-sd3"  # A packaged model, the folder of a diffusers pipeline, a hub id, or a .safetensors file
    adapter: str | None = None  # See `model.adapter` of a configuration
    lora: Sequence[str | Path] = ()
    """LoRAs, each PATH or PATH:WEIGHT: a run folder, the folder of a LoRA, or a .safetensors file."""
    seeds: Sequence[int] = (0, 1, 2, 3)  # Seeds; each gives an image of each prompt
    best_of: Count = 1  # Draw so many for each seed and keep the one that the rewards like best
    resample_after: Sequence[int] = ()
    """Steps, 0 to T − 3, after which the `best_of` draws of a seed are resampled by the rewards of their
    predicted images (Feynman-Kac steering); none: the draws do not meet."""
    search: ZeroOrderSearch | PathSearch | None = None
    """Search for noise that the rewards like: from each draw, or with the `best_of` draws of a seed as the
    paths of a group."""
    strength: Positive = 10.0  # λ of exp(λ r), what a steered draw is likelier by, per unit of the rewards' sum
    noise_level: Positive = 0.7  # Level of the noise that separates the children of a resampled draw
    steps: Steps | None = None
    """Denoising steps; without noise on the way where nothing is resampled. None: those of the evaluation of the
    run that made the weights, else the default of the pipeline's call, 10 of packaged models."""
    solver: Solver | None = None
    """Solver of the steps without noise, "euler" or "dpmpp_2m"; steering and searches take Euler steps.
    None: that of the evaluation of the run that made the weights, else "euler"."""
    timestep_schedule: Literal["diffusers", "plain"] | None = None
    """See `rollout.timestep_schedule`. None: that of the run that made the weights, else "diffusers"."""
    batch_size: Count = 16  # Images at once; memory only
    dtype: Dtype | None = None  # Dtype of the weights; None: as they are stored, see `own_sampling`
    device: str = "cpu"  # Device of model and samples
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the adapter: config, variant, image_size, negative_prompt, ...; guidance (else the
    default of the pipeline's call, none of packaged models; None: as `model.guidance` null in training)."""

    def with_own_sampling(self) -> SampleSettings:
        """Fill in what the settings leave open: as the weights' run evaluated, else as the model is used by itself."""
        from visalign.adapters.catalogue import own_sampling

        files = {name: self.options[name] for name in ("variant", "config") if name in self.options}
        own = own_sampling(self.model, self.adapter, self.device, **files)
        drawing, trained = self._as_evaluated()
        if self.resample_after or self.search is not None:
            drawing.pop("solver", None)
        default: dict[str, Any] = {"steps": own.steps, "solver": "euler", "timestep_schedule": "diffusers"}
        drawing = {name: value for name, value in drawing.items() if value and getattr(self, name) is None}
        words = [f"{name} {value}" for name, value in drawing.items() if name == "steps" or value != default[name]]
        words += [f"{n} {'none' if value is None else value}" for n, value in trained.items() if n not in self.options]
        if words and os.environ.get("RANK", "0") == "0":
            line = f"Sampling as the weights' run evaluated: {', '.join(words)}. Options of the command change it."
            print(line, file=sys.stderr)
        guidance = {} if own.guidance is None else {"guidance": own.guidance}
        drawing = {name: getattr(self, name) or value for name, value in {**default, **drawing}.items()}
        options = {**guidance, **trained, **self.options}
        return replace(self, **drawing, dtype=self.dtype or own.dtype, options=options)

    def sigmas(self, policy: DiffusionPolicy) -> Tensor:
        """Return the noise levels [steps + 1] of the policy."""
        return policy.sigmas(self.steps or 0, timestep_schedule=self.timestep_schedule or "diffusers")

    def _as_evaluated(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read (settings, options) of the evaluation of the last LoRA's run, else the model's; ({}, {}) without."""
        from visalign.adapters.catalogue import DRAWN_BY

        for path in [*(parse_lora(name)[0] for name in reversed(self.lora)), Path(self.model)]:
            file = (path.parent if path.is_file() else path) / CONFIG
            content: Mapping[str, Any] = {}
            if path.exists() and file.is_file():
                with suppress(ConfigError):  # other tools have a config.yaml, too
                    content = read_config(file)
            names = ("model", "rollout", "evaluation", "data")
            model, rollout, evaluation, data = sections = [content.get(name) or {} for name in names]
            is_run = all(isinstance(section, Mapping) for section in sections)
            if is_run and content.get("pipeline") in IMAGE_PIPELINES:
                steps, scale = map(evaluation.get, ("steps", "guidance"))
                scale = model.get("guidance") if scale is None else scale
                is_stored, base = data.get("images") or data.get("pairs"), str(model.get("path"))
                options: dict[str, Any] = {"guidance": scale}
                if is_stored and steps is None and scale is None and self._guides(base):  # see `is_used_as_before`
                    options = {}
                else:
                    steps = steps or rollout.get("steps")
                levels = rollout.get("timestep_schedule")
                drawing = {"steps": steps, "solver": evaluation.get("solver"), "timestep_schedule": levels}
                more = {**dict(model.get("options") or {}), **model}
                options |= {n: more[n] for n, default in DRAWN_BY.items() if more.get(n) not in (None, default)}
                return drawing, options
        return {}, {}

    def _guides(self, base: str) -> bool:
        """Return True if the call of the pipeline guides by itself; `base` is the model that the run began with."""
        from visalign.adapters.catalogue import index_source, is_guided_by_call

        described_by = index_source(self.model, self.adapter, self.options.get("config"))
        return is_guided_by_call(base, described_by, self.adapter)

    def __post_init__(self) -> None:
        refuse(self._broken_rules())
        check_device(self.device)

    def _broken_rules(self) -> Iterator[str]:
        seeds, after = list(self.seeds), list(self.resample_after)
        last = math.inf if self.steps is None else self.steps - 3
        if not seeds or min(seeds) < 0 or len(set(seeds)) != len(seeds):
            yield f"The seeds are {seeds}; give different numbers from 0 up."
        if options := sorted({"dtype", "device", "lora", "model"} & set(self.options)):
            yield f"--option names {', '.join(options)}, which is an option of its own (--{options[0]})."
        if not isinstance(guidance := self.options.get("guidance"), int | float | None):
            yield f"guidance is {guidance!r}; give a number, or null for none."
        size = self.options.get("image_size", 1)
        sides = size if isinstance(size, list | tuple) else [size, size]
        if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
            yield f"image_size is {size!r}; give one number or [height, width]."
        if self.solver not in (None, "euler") and (after or self.search is not None):
            option = "--steer" if after else "--search"
            yield f"--solver is {self.solver}, and {option} takes Euler steps. Leave one of the two out."
        if after and (after != sorted(set(after)) or not 0 <= after[0] <= after[-1] <= last):
            yield f"--steer is {after}; of {self.steps} steps give rising ones from 0 to {last}."
        if after and self.best_of < 2:
            yield "--steer resamples the draws of a seed: give best_of (--best-of) of 2 or more."
        if self.search is not None and after:
            yield "--search and --steer are two ways to one image; give one of them."
        if self.search is not None and self.steps is not None:
            try:
                self.search.velocities(self.steps)
            except ValueError as error:
                yield f"The search does not fit: {error}"
        if isinstance(self.search, PathSearch) and self.best_of * self.search.branches < 2:
            yield "One path of one branch leaves nothing to choose: give branches=2 or --best-of 2."


def search_of(name: str, options: Mapping[str, Any]) -> ZeroOrderSearch | PathSearch:
    """Build a search by its name.

    >>> search_of("zero_order", {"rounds": 2})
    ZeroOrderSearch(rounds=2, candidates=1, radius=0.5)
    """
    if name not in SEARCHES:
        raise UserError(f"--search is {name!r}. {suggestion(name, SEARCHES)}Allowed: {', '.join(SEARCHES)}.")
    check_options(f"--search {name}", SEARCHES[name], options)
    try:
        return SEARCHES[name](**options)
    except ValueError as error:
        raise UserError(f"--search {name}: {error}") from error


def load_sampler(settings: SampleSettings) -> DiffusionPolicy:
    """Load the model with its adapters; what the settings leave open is as `with_own_sampling` has it."""
    from visalign.adapters.catalogue import load_policy
    from visalign.adapters.lora import LoraSettings

    none, settings = LoraSettings(rank=1), settings.with_own_sampling()
    options = {"lora_path": [*settings.lora] or None, **settings.options}
    with no_loading_bars():
        return load_policy(
            settings.model,
            adapter=settings.adapter,
            dtype=getattr(torch, str(settings.dtype)),
            device=settings.device,
            defaults={"lora": none},  # frozen in its dtype: adapters that change nothing
            lora=none,
            **{name: value for name, value in options.items() if value is not None},
        )


def sample_images(
    records: Sequence[Mapping[str, Any]],
    settings: SampleSettings,
    output: Path,
    *,
    rewards: Mapping[str, PointwiseReward] | None = None,
) -> list[dict[str, Any]]:
    """Sample and write each image as it is made, then the grid, the page and the table; return the table's rows.

    The noise of an image depends on its prompt, the source that it edits, and its seed alone. With `best_of` N the one
    of N draws with the highest sum of rewards is kept; one that could not be judged only where none could.
    """
    rewards = rewards or {}
    if (settings.best_of > 1 or settings.search is not None) and not rewards:
        reason = f"best_of is {settings.best_of}" if settings.best_of > 1 else "--search is given"
        raise UserError(f"{reason} and nothing says what is best; give a reward (-r).")
    check_texts(records)
    check_folder(output)
    settings = settings.with_own_sampling()
    policy = load_sampler(settings)
    say_places({settings.model: place_of(policy)})
    output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    thumbnails: list[Image.Image] = []
    for row, sample in _Sampler(policy, settings, settings.sigmas(policy)).draw(records, rewards):
        number = len(rows) // len(settings.seeds)
        name, image = f"{number:04d}_{row['seed']}", to_pil(middle_frames(sample[None])[0])
        files = {"image": f"{name}.png"}
        image.save(output / files["image"])
        if sample.ndim == 4 and len(sample) > 1:  # an animated WebP that plays again and again
            files[CLIP], (first, *rest) = f"{name}.webp", map(to_pil, sample)
            options: Any = {"loop": 0, "quality": 90, "lossless": max(first.size) <= PIXELATED_SIDE}
            options["duration"] = round(1000 / getattr(policy, "frame_rate", 8))  # ms
            first.save(output / files[CLIP], save_all=True, append_images=rest, **options)
        rows.append(files | row)
        if number < LARGEST_GRID:
            thumbnails.append(image)
    _as_grid(thumbnails, len(settings.seeds)).save(output / GRID)
    units = {name: reward.unit for name, reward in rewards.items()}
    page = sample_page(rows, size=thumbnails[0].size, rewards=units, facts=_facts(settings))
    write_atomic(output / PAGE, page)
    write_lines(output / TABLE, rows)  # last: with it the folder is whole
    return rows


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSONL."""
    write_atomic(path, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))


def check_folder(output: Path) -> None:
    """Refuse an output that is no empty or new folder."""
    check_place(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is no empty folder. Give another one, so that no image is lost.")


class _Draw(NamedTuple):
    """Best so far of a seed's draws."""

    sample: Tensor
    scores: dict[str, float | None]
    total: float


class _Judge(NamedTuple):
    """Scores of images or videos by the rewards, for the prompts of some records."""

    rewards: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]

    def of(self, rows: slice) -> _Judge:
        return _Judge(self.rewards, self.records[rows])

    def __call__(self, samples: Tensor) -> tuple[dict[str, Scores], Tensor]:
        """Score images or videos [N, F, 3, H, W]; return label -> scores, and [N] sums, −∞ where one failed."""
        samples = torch.where(samples.isfinite(), rounded_levels(samples).float() / 255, samples)  # as in files
        stills, prompts = middle_frames(samples), [str(record["prompt"]) for record in self.records]
        scores: dict[str, Scores] = {}
        total = torch.zeros(len(samples))
        for name, reward in self.rewards.items():
            images = samples if reward.capabilities.takes_clips else stills
            score = scores[name] = score_named(reward, images, prompts, self.records, name=name)
            sign = 1.0 if reward.higher_is_better else -1.0
            total += torch.where(score.valid, sign * score.value, -torch.inf).cpu()
        return scores, total


def _keep_best(best: dict[int, _Draw], samples: Tensor, judge: _Judge, rows: slice, count: int) -> list[str]:
    """Keep in `best` the first or highest draw of each seed, and return why draws could not be judged."""
    # a function of its own: a batch is freed when it returns, before the next one is decoded
    scores, totals = judge(samples)
    for i, total in enumerate(totals.tolist()):
        index = (rows.start + i) // count
        if index not in best or total > best[index].total:
            values = {n: float(s.value[i]) if bool(s.valid[i]) else None for n, s in scores.items()}
            best[index] = _Draw(samples[i].clone(), values, total)  # a view would keep its whole batch
    reasons = [failure_reasons(score) for score in scores.values()]
    return [next(filter(None, row)) for row in zip(*reasons, strict=True) if any(row)]


@dataclass(frozen=True)
class _Sampler:
    """Draws of a policy by the settings of its sampling."""

    policy: Any
    settings: SampleSettings
    sigmas: Tensor

    def draw(
        self, records: Sequence[Mapping[str, Any]], rewards: Mapping[str, PointwiseReward]
    ) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield (row, image [3, H, W] or video [F, 3, H, W]), seeds of a prompt side by side.

        Only the best draw so far of a seed is kept, so that memory does not grow; of draws that meet, the latents.
        """
        count, failures, unjudged = self.settings.best_of, list[str](), 0
        requests = [(record, seed) for record in records for seed in self.settings.seeds]
        together = max(1, self.settings.batch_size // count)
        declared = {label: with_capabilities(reward) for label, reward in rewards.items()}
        for start in range(0, len(requests), together):
            part = [(record, seed, i) for record, seed in requests[start : start + together] for i in range(count)]
            inputs = encoder_inputs(self.policy, [record for record, _, _ in part])
            seeds = [sample_seed("sample", *record_key(e), s, i) for e, (_, s, i) in zip(inputs, part, strict=True)]
            judge = _Judge(declared, [dict(record) for record, _, _ in part])
            best: dict[int, _Draw] = {}
            with torch.no_grad():
                condition = self.policy.encode(inputs)
                before = self.policy.forward_count.equivalents
                for rows, latents in self._latents(condition, seeds, judge):
                    failures += _keep_best(best, self._decode(latents), judge.of(rows), rows, count)
                spent = self.policy.forward_count.equivalents - before
            for index, draw in best.items():
                record, seed, _ = part[index * count]
                row: dict[str, Any] = {"prompt": str(record["prompt"]), "seed": seed, **draw.scores}
                if metadata := _metadata(record):
                    row["metadata"] = metadata
                row[COST] = spent * count // len(part)  # every draw takes as many
                unjudged += draw.total == -torch.inf
                yield row, draw.sample
        if failures:
            warning = f"{len(failures)} of {len(requests) * count} draws could not be judged: {failures[0]}."
            if count > 1 and unjudged:
                warning += f" {unjudged} of {len(requests)} seeds have no draw to prefer, and keep the first."
            warnings.warn(warning, stacklevel=2)

    def _decode(self, latents: Tensor) -> Tensor:
        """Decode latents [N, ...] to images or videos, float32 on the CPU."""
        batches = latents.split(self.settings.batch_size)
        samples = [decode_images(self.policy, batch, clips=True).float().cpu() for batch in batches]
        return samples[0] if len(samples) == 1 else torch.cat(samples)  # no second copy in memory

    def _latents(self, condition: Condition, seeds: Sequence[int], judge: _Judge) -> Iterator[tuple[slice, Tensor]]:
        """Yield (rows, their final latents), batch by batch; where a reward compares the draws, all together."""
        compares = any(reward.capabilities.compares_samples for reward in judge.rewards.values())
        size = len(seeds) if compares else self.settings.batch_size
        parts = [slice(first, min(first + size, len(seeds))) for first in range(0, len(seeds), size)]
        if self.settings.resample_after or isinstance(self.settings.search, PathSearch):  # the draws of a seed meet
            latents = self._denoise(condition, seeds, judge)
            yield from ((rows, latents[rows]) for rows in parts)
            return
        for rows in parts:
            part = condition.select(torch.arange(rows.start, rows.stop))
            yield rows, self._denoise(part, seeds[rows], judge.of(rows))

    def _denoise(self, condition: Condition, seeds: Sequence[int], judge: _Judge) -> Tensor:
        """Compute [N, ...] final latents: along the ODE, steered, or searched for."""
        settings = self.settings
        common: dict[str, Any] = {"sigmas": self.sigmas, "seeds": seeds, "batch_size": settings.batch_size}
        if settings.search is not None:
            common |= {"paths": settings.best_of} if isinstance(settings.search, PathSearch) else {}
            return settings.search(self.policy, condition, lambda images: judge(images)[1], **common)
        if not settings.resample_after:
            return rollout(self.policy, condition, solver=settings.solver or "euler", **common).latents
        common |= {"particles": settings.best_of, "resample_after": settings.resample_after}
        common |= {"strength": settings.strength, "noise_level": settings.noise_level}
        return steered_rollout(self.policy, condition, lambda images: judge(images)[1], **common)


def _metadata(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a prompt's record that JSON can hold, which rewards of the images read again."""
    fields: dict[str, Any] = {}
    for name, value in record.items():
        with suppress(TypeError, ValueError):  # an image in memory, NaN, half a character
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            if name != "prompt" and value is not None:
                fields[name] = value
    return fields


def _facts(settings: SampleSettings) -> list[tuple[str, Any]]:
    facts = {
        "Model": settings.model,
        "LoRA": ", ".join(map(str, settings.lora)) or None,
        "Steps": settings.steps,
        "Dtype": None if settings.dtype == "float32" else settings.dtype,
        "Solver": None if settings.solver == "euler" else settings.solver,
        "Draws of a seed": settings.best_of if settings.best_of > 1 else None,
        "Resampled after steps": ", ".join(map(str, settings.resample_after)) or None,
        "Search": settings.search,
        **settings.options,
    }
    return [(name, value) for name, value in facts.items() if value is not None]


def _as_grid(images: Sequence[Image.Image], columns: int) -> Image.Image:
    """Paste images into a sheet, a row per prompt and a column per seed."""
    width, height = images[0].size
    sheet = Image.new("RGB", (columns * width, -(-len(images) // columns) * height), "white")
    for i, image in enumerate(images):
        sheet.paste(image, ((i % columns) * width, (i // columns) * height))
    return sheet
