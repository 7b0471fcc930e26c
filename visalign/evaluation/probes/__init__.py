# SPDX-License-Identifier: Apache-2.0
"""Probes of a reward: changed images and prompts that should not pay, and verdicts on the responses.

It needs images and scores; running a reward belongs to `visalign.pipelines.probe`.
"""
