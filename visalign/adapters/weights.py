# SPDX-License-Identifier: Apache-2.0
"""Trained parameters of a policy, and the reference model from before training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peft.tuners.lora import LoraLayer
from torch import nn

from visalign.errors import UserError
from visalign.swapping import lora_disabled, swapped_weights


class TrainedWeights:
    """Parameters with `requires_grad`, and the model before training: without its LoRA layers, or a copy of it."""

    def __init__(self, model: nn.Module, adapters: list[LoraLayer] | None, *, reference: bool = True) -> None:
        self._model = model
        self._names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self._adapters = adapters
        copied = reference and adapters is None
        self._original = [weight.detach().clone() for _, weight in self.named()] if copied else None
        self._depth = 0

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters in the model's order, also inside `reference`."""
        return [(name, self._model.get_parameter(name)) for name in self._names]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Restore the model from before training inside the block; nestable. Call backward outside."""
        self._depth += 1
        try:
            if self._depth > 1:
                yield
            elif self._adapters is not None:
                with lora_disabled(self._adapters):
                    yield
            elif self._original is None:
                raise UserError(
                    "The policy was created with reference=False, so the model before training was not kept. Use "
                    "reference=True, or train adapters."
                )
            else:
                with swapped_weights([weight for _, weight in self.named()], self._original):
                    yield
        finally:
            self._depth -= 1
