# SPDX-License-Identifier: Apache-2.0
"""Prompt sets, the embedded shapes world with its exact verifier, and the packaged model folders."""
