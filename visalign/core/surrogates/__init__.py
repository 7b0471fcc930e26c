# SPDX-License-Identifier: Apache-2.0
"""Ratio, surrogate, off-policy correction, KL, value loss and aggregation.

It needs `groups`; no advantage is made here.
"""
