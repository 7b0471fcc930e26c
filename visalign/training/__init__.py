# SPDX-License-Identifier: Apache-2.0
"""Training: one `Trainer`, and what differs between images, texts, demonstrations and labels.

It needs a policy and a reward handed in; no model family and no judge comes in.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
