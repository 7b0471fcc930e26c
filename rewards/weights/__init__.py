# SPDX-License-Identifier: Apache-2.0
"""What every judge with weights shares: checkpoint files, fingerprints, kept features, resizing, heads.

It needs `base`; it knows no particular judge.
"""
