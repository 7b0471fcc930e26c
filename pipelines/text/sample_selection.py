# SPDX-License-Identifier: Apache-2.0
"""From judged completions to a dataset: which are chosen, how they are written, what is said of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from visalign.errors import UserError
from visalign.pipelines.shared.parts import Records
from visalign.training.text.sampling_grid import Completions
from visalign.training.text.sampling_statistics import statistics
from visalign.training.text.selection import accepted_completions, best_of_group, every_valid

from .sample_config import SelectionConfig

OWN_FIELDS = ("completion", "reward", "temperature", "top_p", "seed", "sample", "group")
"""What the dataset adds to a prompt's record; `sample` counts the completions of one point to one prompt,
`group` is the number of the prompt."""


def chosen_completions(rule: SelectionConfig, completions: Completions, free: Tensor) -> list[int]:
    """Places of the completions that become the dataset.

    Args:
        rule: how they are chosen.
        completions: B completions.
        free: bool [B], which may be chosen.
    """
    if rule.rule == "all":
        return every_valid(free)
    if rule.rule == "best_of_n":
        return best_of_group(completions.reward, completions.prompt, seed=rule.seed, valid=free)
    return accepted_completions(
        completions.reward,
        completions.prompt,
        completions.text,
        threshold=rule.threshold,
        per_group=rule.per_prompt,
        seed=rule.seed,
        valid=free,
    )


def nothing_chosen(rule: SelectionConfig, completions: Completions, free: Tensor, output: Path) -> UserError:
    """What to say where no completion was chosen.

    Args:
        rule: how completions are chosen.
        completions: B completions.
        free: bool [B], which may be chosen.
        output: the run's folder.
    """
    if not bool(free.any()):
        cut = int(completions.truncated.sum())
        return UserError(
            f"None of the {len(completions)} completions may be chosen: {cut} of them met the length limit. "
            "No dataset was written. Raise rollout.max_new_tokens in a new run, or set "
            "selection.truncated=true and go on with --resume."
        )
    best = float(completions.reward[free].max())
    return UserError(
        f"None of the {len(completions)} completions was accepted: the highest reward is {best:g}, and "
        f"selection.threshold is {rule.threshold:g}. No dataset was written; the completions are kept in "
        f"'{output}'. Lower the threshold and go on with --resume, or sample more."
    )


def dataset_record(records: Records, completions: Completions, place: int) -> dict[str, Any]:
    """A line of the dataset: prompt, completion, how it came about, and what else the prompt's record holds.

    Args:
        records: of the prompts.
        completions: B completions.
        place: which of them.
    """
    point, record = completions.point[place], records[completions.prompt[place]]
    own = {
        "completion": completions.text[place],
        "reward": float(completions.reward[place]),
        "temperature": point.temperature,
        "top_p": point.top_p,
        "seed": point.seed,
        "sample": completions.number[place],
        "group": completions.prompt[place],
    }
    return {"prompt": record["prompt"], **own, **{k: v for k, v in record.items() if k != "prompt"}}


def table(
    completions: Completions, free: Tensor, chosen: Sequence[int], threshold: float, by: Sequence[str]
) -> list[dict[str, Any]]:
    """Statistics of the completions that agree in some fields of their points.

    Args:
        completions: B completions.
        free: bool [B], which may be chosen.
        chosen: places of those that were.
        threshold: smallest reward that is accepted.
        by: names of the fields.
    """
    keys = [tuple(getattr(point, name) for name in by) for point in completions.point]
    rows = []
    for key in dict.fromkeys(keys):
        places = [i for i, own in enumerate(keys) if own == key]
        found = statistics(completions.rows(places), free[places], threshold=threshold)
        picked = sum(keys[i] == key for i in chosen)
        rows.append({**dict(zip(by, key, strict=True)), **found, "selected": picked})
    return rows
