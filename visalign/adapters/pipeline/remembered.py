# SPDX-License-Identifier: Apache-2.0
"""Cache lookups that diffusers repeats over all modules of all components several times a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .quantization import dtype_of

LOOKED_UP = ("dtype", "device", "_execution_device")
"""Properties of a pipeline and of its networks whose values are cached."""


class RememberedLookups:
    """Caches these properties while a pipeline is called.

    They walk through all modules for hooks (of offloading, of casting layer by layer), five to ten times a
    call, which takes the longer the larger the model is. The cached value is diffusers' own, except the dtype
    of a network in 4 bits (`dtype_of`), until the weights move or change their dtype; hooks must be there
    before the pipeline becomes a policy. Outside of the call each class is its own.
    """

    def __init__(self, pipe: Any, networks: Mapping[str, Any]) -> None:
        self._networks = list(networks.values())
        self._parts = [pipe, *self._networks]
        self._kinds: dict[type, type] = {}
        self._values: dict[tuple[int, str], Any] = {}
        self._weights: Any = None

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Keep the first value of each cached property inside the block."""
        weight = next(self._networks[0].parameters())
        if self._weights != (weight.dtype, weight.device):
            self._values = {(id(network), "dtype"): dtype_of(network) for network in self._networks}
            self._weights = weight.dtype, weight.device
        kinds = [type(part) for part in self._parts]
        try:
            for part, kind in zip(self._parts, kinds, strict=True):
                if kind not in self._kinds:
                    self._kinds[kind] = self._remembering(kind)
                part.__class__ = self._kinds[kind]
            yield
        finally:
            for part, kind in zip(self._parts, kinds, strict=True):
                part.__class__ = kind

    def _remembering(self, kind: Any) -> type:
        """Return a class of the same name that caches."""

        def cached(name: str) -> property:
            original = getattr(kind, name)

            def value(part: Any) -> Any:
                key = id(part), name
                if key not in self._values:
                    self._values[key] = original.fget(part)
                return self._values[key]

            return property(value)

        def free(pipe: Any) -> None:
            """Skip the end-of-call hook where no component is offloaded and no feature cache is on."""
            has_cache = any(getattr(network, "is_cache_enabled", False) for network in self._networks)
            if has_cache or getattr(pipe, "_all_hooks", None):
                kind.maybe_free_model_hooks(pipe)

        members: dict[str, Any] = {name: cached(name) for name in LOOKED_UP if hasattr(kind, name)}
        if hasattr(kind, "maybe_free_model_hooks"):
            members["maybe_free_model_hooks"] = free
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        return type(kind.__name__, (kind,), {**names, **members})
