# SPDX-License-Identifier: Apache-2.0
"""Statistics of arrays: intervals, correlations, calibration, agreement, diversity.

It needs numpy and scipy; it knows no reward, image or file. Inputs must be finite: leave out samples
without a score, and count them.
"""
