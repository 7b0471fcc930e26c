# SPDX-License-Identifier: Apache-2.0
"""Unit tests of generated code, run in a sandbox.

It needs `base` and a POSIX system; nothing generated runs in this process.
"""
