# SPDX-License-Identifier: Apache-2.0
"""Diversity of the low-rank matrices of an ensemble's members."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visalign.core.precision import float32_dtype


def nuclear_diversity(matrices: Sequence[Tensor], *, dim: int = 0) -> Tensor:
    """Nuclear norm of the members' matrices put together along `dim`, over the largest that their size allows.

    ‖C‖_* / (‖C‖_F √min(n, m)) with C [n, m] = [X_1; …; X_M]: 1 where all singular values of C are alike, and
    √(1/M) of that of one member where all members are equal. The paper's is ‖C‖_* itself, which also grows
    with the matrices; over ‖C‖_F it does not. dim is 0 for LoRA's A [r, in], 1 for its B [out, r]. Zhai et
    al., "Uncertainty-penalized RLHF with diverse reward LoRA ensembles", arXiv 2401.00243.
    """
    joined = torch.cat([matrix.to(float32_dtype(matrix)) for matrix in matrices], dim)
    nuclear, frobenius = torch.linalg.matrix_norm(joined, "nuc"), torch.linalg.matrix_norm(joined)
    return nuclear / (frobenius * min(joined.shape) ** 0.5)
