# SPDX-License-Identifier: Apache-2.0
"""`visalign collect`: votes of people and of judges on images, their agreement, and their export.

It needs `shared`, `score` (reading images) and `serve_reward` (addresses); no policy comes in.
"""
