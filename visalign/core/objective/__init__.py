# SPDX-License-Identifier: Apache-2.0
"""The `Objective`: rows of named algorithms, prepared per optimizer step and summed over any micro-
batches; its explanation and its checks.

It needs all other rooms of the core; nothing of the core imports it.
"""
