# SPDX-License-Identifier: Apache-2.0
"""The jobs of diffusion policies; the algorithms belong to `visalign.training` and `visalign.core`."""
