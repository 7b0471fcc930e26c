# SPDX-License-Identifier: Apache-2.0
"""Result of one held-out evaluation, sample by sample, and its numbers."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from visalign.atomic import write_atomic
from visalign.errors import UserError
from visalign.evaluation.statistics.intervals import Interval, finite, paired_bootstrap, share_interval

LENGTH, ENTROPY = NEUTRAL = "length", "token_entropy"
"""Measures of completions, of which neither direction is better or worse."""
_FORMAT = "visalign held-out result 1"


@dataclass(frozen=True, kw_only=True)
class HeldoutResult:
    """N = records × seeds samples, those of a record together; NaN and means without those that have no score."""

    prompts: tuple[str, ...]  # [N]
    tags: tuple[str, ...]  # [N] category of each prompt
    seeds: NDArray[np.int64]  # [N] seed; with the prompt it fixes the starting noise
    correct: NDArray[np.bool_]  # [N] verdict; False where `judged` is False
    judged: NDArray[np.bool_]  # [N] True where there is a verdict
    reasons: tuple[str, ...]  # [N] why wrong, or why there is no verdict; may be empty
    scores: Mapping[str, NDArray[np.float32]]  # reward name -> [N], NaN where invalid
    units: Mapping[str, str]  # reward name -> unit
    higher_is_better: Mapping[str, bool]  # reward name -> direction
    images: NDArray[np.uint8]  # [M, H, W, 3] images of the samples `image_index`, reduced when they are large
    image_index: NDArray[np.int64]  # [M] ascending sample numbers
    completions: tuple[str, ...] = ()  # [N] completions of a text policy; empty where the samples are images
    sources: tuple[str, ...] = ()  # [N] identity of the images to edit, see `keys`; empty where no record has one

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def keys(self) -> list[tuple[str, ...]]:
        """[N] identity of the records (`record_key`)."""
        sources = self.sources or [""] * len(self)
        return [(p, s) if s else (p,) for p, s in zip(self.prompts, sources, strict=True)]

    def title(self, row: int) -> str:
        """Return a sample's prompt, with the names of the images that it edits."""
        prompt, *source = self.keys[row]
        names = ", ".join(Path(path).name for path in "".join(source).split("\n"))
        return f"{prompt} ({names})" if names else prompt

    @property
    def accuracy(self) -> float:
        """Share correct of the samples with a verdict; NaN without any."""
        return self.accuracy_of(slice(None))

    @property
    def by_category(self) -> dict[str, float]:
        """Accuracy per tag, in order of appearance."""
        return {tag: k / n if n else math.nan for tag, (k, n) in self.counts.items()}

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """tag -> (correct, judged), in order of appearance."""
        rows = {tag: self.rows(tag) for tag in dict.fromkeys(self.tags)}
        return {tag: (int(self.correct[row].sum()), int(self.judged[row].sum())) for tag, row in rows.items()}

    def changes(self, before: HeldoutResult, rows: Sequence[int], labels: Iterable[str]) -> dict[str, float]:
        """Return label -> mean change of a reward or of the "accuracy" in standard errors, > 0 better, paired (n ≥ 2).

        Where all change alike it is that of one more sample without a change: n or −n. `rows` [N] are the samples'
        indices in `before`; another prompt or seed there is left out.
        """
        keys, old_keys = self.keys, before.keys
        pairs = [
            (new, old)
            for new, old in enumerate(rows)
            if old < len(before) and (keys[new], self.seeds[new]) == (old_keys[old], before.seeds[old])
        ]
        new_rows, old_rows = [new for new, _ in pairs], [old for _, old in pairs]
        columns, old_columns = ({**side.scores, "accuracy": side.outcome()} for side in (self, before))
        changes = {}
        for label in (label for label in labels if label in columns and label in old_columns):
            change = columns[label][new_rows].astype(np.float64) - old_columns[label][old_rows]
            change = change[np.isfinite(change)] * (1 if self.higher_is_better.get(label, True) else -1)
            if len(change) > 1:
                error = float(change.std(ddof=1)) / math.sqrt(len(change))
                alike = (change == change[0]).all()
                changes[label] = float(np.sign(change[0])) * len(change) if alike else float(change.mean()) / error
        return changes

    def rows(self, tag: str) -> NDArray[np.bool_]:
        """Return a mask [N] of the samples of one category."""
        return np.array([entry == tag for entry in self.tags], dtype=bool)

    def interval(self, tag: str | None = None) -> Interval:
        """Return the interval over prompts of the accuracy, of all or of one category (NaN where absent)."""
        rows = self.judged & (np.ones(len(self), dtype=bool) if tag is None else self.rows(tag))
        keys = self.keys
        return share_interval(self.correct[rows], [keys[k] for k in np.flatnonzero(rows)])

    def accuracy_of(self, rows: Sequence[int] | slice) -> float:
        """Return the share correct of some samples; NaN where none has a verdict."""
        judged = int(self.judged[rows].sum())
        return int(self.correct[rows].sum()) / judged if judged else math.nan

    def has_same_samples(self, other: HeldoutResult) -> bool:
        """Check whether completions, kept images and scores are those of another result, bit for bit."""
        return (
            self.completions == other.completions
            and np.array_equal(self.images, other.images)
            and all(np.array_equal(v, other.scores[n], equal_nan=True) for n, v in self.scores.items())
        )

    def outcome(self) -> NDArray[np.float64]:
        """Return outcomes [N]: 1 correct, 0 wrong, NaN without a verdict."""
        return np.where(self.judged, self.correct.astype(np.float64), np.nan)

    def is_verdict(self, name: str) -> bool:
        """Check whether a reward's scores are the verdicts themselves."""
        return bool(self.judged.any()) and np.array_equal(self.scores[name], self.outcome(), equal_nan=True)

    def mean(self, name: str) -> float:
        """Return the mean of a reward over its valid samples; NaN when there is none."""
        valid = self.scores[name][np.isfinite(self.scores[name])]
        return float(valid.mean(dtype=np.float64)) if len(valid) else math.nan

    def mean_interval(self, name: str, rows: Sequence[int] | None = None) -> Interval:
        """Return the mean of a reward with its 95 % interval over prompts, of all or some rows; a share of 0 and 1."""
        keys, rows = self.keys, range(len(self)) if rows is None else rows
        values, prompts = self.scores[name][list(rows)], [keys[row] for row in rows]
        share, generator = bool(np.isin(np.nan_to_num(values), (0, 1)).all()), torch.Generator().manual_seed(0)
        return paired_bootstrap(np.zeros(len(values)), values, prompts, generator=generator, share=share)

    def means(self, names: Iterable[str], rows: Sequence[int] | None = None) -> dict[str, float]:
        """Return NAME, NAME.low, NAME.high: `mean_interval` of rewards."""
        means = {name: self.mean_interval(name, rows) for name in names if name in self.scores}
        ends = {"": "estimate", ".low": "low", ".high": "high"}
        return {f"{n}{suffix}": getattr(mean, end) for n, mean in means.items() for suffix, end in ends.items()}

    def invalid(self, name: str) -> int:
        """Return the number of samples that a reward could not score."""
        return int((~np.isfinite(self.scores[name])).sum())

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers without the samples, JSON-able; undefined numbers are None."""
        rewards = {
            name: {"mean": finite(self.mean(name)), "unit": self.units[name]}
            | {"higher_is_better": self.higher_is_better[name]}
            | {"valid": len(self) - self.invalid(name), "invalid": self.invalid(name)}
            for name in self.scores
        }
        return {
            "accuracy": finite(self.accuracy),
            "accuracy_interval": self.interval().to_dict(),
            "by_category": {tag: finite(value) for tag, value in self.by_category.items()},
            "counts": {tag: {"correct": k, "judged": n} for tag, (k, n) in self.counts.items()},
            "rewards": rewards,
            "samples": len(self),
            "prompts": len(set(self.keys)),
            "seeds": sorted({int(seed) for seed in self.seeds}),
            "without_verdict": int((~self.judged).sum()),
        }

    def save(self, path: Path) -> Path:
        """Write everything to one `.npz` file (no pickle), atomically; `load_heldout` reads it back equal."""
        header = {
            "format": _FORMAT,
            **{name: getattr(self, name) for name in _TEXTS},
            "names": list(self.scores),
            "units": dict(self.units),
            "higher_is_better": dict(self.higher_is_better),
        }
        arrays = {f"score{number}": values for number, values in enumerate(self.scores.values())}
        arrays |= {name: getattr(self, name) for name in _ARRAYS}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, header=np.array(json.dumps(header)), **arrays)
        return write_atomic(path, buffer.getvalue())


_ARRAYS = ("seeds", "correct", "judged", "images", "image_index")
_TEXTS = ("prompts", "tags", "reasons", "completions", "sources")


def load_heldout(path: Path) -> HeldoutResult:
    """Read a file of `HeldoutResult.save`."""
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as file:
            header = json.loads(str(file["header"]))
            arrays = {name: file[name] for name in _ARRAYS}
            scores = {name: file[f"score{number}"] for number, name in enumerate(header["names"])}
    except FileNotFoundError as error:
        raise UserError(f"There is no held-out result at {path}; evaluate first.") from error
    except (ValueError, KeyError, EOFError, OSError, TypeError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} is no held-out result, or was cut short ({error}); delete it and evaluate again."
        ) from error
    return HeldoutResult(
        **{name: tuple(header.get(name, ())) for name in _TEXTS},
        scores=scores,
        units=header["units"],
        higher_is_better=header["higher_is_better"],
        **arrays,
    )


def joined(parts: Sequence[HeldoutResult]) -> HeldoutResult:
    """Concatenate results of several processes, by the same rewards; a measure missing from a part is NaN there."""
    starts = np.cumsum([0, *map(len, parts)])
    names = dict.fromkeys(name for part in parts for name in part.scores)
    with_images = [part for part in parts if len(part.images)] or parts
    sources = [source for part in parts for source in part.sources or [""] * len(part)]
    indices = [part.image_index + start for part, start in zip(parts, starts[:-1], strict=True)]
    return replace(
        parts[0],
        **{name: tuple(x for part in parts for x in getattr(part, name)) for name in _TEXTS if name != "sources"},
        sources=tuple(sources) if any(sources) else (),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS[:3]},
        scores={
            name: np.concatenate([part.scores.get(name, np.full(len(part), np.nan, np.float32)) for part in parts])
            for name in names
        },
        units={name: unit for part in parts for name, unit in part.units.items()},
        higher_is_better={name: up for part in parts for name, up in part.higher_is_better.items()},
        images=np.concatenate([part.images for part in with_images]),
        image_index=np.concatenate(indices),
    )
