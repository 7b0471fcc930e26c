# SPDX-License-Identifier: Apache-2.0
"""Training of process rewards: judges of the steps of a text.

It needs a scored model and labels; rollouts do not come in.
"""
