# SPDX-License-Identifier: Apache-2.0
"""Adapt diffusers pipelines and transformers language models to policies; LoRA; contract tests.

Everything is imported at first use, so text policies work without diffusers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
