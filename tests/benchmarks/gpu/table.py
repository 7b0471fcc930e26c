# SPDX-License-Identifier: Apache-2.0
"""Images a second and share of peak of whole training iterations at SD3.5-medium's size, random weights, 512².

`python tests/benchmarks/gpu/table.py` writes `table.json` and `table.md` into --output and prints them: each algorithm
with blocks as they are by default (compiled on a GPU) and, by --eager, with model.compile=false. Rows "published loop"
spend the passes of the released Flow-GRPO loop on the same network, eagerly, with peft's float32 LoRA under autocast.
Shares count a backward as two forwards and are of --peak: of a whole iteration, of its rollout, of its update.
--tiny runs everything on a small network, on any device.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, ".")
import visalign.pipelines.flow_grpo.job as job
from tests.benchmarks.images.published_loop import Published
from visalign.adapters.lora import CastLinear
from visalign.config import load_config
from visalign.pipelines.flow_grpo.parts import build_policy

HERE = Path(__file__).parent
NO_GUIDANCE = "model.guidance=1.0"
NO_KL = 'objective.changes_for={"flow_grpo": {"kl": 0.0}}'
NFT = [
    NO_GUIDANCE,
    "objective.algorithm=diffusion_nft",
    'objective.changes_for={"diffusion_nft": {"levels": 1}}',
    "objective.ratio_bound=null",
]
ROWS = {
    "flow_grpo: guidance, KL": [],
    "flow_grpo: guidance": [NO_KL],
    "flow_grpo": [NO_GUIDANCE, NO_KL],
    "flow_grpo, one window of 3": [NO_GUIDANCE, NO_KL, "rollout.sde_window=3"],
    "diffusion_nft, one level": NFT,
    "diffusion_nft, adapters merged": [*NFT, "rollout.merge_adapters=true"],
}
PUBLISHED = {"published loop: guidance, KL": 0.04, "published loop": 0.0}  # name -> KL; without it no guidance either
PHASES = ("rollout", "decode", "reward", "monitor", "update")
TINY = ["model.image_size=64", "model.dtype=float32", "rollout.group_size=2", "rollout.steps=4"]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tflop_of_forward(policy) -> float:
    """Operations of one forward of one image, in 10¹². A first compiled call under the counter would stay eager."""
    x, time_ = torch.randn(1, *policy.latent_shape, device=policy.device), torch.full((1,), 0.5, device=policy.device)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        policy.velocity(x, time_, policy.encode(["a red circle"]))
    return counter.get_total_flops() / 1e12


def configured(overrides: list[str], folder: Path, options: argparse.Namespace) -> Any:
    batch = 2 if options.tiny else options.batch
    size = [f"model.path={folder}", f"rollout.batch_size={batch}", f"optimizer.micro_batch={batch}"]
    size += TINY if options.tiny else []
    return load_config(job.FlowGRPOConfig, str(HERE / "sd35.yaml"), [*size, *overrides])


def measure(name: str, overrides: list[str], folder: Path, options: argparse.Namespace) -> dict:
    """Run iterations of one algorithm; return the medians after the first, which compiles."""
    config = configured(overrides, folder, options)
    with tempfile.TemporaryDirectory() as output:
        run = job._build(config, Path(output))
        images = config.rollout.prompts_per_iteration * config.rollout.group_size
        iterate, policy = run.trainer.iterate, run.trainer.algorithm.policy
        return measured(name, iterate, policy, run.trainer.clock, images, options)


def measure_published(name: str, folder: Path, options: argparse.Namespace) -> dict:
    """Run iterations of the published loop's passes; its batch is halved under guidance, whose halves it joins."""
    guided = PUBLISHED[name] > 0
    changes = ["model.autocast=bfloat16", "model.compile=false", *([] if guided else [NO_GUIDANCE])]
    config = configured(changes, folder, options)
    policy: Any = build_policy(config.model, torch.device("cuda" if torch.cuda.is_available() else "cpu"), 0)
    for layer in policy.module.modules():
        if isinstance(layer, CastLinear):
            layer.__class__ = Linear  # as peft multiplies
    rollout = config.rollout
    batch = max(1, rollout.batch_size // (1 + guided))
    sizes = {"prompts": rollout.prompts_per_iteration, "group": rollout.group_size, "batch": batch}
    published = Published(policy, argparse.Namespace(**sizes, steps=rollout.steps, kl=PUBLISHED[name]))

    def iterate() -> dict[str, float]:
        published.iterate()
        return {f"seconds/{phase}": value for phase, value in published.clock.take().items()}

    return measured(name, iterate, policy, published.clock, sizes["prompts"] * sizes["group"], options)


def measured(
    name: str, iterate: Callable[[], Any], policy: Any, clock: Any, images: int, options: argparse.Namespace
) -> dict:
    """Time iterations of `images` that `clock` divides into phases."""
    tflop, passes = tflop_of_forward(policy), passes_by_phase(clock, policy.forward_count)
    seconds, records = [], []
    for _ in range(options.iterations + 1):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        passes.clear()
        synchronize()
        start = time.perf_counter()
        records.append(iterate())
        synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[1:])
    phases = {phase: statistics.median(r.get(f"seconds/{phase}", 0.0) for r in records[1:]) for phase in PHASES}

    def share(spent: int, time: float) -> float:
        return spent * tflop * 1e12 / time / options.peak

    row = {
        "name": name,
        "images/s": images / median,
        "share": share(passes.total(), median),
        "share of rollout": share(passes["rollout"], phases["rollout"]),
        "share of update": share(passes["update"], phases["update"]),
        "passes": passes.total() / images,
        "GiB": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan"),
        "compilation s": seconds[0] - median,
        "s": median,
        "ratio floor": max(record.get("loss/ratio_floor", 0.0) for record in records),
        **phases,
    }
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def passes_by_phase(clock: Any, count: Any) -> Counter[str]:
    """Count forward-equivalents in each phase of a clock from now on."""
    passes, timed = Counter[str](), clock.phase

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        before = count.equivalents
        with timed(name):
            yield
        passes[name] += count.equivalents - before

    clock.phase = phase
    return passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=3, help="measured after the first")
    names = [*ROWS, *PUBLISHED]
    parser.add_argument("--rows", nargs="*", default=names, choices=names, metavar="NAME", help="; ".join(names))
    parser.add_argument("--eager", action="store_true", help="also with model.compile=false")
    parser.add_argument("--peak", type=float, default=989e12, help="operations a second; an H100's and H200's in bf16")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "visalign-gpu")
    options = parser.parse_args()
    folder = options.output / ("sd35-tiny" if options.tiny else "sd35")
    if not (folder / "model_index.json").exists():
        size = ["--tiny"] if options.tiny else []
        subprocess.run([sys.executable, str(HERE / "make_sd35.py"), str(folder), *size], check=True)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {"card": card, "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    rows = []
    for name in options.rows:
        for compiled in (True, False) if options.eager and name in ROWS else (True,):
            if name in PUBLISHED:
                rows.append(measure_published(name, folder, options))
            else:
                label = name if compiled else f"{name}, eager"
                mode = [] if compiled else ["model.compile=false"]
                rows.append(measure(label, [*ROWS[name], *mode], folder, options))
            print(json.dumps(rows[-1]), flush=True)
            (options.output / "table.json").write_text(json.dumps({**about, "rows": rows}, indent=1))
            gc.collect()
            torch.cuda.empty_cache()
    columns = list(rows[0])
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(str(row[column]) for column in columns) for row in rows]
    table = ", ".join(f"{key} {value}" for key, value in about.items()) + "\n\n"
    table += "".join(f"| {line} |\n" for line in lines)
    (options.output / "table.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
