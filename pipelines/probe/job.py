# SPDX-License-Identifier: Apache-2.0
"""Probe a reward on reference samples: its responses to changes that should not move it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from visalign.atomic import write_atomic
from visalign.evaluation.pages.base import embedded, embedded_text
from visalign.evaluation.pages.probe_page import file_tables, probe_page
from visalign.evaluation.pages.table_files import FOLDER, write_tables
from visalign.evaluation.probes import response
from visalign.evaluation.probes.catalogue import PAIR_PROBES, PROBES, Probe, examples, select_probes
from visalign.evaluation.probes.text_catalogue import TEXT_PAIR_PROBES, TEXT_PROBES
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.pipelines.score.provenance import reward_identity
from visalign.pipelines.score.score import check_batch_size
from visalign.pipelines.shared.run_folder import pretty
from visalign.rewards.text.completions import CompletionPairs, CompletionScores

from .reference import Reference
from .runner import PairRunner, ScoreRunner

RESULT, PAGE = "probe.json", "probe.html"
SHOWN_SIDE = 224  # Longest side of the example images on the page, in pixels
_CATALOGUES = {
    (False, True): PROBES,
    (False, False): PAIR_PROBES,
    (True, True): TEXT_PROBES,
    (True, False): TEXT_PAIR_PROBES,
}
"""(of texts, gives scores) -> probes."""


def probes_for(judge: PointwiseReward | PairwiseReward, names: Sequence[str] | None = None) -> tuple[Probe, ...]:
    """Select the probes of a reward by its kind; one that can do both is probed as one that scores."""
    of_texts = isinstance(judge, CompletionScores | CompletionPairs)
    return select_probes(names, _CATALOGUES[of_texts, isinstance(judge, PointwiseReward)])


def probe_reward(
    judge: PointwiseReward | PairwiseReward,
    reference: Reference,
    *,
    probes: Sequence[Probe] | None = None,
    seed: int = 0,
    batch_size: int = 32,
    on_probe: Callable[[int, str], object] = lambda done, title: None,
) -> dict[str, Any]:
    """Run probes on a reward, and return their reports; `on_probe` gets the number finished and the next title."""
    started = time.perf_counter()
    probes = probes_for(judge) if probes is None else probes
    is_pointwise = isinstance(judge, PointwiseReward)
    if is_pointwise:
        check_batch_size(judge.name, judge, len(reference.samples), batch_size)
    runner = (ScoreRunner if is_pointwise else PairRunner)(judge, reference, batch_size)  # type: ignore[arg-type]
    reports = []
    for index, probe in enumerate(probes):
        on_probe(index, probe.title)
        levels = [runner.run_level(probe, level, seed) for level in probe.levels]
        reports.append(response.probe_report(probe, levels))
    identity = reward_identity(judge)
    about = {"name": judge.name, "kind": runner.kind, "unit": runner.unit, "higher_is_better": runner.higher_is_better}
    about |= {"digest": identity.digest, "identity": json.loads(json.dumps(asdict(identity), default=str))}
    return {
        "format": "visalign probe 1",
        "judge": about,
        "reference": runner.record(),
        "limits": dict(response.LIMITS),
        "level": response.LEVEL,
        "seed": seed,
        "batch_size": batch_size,
        "summary": response.summary(reports),
        "probes": reports,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _shown(item: Any) -> dict[str, Any]:
    return embedded_text(item) if isinstance(item, str) else embedded(item, side=SHOWN_SIDE)


def write_probe(folder: Path, result: Mapping[str, Any], reference: Reference, *, seed: int = 0) -> Path:
    """Write `probe.json`, `tables/` and `probe.html`, with the first reference image as example; return its path."""
    sample = reference.samples[0]
    images = {}
    for probe in _CATALOGUES[isinstance(sample.image, str), result["judge"]["kind"] == ScoreRunner.kind]:
        levels = examples(probe, sample, torch.Generator().manual_seed(1_000_003 * seed))
        images[probe.name] = [{"label": label} | _shown(image) for label, image in levels]
    original = _shown(sample.image) | {"prompt": sample.prompt}
    write_atomic(folder / RESULT, pretty(result))
    write_tables(folder / FOLDER, file_tables(result))
    return write_atomic(folder / PAGE, probe_page(result, original, images))
