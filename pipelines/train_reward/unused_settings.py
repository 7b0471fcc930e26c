# SPDX-License-Identifier: Apache-2.0
"""Settings of the data that a job would not read: refused, so that none is thought to have had an effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any

from visalign.data.sets.sources import GENERATED
from visalign.errors import UserError
from visalign.training.reward.tasks import TASKS

if TYPE_CHECKING:
    from .config import TrainRewardConfig


@dataclass(frozen=True)
class Used:
    """When a setting has an effect."""

    when: Callable[[TrainRewardConfig], bool]
    where: str
    """The same in words, behind "is used"."""


def _pairs(config: TrainRewardConfig) -> bool:
    """Whether generated pairs with their labels are learnt from or measured on."""
    data, labels = config.data, TASKS[config.objective.task].labels
    return labels == "pairs" and "shapes:pairs" in (data.train, data.heldout)


USED: dict[str, Used] = {
    "theta": Used(lambda c: c.objective.task == "ict", "by the task ict alone"),
    "kinds": Used(
        lambda c: TASKS[c.objective.task].labels == "pairs" and c.data.train == "shapes:pairs",
        "where data.train is shapes:pairs and the task learns from pairs (data.heldout has heldout_kinds)",
    ),
    "heldout_kinds": Used(lambda c: c.data.heldout == "shapes:pairs", "where data.heldout is shapes:pairs"),
    "labels": Used(_pairs, "where data.train or data.heldout is shapes:pairs and the task learns from pairs"),
    "annotators": Used(
        lambda c: (
            (_pairs(c) and c.data.labels == "votes") or "shapes:quality" in (c.data.train, c.data.heldout)
        ),
        "by shapes:quality, and by shapes:pairs where data.labels is votes and the task learns from pairs",
    ),
    "train_split": Used(lambda c: c.data.train not in GENERATED, "where data.train is a file or layout"),
    "heldout_split": Used(
        lambda c: c.data.heldout is not None and c.data.heldout not in GENERATED,
        "where data.heldout is a file or layout",
    ),
}
"""Settings of `data` that not every job reads."""

UNUSED = {
    ("pair", "smoothing"): "model.kind is yes_no",
    ("pair", "pair_weight"): "model.kind is yes_no",
    ("pair", "likelihood"): "model.kind is yes_no",
    ("checklist, head", "mass"): "model.train is lora",
}
"""(kind, or kind and what is trained; setting of an objective that its task has and the judge does not read)
-> where it is read. A judge of kind pair learns the share of the votes."""


def refuse_unused(config: TrainRewardConfig) -> None:
    """Refuse settings other than their defaults that the job would not read.

    Args:
        config: of the job.

    Raises:
        UserError: naming the setting, the task, and where the setting is used.
    """
    default = {field.name: _default(field) for field in fields(config.data)}
    for name, used in USED.items():
        given = getattr(config.data, name)
        if given != default[name] and not used.when(config):
            raise UserError(
                f"data.{name} is {given!r}, and the task {config.objective.task} on data.train "
                f"{config.data.train} and data.heldout {config.data.heldout} does not read it: it is used "
                f"{used.where}. Leave it out."
            )
    kind, train = config.model.kind, config.model.train
    for field in fields(config.objective):
        given = getattr(config.objective, field.name)
        where = UNUSED.get((kind, field.name)) or UNUSED.get((f"{kind}, {train}", field.name))
        if where is not None and given != field.default:
            raise UserError(
                f"objective.{field.name} is {given!r}, and a judge of kind {kind} with model.train {train} "
                f"does not use it: the task {config.objective.task} uses it where {where}. Leave it out."
            )


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()
