# SPDX-License-Identifier: Apache-2.0
"""Data sets on disk: prompts, preference pairs, quality scores, given completions, their layouts and their leaks.

It needs files; nothing is judged or trained here.
"""
