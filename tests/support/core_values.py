# SPDX-License-Identifier: Apache-2.0
"""Small tensors and the comparison with numbers worked out by hand, for the tests of the formulas."""

from __future__ import annotations

import torch
from torch import Tensor


def f64(*values: float) -> Tensor:
    """A vector in double precision."""
    return torch.tensor(values, dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in double precision, the same for the same seed."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_values(ours: Tensor, *expected: float, rtol: float = 1e-6, atol: float = 1e-12) -> None:
    """Fail unless a vector (or a number) holds these values in double precision; NaN equals NaN."""
    torch.testing.assert_close(ours, f64(*expected), rtol=rtol, atol=atol, equal_nan=True)
