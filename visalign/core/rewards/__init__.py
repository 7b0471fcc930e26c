# SPDX-License-Identifier: Apache-2.0
"""Rewards before they are advantages: terms, shaping, steps, uncertainty, sets, best of n.

It needs `groups`; no judge comes in.

Common to all functions: rewards are [B], in any unit; steps and decisions are [B, T] with `weight` 0 where
absent, whose values are never read; results are float32, or float64 for float64 inputs, and have no gradient
unless stated. A reward that is not finite is missing and stays so (NaN).
"""
