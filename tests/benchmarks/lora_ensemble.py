# SPDX-License-Identifier: Apache-2.0
"""One-pass LoRA ensemble against the same members one after another, on the embedded judge's kind of network.

    OMP_NUM_THREADS=1 python tests/benchmarks/lora_ensemble.py [--members 4] [--rows 8] [--tokens 48]

A small vision tower (frozen, no adapters) makes image tokens, a Qwen2 backbone with LoRA on q and v reads
them with the text. Sequential is peft's way: `set_adapter`, whole forward with the tower, next member.
"One pass, no tower" leaves the tower out of both, which shows what sharing the backbone's pass alone gives.
Medians of alternating rounds in one process; the outputs are compared first.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import CLIPVisionConfig, CLIPVisionModel, Qwen2Config, Qwen2Model

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from visalign.rewards.lora_ensemble import LoraEnsemble, last_token  # noqa: E402  # after the path

TARGETS = ["q_proj", "v_proj"]
WIDTH = 128


def networks(members: int) -> tuple[CLIPVisionModel, Any, LoraEnsemble]:
    """Tower, peft model with M adapters, and the same adapters stacked."""
    torch.manual_seed(0)
    tower = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=64,
            patch_size=8,
        )
    ).eval()
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    backbone = Qwen2Model(config).eval()
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS)
    peft: Any = get_peft_model(copy.deepcopy(backbone), lora, adapter_name="m0")  # type: ignore[arg-type]
    for m in range(1, members):
        peft.add_adapter(f"m{m}", lora)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    ensemble = LoraEnsemble(backbone, members=members, hidden_size=WIDTH, targets=TARGETS, rank=8, alpha=16)
    for m in range(members):
        ensemble.load_member(m, get_peft_model_state_dict(peft, adapter_name=f"m{m}"))
    return tower, peft.eval(), ensemble


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description="One-pass LoRA ensemble against sequential members.")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    tower, peft, ensemble = networks(options.members)
    pixels = torch.rand(options.rows, 3, 64, 64)
    text = torch.randn(options.rows, options.tokens, WIDTH)

    def tokens() -> Tensor:
        return torch.cat([tower(pixels).last_hidden_state, text], 1)

    ready = tokens().detach()

    def sequential(embed: Callable[[], Tensor]) -> Tensor:
        found = []
        for m in range(options.members):
            peft.set_adapter(f"m{m}")
            feature = last_token(peft(inputs_embeds=embed()), {})
            found.append(feature @ ensemble.head[m].T + ensemble.bias[m])
        return torch.stack(found)

    ways: dict[str, Callable[[], Tensor]] = {
        "sequential": lambda: sequential(tokens),
        "one pass": lambda: ensemble(inputs_embeds=tokens()),
        "sequential, no tower": lambda: sequential(lambda: ready),
        "one pass, no tower": lambda: ensemble(inputs_embeds=ready),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        error = float((ways["sequential"]() - ways["one pass"]()).abs().max())
        for _ in range(options.rounds):
            for name, run in ways.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"{options.members} members, {options.rows} rows; largest difference of the outputs {error:.1e}")
    for name, value in median.items():
        print(f"{name:24s} {1e3 * value:8.1f} ms")
    print(f"ratio                    {median['sequential'] / median['one pass']:.2f}")
    print(f"ratio, no tower          {median['sequential, no tower'] / median['one pass, no tower']:.2f}")


if __name__ == "__main__":
    main()
