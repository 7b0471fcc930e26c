# SPDX-License-Identifier: Apache-2.0
"""`visalign compare`, `rank` and `agree`: images side by side under one or several rewards.

It needs `score`; no policy comes in.
"""
