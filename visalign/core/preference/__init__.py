# SPDX-License-Identifier: Apache-2.0
"""Losses and statistics of preferences: Bradley-Terry, Thurstone, fidelity, uncertainty-aware ranking,
rankings from pairs,
direct preference optimisation.

It needs `groups`; no network comes in.
"""
