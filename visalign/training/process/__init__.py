# SPDX-License-Identifier: Apache-2.0
"""Training of process rewards, which score the steps of a text, from labels."""
