# SPDX-License-Identifier: Apache-2.0
"""Images a second and share of peak of whole training iterations at SD3.5-medium's size, random weights, 512².

`python tests/benchmarks/gpu/table.py` writes `table.json` and `table.md` into --output and prints them: each algorithm
with blocks as they are by default (compiled on a GPU) and with model.compile=false. Shares count a backward as two
forwards and are of --peak. --tiny runs everything on a small network, on any device.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, ".")
import visalign.pipelines.flow_grpo.job as job
from visalign.config import load_config

HERE = Path(__file__).parent
NO_GUIDANCE = "model.guidance=1.0"
NO_KL = 'objective.changes_for={"flow_grpo": {"kl": 0.0}}'
ROWS = {
    "flow_grpo: guidance, KL": [],
    "flow_grpo: guidance": [NO_KL],
    "flow_grpo": [NO_GUIDANCE, NO_KL],
    "flow_grpo, one window of 3": [NO_GUIDANCE, NO_KL, "rollout.sde_window=3"],
    "diffusion_nft, one level": [
        NO_GUIDANCE,
        "objective.algorithm=diffusion_nft",
        'objective.changes_for={"diffusion_nft": {"levels": 1}}',
        "objective.ratio_bound=null",
    ],
}
PHASES = ("rollout", "decode", "reward", "monitor", "update")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def tflop_of_forward(policy) -> float:
    """Operations of one forward of one image, in 10¹². A first compiled call under the counter would stay eager."""
    x, time_ = torch.randn(1, *policy.latent_shape, device=policy.device), torch.full((1,), 0.5, device=policy.device)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.compiler.set_stance("force_eager"):
        policy.velocity(x, time_, policy.encode(["a red circle"]))
    return counter.get_total_flops() / 1e12


def measure(name: str, overrides: list[str], folder: Path, options: argparse.Namespace) -> dict:
    """Run iterations of one algorithm; return the medians after the first, which compiles."""
    tiny = options.tiny
    batch = 2 if tiny else options.batch
    config = load_config(
        job.FlowGRPOConfig,
        str(HERE / "sd35.yaml"),
        [
            f"model.path={folder}",
            f"model.image_size={64 if tiny else 512}",
            f"rollout.group_size={2 if tiny else 16}",
            f"rollout.batch_size={batch}",
            f"optimizer.micro_batch={batch}",
            *overrides,
        ],
    )
    images = config.rollout.prompts_per_iteration * config.rollout.group_size
    with tempfile.TemporaryDirectory() as output:
        run = job._build(config, Path(output))
        policy = run.trainer.algorithm.policy
        tflop = tflop_of_forward(policy)
        seconds, passes, records = [], [], []
        for _ in range(options.iterations + 1):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            before = policy.forward_count.equivalents
            synchronize()
            start = time.perf_counter()
            records.append(run.trainer.iterate())
            synchronize()
            seconds.append(time.perf_counter() - start)
            passes.append(policy.forward_count.equivalents - before)
        gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")
    median = statistics.median(seconds[1:])
    row = {
        "name": name,
        "images/s": images / median,
        "share": passes[-1] * tflop * 1e12 / median / options.peak,
        "passes": passes[-1] / images,
        "GiB": gib,
        "first s": seconds[0],
        "s": median,
        "ratio floor": max(record.get("loss/ratio_floor", 0.0) for record in records),
    }
    row |= {phase: statistics.median(r.get(f"seconds/{phase}", 0.0) for r in records[1:]) for phase in PHASES}
    del run, policy
    gc.collect()
    torch.cuda.empty_cache()
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=3, help="measured after the first")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS, metavar="NAME")
    parser.add_argument("--eager", action="store_true", help="also with model.compile=false")
    parser.add_argument("--peak", type=float, default=989e12, help="operations a second; an H100's and H200's in bf16")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "visalign-gpu")
    options = parser.parse_args()
    folder = options.output / ("sd35-tiny" if options.tiny else "sd35")
    if not (folder / "model_index.json").exists():
        size = ["--tiny"] if options.tiny else []
        subprocess.run([sys.executable, str(HERE / "make_sd35.py"), str(folder), *size], check=True)
    rows = []
    for name, overrides in ROWS.items():
        if name not in options.rows:
            continue
        for compiled in (True, False) if options.eager else (True,):
            label = name if compiled else f"{name}, eager"
            mode = [] if compiled else ["model.compile=false"]
            rows.append(measure(label, [*overrides, *mode], folder, options))
            print(json.dumps(rows[-1]), flush=True)
            (options.output / "table.json").write_text(json.dumps(rows, indent=1))
    columns = list(rows[0])
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(str(row[column]) for column in columns) for row in rows]
    table = "\n".join(f"| {line} |" for line in lines)
    (options.output / "table.md").write_text(table + "\n")
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{card}, torch {torch.__version__}\n\n{table}")


if __name__ == "__main__":
    main()
