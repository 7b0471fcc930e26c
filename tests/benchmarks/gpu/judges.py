# SPDX-License-Identifier: Apache-2.0
"""Images a second of `reward_dance` with a Qwen2-VL-2B of random weights at 448²; --tiny leaves the host's part."""

import argparse
import cProfile
import itertools
import json
import pstats
import statistics
import sys
import time

import torch
from transformers import AutoConfig, AutoProcessor, Qwen2VLForConditionalGeneration
from transformers.image_utils import SizeDict

sys.path.insert(0, ".")
from visalign.rewards.questions.reward_dance import RewardDance
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.template import JudgeSettings

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--images", type=int, default=64)
parser.add_argument("--max-tokens", type=int, nargs="+", default=[8192, 16384, 32768])
parser.add_argument("--profile", action="store_true", help="print the host's functions and the card's busy share")
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()
device, count = "cuda" if torch.cuda.is_available() else "cpu", options.images
config, processor = (kind.from_pretrained("assets/shapes-vlm") for kind in (AutoConfig, AutoProcessor))
width, layers, sections = (32, 1, [1, 1, 2]) if options.tiny else (1536, 28, [16, 24, 24])
config.text_config.update({"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": width * 35 // 6})
config.text_config.update({"layer_types": ["full_attention"] * layers, "vocab_size": 507 if options.tiny else 151936})
config.text_config.num_attention_heads = 4 if options.tiny else 12
config.text_config.rope_parameters["mrope_section"] = sections
config.vision_config.update({"patch_size": 14, "hidden_size": width, "embed_dim": 32 if options.tiny else 1280})
config.vision_config.update({"depth": 1 if options.tiny else 32, "num_heads": 4 if options.tiny else 16})
config.vision_config.mlp_ratio = 4
torch.set_default_dtype(torch.float32 if options.tiny else torch.bfloat16)
with torch.device(device):
    model = Qwen2VLForConditionalGeneration(config).eval().requires_grad_(False)
torch.set_default_dtype(torch.float32)
processor.image_processor.patch_size = 14
processor.image_processor.size = SizeDict(shortest_edge=448 * 448, longest_edge=448 * 448)
prompts = [f"a red circle and {number} blue squares" for number in range(count)]
for tokens, location in itertools.product(options.max_tokens, dict.fromkeys((device, "cpu"))):
    engine = VisionLanguageEngine(model, processor, settings=JudgeSettings(), max_tokens_per_batch=tokens)
    reward, seconds, profile = RewardDance(engine, min_mass=0.0), [], cProfile.Profile()
    batches = [torch.rand(count, 3, 512, 512, device=device).to(location) for _ in range(6)]
    for images in batches[:4]:
        start = time.perf_counter()
        assert bool(reward.score(images, prompts).valid.all())
        seconds.append(time.perf_counter() - start)
    row = {"tokens a batch": tokens, "images on": location, "images/s": count / statistics.median(seconds[1:])}
    print(json.dumps(row), flush=True)
    if not options.profile:
        continue
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, device.upper())]) as trace:
        start = time.perf_counter()
        reward.score(batches[4], prompts)
        elapsed = time.perf_counter() - start
    busy = sum(event.self_device_time_total for event in trace.key_averages() if device == "cuda") / 1e6
    print(json.dumps({"CUDA busy share": busy / elapsed}))
    profile.runcall(reward.score, batches[5], prompts)
    pstats.Stats(profile).sort_stats("cumulative").print_stats(30)
