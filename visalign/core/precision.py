# SPDX-License-Identifier: Apache-2.0
"""Cast at the border of a function: half precision is computed in float32, float64 stays."""

from __future__ import annotations

import torch
from torch import Tensor


def float32(value: Tensor) -> Tensor:
    """Cast to float32 or better, differentiable."""
    return value.to(float32_dtype(value))


def float32_dtype(value: Tensor) -> torch.dtype:
    """Return float32, or the tensor's dtype if it is better."""
    return torch.promote_types(value.dtype, torch.float32)
