# SPDX-License-Identifier: Apache-2.0
"""A judge behind HTTP, and the client that is a reward.

It needs `base` and Starlette or httpx; it knows no particular judge.
"""
