# SPDX-License-Identifier: Apache-2.0
"""HEIE: a judge that draws where an image is wrong.

`assets/build/heie.py` trains its heads.
"""
