# SPDX-License-Identifier: Apache-2.0
"""From rewards to advantages: baselines, scales, returns, and the published rules.

It needs `groups`; no ratio and no log-probability comes in.
"""
