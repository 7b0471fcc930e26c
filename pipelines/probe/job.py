# SPDX-License-Identifier: Apache-2.0
"""A judge tried with every probe on reference images: how it responds to what should not move it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from visalign.atomic import write_atomic
from visalign.errors import UserError
from visalign.evaluation.pages.base import embedded
from visalign.evaluation.pages.probe_page import file_tables, probe_page
from visalign.evaluation.pages.table_files import FOLDER, write_tables
from visalign.evaluation.probes import response as answer
from visalign.evaluation.probes.catalogue import Probe, examples, select_probes
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.pipelines.score.provenance import reward_identity
from visalign.pipelines.shared.run_folder import pretty

from .reference import Reference
from .subjects import Comparer, Scorer

RESULT, PAGE = "probe.json", "probe.html"
SHOWN_SIDE = 224
"""Longest side of the example images on the page, in pixels."""

OnProbe = Callable[[int, int, str], object]
"""Called with the probes done, all probes, and the title of the next."""


def probes_for(
    judge: PointwiseReward | PairwiseReward, names: Sequence[str] | None = None
) -> tuple[Probe, ...]:
    """The probes of a judge of its kind; one that can do both is tried as one that scores."""
    if not isinstance(judge, PointwiseReward):
        return select_probes(names, Comparer.probes)
    scoring = {probe.name for probe in Scorer.probes}
    for probe in select_probes(names, Comparer.probes) if names else ():
        if probe.name not in scoring:
            raise UserError(
                f"The probe {probe.name!r} is for judges that compare, and {judge.name} scores single "
                f"images. Allowed for it: {', '.join(scoring)}."
            )
    return select_probes(names, Scorer.probes)


def probe_reward(
    judge: PointwiseReward | PairwiseReward,
    reference: Reference,
    *,
    probes: Sequence[Probe] | None = None,
    seed: int = 0,
    batch_size: int = 32,
    on_probe: OnProbe | None = None,
) -> dict[str, Any]:
    """Try a judge.

    Returns:
        JSON-able: `judge`, `reference`, `limits`, `summary` (verdict -> probes), `probes`, `seconds`.
    """
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; it must be at least 1.")
    started = time.perf_counter()
    tried = probes_for(judge) if probes is None else probes
    subject = _subject(judge, reference, batch_size)
    reports = []
    for place, probe in enumerate(tried):
        if on_probe is not None:
            on_probe(place, len(tried), probe.title)
        reports.append(
            answer.probe_report(probe, [subject.level(probe, level, seed) for level in probe.levels])
        )
    identity = reward_identity(judge)
    return {
        "format": "visalign probe 1",
        "judge": {
            "name": judge.name,
            "kind": subject.kind,
            "unit": subject.unit,
            "higher_is_better": subject.higher_is_better,
            "digest": identity.digest,
            "identity": json.loads(json.dumps(asdict(identity), default=str)),
        },
        "reference": subject.record(),
        "limits": dict(answer.LIMITS),
        "level": answer.LEVEL,
        "seed": seed,
        "batch_size": batch_size,
        "summary": answer.summary(reports),
        "probes": reports,
        "seconds": round(time.perf_counter() - started, 3),
    }


def _subject(
    judge: PointwiseReward | PairwiseReward, reference: Reference, batch_size: int
) -> Scorer | Comparer:
    if isinstance(judge, PointwiseReward):
        return Scorer(judge, reference, batch_size)
    return Comparer(judge, reference, batch_size)


def write_probe(folder: Path, result: Mapping[str, Any], reference: Reference, *, seed: int = 0) -> Path:
    """Write `probe.json`, `tables/` and `probe.html`, whose path is returned; the reference's first image
    shows the changes.
    """
    sample = reference.samples[0]
    images = {}
    for probe in Scorer.probes if result["judge"]["kind"] == Scorer.kind else Comparer.probes:
        shown = examples(probe, sample, torch.Generator().manual_seed(1_000_003 * seed))
        images[probe.name] = [{"label": label} | embedded(image, side=SHOWN_SIDE) for label, image in shown]
    original = embedded(sample.image, side=SHOWN_SIDE) | {"prompt": sample.prompt}
    write_atomic(folder / RESULT, pretty(result))
    write_tables(folder / FOLDER, file_tables(result))
    return write_atomic(folder / PAGE, probe_page(result, original, images))
