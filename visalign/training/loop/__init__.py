# SPDX-License-Identifier: Apache-2.0
"""Parts of every run: the loop, checkpoints, counters, EMA, metrics, progress, prompt sampling, judging.

It needs torch and accelerate; no algorithm and no kind of sample comes in.
"""
