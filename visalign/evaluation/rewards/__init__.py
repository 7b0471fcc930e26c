# SPDX-License-Identifier: Apache-2.0
"""How good a reward is, measured on votes and quality scores: accuracy, calibration, slices, comparison
of several.

It needs judgements already made; no judge is loaded here.
"""
