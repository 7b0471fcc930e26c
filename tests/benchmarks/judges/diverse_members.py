# SPDX-License-Identifier: Apache-2.0
"""Do members whose LoRA matrices are kept apart doubt more where their mean is wrong?

    python tests/benchmarks/judges/diverse_members.py --output runs/diverse --seeds 0 1 2

Two ensembles of three HPSv3 judges share the first member; the others have other seeds alone, or the same
seeds and `model.diversity` (UP-RLHF, arXiv 2401.00243). On clear held-out pairs, on own grounds and on pink:
accuracy of the mean lead, deviation of the leads, its AUROC for errors; 95 % by bootstrap over the pairs of
all seeds, paired. Before it was run: "diversity makes σ tell errors" is refuted on a ground where the
interval of the AUROC's gain holds 0 or lies below; where the diversity did not grow nothing is tested.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.benchmarks.judges.shared_blind_spots import DRAWS, drawn, lora_members
from tests.support.benchmarks import quantile_text, run_parser, write_rows
from visalign.data.shapes.preferences import ShapesPair
from visalign.pipelines.jobs import load_job
from visalign.pipelines.train_reward.judges import OtherMembers
from visalign.rewards.hpsv3.ensemble_folders import adapters_of
from visalign.rewards.hpsv3.ensemble_judge import LoraEnsembleReward
from visalign.training.reward.heldout import auroc

GROUNDS = {"own grounds": None, "pink": "pink"}
ARMS = {"other seeds": [0, 1, 2], "other seeds, diversity": [0, 3, 4]}
"""Ensemble -> its members among the five of a seed."""
MEASURES = ("accuracy", "deviation", "AUROC")
BATCH, UPDATES, SPREAD = 16, 16, 200
"""Pairs of an update; updates of an iteration; training pairs by whose leads members are scaled."""


def written(folder: Path, pairs: list[ShapesPair]) -> Path:
    """A file of the pairs with their votes, which all members of a seed learn."""
    table, rows = folder / "pairs.jsonl", []
    if table.is_file():
        return table
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number, pair in enumerate(pairs):
        row = {"prompt": pair.prompt, **dict(zip(("votes_left", "votes_right"), pair.votes, strict=True))}
        for side, image in zip(("left", "right"), pair.images(), strict=True):
            row[f"image_{side}"] = f"images/{number}_{side}.png"
            Image.fromarray(image).save(folder / row[f"image_{side}"])
        rows.append(row)
    return write_rows(table, rows)


def learnt(folder: Path, table: Path, pairs: int, seed: int, weight: float, other_members: list[Path]) -> Path:
    """The folder of a member; an interrupted run is resumed."""
    if not (folder / "summary.json").is_file():
        iterations = max(1, pairs // (BATCH * UPDATES))
        overrides = [
            f"seed={seed}", f"data.train={table}", "data.size=null", "data.heldout=null",
            f"data.batch={BATCH}", "optimizer.lr=2e-3", "optimizer.warmup_updates=10",
            f"optimizer.decay_updates={iterations * UPDATES}", f"optimizer.updates_per_iteration={UPDATES}",
            f"run.iterations={iterations}", "evaluation.every=0",
        ]  # fmt: skip
        if other_members:
            names = ", ".join(map(str, other_members))
            overrides.append(f"model.diversity={{weight: {weight}, others: [{names}]}}")
        job = load_job("shapes_hpsv3", overrides)
        job.run(job.config, output=folder, resume=folder.is_dir())
    return folder / "judge"


def diversity(members: list[Path]) -> float:
    """What `model.diversity` maximises, of the matrices of all members."""
    own = {f"{name}.default.weight": value for name, value in adapters_of(members[-1]).items()}
    return float(OtherMembers([str(member) for member in members[:-1]], own).diversity())


def one_seed(seed: int, options: argparse.Namespace) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """(Ensemble, ground) -> ([N] whether the mean lead is wrong, [N] deviation of the members)."""
    folder = options.output / f"seed{seed}_{options.pairs}"
    train = drawn("train", seed, None, options.pairs, clear=False)
    table, members = written(folder, train), []
    for number, is_diverse in enumerate((False, False, False, True, True)):
        own = [members[0], *members[3:]] if is_diverse else []
        name = f"diverse{options.weight:g}_{number - 2}" if is_diverse else f"member{number}"
        order = 10 * seed + (number - 2 if is_diverse else number)
        members.append(learnt(folder / name, table, options.pairs, order, options.weight, own))
    tests = [drawn("heldout", seed + 500, ground, options.heldout, clear=True) for ground in GROUNDS.values()]
    saved, outcomes = folder / f"leads_{options.weight:g}_{options.heldout}.pt", {}
    if not saved.is_file():
        judge = LoraEnsembleReward.from_members(members)
        torch.save(lora_members(judge, [train[:SPREAD], *tests]), saved)
    train_leads, *leads = torch.load(saved)
    for ground, pairs, lead in zip(GROUNDS, tests, leads, strict=True):
        left = torch.tensor([pair.utility[0] > pair.utility[1] for pair in pairs])
        lead = lead / train_leads.std(1, keepdim=True)
        for arm, chosen in ARMS.items():
            outcomes[arm, ground] = ((lead[chosen].mean(0) > 0) != left, lead[chosen].std(0))
        by_member = ", ".join(f"{value:.3f}" for value in ((lead > 0) == left).double().mean(1).tolist())
        print(f"seed {seed}, {ground}: accuracy of each member {by_member}", flush=True)
    for arm, chosen in ARMS.items():
        print(f"seed {seed}, {arm}: diversity {diversity([members[m] for m in chosen]):.4f}", flush=True)
    return outcomes


def measured(wrong: Tensor, std: Tensor) -> list[float]:
    return [1 - float(wrong.double().mean()), float(std.mean()), auroc(std, wrong)]


def main() -> None:
    parser = run_parser(__doc__, seeds=[0])
    parser.add_argument("--pairs", type=int, default=1536, help="to learn from")
    parser.add_argument("--heldout", type=int, default=1000, help="pairs on each ground")
    parser.add_argument("--weight", type=float, default=1.0, help="of the diversity")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [one_seed(seed, options) for seed in options.seeds]
    size = options.heldout * len(seeds)
    resamples = torch.from_numpy(np.random.default_rng(0).integers(size, size=(DRAWS, size)))
    print(f"| ground | members | {' | '.join(MEASURES)} |\n{'|---' * 5}|")
    for ground in GROUNDS:
        value, draws = {}, {}
        for arm in ARMS:
            wrong, std = (torch.cat([outcomes[arm, ground][what] for outcomes in seeds]) for what in range(2))
            value[arm] = np.array(measured(wrong, std))
            draws[arm] = np.array([measured(wrong[rows], std[rows]) for rows in resamples])
        first, second = ARMS
        value["gain"], draws["gain"] = value[second] - value[first], draws[second] - draws[first]
        for arm in value:
            form = "+.3f" if arm == "gain" else ".3f"
            cells = [quantile_text(value[arm][n], draws[arm][:, n], form) for n in range(len(MEASURES))]
            print(f"| {ground} | {arm} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
