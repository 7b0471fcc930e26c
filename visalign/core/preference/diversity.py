# SPDX-License-Identifier: Apache-2.0
"""Diversity of the low-rank matrices of an ensemble's members."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visalign.core.precision import float32_dtype


def nuclear_diversity(matrices: Sequence[Tensor], *, dim: int = 0) -> Tensor:
    """Nuclear norm of the members' matrices put together, over the largest that their size allows.

    ‖C‖_* / (‖C‖_F √min(n, m)) with C [n, m] = [X_1; …; X_M]: 1 where all singular values of C are alike, and
    √(1/M) of that of one member where all members are equal. The paper's is ‖C‖_* itself, which also grows
    with the matrices; over ‖C‖_F it does not.

    Args:
        matrices: M matrices that differ in `dim` at most, not all 0; [r, in] of LoRA's A, [out, r] of its B.
        dim: along which they are put together: 0 for A, 1 for B.

    Returns:
        Scalar in (0, 1], float32 or better, with gradient.

    Zhai et al., "Uncertainty-penalized RLHF with diverse reward LoRA ensembles", arXiv 2401.00243.
    """
    shapes = {tuple(size for axis, size in enumerate(matrix.shape) if axis != dim) for matrix in matrices}
    if dim not in (0, 1) or len(shapes) != 1 or any(matrix.dim() != 2 for matrix in matrices):
        raise ValueError(
            f"matrices have shapes {[tuple(matrix.shape) for matrix in matrices]} and dim is {dim}; give one "
            "or more matrices that are alike but along dim, which is 0 or 1."
        )
    joined = torch.cat([matrix.to(float32_dtype(matrix)) for matrix in matrices], dim)
    nuclear, frobenius = torch.linalg.matrix_norm(joined, "nuc"), torch.linalg.matrix_norm(joined)
    return nuclear / (frobenius * min(joined.shape) ** 0.5)
