# SPDX-License-Identifier: Apache-2.0
"""Preferences from scores, win rates and rankings from preferences; works with any reward.

Imports `base` and the core's preference module.
"""
