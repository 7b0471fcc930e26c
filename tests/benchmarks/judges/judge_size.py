# SPDX-License-Identifier: Apache-2.0
"""Does a larger judge make a better policy, and do the best of N samples as references?

    python tests/benchmarks/judges/judge_size.py --output runs/size --seeds 0 1 2

RewardDance's claims (arXiv 2509.08826, tables 2, 7 and 8). One judge in three sizes, `shapes-vlm` with its
first 1, 2 or 4 language layers, fine-tuned alike: P(yes) of one image. Each is the only reward of `shapes_nft`,
without the guided reference. The largest also rewards by the log-odds over two references of a prompt: the
best or the worst two of 8 samples. Beside it, added afterwards: the sample of 8 that a judge rates highest.

Before it was run: size is refuted where the interval of the largest judge's lead in verified accuracy over
the smallest's holds 0 or lies below it; references where the best two do not beat none; their choice where
they do not beat the worst two. 95 % by bootstrap over held-out prompts, paired, over all seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.benchmarks.judges.generative_judges import BATCH, accuracy, clear_pairs
from tests.support.benchmarks import (
    interval_text,
    lead_text,
    print_table,
    read_rows,
    run_parser,
    run_visalign,
    train_once,
    write_rows,
)
from visalign.data.assets import assets_folder
from visalign.data.shapes.prompts import CATEGORIES, heldout_prompts, train_prompts
from visalign.evaluation.heldout.result import load_heldout
from visalign.evaluation.statistics.intervals import wilson_interval
from visalign.rewards import load_judge, load_reward
from visalign.rewards.questions.reward_dance import RewardDancePairs
from visalign.rewards.questions.reward_dance_reference import ReferenceReward
from visalign.training.loop.metrics import read_metrics

MOST = 4
"""Language layers of `shapes-vlm`."""
SAMPLES, REFERENCES, EACH, UPDATES = 8, 2, 16, 4
"""Of a prompt; those that are kept; training prompts of a category at most; updates of an iteration."""
ALONE, PAIR = "P(yes), one image", "P(yes), pair"
ARMS: dict[str, tuple[int, str | None]] = {
    "4 of 4 layers": (4, None),
    "1 of 4 layers": (1, None),
    "4 layers, the best two": (4, "best"),
    "4 layers, the worst two": (4, "worst"),
    "2 of 4 layers": (2, None),
}
"""Name -> (layers, which samples are references)."""
LEADS = (
    ("4 of 4 layers", "1 of 4 layers"),
    ("4 of 4 layers", "2 of 4 layers"),
    ("2 of 4 layers", "1 of 4 layers"),
    ("4 layers, the best two", "4 of 4 layers"),
    ("4 layers, the best two", "4 layers, the worst two"),
)


class AgainstReferences(ReferenceReward):
    """Log-odds that an image beats the references of its prompt, which stand in the record."""

    def __init__(self, model: str) -> None:
        super().__init__(RewardDancePairs(model, both_orders=False))


def cut(folder: Path, layers: int) -> Path:
    """`shapes-vlm` with its first language layers."""
    if folder.is_dir():
        return folder
    source = assets_folder() / "shapes-vlm"
    dropped = tuple(f"model.layers.{number}." for number in range(layers, MOST))
    weights = load_file(source / "model.safetensors")
    remaining = {name: weight for name, weight in weights.items() if not name.startswith(dropped)}
    part = folder.with_suffix(".part")
    shutil.copytree(source, part, dirs_exist_ok=True)
    save_file(remaining, part / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = config["text_config"]
    text |= {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers]}
    (part / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return part.rename(folder)


def trained(folder: Path, kind: str, model: Path, pairs: int, seed: int) -> Path:
    """The folder of a judge."""
    updates = math.ceil(pairs / BATCH)
    train_once(
        folder, "shapes_reward_dance" if kind == ALONE else "shapes_reward_dance_pairs",
        f"model.path={model}", "model.train=full", "data.kinds=[alignment]", "data.surroundings=0",
        f"data.size={pairs}", "data.heldout_size=100", "evaluation.every=0", "optimizer.lr=1e-3",
        "optimizer.updates_per_iteration=1", f"optimizer.decay_updates={updates}",
        f"run.iterations={updates}", "run.checkpoint_every=1000", f"seed={seed}", command="train-reward",
    )  # fmt: skip
    return folder / "judge"


def prompts(folder: Path, seed: int, per_category: int) -> Path:
    """A table of training prompts, as many of each category, if there are enough."""
    table = folder / "prompts.jsonl"
    if not table.is_file():
        records, order, chosen = train_prompts(), np.random.default_rng(seed), []
        for name in CATEGORIES:
            own = [record for record in records if record["tag"] == name]
            chosen += [own[index] for index in order.permutation(len(own))[:per_category]]
        write_rows(table, chosen)
    return table


def sampled(folder: Path, prompt_file: Path, *more: str, first: int = 0, size: int = SAMPLES) -> dict[str, list[str]]:
    """Prompt -> its samples by the packaged generator, or by that of `--model` in `more`."""
    if not (folder / "images.jsonl").is_file():
        arguments = ("--seeds", f"{first}-{first + size - 1}", "--batch-size", "96", *more)
        run_visalign("sample", str(prompt_file), *arguments, "-o", str(folder))
    samples: dict[str, list[str]] = {}
    for row in read_rows(folder / "images.jsonl"):
        samples.setdefault(row["prompt"], []).append(str(folder / row["image"]))
    return samples


def references(folder: Path, prompt_file: Path, samples: Path, judge: Path) -> dict[str, Path]:
    """Tables of the same prompts, whose records name the best or the worst samples of the prompt."""
    tables = {name: folder / f"{name}.jsonl" for name in ("best", "worst")}
    if all(table.is_file() for table in tables.values()):
        return tables
    images = sampled(samples, prompt_file)
    ranker = ReferenceReward(RewardDancePairs(str(judge)))
    rows: dict[str, list[Any]] = {name: [] for name in tables}
    for record in read_rows(prompt_file):
        own = images[record["prompt"]]
        order = ranker.rank(own, record["prompt"], record)
        for name, selected in (("best", order[:REFERENCES]), ("worst", order[-REFERENCES:])):
            rows[name].append({**record, "references": [own[index] for index in selected]})
    return {name: write_rows(table, rows[name]) for name, table in tables.items()}


def policy(folder: Path, reward: str, judge: Path, table: Path, seed: int, iterations: int) -> None:
    """Train `shapes_nft` with a judge as its only reward."""
    row = "objective.changes_for.diffusion_nft_closed"
    train_once(
        folder, "shapes_nft", f"data.train={table}",
        f"rewards.terms={{judge: {{name: '{reward}', options: {{model: '{judge}'}}}}}}",
        f"{row}.reference_guidance=null", f"{row}.kl_until={iterations // 4}", f"seed={seed}",
        "rollout.prompts_per_iteration=12", f"optimizer.updates_per_iteration={UPDATES}",
        f"optimizer.decay_updates={UPDATES * iterations}",
        "evaluation={every: 0, rewards: {shapes_verifier: {}}}", "monitor.features=null",
        f"run.iterations={iterations}", "run.max_seconds=null",
    )  # fmt: skip


def run(folder: Path, arm: str, options: argparse.Namespace, seed: int) -> None:
    """Train judge and policy of an arm, unless they exist."""
    layers, choice = ARMS[arm]
    kind = ALONE if choice is None else PAIR
    judge = trained(judge_of(folder, arm), kind, cut(folder / f"cut{layers}", layers), options.pairs, seed)
    if arm not in options.policies:
        return
    prompt_file, reward = prompts(folder, seed, options.each), "reward_dance"
    if choice is not None:
        prompt_file = references(folder / "references", prompt_file, folder / "references" / "samples", judge)[choice]
        reward = f"{Path(__file__).resolve()}:AgainstReferences"
    policy(policy_of(folder, arm), reward, judge, prompt_file, seed, options.iterations)


def picked(output: Path, folder: Path, arm: str) -> tuple[np.ndarray, np.ndarray]:
    """[P] share of right images among 8 samples of a held-out prompt; [P] whether the judge's is one."""
    choice, judge = ARMS[arm][1], judge_of(folder, arm) / "judge"
    prompt_file = write_rows(output / "heldout.jsonl", heldout_prompts())
    images = sampled(output / "candidates", prompt_file, first=SAMPLES)
    reward: Any = load_judge("reward_dance", model=str(judge)) if choice is None else AgainstReferences(str(judge))
    if choice is not None:
        prompt_file = references(folder / "heldout", prompt_file, output / "pool", judge)[choice]
    records = [record for record in read_rows(prompt_file) for _ in range(SAMPLES)]
    candidates = [image for record in records[::SAMPLES] for image in images[record["prompt"]]]
    texts = [record["prompt"] for record in records]
    scores = reward.score(candidates, texts, records).value.view(-1, SAMPLES)
    truth = load_reward("shapes_verifier").score(candidates, texts, records).value.view(-1, SAMPLES)
    return truth.mean(1).numpy(), truth.gather(1, scores.argmax(1, keepdim=True))[:, 0].numpy()


def judge_of(folder: Path, arm: str) -> Path:
    """Where the training of an arm's judge is; arms with references share it."""
    layers, choice = ARMS[arm]
    return folder / ("judge_pair" if choice else f"judge_{layers}")


def policy_of(folder: Path, arm: str) -> Path:
    """Where the policy of an arm is."""
    layers, choice = ARMS[arm]
    return folder / f"policy_{choice or layers}"


def right(folder: Path, arm: str, count: int) -> dict[str, int]:
    """Set -> how many of its pairs the judge of an arm ranks as they are."""
    kind, judge = PAIR if ARMS[arm][1] else ALONE, judge_of(folder, arm) / "judge"
    return {
        name: round(count * accuracy(kind, judge, clear_pairs(share, count, ["alignment"])))
        for name, share in (("known grounds", 0.0), ("other grounds", 1.0))
    }


def change(before: list[np.ndarray], after: list[np.ndarray], prompts: list[str]) -> str:
    """Gain in right images over before, paired over the prompts of all seeds."""
    return lead_text(np.concatenate(after), np.concatenate(before), prompts * len(before))


def measured(output: Path, folders: list[Path], arm: str, options: argparse.Namespace) -> dict[str, Any]:
    """Entries of the table for an arm: texts of its columns, and outcomes [P] a seed."""
    counts = [right(folder, arm, options.heldout) for folder in folders]
    columns: dict[str, Any] = {}
    for name in counts[0]:
        share = wilson_interval(sum(count[name] for count in counts), options.heldout * len(counts))
        columns[name] = interval_text(share.estimate, share.low, share.high, ".3f")
    columns["lot"], columns["best of 8"] = (
        list(side) for side in zip(*(picked(output, f, arm) for f in folders), strict=True)
    )
    if arm in options.policies:
        runs, spread = [policy_of(folder, arm) for folder in folders], []
        for side in ("before", "after"):
            ends = [load_heldout(path / f"{side}.npz") for path in runs]
            columns[side] = [end.outcome().reshape(-1, len(set(end.seeds.tolist()))).mean(1) for end in ends]
        for path in runs:
            own = [row["reward_group_std"] for row in read_metrics(path / "metrics.jsonl")]
            spread.append(np.mean(own[-3:]) / np.mean(own[:3]))
        columns["spread"] = f"{np.mean(spread):.2f}"
    return columns


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--heldout", type=int, default=600, help="pairs")
    parser.add_argument("--each", type=int, default=EACH, help="training prompts of a category at most")
    parser.add_argument("--iterations", type=int, default=12, help="of the policies")
    parser.add_argument("--policies", nargs="*", choices=ARMS, default=list(ARMS), help="that are trained")
    options = parser.parse_args()
    output, texts = options.output, [record["prompt"] for record in heldout_prompts()]
    folders = [output / f"seed{seed}" for seed in options.seeds]
    for folder, seed in zip(folders, options.seeds, strict=True):
        for arm in ARMS:
            run(folder, arm, options, seed)
    arms: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        arms[arm] = measured(output, folders, arm, options)
        (output / "arms.json").write_text(json.dumps(arms, default=np.ndarray.tolist), encoding="utf-8")
    titles = {"best of 8": ("lot", "best of 8, over one by lot"), "after": ("before", "trained, over before")}
    rows = []
    for arm, own in arms.items():
        row = {"judge": arm, "known grounds": own["known grounds"], "other grounds": own["other grounds"]}
        for key, (start, title) in titles.items():
            if start in own:
                means = f"{np.mean(own[start]):.3f} -> {np.mean(own[key]):.3f}"
                row[title] = f"{means}, {change(own[start], own[key], texts)}"
        rows.append({**row, "spread left": own.get("spread", "")})
    for one, other in LEADS:
        row = {"judge": f"{one} over {other}"}
        for key, (_, title) in titles.items():
            if key in arms[one] and key in arms[other]:
                row[title] = change(arms[other][key], arms[one][key], texts)
        rows.append(row)
    print_table(f"{options.pairs} pairs, {options.iterations} iterations, seeds {options.seeds}", rows)


if __name__ == "__main__":
    main()
