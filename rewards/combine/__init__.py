# SPDX-License-Identifier: Apache-2.0
"""Several rewards as one: weighted sum, ensemble, use of uncertainty, calibrated scales, frames of clips.

It needs `base`; it knows no particular judge.
"""
