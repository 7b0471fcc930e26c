# SPDX-License-Identifier: Apache-2.0
"""The jobs of text policies; the algorithms belong to `visalign.training` and `visalign.core`."""
