# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""Inside TRL: every row in its trainer equals `Objective`, and stock GRPO is met where the row is TRL's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig
from trl import GRPOTrainer as Stock

from visalign.core import NAMED, Objective, PolicyOutput, Trajectories, named_objective, token_log_probs
from visalign.data.assets import assets_folder
from visalign.integrations.hosts import fitting
from visalign.integrations.trl import GIVEN, GRPOTrainer, reference_beta, reward_function

ROWS = fitting(GIVEN)
HOT = 3.0
"""A temperature at which the small model says many things."""
FOLDER = assets_folder() / "tasks-qwen3"


def reward(completions: Any, **_: Any) -> list[float | None]:
    """A number for each place, whatever the completion; none for the first."""
    return [None if i == 0 else float(i * 7 % 5) for i in range(len(completions))]


def second(completions: Any, **_: Any) -> list[float]:
    """Another number for each place."""
    return [float(i * 3 % 4) for i in range(len(completions))]


def trainer_of(kind: Callable[..., Any], folder: Path, rewards: Any, *, beta: float = 0.0, **options: Any) -> Any:
    """A trainer of two prompts × 4 completions in 4 micro-batches, on a model in float64."""
    steps = options.pop("max_steps", 1)
    changes = options.pop("config", {})
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64)
    config = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=steps,
        num_generations=4,
        max_completion_length=8,
        temperature=HOT,
        max_grad_norm=0,
        beta=beta,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        logging_steps=1,
        **{
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "steps_per_generation": 4,
            "learning_rate": 1e-4,
            **changes,
        },
    )
    rows = Dataset.from_list([{"prompt": f"What is {i} + 2?", "answer": str(i + 2)} for i in range(8)])
    return kind(model, reward_funcs=rewards, args=config, train_dataset=rows, processing_class=tokenizer, **options)


class Compare(TrainerCallback):
    """Before each optimizer step: TRL's gradient beside the objective's on all samples at once."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.apart, self.off = objective, [], []
        self.trainer: Any = None
        self.made: dict[str, Any] = {}
        self.rewards = torch.empty(0)
        self.old = (torch.empty(0), torch.empty(0))

    def watch(self, trainer: Any) -> None:
        """Keep what a generation gave, and the log-probs of the policy that gave it."""
        self.trainer, generate = trainer, trainer._generate_and_score_completions

        def kept(inputs: Any) -> Any:
            out = generate(inputs)
            self.made = {key: value for key, value in out.items() if not key.startswith("visalign_")}
            self.rewards = trainer._rewards
            with torch.no_grad():
                self.old = self._now()
            return out

        trainer._generate_and_score_completions = kept
        trainer.add_callback(self)

    def _now(self) -> Any:
        batch, model = self.made, self.trainer.model
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        output = token_log_probs(model, ids, mask, temperature=HOT)
        T = batch["completion_ids"].shape[1]
        return output.log_prob[:, -T:], output.entropy[:, -T:]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compare."""
        weight = self.made["completion_mask"].double()
        drawn = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0))
        prepared = self.objective.prepare(
            Trajectories(
                weight=weight,
                old_log_prob=self.old[0],
                entropy=self.old[1],
                group=[0] * 4 + [1] * 4,
                reward=self.rewards,
                reward_weights=[1.0] * self.rewards.shape[1],
                uniform=drawn,
                ref_log_prob=self.made.get("ref_per_token_logps"),
            )
        )
        log_prob, entropy = self._now()
        self.off.append(float((log_prob - self.old[0]).abs().max()))
        loss = self.objective.loss(prepared, PolicyOutput(log_prob=log_prob, entropy=entropy)).total
        parameters = [p for p in self.trainer.model.parameters() if p.requires_grad]
        expected = torch.autograd.grad(loss, parameters)
        got = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        gap = torch.stack([(a - b).norm() for a, b in zip(got, expected, strict=True)]).norm()
        size = torch.stack([b.norm() for b in expected]).norm()
        assert size > 0
        self.apart.append(float(gap / size))


@pytest.mark.parametrize("name", ROWS)
def test_every_row_has_its_objectives_gradient(name: str, tmp_path: Path) -> None:
    objective = NAMED[name]
    compare = Compare(objective)
    rewards = [reward, second] if objective.advantage == "gdpo" else [reward]
    torch.manual_seed(0)
    trainer = trainer_of(
        GRPOTrainer,
        tmp_path,
        rewards,
        beta=reference_beta(objective),
        objective=name,
        max_steps=2,
        config={"num_iterations": 2, "learning_rate": 1e-8 if objective.level != "token" else 1e-4},
    )
    compare.watch(trainer)
    trainer.train()
    assert len(compare.apart) == 2 and max(compare.apart) <= 2e-6
    assert compare.off[0] < 1e-9 and compare.off[1] > 1e-5  # the second update's ratio has left 1


def moved(kind: Callable[..., Any], folder: Path, *, config: dict[str, Any], **options: Any) -> Tensor:
    """All parameters after three steps."""
    torch.manual_seed(0)
    trainer = trainer_of(kind, folder, [second], max_steps=3, config=config, **options)
    trainer.train()
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


SLOPE = {"optim": "sgd", "learning_rate": 1e-2, "num_iterations": 2}
"""Steps along the gradient; AdamW makes a step of a gradient that is but rounding."""


@pytest.mark.parametrize(
    ("loss_type", "objective"),
    [
        ("grpo", named_objective("grpo", kl=0.0, advantage_options={"eps": 1e-4})),
        ("dr_grpo", named_objective("dr_grpo", length=8)),
        ("dapo", named_objective("dapo", drop_zero_signal=False, advantage_options={"eps": 1e-4})),
    ],
)
def test_stock_rows_move_as_stock_does(loss_type: str, objective: Objective, tmp_path: Path) -> None:
    scale = {"dr_grpo": "none"}.get(loss_type, "group")
    high = {"dapo": 0.28}.get(loss_type, 0.2)
    settings = {"loss_type": loss_type, "scale_rewards": scale, "epsilon_high": high}
    stock = moved(Stock, tmp_path / "a", config=settings | SLOPE)
    ours = moved(GRPOTrainer, tmp_path / "b", config=SLOPE, objective=objective)
    assert float((ours - stock).abs().max()) <= 1e-6
    start = torch.cat([p.flatten() for p in AutoModelForCausalLM.from_pretrained(FOLDER).parameters()])
    assert float((stock - start).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("objective", "beta", "config", "why"),
    [
        ("ppo", 0.02, {}, r"'ppo' has value=1, which needs value, and TRL's GRPOTrainer has none.*grpo"),
        ("flow_grpo", 0.0, {}, "has no meaning on tokens.*Take 'grpo'"),
        ("grpo", 0.0, {}, "GRPOConfig beta=0.*set beta=0.04"),
        ("dapo", 0.0, {"delta": 1.5}, "delta changes TRL's own loss"),
    ],
)
def test_what_does_not_fit_is_refused(
    objective: str, beta: float, config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=why):
        trainer_of(GRPOTrainer, tmp_path, [second], beta=beta, objective=objective, config=config)


def test_judges_are_reward_functions(tmp_path: Path) -> None:
    judge = reward_function("boxed_answer")
    columns = {"prompts": ["2 + 2?"] * 2, "answer": ["4", "4"], "trainer_state": None}
    assert judge(completions=["\\boxed{4}", "\\boxed{5}"], **columns) == [1.0, 0.0]
    turns = [[{"role": "assistant", "content": "\\boxed{4}"}]] * 2
    assert judge(completions=turns, **columns) == [1.0, 1.0]
    trainer = trainer_of(GRPOTrainer, tmp_path, judge, objective="dapo")
    trainer.train()
    assert any(f"rewards/{judge.__name__}/mean" in line for line in trainer.state.log_history)


def test_two_processes_move_as_one(tmp_path: Path) -> None:
    gradients = []
    for ranks in (1, 2):
        file = tmp_path / f"{ranks}.pt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        settings = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        process = subprocess.run(
            [*command, str(ranks), __file__, str(file)],
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=300,
        )
        assert process.returncode == 0, process.stderr.decode()[-3000:]
        gradients.append(torch.load(file))
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) <= 1e-6


def lengths(completions: list[str], **_: Any) -> list[float]:
    """A number for each text, in any process."""
    return [float(len(text) % 5) for text in completions]


def one_of_several(file: Path) -> None:
    """One process of the test above: a step on completions that are the same for any number of processes;
    the first writes the gradient."""
    ranks = int(os.environ["WORLD_SIZE"])
    size = 8 // ranks

    class Fixed(GRPOTrainer):
        def _generate(self, prompts: list) -> Any:
            first = self.accelerator.process_index * size
            tokens = [[(7 * i + j) % 50 + 20 for j in range(3 + i)] for i in range(first, first + size)]
            generated = super()._generate(prompts)
            texts = self._tokenizer.batch_decode(tokens)
            return (generated[0], tokens, None, texts, *generated[4:])

    trainer = trainer_of(
        Fixed,
        file.parent / f"run{ranks}",
        [lengths],
        objective=replace(NAMED["dapo"], selection="kl_cov", selection_options=NAMED["kl_cov"].selection_options),
        config={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4 // ranks}
        | {"steps_per_generation": 4 // ranks},
    )
    gradients: list[Tensor] = []

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))

    trainer.add_callback(Keep())
    trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save(gradients[0], file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    one_of_several(Path(sys.argv[1]))
