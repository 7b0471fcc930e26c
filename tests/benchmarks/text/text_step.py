# SPDX-License-Identifier: Apache-2.0
"""A step of the text trainer beside a step of TRL's GRPOTrainer: seconds, tokens and memory, on CPU.

    python tests/benchmarks/text/text_step.py                                  the embedded model, 1.2 M
    python tests/benchmarks/text/text_step.py --reward alternating --beta 0.04 no completion is passed over
    python tests/benchmarks/text/text_step.py --width 512 --layers 8 --prompts 4    42 M random, 32k tokens

Needs `pip install trl==1.16.0`; without it our own numbers are printed alone. A step is P prompts completed G
times, judged, and the updates on them. Each side runs in a process of its own, steps alternate. Model,
prompts (token ids are compared), lengths, sampling, reward, micro-batches, AdamW and threads are the same;
TRL generates by `transformers.generate`. Completions are drawn independently, so lengths differ: see the
seconds per 1000 tokens; ours spends no backward pass on completions without signal where β is 0. Memory is
VmHWM above what was resident once the model was loaded. Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import ROOT, argument_parser, ask_child

EMBEDDED = ROOT / "assets" / "tasks-qwen3"
NAMES = ("visalign", "TRL")
Rows = Sequence[Mapping[str, float]]


def random_model(options: argparse.Namespace, folder: Path) -> Path:
    """A Qwen3 of the wanted size with random weights; the embedded tokenizer uses few of its ids."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    heads = max(1, options.width // 64)
    config = Qwen3Config(
        vocab_size=options.vocab, hidden_size=options.width, intermediate_size=3 * options.width,
        num_hidden_layers=options.layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2), head_dim=64, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def start(options: argparse.Namespace, side: str, model: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--side", side, "--model", str(model)]
    for name in ("prompts", "group", "max_new_tokens", "micro", "updates", "beta", "lr", "reward"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    for name in ("rounds", "warmup", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads))
    environment = {**os.environ, **threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def measure(options: argparse.Namespace, model: Path) -> dict[str, Rows]:
    """The rows of each side's steps after the first ones."""
    rows: dict[str, list[dict[str, float]]] = {}
    running, ready = {}, {}
    with ExitStack() as stack:
        for side in NAMES:
            process = stack.enter_context(start(options, side, model))
            answer = ask_child(process, go=False)
            if "error" in answer:
                print(f"left out: {side}: {answer['error']}")
            else:
                running[side], ready[side], rows[side] = process, answer, []
        if len({answer["prompts"] for answer in ready.values()}) > 1:
            raise SystemExit("The two sides encode the prompts differently, so nothing can be compared.")
        for number in range(options.warmup + options.rounds):
            for side, process in running.items():
                row = ask_child(process, go=True)
                print(f"{number} {side}: {row}", file=sys.stderr)
                if "error" in row:
                    raise SystemExit(f"{side} failed in step {number}: {row['error']}")
                rows[side].append(row)
        for process in running.values():
            process.communicate()
    return {side: steps[options.warmup :] for side, steps in rows.items()}


def summary(rows: Rows) -> dict[str, float]:
    """The lines of the table: medians over the steps, sums for the ratio to tokens, the largest peak."""
    tokens = sum(row["tokens"] for row in rows)
    return {
        "seconds per step": median(row["seconds"] for row in rows),
        "  generation": median(row["generation"] for row in rows),
        "  the rest": median(row["seconds"] - row["generation"] for row in rows),
        "CPU seconds per step": median(row["cpu"] for row in rows),
        "tokens per step": tokens / len(rows),
        "seconds per 1000 tokens": 1000 * sum(row["seconds"] for row in rows) / tokens,
        "CPU seconds per 1000 tokens": 1000 * sum(row["cpu"] for row in rows) / tokens,
        "peak memory above the model, MB": max(row["memory"] for row in rows) / 1e6,
    }


def heading(options: argparse.Namespace) -> str:
    """The settings and the versions."""
    size = f"random, width {options.width}, {options.layers} layers, {options.vocab} tokens"
    packages = ["visalign", "trl", "transformers", "torch"]
    installed = [name for name in packages if find_spec(name) is not None]
    return (
        f"{EMBEDDED.name if options.width is None else size}; P = {options.prompts}, G = {options.group}, at "
        f"most {options.max_new_tokens} tokens, micro-batch {options.micro}, {options.updates} update(s), "
        f"β = {options.beta:g}, reward {options.reward}, {options.threads} thread(s), {options.rounds} steps "
        f"each\n{', '.join(f'{name} {version(name)}' for name in installed)}"
    )


def table(by_side: Mapping[str, Rows]) -> str:
    """A column per side, and their ratio."""
    columns = {side: summary(rows) for side, rows in by_side.items()}
    ours, theirs = columns["visalign"], columns.get("TRL")
    lines = [f"{'':34}" + "".join(f"{side:>12}" for side in columns) + (f"{'ratio':>9}" if theirs else "")]
    for name, value in ours.items():
        line = f"{name:34}" + "".join(f"{column[name]:12.3f}" for column in columns.values())
        lines.append(line + (f"{value / theirs[name]:9.2f}" if theirs else ""))
    return "\n".join(lines)


def verdict(by_side: Mapping[str, Rows]) -> bool:
    """Print the median of the steps' ratios; whether ours is no slower and takes less memory."""
    pairs = list(zip(by_side["visalign"], by_side["TRL"], strict=True))
    seconds = median(a["seconds"] / b["seconds"] for a, b in pairs)
    per_token = median(a["seconds"] / a["tokens"] * b["tokens"] / b["seconds"] for a, b in pairs)
    memory = max(a["memory"] for a, _ in pairs) / max(b["memory"] for _, b in pairs)
    print(
        f"visalign / TRL, median of {len(pairs)} pairs of steps: seconds {seconds:.2f}, seconds per token "
        f"{per_token:.2f}; peak memory {memory:.2f}"
    )
    return seconds <= 1 and per_token <= 1 and memory < 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=16, help="P, prompts per step (default 16)")
    parser.add_argument("--group", type=int, default=8, help="G, completions per prompt (default 8)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="tokens of a completion at most")
    parser.add_argument("--micro", type=int, default=32, help="completions per backward pass (default 32)")
    parser.add_argument("--updates", type=int, default=1, help="optimizer updates per step (default 1)")
    parser.add_argument("--beta", type=float, default=0.0, help="KL to the reference (default 0: none)")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate; small, so that lengths stay")
    parser.add_argument("--reward", choices=["task", "alternating"], help="default: task; random: alternating")
    parser.add_argument("--width", type=int, help="of a random Qwen3 in place of the embedded model")
    parser.add_argument("--layers", type=int, default=8, help="of it (default 8)")
    parser.add_argument("--vocab", type=int, default=32768, help="of it (default 32768)")
    parser.add_argument("--rounds", type=int, default=8, help="steps measured of each side (default 8)")
    parser.add_argument("--warmup", type=int, default=2, help="first steps that are left out (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="of each process (default 1)")
    parser.add_argument("--side", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name in ("rounds", "micro", "updates"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1.")
    completions, part = options.prompts * options.group, options.micro * options.updates
    if completions % part:
        parser.error(
            f"--prompts × --group = {completions} completions are no multiple of --micro × --updates = {part}."
        )
    if options.reward is None:
        options.reward = "task" if options.width is None else "alternating"
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both sides, print the table."""
    options = parse(arguments)
    if options.side:
        from text_step_sides import serve

        channel = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print to stdout
        serve(options, channel)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = EMBEDDED if options.width is None else random_model(options, Path(folder))
        by_side = measure(options, model)
    print(heading(options))
    print(table(by_side))
    signal = median(row["signal"] for row in by_side["visalign"])
    print(f"completions with signal (visalign, median): {signal:.0%}")
    return 0 if "TRL" not in by_side else int(not verdict(by_side))


if __name__ == "__main__":
    sys.exit(main())
