# SPDX-License-Identifier: Apache-2.0
"""Statistics of numbers: intervals, correlations, calibration, agreement, diversity.

It needs arrays and scipy; it never sees a judge, an image of ours or a file. Lengths that differ, NaN
where nothing says that it may be, and a side without any variation are a ValueError that says so.
"""
