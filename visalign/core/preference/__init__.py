# SPDX-License-Identifier: Apache-2.0
"""Losses and statistics of preferences: Bradley-Terry, Thurstone, fidelity, uncertainty-aware ranking,
rankings from pairs, direct preference optimisation. It needs `groups`; no network comes in.

Common to all functions: scores, log-odds and log-probabilities are differentiable, of one shape, [*], [N] for N pairs
or [B] for B samples. Log-probs are summed over the tokens of a completion; those called `ref_*` are the reference
policy's and get no gradient. A loss comes back per pair, float32, or float64 for float64 inputs.

`label` [*] is the probability p that the left sample (the chosen one) is better, without gradient: 1 and 0
for clear pairs, between them where people disagreed. None means 1; a pair whose label is NaN costs 0 and
moves nothing, whatever its scores.
"""
