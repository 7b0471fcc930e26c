# SPDX-License-Identifier: Apache-2.0
"""The vision-language engine of the judges: template, tokens, packs, states, generation.

It needs transformers; no published prompt and no score comes in.
"""
