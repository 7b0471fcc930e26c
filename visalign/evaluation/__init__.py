# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a model, and of rewards on preference and quality sets, with intervals and pages.

It needs what was sampled or judged, handed in; no model and no judge is loaded here.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
