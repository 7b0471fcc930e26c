# SPDX-License-Identifier: Apache-2.0
"""HEIE: plausibility of an image with a heatmap of what is wrong; `assets/build/heie.py` trains its heads."""
