# SPDX-License-Identifier: Apache-2.0
"""One-pass LoRA ensemble against the same members one after another: the judge, and a network alone.

    OMP_NUM_THREADS=2 python tests/benchmarks/lora_ensemble.py --judge shapes-hpsv3-ensemble [--rows 64]
    OMP_NUM_THREADS=1 python tests/benchmarks/lora_ensemble.py [--members 4] [--rows 8] [--tokens 48]

The judge: `LoraEnsembleReward.score` of pictures with a prompt each, against `HPSv3.score` of its members one
after another, each with its LoRA merged into its own copy of the base. "Known pictures" leaves the vision
tower out of both, as in a call that meets the pictures again.

The network: a small vision tower (frozen, no adapters) makes image tokens, a Qwen2 backbone with LoRA on q
and v reads them with the text. Sequential is peft's way: `set_adapter`, whole forward with the tower, next
member. "Mixed batch" is peft's other way: one pass with `adapter_names=`, which loops over the adapters.
"One pass, no tower" leaves the tower out of all, which shows what sharing the backbone's pass alone gives.
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

from visalign.data.assets import resolve_model
from visalign.data.shapes.prompts import train_prompts
from visalign.rewards.hpsv3.ensemble_judge import LoraEnsembleReward
from visalign.rewards.hpsv3.ensemble_model import stack_adapters
from visalign.rewards.hpsv3.head import RanknetHead
from visalign.rewards.hpsv3.judge import HPSv3, HPSv3Model
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.template import JudgeSettings

TARGETS = ["q_proj", "v_proj"]
WIDTH = 128


def networks(members: int) -> tuple[CLIPVisionModel, Any, Qwen2Model]:
    """Tower, peft model with M adapters, and a backbone with the same adapters stacked."""
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
    states = [get_peft_model_state_dict(peft, adapter_name=f"m{m}") for m in range(members)]
    names = sorted({key.partition(".lora_")[0].removeprefix("base_model.model.") for key in states[0]})
    with torch.no_grad():
        for name, layer in stack_adapters(backbone, names, members, 8, 16 / 8).items():
            for part, target in (("lora_A", layer.lora_a), ("lora_B", layer.lora_b)):
                key = f"base_model.model.{name}.{part}.weight"
                target.copy_(torch.stack([state[key] for state in states]))
    return tower, peft.eval(), backbone


def alone(ensemble: LoraEnsembleReward, base: str, number: int, **options: Any) -> HPSv3:
    """A member as a judge of its own, its LoRA merged into a copy of the base."""
    model = ensemble.model
    settings = model.engine.settings
    engine = VisionLanguageEngine.from_pretrained(
        base, settings=settings, positions=model.engine.positions, **settings.rest["pixels"], **options
    )
    tensors = {name: value[number] for name, value in model.tensors().items()}
    with torch.no_grad():
        for name in model.adapters:
            weight = engine.model.get_submodule(name).weight
            low, high = tensors.pop(f"{name}.lora_A"), tensors.pop(f"{name}.lora_B")
            weight += (model.scaling * (high @ low)).to(weight)
    token = tensors.pop("reward_token")
    stretch = tensors.pop("stretch")
    with torch.no_grad():  # the mean alone is compared, and its scale can stand in the last layer
        tensors["rm_head.5.weight"] = tensors["rm_head.5.weight"] * stretch
        tensors["rm_head.5.bias"] = tensors["rm_head.5.bias"] * stretch
    head = RanknetHead.from_state_dict(tensors).to(engine.network.device)
    member = HPSv3Model(engine, head, template=model.template, clamp=model.clamp)
    member.add_token(token)
    return HPSv3(member.eval().requires_grad_(False))


def judges(options: argparse.Namespace) -> None:
    """The judge against its members."""
    where = {"device": options.device}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.precision]
    ensemble = LoraEnsembleReward.from_pretrained(options.judge, precision=options.precision, **where)
    base = JudgeSettings.read(resolve_model(options.judge)).rest["base"]
    members = [alone(ensemble, base, m, dtype=dtype, **where) for m in range(ensemble.model.members)]
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (options.rows, 3, 64, 64), generator=generator).float() / 255
    prompts = [str(record["prompt"]) for record in train_prompts()[:: len(train_prompts()) // options.rows]]
    prompts = prompts[: options.rows]

    def one_pass() -> Tensor:
        parts = ensemble.score(images, prompts).parts
        return torch.stack([parts[f"member_{m}"] for m in range(len(members))])

    def sequential() -> Tensor:
        return torch.stack([member.score(images, prompts).value for member in members])

    def fresh(run: Callable[[], Tensor], *asked: LoraEnsembleReward | HPSv3) -> Callable[[], Tensor]:
        def forgetting() -> Tensor:
            for judge in asked:
                judge.model.engine.clear_features()
            return run()

        return forgetting

    found, expected = one_pass(), sequential()
    error = float(((found - expected) / expected).abs().max())
    print(f"{len(members)} members, {options.rows} rows, {torch.get_num_threads()} threads, {options.device}")
    print(f"largest relative difference of the scores {error:.1e}")
    show(
        timed(
            {
                "sequential": fresh(sequential, *members),
                "one pass": fresh(one_pass, ensemble),
                "sequential, known pictures": sequential,
                "one pass, known pictures": one_pass,
            },
            options.rounds,
        ),
        ", known pictures",
    )


def timed(ways: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of alternating rounds: on the clock, and of processors (other work disturbs it less)."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    with torch.no_grad():
        for _ in range(rounds):
            for name, run in ways.items():
                start, work = time.perf_counter(), time.process_time()
                run().cpu()
                seconds[name].append((time.perf_counter() - start, time.process_time() - work))
    return {
        name: (statistics.median(one for one, _ in times), statistics.median(two for _, two in times))
        for name, times in seconds.items()
    }


def show(median: dict[str, tuple[float, float]], without: str) -> None:
    """Print times and how many times as fast one pass is."""
    for name, (clock, work) in median.items():
        print(f"{name:28s} {1e3 * clock:8.1f} ms {1e3 * work:8.1f} ms of processors")
    for end in ("", without):
        for other in (f"sequential{end}", f"mixed batch{end}"):
            if other in median:
                pairs = zip(median[other], median[f"one pass{end}"], strict=True)
                clock, work = (slow / fast for slow, fast in pairs)
                print(f"{'times as fast as ' + other:40s} {clock:8.2f}    {work:8.2f}    of processors")


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description="One-pass LoRA ensemble against sequential members.")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--judge", help="folder or packaged name of an ensemble, in place of the network")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.judge:
        judges(options)
        return
    tower, peft, stacked = networks(options.members)
    pixels = torch.rand(options.rows, 3, 64, 64)
    text = torch.randn(options.rows, options.tokens, WIDTH)

    def tokens() -> Tensor:
        return torch.cat([tower(pixels).last_hidden_state, text], 1)

    ready = tokens().detach()

    names = [f"m{m}" for m in range(options.members) for _ in range(options.rows)]

    def last(model: Any, embeds: Tensor, **more: Any) -> Tensor:
        return model(inputs_embeds=embeds, **more).last_hidden_state[:, -1]

    def sequential(embed: Callable[[], Tensor]) -> Tensor:
        found = []
        for m in range(options.members):
            peft.set_adapter(f"m{m}")
            found.append(last(peft, embed()))
        return torch.cat(found)

    def repeated(embeds: Tensor) -> Tensor:
        return embeds.repeat(options.members, 1, 1)

    ways: dict[str, Callable[[], Tensor]] = {
        "sequential": lambda: sequential(tokens),
        "mixed batch": lambda: last(peft, repeated(tokens()), adapter_names=names),
        "one pass": lambda: last(stacked, repeated(tokens())),
        "sequential, no tower": lambda: sequential(lambda: ready),
        "mixed batch, no tower": lambda: last(peft, repeated(ready), adapter_names=names),
        "one pass, no tower": lambda: last(stacked, repeated(ready)),
    }
    with torch.no_grad():
        found = ways["one pass"]()
        error = max(float((ways[name]() - found).abs().max()) for name in ("sequential", "mixed batch"))
    print(f"{options.members} members, {options.rows} rows; largest difference of the outputs {error:.1e}")
    show(timed(ways, options.rounds), ", no tower")


if __name__ == "__main__":
    main()
