# SPDX-License-Identifier: Apache-2.0
"""The embedded text tasks: prompts with known answers and worked demonstrations.

It needs nothing; no tokenizer comes in.
"""
