# SPDX-License-Identifier: Apache-2.0
"""What a process holds that trains a judge of some 100 M random weights, and what `visalign plan` says of it.

    python tests/benchmarks/judges/judge_memory.py --processes 2

On the CPU (gloo, one thread each), float32: two iterations and a measurement in between. What is held is the
resident memory above that after the same at tiny size (libraries, the processes' meeting), of the process
that takes most; checkpoints and the saving of the result are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import open_clip
import torch
from accelerate import Accelerator
from transformers import Qwen2VLForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.benchmarks.processes.sharding import ROOT, resident
from tests.support.models.clip import save_tiny_clip, tiny_config, tiny_tokenizer
from tests.support.models.language import save_tiny_language_model
from tests.support.models.vision_language import save_tiny_seeing_model, tiny_seeing_model
from visalign.config import load_config
from visalign.pipelines.text import process
from visalign.pipelines.train_reward import job
from visalign.rewards.clip.open_clip_folder import save_open_clip
from visalign.training import end_processes

WIDTH = 768
JUDGES = {
    "hpsv3, LoRA": ("vlm", "kind: hpsv3, train: lora, head: [64, 16]", "uncertainty"),
    "hpsv3, in full": ("vlm", "kind: hpsv3, train: full, head: [64, 16]", "uncertainty"),
    "ict": ("clip", "kind: ict", "ict"),
    "hp, its head": ("clip", "kind: hp, train: head, head: [64, 32, 16, 8]", "hp"),
    "text_process": ("lm", "", ""),
}
BRIEF = ("data={size: 8, heldout_size: 2, batch: 4, micro_batch: 2}", "optimizer.updates_per_iteration=1")


def save_models(folder: Path) -> None:
    """Tiny models, and large ones beside them; judged completions."""
    save_tiny_seeing_model(folder / "tiny" / "vlm")
    save_tiny_seeing_model(folder / "large" / "vlm")  # its processor
    config: Any = tiny_seeing_model().config
    sizes = {"intermediate_size": 4 * WIDTH, "num_hidden_layers": 10, "num_attention_heads": 48}
    for key, value in {"hidden_size": WIDTH, "initializer_range": 0.02, **sizes}.items():
        setattr(config.text_config, key, value)
    config.text_config.layer_types = ["full_attention"] * sizes["num_hidden_layers"]
    config.vision_config.hidden_size = WIDTH
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder / "large" / "vlm")
    save_tiny_clip(folder / "tiny" / "clip")
    large = tiny_config()
    large["vision_cfg"] |= {"layers": 12, "width": WIDTH, "head_width": 64}
    large["text_cfg"] |= {"layers": 4, "width": 512, "heads": 8}
    model = open_clip.CLIP(large["embed_dim"], large["vision_cfg"], large["text_cfg"])
    save_open_clip(folder / "large" / "clip", model, large, tiny_tokenizer(), dtype=torch.float32)
    save_tiny_language_model(folder / "tiny" / "lm", max_position_embeddings=256)
    of_language = {**sizes, "num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}
    save_tiny_language_model(
        folder / "large" / "lm", max_position_embeddings=256, hidden_size=WIDTH, **of_language
    )
    texts = [("a b\n" * (20 + n % 5)).strip() for n in range(24)]
    rows = [{"prompt": f"q{n}", "completion": text, "reward": float(n % 2)} for n, text in enumerate(texts)]
    (folder / "judged.jsonl").write_text("\n".join(map(json.dumps, rows)))


def made_of(name: str, folder: Path, size: str, sharding: bool) -> tuple[Any, Any]:
    """(the configuration of a run, the module of its job)."""
    model, settings, task = JUDGES[name]
    run = f"run={{iterations: 2, device: cpu, threads: 1, sharding: {sharding}}}"
    if not settings:
        given = [f"data={{train: {folder}/judged.jsonl, batch: 4}}", f"model.path={folder / size / model}"]
        return load_config(process.TextProcessConfig, None, [*given, run]), process
    path = f"model={{{settings}, path: {folder / size / model}}}"
    return load_config(job.TrainRewardConfig, None, [path, f"objective.task={task}", *BRIEF, run]), job


def trained(name: str, folder: Path, size: str, sharding: bool) -> None:
    """Two iterations and a measurement."""
    config, module = made_of(name, folder, size, sharding)
    more = () if module is process else (False,)
    made = module._build(config, folder / f"{name}, {size}, {sharding}", *more)
    made.trainer.iterate()
    with made.trainer.algorithm.unsharded():
        made.measure()
    made.trainer.iterate()


def work(name: str, folder: Path, sharding: bool) -> None:
    """One process of the training; the first says what was planned and held."""
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    trained(name, folder, "tiny", sharding)
    config, module = made_of(name, folder, "large", sharding)
    planned = module.estimate(config)["memory_in_GB"]["in_all"]
    gc.collect()
    accelerator.wait_for_everyone()
    begin, ended, peak = resident(), Event(), [0]

    def look() -> None:
        while not ended.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.005)

    watch = Thread(target=look)
    watch.start()
    trained(name, folder, "large", sharding)
    ended.set()
    watch.join()
    peaks: Any = accelerator.gather(torch.tensor([peak[0] - begin]))
    if accelerator.is_main_process:
        held = int(peaks.max()) / 1e9
        kind = ("FSDP2" if sharding else "DDP") if accelerator.num_processes > 1 else "alone"
        print(f"{name}, {kind}: {planned:.2f} GB planned, {held:.2f} held ({planned / held:.2f})", flush=True)
    end_processes()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", choices=JUDGES, help="one of the judges")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        name, folder, sharding = options.work
        work(name, Path(folder), sharding == "True")
        return 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # else glibc keeps much of what was freed
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    start = [*start, str(options.processes)] if options.processes > 1 else [sys.executable]
    with tempfile.TemporaryDirectory() as folder:
        save_models(Path(folder))
        for name in [options.only] if options.only else JUDGES:
            for sharding in (False, True) if options.processes > 1 else (False,):
                given = [__file__, "--work", name, folder, str(sharding)]
                subprocess.run([*start, *given], env=environment, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
