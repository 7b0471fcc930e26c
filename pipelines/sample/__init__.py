# SPDX-License-Identifier: Apache-2.0
"""`visalign sample`: images of prompts from a model, with what was trained.

It needs an adapter and, for the best of several, a reward; nothing that trains comes in.
"""
