# SPDX-License-Identifier: Apache-2.0
"""A reward tried with every probe on reference pictures: how it responds to what should not move it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from visalign.evaluation import probe_response as answer
from visalign.evaluation.atomic import write_atomic
from visalign.evaluation.pages import embedded
from visalign.evaluation.probe_page import probe_page
from visalign.evaluation.probes import PROBES, Level, Probe, Sample, examples
from visalign.interfaces import PointwiseReward
from visalign.rewards.images import as_contract

from .probe_forms import FORMS, among_white
from .probe_scorer import Reference, Scorer
from .score_log import judge_identity

RESULT, PAGE = "probe.json", "probe.html"
ALONE = 16
"""Pictures that are asked for one by one in the probe of the neighbours."""
SHOWN_SIDE = 224
"""Longest side of the example pictures on the page, in pixels."""

OnProbe = Callable[[int, int, str], object]
"""Called with the probes done, all probes, and the title of the next."""


def probe_reward(
    reward: PointwiseReward,
    reference: Reference,
    *,
    probes: Sequence[Probe] = PROBES,
    seed: int = 0,
    batch_size: int = 32,
    on_probe: OnProbe | None = None,
) -> dict[str, Any]:
    """Try a reward.

    Args:
        reward: A pointwise reward.
        reference: Pictures that it tells apart.
        probes: What to try.
        seed: Of noise and scattering.
        batch_size: Pictures scored at once.
        on_probe: Told about progress.

    Returns:
        JSON-able: `judge`, `reference`, `limits`, `summary` (verdict -> probes), `probes`, `seconds`.

    Raises:
        UserError: The reward judges fewer than two of the reference pictures, or all of them alike.
        RewardError: It raised.
    """
    started = time.perf_counter()
    scorer = Scorer(reward, reference, batch_size)
    reports = []
    for place, probe in enumerate(probes):
        if on_probe is not None:
            on_probe(place, len(probes), probe.title)
        table = [_level(scorer, probe, level, seed) for level in probe.levels]
        reports.append(answer.probe_report(probe, table))
    identity = judge_identity(reward)
    return {
        "format": "visalign probe 1",
        "judge": {
            "name": reward.name,
            "unit": reward.unit,
            "higher_is_better": reward.higher_is_better,
            "digest": identity.digest,
            "identity": json.loads(json.dumps(asdict(identity), default=str)),
        },
        "reference": scorer.record(),
        "limits": {"gain": answer.GAIN, "move": answer.MOVE, "same": answer.SAME, "loss": answer.LOSS},
        "level": answer.LEVEL,
        "seed": seed,
        "batch_size": batch_size,
        "summary": answer.summary(reports),
        "probes": reports,
        "seconds": round(time.perf_counter() - started, 3),
    }


def write_probe(folder: Path, result: Mapping[str, Any], reference: Reference, *, seed: int = 0) -> Path:
    """Write `probe.json` and `probe.html`.

    Args:
        folder: Made if missing.
        result: From `probe_reward`.
        reference: The same that was probed; its first picture shows the changes.
        seed: As above.

    Returns:
        The page's path.
    """
    sample = reference.samples[0]
    pictures = {}
    for probe in PROBES:
        shown = examples(probe, sample, _generator(seed, 0))
        pictures[probe.name] = [{"label": label} | embedded(image, side=SHOWN_SIDE) for label, image in shown]
    original = embedded(sample.image, side=SHOWN_SIDE) | {"prompt": sample.prompt}
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(folder / RESULT, (text + "\n").encode())
    return write_atomic(folder / PAGE, probe_page(result, original, pictures).encode())


def _level(scorer: Scorer, probe: Probe, level: Level, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
    """[N] responses of all reference samples at one level, and its report."""
    judged = [row for row, value in enumerate(scorer.value) if math.isfinite(value)]
    if probe.name == "neighbours":
        rows, (value, reasons) = _neighbours(scorer, level, judged)
    elif probe.name == "form":
        rows = judged
        value, reasons = _forms(scorer, level, rows)
    else:
        changed = {row: _changed(scorer, probe, level, row, seed) for row in judged}
        rows = [row for row, sample in changed.items() if sample is not None]
        value, reasons = scorer.score(rows, [s for s in changed.values() if s is not None])
    response = answer.responses(
        scorer.value[rows], value, scorer.spread, higher_is_better=scorer.reward.higher_is_better
    )
    full = np.full(len(scorer.value), np.nan)
    full[rows] = response
    left_out = len(judged) - len(rows)
    return full, answer.level_report(level.label, level.x, response, reasons, left_out=left_out)


def _changed(scorer: Scorer, probe: Probe, level: Level, row: int, seed: int) -> Sample | None:
    samples = scorer.reference.samples
    sample = samples[row]
    if probe.change is not None:
        return probe.change(sample, level, _generator(seed, row))
    other = next((s.prompt for s in samples[row + 1 :] + samples[:row] if s.prompt != sample.prompt), None)
    return None if other is None else Sample(sample.image, other)


def _neighbours(
    scorer: Scorer, level: Level, judged: list[int]
) -> tuple[list[int], tuple[np.ndarray, list[str | None]]]:
    samples = scorer.reference.samples
    if level.label == "in reverse order":
        rows = judged[::-1]
        return rows, scorer.score(rows, [samples[row] for row in rows])
    rows = judged[:ALONE]
    values, reasons = [], []
    for row in rows:
        images, prompts = [samples[row].image], [samples[row].prompt]
        if level.label == "among white pictures":
            images, prompts = among_white(samples[row].image, prompts[0], scorer.batch_size)
        value, reason = scorer.ask(as_contract(images), prompts, [row] * len(prompts))
        values.append(value[0])
        reasons.append(reason[0])
    return rows, (np.array(values), reasons)


def _forms(scorer: Scorer, level: Level, rows: list[int]) -> tuple[np.ndarray, list[str | None]]:
    samples = scorer.reference.samples
    values, reasons = [], []
    for start in range(0, len(rows), scorer.batch_size):
        part = rows[start : start + scorer.batch_size]
        images = [FORMS[level.label](samples[row].image) for row in part]
        found = scorer.ask(images, [samples[row].prompt for row in part], part)
        values.append(found[0])
        reasons += found[1]
    return np.concatenate(values), reasons


def _generator(seed: int, row: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + row)
