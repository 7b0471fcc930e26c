# SPDX-License-Identifier: Apache-2.0
"""Causal and vision-language models of transformers as text policies.

It needs transformers; no objective and no reward comes in.
"""
