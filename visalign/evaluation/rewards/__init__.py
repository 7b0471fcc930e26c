# SPDX-License-Identifier: Apache-2.0
"""Quality of a reward on votes and opinion scores: accuracy, calibration, slices, comparison of several.

It needs scores that were already computed; no reward is loaded here.
"""
