# SPDX-License-Identifier: Apache-2.0
"""visalign: align visual generation with rewards; one objective core for images and text.

Names that most programs need, each imported at first use (`__init__.pyi` lists them); the subpackages
(`visalign.core`, `visalign.rewards`, `visalign.training`, ...) have the rest.
"""

import sys
from typing import Any

import lazy_loader

from visalign.versions import MissingExtraFinder, visalign_version

if not any(isinstance(finder, MissingExtraFinder) for finder in sys.meta_path):
    sys.meta_path.append(MissingExtraFinder())

_lazy_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _lazy_attribute(name)
    if name == "__version__":
        return visalign_version()
    raise AttributeError(
        f"module 'visalign' has no attribute {name!r}. It has {', '.join(__all__)}; subpackages have more."
    )
