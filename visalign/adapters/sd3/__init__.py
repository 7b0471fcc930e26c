# SPDX-License-Identifier: Apache-2.0
"""Stable Diffusion 3 pipelines as diffusion policies, written by hand because it pays in speed.

It needs diffusers; no objective and no reward comes in.
"""
