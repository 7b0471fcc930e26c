# SPDX-License-Identifier: Apache-2.0
"""Rounds of reward and policy: samples, labels where the ensemble is unsure, a new ensemble, a new policy."""
