# SPDX-License-Identifier: Apache-2.0
"""The two sides of `text_step.py`, each in a process of its own: our text trainer and TRL's GRPOTrainer.

A side loads the model folder, notes its resident memory, builds its trainer and says that it is ready. Then
it makes one step for each line that it is sent, and answers with what the step took.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from tests.support.benchmarks import process_memory
from visalign.adapters.causal_lm.policy import CausalLMPolicy
from visalign.data.text_tasks.tasks import text_tasks
from visalign.interfaces import Scores
from visalign.rewards.text.verifiable import TaskAnswer
from visalign.text.chat import PromptEncoder
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.sampler import PromptSampler
from visalign.training.loop.trainer import RunSettings, Trainer
from visalign.training.text.rl import TextRL
from visalign.training.text.settings import TextObjectiveSettings, TextRolloutSettings

SEED = 0
INSTALL = "pip install trl==1.16.0"
Records = Sequence[Mapping[str, Any]]


class AlternatingReward:
    """1 for every other completion: each group has signal, whatever the model writes."""

    name, unit, range, higher_is_better = "alternating", "1 = odd place", (0.0, 1.0), True

    def score(self, completions: Sequence[str], prompts: Sequence[Any], metadata: Any = None) -> Scores:
        """Score B completions, [B]."""
        value = torch.arange(len(completions)) % 2
        return Scores(value=value.float(), valid=torch.ones(len(value), dtype=torch.bool), unit=self.unit)


REWARDS: dict[str, Callable[[], Any]] = {"task": TaskAnswer, "alternating": AlternatingReward}


class Meter:
    """Seconds and memory of this process, step by step, over a channel that nothing else writes to."""

    def __init__(self, channel: TextIO) -> None:
        self.channel = channel
        self.tokens, self.generation = 0, 0.0
        self._wall = self._cpu = self._baseline = 0.0

    def say(self, answer: Mapping[str, Any]) -> None:
        """Send one answer."""
        print(json.dumps(answer), file=self.channel, flush=True)

    def loaded(self) -> None:
        """The model is there: what comes on top of this is the trainer's."""
        Path("/proc/self/clear_refs").write_text("5")
        self._baseline = process_memory("VmRSS")

    def ready(self, prompts: Sequence[Sequence[int]]) -> None:
        """The trainer is there; `prompts` are the token ids of all steps."""
        read = hashlib.sha256(json.dumps([list(map(int, ids)) for ids in prompts]).encode()).hexdigest()
        self.say({"ready": True, "prompts": read})

    def wait(self) -> bool:
        """Wait for a line and start the clocks; False when there is none any more."""
        going = bool(sys.stdin.readline())
        self.tokens, self.generation = 0, 0.0
        self._wall, self._cpu = time.perf_counter(), time.process_time()
        return going

    def report(self, **more: float) -> None:
        """Stop the clocks and send what they say."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        measures = {"seconds": wall, "cpu": cpu, "generation": self.generation, "tokens": self.tokens}
        self.say({**measures, "memory": process_memory("VmHWM") - self._baseline, **more})


def records_in_order(options: argparse.Namespace) -> tuple[Records, list[int]]:
    """All records, and the P of them that each step asks, one step after the other."""
    records = text_tasks(512, seed=SEED)
    sampler = PromptSampler(len(records), options.prompts, options.group, SEED)
    steps = range(options.warmup + options.rounds)
    return records, [i for n in steps for i in sampler.batch(n).prompt_index[:: options.group].tolist()]


def load(options: argparse.Namespace, meter: Meter) -> tuple[Any, Any]:
    """Model and tokenizer of the folder, float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    meter.loaded()
    return model, tokenizer


def ours(options: argparse.Namespace, meter: Meter, folder: Path) -> None:
    """Our trainer, step by step; its line of metrics.jsonl is made and not written."""
    model, tokenizer = load(options, meter)
    records, order = records_in_order(options)
    completions = options.prompts * options.group
    prompts = PromptEncoder(tokenizer, plain_as_chat=True)
    policy = CausalLMPolicy(
        model, tokenizer, prompts=prompts, reference=bool(options.beta), generate_batch=completions,
        score_batch=options.micro,
    )  # fmt: skip
    algorithm = TextRL(
        policy,
        REWARDS[options.reward](),
        records,
        rollout=TextRolloutSettings(
            prompts_per_iteration=options.prompts, group_size=options.group, max_new_tokens=options.max_new_tokens
        ),
        objective=TextObjectiveSettings(algorithm="grpo", changes={"kl": options.beta}),
        seed=SEED,
        accelerator=Accelerator(cpu=True),
    )
    trainer = Trainer(
        algorithm,
        optimizer=OptimizerSettings(
            lr=options.lr, weight_decay=0.0, updates_per_iteration=options.updates,
            micro_batch=options.micro, ema_decay=0.0, ema_every=1,
        ),
        run=RunSettings(folder=folder, iterations=len(order), config={}),
    )  # fmt: skip
    meter.ready(prompts.encode([records[i]["prompt"] for i in order]))
    total = 0
    while meter.wait():
        record = trainer.iterate()
        meter.tokens, total = record["tokens"] - total, record["tokens"]
        meter.generation = record["seconds/rollout"]
        meter.report(signal=1 - record["frac_reward_zero_std"])


class Pace(TrainerCallback):
    """Holds TRL's loop between two steps; a step is a generation and the updates that it serves."""

    def __init__(self, meter: Meter, updates: int, begin: Callable[[], None]) -> None:
        self.meter, self.updates, self.begin = meter, updates, begin

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say so, and wait for the first step."""
        self.begin()
        control.should_training_stop = not self.meter.wait()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report, and wait for the next step."""
        if state.global_step % self.updates == 0:
            self.meter.report()
            if state.global_step < state.max_steps:
                control.should_training_stop = not self.meter.wait()


def trl_settings(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Settings with which GRPOConfig does what our trainer does, and writes nothing."""
    completions = options.prompts * options.group
    return {
        "output_dir": str(folder), "num_generations": options.group,
        "max_completion_length": options.max_new_tokens, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "beta": options.beta, "loss_type": "grpo", "scale_rewards": "group",
        "per_device_train_batch_size": options.micro,
        "gradient_accumulation_steps": completions // (options.updates * options.micro),
        "generation_batch_size": completions,
        "max_steps": options.updates * (options.warmup + options.rounds), "learning_rate": options.lr,
        "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
        "shuffle_dataset": False, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "dataloader_num_workers": 0, "dataloader_pin_memory": False, "logging_strategy": "no",
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "seed": SEED,
    }  # fmt: skip


def trl(options: argparse.Namespace, meter: Meter, folder: Path) -> None:
    """TRL's trainer in its own loop, held between two steps."""
    try:
        from datasets import Dataset  # type: ignore[import-not-found]  # comes with trl, which this side needs
        from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        meter.say({"error": f"{error}; to install: {INSTALL}"})
        return
    model, tokenizer = load(options, meter)
    records, order = records_in_order(options)
    reward = REWARDS[options.reward]()

    def judge(completions: Any, completion_ids: Any, index: Any, **_: Any) -> list[float]:
        meter.tokens += sum(map(len, completion_ids))
        chosen = [records[i] for i in index]
        texts = [turns[0]["content"] for turns in completions]
        return reward.score(texts, [record["prompt"] for record in chosen], chosen).value.tolist()

    messages = [[{"role": "user", "content": records[i]["prompt"]}] for i in order]
    trainer: Any = GRPOTrainer(
        model=model, processing_class=tokenizer, reward_funcs=judge,
        args=GRPOConfig(**trl_settings(options, folder)),
        train_dataset=Dataset.from_dict({"prompt": messages, "index": order}),
    )  # fmt: skip
    generate = trainer._generate

    def timed(*arguments: Any, **keywords: Any) -> Any:
        begun = time.perf_counter()
        outputs = generate(*arguments, **keywords)
        meter.generation += time.perf_counter() - begun
        return outputs

    def begin() -> None:
        meter.ready(trainer._tokenize_prompts(messages)[0])

    trainer._generate = timed
    trainer.add_callback(Pace(meter, options.updates, begin))
    trainer.train()


SIDES: dict[str, Callable[[argparse.Namespace, Meter, Path], None]] = {"visalign": ours, "TRL": trl}


def serve(options: argparse.Namespace, channel: TextIO) -> None:
    """Be one side until no more lines come."""
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        SIDES[options.side](options, Meter(channel), Path(folder))
