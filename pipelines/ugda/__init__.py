# SPDX-License-Identifier: Apache-2.0
"""Rounds of reward and policy: samples, labels where the ensemble is unsure, a new ensemble, a new policy.

It needs the jobs that train judges and policies, `sample` and `collect`; how these learn stays with them.
"""
