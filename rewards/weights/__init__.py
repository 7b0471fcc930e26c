# SPDX-License-Identifier: Apache-2.0
"""Shared by rewards with weights: checkpoint files, fingerprints, feature caches, resizing, heads."""
