# SPDX-License-Identifier: Apache-2.0
"""Rewards before they are advantages: terms, shaping, steps, uncertainty, off-policy use, best of n.

It needs `groups`; no judge comes in.
"""
