# SPDX-License-Identifier: Apache-2.0
"""The command line, one file per command: options in, a job called, messages out. Only `__main__` imports it."""
