# SPDX-License-Identifier: Apache-2.0
"""Trainings by name, which any number of processes runs. Each resumes where it can, and leaves metrics,
checkpoints and the gradient of every update in FOLDER/NAME.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor

from tests.support.models.language import tiny_config, tiny_tokenizer
from tests.support.models.sd3 import tiny_sd3_pipeline
from tests.support.training.images import Brightness, ToyNet, ToyPolicy, toy_trainer
from tests.support.training.rewards import ToyJudge, ToyPairs
from tests.support.training.text import DEMONSTRATIONS, Letters, toy_policy, toy_text_trainer
from visalign.adapters import LoraSettings, SD3Policy
from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches, with_mismatched
from visalign.adapters.causal_lm.lora import text_lora
from visalign.adapters.weights import TrainedWeights
from visalign.rewards.text.combine import WeightedTextSum
from visalign.text import ToolPolicy, ToolUse
from visalign.training import (
    DPO,
    SFT,
    BranchSettings,
    DPOSettings,
    OptimizerSettings,
    RewardModeling,
    RewardObjectiveSettings,
    RunSettings,
    ScoutSettings,
    SelfImitationSettings,
    Trainer,
    end_processes,
)
from visalign.training.loop.dynamic_groups import DynamicSettings
from visalign.training.loop.sharding import gathered, unsharded_state
from visalign.training.policy.winners import ReplaySettings
from visalign.training.process.label_fit import FitSettings, label_trainer
from visalign.training.process.trainer import train_process_reward

UNEVEN = {"prompts_per_iteration": 3, "group_size": 5}
"""Fifteen samples, of which two or four processes have parts of groups."""
PAUSE = "VISALIGN_TEST_PAUSE"
"""Environment variable: seconds that a reward takes."""
STEPS = [
    {"prompt": "q", "steps": ["1+1=2", "2+2=5\n"], "labels": [1, 0]},
    {"prompt": "q", "steps": ["3"], "labels": [True]},
    {"prompt": "q", "steps": ["4", "5", "6"], "labels": [None, 0.25, 1]},
]


class SlowLetters(Letters):
    """Letters after a pause."""

    def score(self, completions: Any, prompts: Any, metadata: Any = None) -> Any:
        time.sleep(float(os.environ.get(PAUSE, "0")))
        return super().score(completions, prompts, metadata)


class FewLetters(Letters):
    """Gives most prompts no signal, so that a step keeps few groups."""

    def score(self, completions: Any, prompts: Any, metadata: Any = None) -> Any:
        scores = super().score(completions, prompts, metadata)
        scores.value[torch.tensor([str(prompt) not in ("g", "h i") for prompt in prompts])] = 0.0
        return scores


def text(folder: Path, accelerator: Accelerator, algorithm: str, **changes: Any) -> Trainer[Any]:
    """A trainer of text on samples that no number of processes divides."""
    arguments = {"rollout": {**UNEVEN, **changes.pop("rollout", {})}, **changes}
    pace = {"micro_batch": 4, "ema_decay": 0.5, "lr": 1e-3, **arguments.pop("optimizer", {})}
    run = {"iterations": 2, "checkpoint_every": 1, **arguments.pop("run", {})}
    arguments["sharding"] = arguments.get("sharding", False) and accelerator.num_processes > 1
    return toy_text_trainer(folder, algorithm, accelerator=accelerator, optimizer=pace, run=run, **arguments)


def slow(folder: Path, accelerator: Accelerator) -> Trainer[Any]:
    """GRPO with a pull to the reference, long enough to be killed."""
    options = {"objective": {"changes": {"kl": 0.05}}, "reward": SlowLetters("a"), "run": {"iterations": 4}}
    return text(folder, accelerator, "grpo", **options)


SUPERVISED_PACE = OptimizerSettings(lr=1e-3, micro_batch=1, ema_decay=0.5, ema_every=1)


def _run(folder: Path) -> RunSettings:
    return RunSettings(folder=folder, iterations=2, checkpoint_every=1)


def sft(folder: Path, accelerator: Accelerator, sharding: bool = False) -> Trainer[Any]:
    """Batches of three demonstrations."""
    policy = toy_policy()
    return Trainer(
        SFT(
            policy,
            DemonstrationBatches(policy, DEMONSTRATIONS, size=3, seed=5),
            accelerator=accelerator,
            sharding=sharding and accelerator.num_processes > 1,
        ),
        optimizer=SUPERVISED_PACE,
        run=_run(folder),
    )


def kto(folder: Path, accelerator: Accelerator) -> Trainer[Any]:
    """Batches of three of the four votes."""
    policy, settings = toy_policy(), DPOSettings(row="kto")
    records = with_mismatched(policy, [*DEMONSTRATIONS, DEMONSTRATIONS[0]])
    algorithm = DPO(
        policy,
        DemonstrationBatches(policy, records, size=3, seed=5, field=settings.fields),
        settings=settings,
        good=[True, False, True, False],
        accelerator=accelerator,
    )
    return Trainer(algorithm, optimizer=SUPERVISED_PACE, run=_run(folder))


def judge(folder: Path, accelerator: Accelerator, sharding: bool = False) -> Trainer[Any]:
    """Batches of nine pairs."""
    algorithm = RewardModeling(
        ToyJudge(dropout=0.0),
        ToyPairs(9, micro=2),
        objective=RewardObjectiveSettings(task="bradley_terry"),
        accelerator=accelerator,
        sharding=sharding and accelerator.num_processes > 1,
    )
    # pairs do not depend on a bias, so its gradient is rounding, which AdamW must not amplify
    pace = OptimizerSettings(lr=1e-3, eps=1e-2, ema_decay=0.5, ema_every=1)
    return Trainer(algorithm, optimizer=pace, run=_run(folder))


def process_reward(folder: Path, accelerator: Accelerator, sharding: bool = False) -> Trainer[Any]:
    """Batches of two texts, so that the last has one."""
    from transformers import Qwen3ForTokenClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForTokenClassification(tiny_config(num_labels=2, classifier_dropout=0.0))
    settings = FitSettings(batch_size=2, epochs=2, learning_rate=1e-3)
    divided = model if sharding and accelerator.num_processes > 1 else None
    trainer = label_trainer(list(model.named_parameters()), settings, divided=divided)
    untyped: Any = trainer

    def train() -> None:
        reports = train_process_reward(model, tiny_tokenizer(), STEPS, trainer=trainer)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reports.txt").write_text("\n".join(f"{r.loss} {r.accuracy} {r.labels}" for r in reports))

    untyped.train = train
    return trainer


SCOUTED = {"prompts_per_iteration": 4, "group_size": 4, "scout": ScoutSettings(pool=6, steps=2)}
BRANCHES = {"prompts_per_iteration": 4, "group_size": 4, "branch": BranchSettings(at=[0, 1])}


def images(
    folder: Path,
    accelerator: Accelerator,
    row: str,
    *,
    rollout: Any = None,
    sharding: bool = False,
    added: Any = (),
    **objective: Any,
) -> Trainer[Any]:
    """A trainer of images; where a row lets it be, on samples that no number of processes divides."""
    changes: dict[str, Any] = {"kl": 0.01}
    if "flow" in row:
        changes |= {"surrogate_options": {"eps_low": 0.1, "eps_high": 0.1}}
    if row == "draft":
        changes |= {"last": 2}
    if row == "tdm_r1":
        changes = {"teacher_guidance": None, "critic_updates": 1}
    if sharding and not added:  # the toy has no LoRA for a reference
        changes |= {"kl": 0.0}
    return toy_trainer(
        folder,
        accelerator=accelerator,
        objective={"algorithm": row, "changes": changes, **objective},
        rollout=rollout or UNEVEN,
        optimizer={"micro_batch": 7, "lr": 1e-3, **({"eps": 1e-2} if row == "flowrl" else {})},
        run={"iterations": 3 if added else 2, "checkpoint_every": 1},
        **dict(added),
        sharding=sharding and accelerator.num_processes > 1,
    )


def continued() -> Any:
    """A policy that goes on from a LoRA: its reference is a copy of the adapters."""
    policy: Any = SD3Policy(tiny_sd3_pipeline(), lora=LoraSettings(rank=2, alpha=2))
    policy._trained = TrainedWeights(policy.module, None)
    return policy


def tools(folder: Path, accelerator: Accelerator) -> Trainer[Any]:
    """Completions that are longer by their answers, in each process by others."""
    policy = toy_policy()
    use = ToolUse(tool=lambda text: "+" * 3 * len(text), close="e", max_calls=1)
    writer = ToolPolicy(policy, policy.tokenizer, use)
    size = {"max_new_tokens": 60, "stop": ["a", "b", "c"]}
    return text(folder, accelerator, "grpo", policy=policy, generator=writer, rollout=size)


class TwoNets(torch.nn.Module):
    """Two networks, of which the noise level chooses one, as of Wan 2.2."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.low = ToyNet(torch.float32), ToyNet(torch.float32)
        self.shift = self.high.shift

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
        v = torch.zeros_like(x)
        for net, rows in ((self.high, sigma > 0.3), (self.low, sigma <= 0.3)):
            if rows.any():
                v = v.index_put((rows,), net(x[rows], sigma[rows], prompt[rows]))
        return v


def two_networks() -> ToyPolicy:
    policy: Any = ToyPolicy()
    policy.net = TwoNets()
    policy.networks = dict(policy.net.named_children())
    return policy


class BrightAlone(Brightness):
    """`Brightness` of the prompt bright; all other groups are without signal."""

    def score(self, images: Any, prompts: Any, metadata: Any = None) -> Any:
        scores = super().score(images, prompts, metadata)
        return replace(scores, value=scores.value * torch.tensor([prompt == "bright" for prompt in prompts]))


MORE, REPLAY = DynamicSettings(enabled=True, max_rounds=2), ReplaySettings(warmup=1)
MIXED = {"a": (Letters("a"), 1.0), "b": (Letters("b"), 0.5)}
JOBS: dict[str, Callable[[Path, Accelerator], Trainer[Any]]] = {
    "slow": slow,
    "dapo+dynamic": lambda f, a: text(f, a, "dapo", dynamic={"max_rounds": 3}, reward=FewLetters("a")),
    "grpo+balance": lambda f, a: text(f, a, "grpo", reward=WeightedTextSum(MIXED), objective={"balance_every": 1}),
    "grpo+imitation": lambda f, a: text(
        f,
        a,
        "grpo",
        self_imitation=SelfImitationSettings(warmup=1, cov_share=0.1),
        rollout={"top_p": 0.9},
        run={"iterations": 3},
    ),
    # its head begins at 0, where gradients are rounding, which AdamW must not amplify
    "flowrl": lambda f, a: text(f, a, "flowrl", optimizer={"eps": 1e-2}),
    "ppo": lambda f, a: text(
        f, a, "ppo", objective={"epochs": 2}, rollout={"truncated": "mask", "max_new_tokens": 24}
    ),
    "grpo+tools": tools,
    "kto": kto,
    "judge": judge,
    "process_reward": process_reward,
    "flow_grpo": lambda f, a: images(f, a, "flow_grpo"),
    "flow_grpo+dynamic": lambda f, a: images(f, a, "flow_grpo", added={"dynamic": MORE, "reward": BrightAlone()}),
    "par": lambda f, a: images(f, a, "par"),
    "flowrl of images": lambda f, a: images(f, a, "flowrl"),
    "diffusion_nft+replay": lambda f, a: images(f, a, "diffusion_nft", added={"self_imitation": REPLAY}),
    "diffusion_nft of two networks": lambda f, a: images(f, a, "diffusion_nft", added={"policy": two_networks()}),
    "flow_grpo+branches": lambda f, a: images(f, a, "flow_grpo", rollout=BRANCHES, credit="branches"),
    "diffusion_nft+sharded": lambda f, a: images(f, a, "diffusion_nft", sharding=True),
    "ram+continued+sharded": lambda f, a: images(f, a, "ram", sharding=True, added={"policy": continued()}),
    "gspo+lora+sharded": lambda f, a: text(
        f,
        a,
        "gspo",
        policy=toy_policy(lora=text_lora(rank=2, alpha=4.0)),
        objective={"changes": {"kl": 0.05}},
        sharding=True,
    ),
    "sft+sharded": lambda f, a: sft(f, a, sharding=True),
    "judge+sharded": lambda f, a: judge(f, a, sharding=True),
    "process_reward+sharded": lambda f, a: process_reward(f, a, sharding=True),
    "crd": lambda f, a: images(f, a, "crd", rollout=SCOUTED),
    "draft": lambda f, a: images(f, a, "draft"),
    "tdm_r1": lambda f, a: images(f, a, "tdm_r1"),
}


def run(folder: Path, names: Sequence[str]) -> None:
    """Train by each name."""
    accelerator = Accelerator(cpu=True)
    for name in names:
        trainer = JOBS[name](folder / name, accelerator)
        divided = name.endswith("+sharded") and accelerator.num_processes > 1
        assert all(isinstance(m, DTensor) == divided for _, m in trainer.weights.masters), name
        gradients: list[torch.Tensor] = []
        trainer.weights.clip = _kept(trainer, gradients)
        trainer.resume()
        trainer.train()
        if name == "sft+sharded":
            with unsharded_state(trainer.algorithm.policy.module):
                if accelerator.is_main_process:
                    trainer.algorithm.policy.save(folder / name / "saved")
        if accelerator.is_main_process:
            torch.save(gradients, folder / name / "gradients.pt")


def _kept(trainer: Trainer[Any], gradients: list[torch.Tensor]) -> Any:
    """The trainer's clipping, which keeps its gradient."""
    weights, clip = trainer.weights, trainer.weights.clip

    def clipped(max_norm: float) -> float:
        slopes = [torch.zeros_like(m) if m.grad is None else m.grad for _, m in weights.masters]
        gradients.append(torch.cat([gathered(gradient).flatten() for gradient in slopes]))
        return clip(max_norm)

    return clipped


def forked(folder: Path, processes: int, names: Sequence[str]) -> bool:
    """Train by each name `in_forks`."""
    return in_forks(folder, processes, partial(run, folder, names))


def in_forks(folder: Path, processes: int, work: Callable[[], object]) -> bool:
    """Run `work` in several forks of this process, with ids in FOLDER/pid.RANK; return whether all ended well."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in range(processes):
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)  # renews torch's thread pool: autograd's threads, two at once, would break on it
            shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ |= {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "1"}
            torch.cuda.is_available = lambda: False  # CUDA does not survive a fork
            torch._C._get_accelerator = lambda *_: torch.device("cpu")  # on which a barrier allocates
            AcceleratorState._reset_state(reset_partial_state=True)  # another test's, of one process
            code = 1
            try:
                work()
                end_processes()
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(code)
        (folder / f"pid.{rank}").write_text(str(pid))
        started.append(pid)
    return all([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in started])


def run_all(*runs: tuple[Path, int, Sequence[str]]) -> None:
    """`forked` with each of the arguments in turn."""
    for folder, count, names in runs:
        if not forked(folder, count, names):
            sys.exit(f"{count} processes in {folder} ended badly")
