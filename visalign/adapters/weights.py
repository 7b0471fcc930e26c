# SPDX-License-Identifier: Apache-2.0
"""What training moves, and the way back: the reference is the model as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from visalign.errors import UserError

from .lora import lora_disabled


@contextmanager
def swapped_weights(parameters: Sequence[nn.Parameter], stored: Sequence[Tensor]) -> Iterator[None]:
    """Let the parameters hold the stored values (same shapes, device and dtype) inside the block; nothing is
    copied.

    A graph built before the block is still good after it; a backward *inside* would use the stored weights.
    """
    current = [parameter.data for parameter in parameters]
    try:
        for parameter, other in zip(parameters, stored, strict=True):
            parameter.data = other
        yield
    finally:
        for parameter, own in zip(parameters, current, strict=True):
            parameter.data = own


class TrainedWeights:
    """The parameters that the optimizer moves, and the model before it did.

    Args:
        model: with `requires_grad` set where it is trained.
        adapters: the layers of a LoRA, which the reference does without; None where the model's own weights
            are trained, and a copy of them is kept (one more model in memory).
        reference: keep that copy; without it `reference` is refused.
    """

    def __init__(self, model: nn.Module, adapters: list[LoraLayer] | None, *, reference: bool = True) -> None:
        self._model = model
        self._names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self._adapters = adapters
        copied = reference and adapters is None
        self._original = [weight.detach().clone() for _, weight in self.named()] if copied else None
        self._depth = 0

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters, in the order of the model, also inside `reference`."""
        return [(name, self._model.get_parameter(name)) for name in self._names]

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the model is what it was before training; may be nested. Call backward outside of it."""
        self._depth += 1
        try:
            if self._depth > 1:
                yield
            elif self._adapters is not None:
                with lora_disabled(self._adapters):
                    yield
            elif self._original is None:
                raise UserError(
                    "The policy was made with reference=False, so the model before training was not kept. "
                    "Make it with reference=True, which takes one more model in memory, or train adapters."
                )
            else:
                with swapped_weights([weight for _, weight in self.named()], self._original):
                    yield
        finally:
            self._depth -= 1
