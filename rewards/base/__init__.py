# SPDX-License-Identifier: Apache-2.0
"""Shared parts of rewards: request in, `Scores` out, images, failures, identity, a user's function."""
