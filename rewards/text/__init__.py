# SPDX-License-Identifier: Apache-2.0
"""Rewards for texts: verifiable answers, format, length, reward models, process rewards."""
