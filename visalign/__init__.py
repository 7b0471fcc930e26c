# SPDX-License-Identifier: Apache-2.0
"""visalign: align visual generation with rewards; one objective core for images and text.

The names here are those that most programs need, each imported at its first use (`__init__.pyi` lists them);
the faces of the wings (`visalign.core`, `visalign.rewards`, `visalign.training`, ...) have the rest.
"""

import sys
from typing import Any

import lazy_loader

from visalign.versions import ExtraNamed, own_version

if not any(isinstance(finder, ExtraNamed) for finder in sys.meta_path):
    sys.meta_path.append(ExtraNamed())

_offered, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _offered(name)
    if name == "__version__":
        return own_version()
    raise AttributeError(
        f"module 'visalign' has no attribute {name!r}. It offers {', '.join(__all__)}; the wings have more."
    )
