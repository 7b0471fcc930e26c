# SPDX-License-Identifier: Apache-2.0
"""visalign: align visual generation with rewards; one objective core for images and text."""

__version__ = "0.1.0"
