# SPDX-License-Identifier: Apache-2.0
"""The jobs of diffusion policies: Flow-GRPO and Pref-GRPO.

It needs `shared`; the algorithms belong to `visalign.training` and `visalign.core`.
"""
