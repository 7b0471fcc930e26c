# SPDX-License-Identifier: Apache-2.0
"""The `Objective`: named algorithms, prepared per optimizer step and summed over any micro-batches.

It needs all other folders of the core; none of them but `regression` imports it.
"""
