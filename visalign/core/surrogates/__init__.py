# SPDX-License-Identifier: Apache-2.0
"""Ratios, surrogates, off-policy correction, KL, value loss and aggregation.

Common to all functions: tensors are [B] or [B, T], for B samples of T decisions; float16 and bfloat16 are
computed in float32; `advantage` is detached; a decision of weight 0 has loss 0 and exactly zero gradient,
even where its input is NaN; losses are per decision and to be minimized.
"""
