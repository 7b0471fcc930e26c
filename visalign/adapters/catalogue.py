# SPDX-License-Identifier: Apache-2.0
"""Adapters by name: one dict, the pipelines that each one loads, and dotted paths for a user's own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from visalign.data.sets.prompt_files import Edits
from visalign.dotted_path import import_by_path
from visalign.errors import UserError, suggestion
from visalign.interfaces import DiffusionPolicy

from .check import METHODS, AdapterError, check_members
from .model_folder import pipeline_index
from .pipeline.families import FAMILIES, REFUSED, Family
from .pipeline.families import PIPELINES as FAMILY_OF

ADAPTERS = {
    "sd3": "visalign.adapters.sd3.policy:SD3Policy",
    "pipeline": "visalign.adapters.pipeline.policy:PipelinePolicy",
}
"""name -> module:class. A module is imported when its adapter is used."""
PIPELINES = {**dict.fromkeys(FAMILY_OF, "pipeline"), "StableDiffusion3Pipeline": "sd3"}
"""`_class_name` in an index -> name of the adapter."""

OWN = (
    "your own as 'package.module:Class' or 'path/to/file.py:Class' (model.adapter=...), a class with "
    "from_pretrained(folder_or_id, *, dtype, device, **options) whose objects are a "
    "visalign.interfaces.DiffusionPolicy; visalign.adapters.check_adapter(policy) tests it"
)


def find_adapter(folder_or_id: str | Path, adapter: str | None = None) -> Any:
    """The class that makes a policy of a model, with all methods of the contract.

    Args:
        folder_or_id: the model; without `adapter` its index decides.
        adapter: a name of the catalogue, `package.module:Class` or `path/to/file.py:Class`.

    Raises:
        FileNotFoundError: there is no such model folder, or it holds no index.
        UserError: there is no adapter of that name, or none for that pipeline.
        AdapterError: the class lacks methods.
    """
    if adapter is None:
        kind = pipeline_index(folder_or_id).get("_class_name")
        if kind in REFUSED:
            raise UserError(f"{folder_or_id} is a {kind}, which {REFUSED[kind]}.")
        if kind not in PIPELINES:
            known = ", ".join(f"{name} ({FAMILY_OF[name]})" for name in PIPELINES)
            raise UserError(
                f"{folder_or_id} is a {kind}; adapters exist for {known}. Give one of these, a row of your "
                f"own in visalign/adapters/pipeline/families.py, or {OWN}."
            )
        adapter = PIPELINES[kind]
    if adapter not in ADAPTERS and ":" not in adapter:
        raise UserError(
            f"There is no adapter {adapter!r}. {suggestion(adapter, ADAPTERS)}Allowed: "
            f"{', '.join(ADAPTERS)}, or {OWN}."
        )
    found = import_by_path(ADAPTERS.get(adapter, adapter), what="adapter")
    missing = [name for name in ("from_pretrained", *METHODS) if not callable(getattr(found, name, None))]
    if not isinstance(found, type) or missing:
        raise AdapterError(
            f"protocol: {adapter!r} is no adapter: a {type(found).__name__} without the methods "
            f"{', '.join(missing) or '(it is no class)'}. Add them, or give {OWN}."
        )
    return found


def load_policy(
    folder_or_id: str | Path,
    *,
    adapter: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    defaults: Mapping[str, Any] | None = None,
    **options: Any,
) -> DiffusionPolicy:
    """A model as a policy, by the adapter that is named or that follows from the model: of SD3 its own one,
    or the general one where an option asks for what only that takes.

    Args:
        folder_or_id: a folder, or `owner/name` on the hub.
        adapter: see `find_adapter`.
        dtype: of the weights.
        device: where they go.
        defaults: what `options` are when nobody set them: an option that has its default is left out where
            the adapter does not know it.
        **options: arguments of the adapter's `from_pretrained`.

    Raises:
        UserError, FileNotFoundError, AdapterError: see `find_adapter`; an option that the adapter does not
            take; the model is no policy.
    """
    kind = find_adapter(folder_or_id, adapter)
    usual, more = defaults or {}, ""
    chosen, refused = _taken(kind, options, usual)
    if refused and adapter in (None, "sd3"):
        general = find_adapter(folder_or_id, "pipeline")
        others = _taken(general, options, usual)
        if adapter is None and not others[1]:
            kind, (chosen, refused) = general, others
        elif general is not kind:
            takes = f"no {', '.join(others[1])}" if others[1] else ", ".join(refused)
            more = f"; model.adapter=pipeline takes {takes}"
    if refused:
        named = [n for n, p in _parameters(kind).items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        near = "".join(suggestion(name, named) for name in refused)
        raise UserError(
            f"The adapter {kind.__name__} takes no {', '.join(refused)}. {near}It takes "
            f"{', '.join(named[1:])}: leave the others at their defaults{more}."
        )
    policy = kind.from_pretrained(folder_or_id, dtype=dtype, device=device, **chosen)
    check_members(policy)
    return policy


def has_two_halves(folder_or_id: str | Path, adapter: str | None, guidance: float | None) -> bool:
    """Whether guidance of this scale takes the network twice."""
    if guidance is None:
        return False
    family = family_of(folder_or_id, adapter)
    if family is None:
        return guidance > 1
    return guidance > family.off and family.guidance in ("concatenated", "two calls")


def family_of(folder_or_id: str | Path, adapter: str | None) -> Family | None:
    """The row of a model that a pipeline's own call drives; None of others."""
    kind = pipeline_index(folder_or_id).get("_class_name") if adapter in (None, "pipeline") else None
    return FAMILIES[FAMILY_OF[kind]] if kind in FAMILY_OF else None


def edits_of(folder_or_id: str | Path, adapter: str | None) -> Edits:
    """Whether a model edits an image: the `source` of its family; of one's own adapter by `takes_source`."""
    family = family_of(folder_or_id, adapter)
    if family is not None:
        return family.source
    found = getattr(find_adapter(folder_or_id, adapter), "takes_source", False)
    if isinstance(found, property):  # the adapter asks its model
        family = family_of(folder_or_id, None)
        return "optional" if family is None else family.source
    return "optional" if found else "none"


def joins_sources(folder_or_id: str | Path, adapter: str | None) -> bool:
    """Whether an edit may start from several images; one's own adapter refuses them itself."""
    family = family_of(folder_or_id, adapter)
    return family is None or family.several


def _taken(
    kind: type, options: Mapping[str, Any], usual: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Those of the options that an adapter is given, unknown ones at their defaults left out, and the names
    of those that it does not take."""
    known = _parameters(kind)
    chosen = {k: v for k, v in options.items() if k in known or k not in usual or v != usual[k]}
    if any(p.kind == p.VAR_KEYWORD for p in known.values()):
        return chosen, []
    return chosen, [name for name in chosen if name not in known]


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """What `from_pretrained` takes, and the constructor too where it passes on what it does not know."""
    loader: Any = kind
    own = dict(inspect.signature(loader.from_pretrained).parameters)
    rest = [name for name, p in own.items() if p.kind == p.VAR_KEYWORD]
    if rest and kind.__init__ is not object.__init__:
        del own[rest[0]]
        own |= dict([*inspect.signature(kind).parameters.items()][1:])  # the first is what was loaded
    return own
