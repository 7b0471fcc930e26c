# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries as policies: diffusers pipelines, causal language models, LoRA, contract tests.

It needs `flow`, `text` and the libraries of the models; no objective and no reward comes in. Everything is
imported at its first use: text policies do without diffusers.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
