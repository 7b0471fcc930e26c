# SPDX-License-Identifier: Apache-2.0
"""Judgements kept on disk under what they depend on.

It needs `base` and sqlite; it knows no judge.
"""
