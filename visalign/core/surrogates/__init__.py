# SPDX-License-Identifier: Apache-2.0
"""Ratios, surrogates, off-policy correction, KL, value loss and aggregation.

Common to all functions: tensors are [B] or [B, T], for B samples of T decisions, of one shape; `advantage` may be [B].
`log_prob` (log π) and, in losses, `log_ratio` (log π − log π_old) are differentiable; advantage, π_old, π_ref, returns
and importance weights are detached. float16 and bfloat16 are computed in float32. A decision of `weight` 0 has loss 0
and exactly zero gradient, even where its input is NaN. Losses are per decision, in the shape of the log-prob, and to
be minimized. Ranges of options are those of `objective.options.RANGES`.
"""
