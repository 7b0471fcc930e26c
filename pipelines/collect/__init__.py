# SPDX-License-Identifier: Apache-2.0
"""`visalign collect`: votes of people and of judges about images, and what they are worth.

It needs `shared`, `score` (reading images) and `serve_reward` (addresses); no policy comes in.
"""
