# SPDX-License-Identifier: Apache-2.0
"""A judge behind HTTP (Starlette), and the client (httpx) that is a reward."""
