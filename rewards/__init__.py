# SPDX-License-Identifier: Apache-2.0
"""Rewards for images and for text: one file per judge, catalogues, composition. Imported at first use.

It needs `interfaces` and `core`; no policy and no training loop comes in.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
