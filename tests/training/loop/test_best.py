# SPDX-License-Identifier: Apache-2.0
"""The best evaluation's weights are the result, by a judge that is not trained on."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.training.images import toy_trainer
from tests.support.training.text import weights_of
from visalign.errors import UserError
from visalign.training import read_metrics
from visalign.training.loop.monitor import best_checkpoint_note

VALUES = {1: 0.2, 2: math.nan, 3: 0.7, 4: 0.7, 5: 0.1}


def _trainer(folder: Path, by: str | None, iterations: int = 5, every: int = 1, **optimizer: Any) -> Any:
    def evaluate(iteration: int) -> dict[str, float]:
        return {"other": VALUES[iteration], "accuracy": 0.5, "unknown": math.nan}

    return toy_trainer(
        folder,
        optimizer={"ema_decay": 0.0, "ema_every": 1, **optimizer},
        run={"iterations": iterations, "evaluate_every": every, "best_by": by, "free_keys": ("best_by",)},
        evaluate=evaluate,
    )


def _result(trainer: Any) -> Tensor:
    with trainer.result():
        return weights_of(trainer)


@pytest.mark.parametrize(
    ("by", "best", "ema"),
    [("heldout/other", 3, {"ema_decay": 0.5}), ("-heldout/other", 5, {}), (None, 5, {"ema_decay": 0.5})],
)
def test_the_weights_of_the_best_evaluation_are_the_result(
    tmp_path: Path, by: str | None, best: int, ema: dict[str, Any]
) -> None:
    """The first among equals, never one without a number."""
    then, run = _trainer(tmp_path / "then", None, best, **ema), _trainer(tmp_path / "run", by, **ema)
    then.train()
    run.train()
    with then.averaged():
        expected = weights_of(then)
    last = weights_of(run)
    assert torch.equal(_result(run), expected)
    assert torch.equal(weights_of(run), last), "the run goes on with its own"
    if by is not None:
        record = {"by": by, "value": VALUES[best], "iteration": best}
        assert run.counters.own["best"] == record
    notes = [
        f"The result has the weights of iteration {best}, selected by run.best_by: {by} was {VALUES[best]:g} there."
    ]
    assert best_checkpoint_note(by, run.counters.own) == ([] if by is None else notes)


def test_a_resumed_run_knows_the_best(tmp_path: Path) -> None:
    uninterrupted = _trainer(tmp_path / "whole", "heldout/other")
    uninterrupted.train()
    _trainer(tmp_path / "cut", "heldout/other", 4).train()
    rest = _trainer(tmp_path / "cut", "heldout/other")
    assert rest.resume()
    rest.train()
    assert torch.equal(_result(rest), _result(uninterrupted)) and rest.counters.own["best"]["iteration"] == 3
    VALUES[6] = 0.0
    last = _trainer(tmp_path / "cut", "-heldout/accuracy")
    assert last.resume()
    assert torch.equal(_result(last), weights_of(last)), "the best by another number is no result"
    other = _trainer(tmp_path / "cut", "-heldout/accuracy", 6)
    assert other.resume()
    other.train()
    assert other.counters.own["best"] == {"by": "-heldout/accuracy", "value": 0.5, "iteration": 6}
    assert [r["heldout/other"] for r in read_metrics(tmp_path / "cut" / "metrics.jsonl")][-1] == 0.0


def test_a_number_that_no_evaluation_had_leaves_the_last_weights_and_says_so(tmp_path: Path) -> None:
    run = _trainer(tmp_path, "heldout/unknown", 2)
    run.train()
    assert torch.equal(_result(run), weights_of(run))
    notes = ["Warning: no evaluation had a number for run.best_by, heldout/unknown: keeping the last weights."]
    assert best_checkpoint_note("heldout/unknown", run.counters.own) == notes


def test_what_one_process_alone_measures_decides_for_all(tmp_path: Path) -> None:
    """Of several processes the first knows the drift of images; the others leave it out."""
    other = _trainer(tmp_path, "heldout/drift", 1)
    other.accelerator = SimpleNamespace(
        is_main_process=False, device=other.accelerator.device, reduce=lambda tensor, _: tensor + 1
    )
    other._evaluate(lambda _: {"accuracy": 0.5})
    assert "best" in other.context.tensors


def test_what_cannot_decide_is_refused(tmp_path: Path) -> None:
    for every in (0, 6):
        message = r"best_by is 'heldout/other', and nothing is evaluated during training.*at most 5"
        with pytest.raises(UserError, match=message):
            _trainer(tmp_path / "never", "heldout/other", every=every)
    message = r"'heldout/othr', .*Did you mean 'heldout/other'.*They have heldout/other, heldout/accuracy, "
    with pytest.raises(UserError, match=message):
        _trainer(tmp_path / "unknown", "heldout/othr").train()
