# SPDX-License-Identifier: Apache-2.0
"""Unit tests of generated code, run by bubblewrap or a sandbox server; none of it runs in this process."""
