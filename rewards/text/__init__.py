# SPDX-License-Identifier: Apache-2.0
"""Rewards of texts: verifiable answers, format, length, reward models, process rewards, and their
catalogue.

It needs `base` and `combine`; no image comes in.
"""
