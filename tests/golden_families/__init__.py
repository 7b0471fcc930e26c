# SPDX-License-Identifier: Apache-2.0
"""Plug-ins of the golden runner, one file per wing; their contract opens `tests/golden_runner.py`."""
