# SPDX-License-Identifier: Apache-2.0
"""What every policy update shares, of images and of texts: the objective's settings and the update by it.

It needs the core's `Objective` and the loop; how a sample is made, and what a decision is, never comes in.
"""
