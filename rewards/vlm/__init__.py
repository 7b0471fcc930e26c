# SPDX-License-Identifier: Apache-2.0
"""Vision-language engine of the judges: template, tokens, packs, states, generation; it needs transformers."""
