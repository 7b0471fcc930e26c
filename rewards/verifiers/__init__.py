# SPDX-License-Identifier: Apache-2.0
"""Judges with a rule: GenEval, OCR, shapes.

It needs a detector or reader and `base`; nothing learnt from preferences comes in.
"""
