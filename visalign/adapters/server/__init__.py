# SPDX-License-Identifier: Apache-2.0
"""A server as the writer of completions: requests, replies, weights handed over.

It needs `visalign.remote`; no network is run in this process.
"""
