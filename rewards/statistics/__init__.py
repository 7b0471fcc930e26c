# SPDX-License-Identifier: Apache-2.0
"""Judges without a model: brightness, sharpness, file size.

It needs `base`; no weights come in.
"""
