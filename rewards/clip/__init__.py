# SPDX-License-Identifier: Apache-2.0
"""The contrastive engine: towers, loading, published layouts, changes to a base.

It needs open_clip; no score is made here.
"""
