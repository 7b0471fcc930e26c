# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of `CausalLMPolicy.generate` at Qwen3-0.6B's size with random weights: captured step and plain loop.

`python tests/benchmarks/gpu/text.py --completions 256 --tokens 256`. No end token: every completion has full length.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, ".")
from visalign.adapters.causal_lm import generation
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.text import StoppingCriteria


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--plain-tokens", type=int, default=64, help="of the plain loop, which is slow")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained("assets/tasks-qwen3")
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936}
    if options.tiny:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4 if options.tiny else 128}
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True)).eval()
    torch.set_default_dtype(torch.float32)
    policy = CausalLMPolicy(model, tokenizer, reference=False, generate_batch=options.completions)
    prompts = [f"What is {i} plus {7 * i}?" for i in range(10, 10 + options.completions // 8)]

    def tokens_per_second(length: int) -> float:
        stopping = StoppingCriteria(max_new_tokens=length, eos_ids=())
        policy.generate(prompts, seeds=0, num_generations=8, stopping=StoppingCriteria(max_new_tokens=4, eos_ids=()))
        start = time.perf_counter()
        rollout = policy.generate(prompts, seeds=0, num_generations=8, stopping=stopping)
        return float(rollout.loss_mask.sum()) / (time.perf_counter() - start)

    for length in (64, options.tokens):
        print(json.dumps({"loop": "as packaged", "tokens": length, "tokens/s": round(tokens_per_second(length))}))
    generation.can_capture = lambda *_: False
    length = options.plain_tokens
    print(json.dumps({"loop": "plain", "tokens": length, "tokens/s": round(tokens_per_second(length))}))


if __name__ == "__main__":
    main()
