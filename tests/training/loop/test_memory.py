# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out: the message names the setting, and a resume with less of it goes on."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.training.images import ToyPolicy, toy_trainer
from visalign.config import flatten
from visalign.pipelines.jobs import load_job
from visalign.pipelines.shared.sections import FREE_KEYS
from visalign.training.loop import checkpoint
from visalign.training.loop.runtime import BOUNDS, OutOfMemory

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...\nmore")
CPU = RuntimeError("err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. 12")


class Narrow(ToyPolicy):
    """Has memory for so many samples, with and without gradient, from its second iteration on."""

    def __init__(self, error: Exception, without: int = 99, within: int = 99) -> None:
        super().__init__()
        self.error, self.most = error, {False: without, True: within}
        self.full = False

    def velocity(self, x: Tensor, *arguments: Any) -> Tensor:
        if self.full and len(x) > self.most[torch.is_grad_enabled()]:
            raise self.error
        return super().velocity(x, *arguments)


def _trainer(folder: Path, policy: ToyPolicy, sizes: dict[str, Any] | None = None, **arguments: Any) -> Any:
    sizes = {"batch_size": 48, "micro_batch": 64, **(sizes or {})}
    own = {"rollout": {"batch_size": sizes["batch_size"]}, "optimizer": {"micro_batch": sizes["micro_batch"]}}
    rest = {"evaluation": {"batch_size": 1}, "model": {"decode_batch": 8}}
    run = {"config": own | rest, "free_keys": FREE_KEYS, "checkpoint_every": 1, "iterations": 2}
    return toy_trainer(folder, policy=policy, run={**run, **arguments.pop("run", {})}, **own, **arguments)


@pytest.mark.parametrize(
    ("narrow", "smaller", "message"),
    [
        (Narrow(CUDA, without=24), "batch_size", "sampling (Tried to allocate 2.00 GiB). rollout.batch_size is 48."),
        (Narrow(CPU, within=32), "micro_batch", "(tried to allocate 9 bytes). optimizer.micro_batch is 64."),
    ],
    ids=["rollout", "update"],
)
def test_the_setting_is_named_and_a_resume_with_half_of_it_goes_on(
    narrow: Narrow, smaller: str, message: str, tmp_path: Path
) -> None:
    _trainer(tmp_path, narrow, run={"iterations": 1}).train()
    narrow.full = True
    stopped = _trainer(tmp_path, narrow)
    assert stopped.resume()
    half, same = ({"batch_size": 24, "micro_batch": 32}[smaller], "memory only: samples and updates stay the same")
    with pytest.raises(OutOfMemory, match=f"{re.escape(message)} .*{same}.*{smaller}={half} and --resume"):
        stopped.train()
    assert [path.name for path in checkpoint.folders(tmp_path / "checkpoints")] == ["step_000001"]
    resumed = _trainer(tmp_path, narrow, {smaller: half})
    assert resumed.resume() and resumed.train().counters.iteration == 2


def test_an_evaluation_is_named_on_the_way_and_before_the_training(tmp_path: Path) -> None:
    def evaluate(_: int) -> dict[str, float]:
        raise CUDA

    message = r"evaluation .*evaluation\.batch_size is 1 already\. Set model\.gradient_checkpointing=true, optimizer"
    trainer = _trainer(tmp_path, ToyPolicy(), evaluate=evaluate, run={"evaluate_every": 1})
    with pytest.raises(OutOfMemory, match=message):
        trainer.train()
    with pytest.raises(OutOfMemory, match=message), trainer.measuring():
        evaluate(0)


def test_a_decoder_is_named(tmp_path: Path) -> None:
    policy = ToyPolicy()
    policy.decode = lambda *_: (_ for _ in ()).throw(CUDA)  # type: ignore[method-assign]
    message = r"while decoding or encoding images \(Tried .*decode_batch is 8\. .*decode_batch=4 and --resume"
    with pytest.raises(OutOfMemory, match=message):
        _trainer(tmp_path, policy).train()


@pytest.mark.parametrize("name", ["shapes_flow_grpo", "text_grpo", "shapes_hpsv3"])
def test_the_named_settings_are_those_of_the_configurations(name: str) -> None:
    keys = flatten(asdict(load_job(name, []).config)).keys()
    for phase in ("update", "evaluation", *(("rollout",) if name != "shapes_hpsv3" else ())):
        assert keys & {*BOUNDS[phase][1]}, phase
    assert ("model.decode_batch" in keys) == (name == "shapes_flow_grpo")
