# SPDX-License-Identifier: Apache-2.0
"""visalign: align visual generation with rewards; one objective core for images and text.

The names here are those that most programs need, each imported at its first use (`__init__.pyi` lists them);
the faces of the wings (`visalign.core`, `visalign.rewards`, `visalign.training`, ...) have the rest.
"""

from typing import Any

import lazy_loader

_offered, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        try:
            return _offered(name)
        except ModuleNotFoundError as error:
            from visalign.versions import missing_extra

            if mend := missing_extra(error):
                raise ModuleNotFoundError(f"visalign.{name}: {mend}", name=error.name) from error
            raise
    if name == "__version__":
        from visalign.versions import own_version

        return own_version()
    raise AttributeError(
        f"module 'visalign' has no attribute {name!r}. It offers {', '.join(__all__)}; the wings have more."
    )
