# SPDX-License-Identifier: Apache-2.0
"""What exists only for tokens: entropy over the vocabulary, the fused output head, selection of tokens.

It needs `groups` and `surrogates`; denoising steps never come in.
"""
