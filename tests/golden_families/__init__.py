# SPDX-License-Identifier: Apache-2.0
"""Plug-ins of the golden runner, one file per wing; the contract stands at the top of `tests/golden_runner.py`."""
