# SPDX-License-Identifier: Apache-2.0
"""The jobs of text policies: GRPO and kin, PPO, SFT, DPO and kin, sampling.

It needs `shared`; the algorithms belong to `visalign.training` and `visalign.core`.
"""
