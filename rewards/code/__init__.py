# SPDX-License-Identifier: Apache-2.0
"""Unit tests of generated code, run by bubblewrap or a sandbox server.

It needs `base` and `text`; generated code never comes into this process.
"""
