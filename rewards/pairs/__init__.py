# SPDX-License-Identifier: Apache-2.0
"""From scores to preferences and back: win rates, ranking, asking both orders.

It needs `base` and the core's preference room; it knows no particular judge.
"""
