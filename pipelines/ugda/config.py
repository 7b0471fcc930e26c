# SPDX-License-Identifier: Apache-2.0
"""Configuration of UGDA rounds. YAML files hold only what differs from these."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from visalign.errors import UserError
from visalign.pipelines.train_reward.config import OffPolicyConfig
from visalign.schema import STRICT
from visalign.settings import MOST_COUNTED, Count, Natural, NonNegative, PositiveShare


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LabelConfig:
    """Selection of the pairs to label, and the labeller."""

    prompts: Count = 75
    """Training prompts that each round samples, drawn again each time."""
    images: Annotated[int, Field(ge=2, le=MOST_COUNTED)] = 4
    """Samples of each; the pairs among them are what may be labelled."""
    source: Literal["policy", "training"] = "policy"
    """Images that may be labelled: new samples of the policy so far, or as published those that its training in the
    round before made; the first round samples."""
    first: Count = 150
    """Pairs of the first round, drawn at random, as there is no ensemble yet."""
    more: Count = 75
    """Pairs of each later round at most."""
    select: Literal["ugda", "uncertainty", "random"] = "ugda"
    """Selection rule. ugda: half of the pairs by the ensemble's variance, of these half by influence;
    uncertainty: by the variance alone; random."""
    by: str = "truth"
    """Labeller: truth (the verifier of the shapes world), people (visalign collect), or a judge's name."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that judge."""
    votes: Count = 1
    """Votes wanted for each pair where people label."""
    max_failure_rate: PositiveShare = 0.1
    """Share of a round's pairs that a labeller may fail on before the run stops."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PartConfig:
    """A job of a round."""

    config: str
    """A packaged configuration or a YAML file."""
    changes: dict[str, Any] = field(default_factory=dict)
    """key.sub -> value over it, such as {run.iterations: 3}."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EnsembleConfig(PartConfig):
    """The ensemble of judges."""

    config: str = "shapes_reward_dance"
    """Training of a member: a configuration of train_reward on pairs."""
    members: Annotated[int, Field(ge=2, le=MOST_COUNTED)] = 3
    """Judges, each from another seed."""
    judge: str = "reward_dance"
    """Catalogue name that loads a member."""
    diversity: NonNegative = 0.0
    """Weight of what keeps the adapters of each member apart from those of the members before it, as
    model.diversity of train_reward; 0: they differ by their seeds alone."""
    off_policy: OffPolicyConfig | None = None
    """OCRM's weights of earlier rounds' pairs for the policy of this one; null: all labels count alike."""


SET_BY_ROUND = {
    "ensemble": ("data.train", "data.heldout", "data.off_policy", "model.diversity", "model.lora_path", "seed"),
    "policy": ("rewards", "seed", "data.pairs", "model.lora_path", "rollout.keep_images"),
}
"""Keys that a round sets itself."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UGDAConfig:
    """UGDA (Sun et al., ICLR 2025): an ensemble as reward, refitted where it is unsure and it matters.

    Differs from the publication, which has no code: images for texts, pairs for answers, members and policy trained
    from their start in each round unless `refine` is set, and the influence of `visalign.training.policy.influence`.
    """

    pipeline: ClassVar[str] = "ugda"

    seed: Natural = 0
    """Random seed of prompts, selection and members."""
    rounds: Count = 2
    """Number of rounds; the first labels at random."""
    refine: bool = False
    """Train on the members and the policy of the round before, as published; false: both from their start."""
    labels: LabelConfig = field(default_factory=LabelConfig)
    """Labelled pairs."""
    ensemble: EnsembleConfig = field(default_factory=EnsembleConfig)
    """Judges that learn from the labels."""
    policy: PartConfig = field(default_factory=lambda: PartConfig(config="shapes_nft"))
    """Training of the policy: a configuration of flow_grpo; its rewards.terms become the ensemble."""

    def __post_init__(self) -> None:
        for name, keys in SET_BY_ROUND.items():
            for change in getattr(self, name).changes:
                if any(change.startswith(key) or key.startswith(f"{change}.") for key in keys):
                    raise UserError(f"{name}.changes sets {change}, which each round sets itself.")
