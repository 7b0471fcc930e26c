# SPDX-License-Identifier: Apache-2.0
"""How good a LoRA ensemble is, and what its deviations tell: two Markdown tables, as in its model card.

    visalign train-reward shapes_hpsv3 seed=1 --output members/1
    visalign train-reward shapes_hpsv3 seed=2 --output members/2
    python tests/benchmarks/judges/lora_ensemble_quality.py \\
        --members shapes-hpsv3 members/1/judge members/2/judge --output ensemble

joins trained judges, aligns them on images of training prompts, saves the folder and measures it; without
members the packaged ensemble of --judge. First table: held-out pairs, AUROC of a deviation for pairs on the
wrong side, and at equal lead. Second: images unlike those of the training, told apart by the deviations.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from visalign.core.preference.uncertainty import log_win_probability, pair_deviation
from visalign.interfaces import Scores
from visalign.pipelines.train_reward.examples import Example, shapes_pairs
from visalign.rewards.hpsv3.ensemble_judge import LoraEnsembleReward
from visalign.rewards.hpsv3.judge import HPSv3
from visalign.rewards.hpsv3.model import REWARD_TOKEN
from visalign.rewards.vlm.engine import Query
from visalign.training.reward.heldout import HeldoutPairs, auroc, pair_measures

BATCH, DRAWS, TILE = 100, 1_000, 16
ALIGNED, ALIGN_SEED = 100, 77
"""Training pairs whose images the members are aligned on, and the seed of their draw."""
COLUMNS = ("accuracy", "accuracy_all", "ece", "nll", "std_auroc", "std_auroc_lead")


@dataclass(frozen=True, kw_only=True)
class Said:
    """What M members say of N images, [M, N] each, float64."""

    mean: Tensor
    std: Tensor

    @property
    def value(self) -> Tensor:
        """[N] mean of the members."""
        return self.mean.mean(0)

    @property
    def epistemic(self) -> Tensor:
        """[N] deviation between the members' means."""
        return self.mean.std(0)

    @property
    def aleatoric(self) -> Tensor:
        """[N] root mean square of the deviations that they state."""
        return self.std.square().mean(0).sqrt()

    @property
    def total(self) -> Tensor:
        """[N] √(epistemic² + aleatoric²), the judge's `Scores.std`."""
        return torch.hypot(self.epistemic, self.aleatoric)


def join(members: Sequence[str], output: Path) -> None:
    """Join trained judges, align levels and scales on images of training prompts, save as float16."""
    judge = LoraEnsembleReward.from_members(members)
    pairs = shapes_pairs(ALIGN_SEED, ALIGNED, split="train")
    images = [(image, pair.prompt) for pair in map(pairs.__getitem__, range(ALIGNED)) for image in pair.images]
    judge.align([image for image, _ in images], [prompt for _, prompt in images])
    with torch.no_grad():
        for value in judge.model.tensors().values():
            value.copy_(value.half())  # exact numbers of float16 are saved as such
    judge.save(output)


@torch.no_grad()
def ask(judge: LoraEnsembleReward, images: Sequence[Tensor], prompts: Sequence[str]) -> Said:
    """What each member says, with its own deviation, which `Scores` does not carry."""
    model, outputs = judge.model, []
    for images_, prompts_ in batches(images, prompts):
        queries = [Query(images=[image], prompt=prompt) for image, prompt in zip(images_, prompts_, strict=True)]
        rows, reasons = model.engine.encode(model.template, queries, at=REWARD_TOKEN)
        assert not any(reasons), reasons
        mean, log_std = model([row for row in rows if row is not None])
        outputs.append(torch.stack([mean, log_std.exp()]).double())
    mean, std = torch.cat(outputs, 2)
    return Said(mean=mean, std=std)


def ask_single(judge: HPSv3, images: Sequence[Tensor], prompts: Sequence[str]) -> Said:
    """What one judge says, as of an ensemble of one."""
    all_scores = [judge.score(*batch) for batch in batches(images, prompts)]
    assert all(bool(scores.valid.all()) for scores in all_scores)
    mean, std = (torch.cat([scores.parts[name] for scores in all_scores]) for name in ("mean", "std"))
    return Said(mean=mean.double()[None], std=std.double()[None])


def batches(images: Sequence[Tensor], prompts: Sequence[str]) -> Iterator[tuple[list[Tensor], list[str]]]:
    """Images with their prompts, a batch at a time."""
    for start in range(0, len(prompts), BATCH):
        yield list(images[start : start + BATCH]), list(prompts[start : start + BATCH])


def check(answers: Said, scores: Scores) -> None:
    """Check the members' mean and deviation against the judge's."""
    assert scores.std is not None
    count = len(scores.value)
    for mine, theirs in ((answers.value, scores.value), (answers.total, scores.std)):
        torch.testing.assert_close(mine[:count], theirs.double(), rtol=1e-4, atol=1e-5)


def labels(examples: Sequence[Example]) -> HeldoutPairs:
    """Truth and votes of pairs that no judge has scored yet."""
    votes = torch.tensor([example.votes for example in examples]).double()
    weight = votes.sum(1)
    return HeldoutPairs(
        difference=torch.zeros(len(examples), dtype=torch.float64),
        prob=None,
        std=None,
        truth=torch.tensor([example.truth for example in examples]).double(),
        share=(votes[:, 0] + votes[:, 2] / 2) / weight,
        weight=weight,
        clear=torch.tensor([example.clear for example in examples]),
    )


def judged(pairs: HeldoutPairs, difference: Tensor, std: Tensor, *, likely: bool = True) -> HeldoutPairs:
    """Pairs with a lead and its deviation [N]; likely: which also give a probability."""
    prob = log_win_probability(difference, std).exp() if likely else None
    return replace(pairs, difference=difference, std=std, prob=prob)


def readings(pairs: HeldoutPairs, left: Said, right: Said) -> dict[str, HeldoutPairs]:
    """What can be made of the members, by the row's name."""
    leads = left.mean - right.mean
    stated = pair_deviation(left.std, right.std)
    members = [judged(pairs, lead, std) for lead, std in zip(leads, stated, strict=True)]
    lead, between = leads.mean(0), leads.std(0)
    aleatoric = pair_deviation(left.aleatoric, right.aleatoric)
    both = pair_deviation(left.epistemic, right.epistemic)
    scored = pair_deviation(left.total, right.total)
    mixed = torch.stack([member.prob for member in members if member.prob is not None]).mean(0)
    return {f"member {m} alone": member for m, member in enumerate(members)} | {
        "ensemble, total deviation of the difference": judged(pairs, lead, torch.hypot(between, aleatoric)),
        "ensemble, epistemic of the difference": judged(pairs, lead, between, likely=False),
        "ensemble, aleatoric alone": judged(pairs, lead, aleatoric),
        "ensemble, `Scores.std` of both images": judged(pairs, lead, scored),
        'ensemble, "epistemic" of both images': judged(pairs, lead, both, likely=False),
        "mean of the members' probabilities": replace(pairs, difference=mixed - 0.5, prob=mixed),
    }


def drawn(pairs: HeldoutPairs, names: Sequence[str]) -> Tensor:
    """[DRAWS, names] measures of pairs drawn with replacement; the same draws for every judge."""
    generator, size, rows = torch.Generator().manual_seed(0), len(pairs.truth), []
    for _ in range(DRAWS):
        at = torch.randint(size, (size,), generator=generator)
        columns = {name: value[at] for name, value in vars(pairs).items() if value is not None}
        measures = pair_measures(replace(pairs, **columns))
        rows.append([measures[name] for name in names])
    return torch.tensor(rows, dtype=torch.float64)


def spread(draws: Tensor, form: str = ".3f") -> str:
    """The 95 % interval of draws."""
    low, high = draws.nanquantile(torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return f"({low:{form}} to {high:{form}})"


def line(name: str, pairs: HeldoutPairs) -> str:
    """One row of the first table."""
    measures = pair_measures(pairs)
    cells = [f"{measures[key]:.3f}" if key in measures else "–" for key in COLUMNS]
    if pairs.std is not None:
        draws = drawn(replace(pairs, prob=None), COLUMNS[4:])
        cells[4:] = [f"{cell} {spread(column)}" for cell, column in zip(cells[4:], draws.T, strict=True)]
    return f"| {' | '.join([name, *cells])} |"


def compare(pairs: HeldoutPairs, other: HeldoutPairs) -> str:
    """How far two judges of the same pairs are apart."""
    keys = ("accuracy_all", "nll")
    mine, theirs = (pair_measures(replace(side, std=None)) for side in (pairs, other))
    draws = drawn(replace(pairs, std=None), keys) - drawn(replace(other, std=None), keys)
    return ", ".join(
        f"{name} {mine[key] - theirs[key]:+.4f} {spread(draws[:, at], '+.4f')}"
        for at, (key, name) in enumerate(zip(keys, ("accuracy over all", "NLL"), strict=True))
    )


def unusual(heldout: Tensor) -> dict[str, Tensor]:
    """Images [N, 3, 64, 64] that no member has met, by their name, after the held-out ones themselves."""
    generator = torch.Generator().manual_seed(1)
    count, tile_count = len(heldout), (heldout.shape[-1] // TILE) ** 2
    tiles = F.unfold(heldout, TILE, stride=TILE)
    shuffled = torch.stack([image[:, torch.randperm(tile_count, generator=generator)] for image in tiles])
    return {
        "held out": heldout,
        "noise": torch.rand(heldout.shape, generator=generator),
        "blank": torch.rand(count, 3, 1, 1, generator=generator).expand(heldout.shape),
        "colours inverted": 1 - heldout,
        "upside down": heldout.flip(2),
        "shrunk to 12 pixels": F.interpolate(heldout, (12, 12), mode="area"),
        "stretched, 48 x 192": F.interpolate(heldout, (48, 192), mode="bilinear", antialias=True).clamp(0, 1),
        "tiles shuffled": F.fold(shuffled, heldout.shape[-2:], TILE, stride=TILE),
    }


def unusual_line(name: str, answers: Said, usual: Said) -> str:
    """One row of the second table."""
    at = torch.tensor([0.25, 0.5, 0.75, 0.95], dtype=torch.float64)
    parts = " / ".join(f"{value:.2f}" for value in answers.epistemic.quantile(at).tolist())
    odd = torch.arange(2 * len(usual.value)) >= len(usual.value)
    aurocs = [
        auroc(torch.cat(values), odd)
        for values in ((usual.epistemic, answers.epistemic), (usual.aleatoric, answers.aleatoric))
    ]
    return f"| {name} | {parts} | {answers.aleatoric.median():.2f} | {aurocs[0]:.2f} | {aurocs[1]:.2f} |"


def pair_table(judge: LoraEnsembleReward, beside: str, examples: Sequence[Example]) -> None:
    """Print the first table, and how far the ensemble and the single judge are apart."""
    prompts, pairs, single = [example.prompt for example in examples], labels(examples), HPSv3(beside)
    sides = [[example.images[side] for example in examples] for side in (0, 1)]
    left, right = (ask(judge, side, prompts) for side in sides)
    check(left, judge.score(sides[0][:BATCH], prompts[:BATCH]))
    rows = readings(pairs, left, right)
    first, second = (ask_single(single, side, prompts) for side in sides)
    single_pairs = judged(pairs, (first.mean - second.mean)[0], pair_deviation(first.std, second.std)[0])
    print(f"{len(examples)} held-out pairs; 95 % intervals by {DRAWS} bootstrap draws\n")
    print("| | clear truth | all | ECE | NLL, nats | AUROC | at equal lead |\n" + "|---" * 7 + "|")
    for name, row in {**rows, f"`{Path(beside).name}`": single_pairs}.items():
        print(line(name, row), flush=True)
    for name in ("ensemble, total deviation of the difference", "mean of the members' probabilities"):
        print(f"\n{name}, minus `{Path(beside).name}`: {compare(rows[name], single_pairs)}", flush=True)
    print(f"\nLeads, root mean square, and their stated deviations, median: {scales(left, right)}")


def scales(left: Said, right: Said) -> str:
    """How far apart each member puts pairs, beside the deviation that it states; votes fix no scale."""
    leads = (left.mean - right.mean).square().mean(1).sqrt()
    stated = pair_deviation(left.std, right.std).median(1).values
    both = zip(leads.tolist(), stated.tolist(), strict=True)
    return ", ".join(f"member {m} {lead:.2f} and {std:.2f}" for m, (lead, std) in enumerate(both))


def image_table(judge: LoraEnsembleReward, examples: Sequence[Example]) -> None:
    """Print the second table."""
    prompts = [example.prompt for example in examples]
    print(f"\n{len(examples)} images of each kind\n")
    print("| images | epistemic | aleatoric, median | AUROC epistemic | AUROC aleatoric |\n" + "|---" * 5 + "|")
    usual: Said | None = None
    for name, images in unusual(torch.stack([example.images[0] for example in examples])).items():
        answers = ask(judge, list(images), prompts)
        usual = usual or answers
        print(unusual_line(name, answers, usual), flush=True)


def main() -> None:
    """Join, measure, print."""
    parser = argparse.ArgumentParser(description="Quality of a LoRA ensemble and of its deviations.")
    parser.add_argument("--members", nargs="+", help="folders or packaged names of trained judges, to be joined")
    parser.add_argument("--output", type=Path, help="folder of the joined ensemble, with --members")
    parser.add_argument("--judge", default="shapes-hpsv3-ensemble", help="what is measured without --members")
    parser.add_argument("--beside", default="shapes-hpsv3", help="a single judge")
    parser.add_argument("--pairs", type=int, default=2_000)
    parser.add_argument("--images", type=int, default=500, help="of each unusual kind")
    parser.add_argument("--seed", type=int, default=5_000_011, help="of the held-out pairs")
    options = parser.parse_args()
    if (options.members is None) != (options.output is None):
        parser.error("--members and --output go together; one of them is missing.")
    if options.members:
        join(options.members, options.output)
    judge = LoraEnsembleReward(options.output or options.judge)
    pairs = shapes_pairs(options.seed, options.pairs, split="heldout")
    examples = [pairs[number] for number in range(options.pairs)]
    pair_table(judge, options.beside, examples)
    image_table(judge, examples[: options.images])


if __name__ == "__main__":
    main()
