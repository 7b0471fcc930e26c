# SPDX-License-Identifier: Apache-2.0
"""Judges behind an OpenAI-compatible server: messages out, replies read.

It needs `visalign.remote` and `reading`; no weights are loaded here.
"""
