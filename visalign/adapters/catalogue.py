# SPDX-License-Identifier: Apache-2.0
"""Find the adapter of a model, and load a model as a policy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from visalign.data.assets import PACKAGED, resolve_model
from visalign.data.sets.prompt_files import Edits
from visalign.dotted_path import import_by_path
from visalign.errors import UserError, suggestion
from visalign.interfaces import DiffusionPolicy

from .check import METHODS, AdapterError, check_members
from .model_folder import pipeline_index, stored_dtype
from .pipeline.arguments import CUSTOM_ADAPTER, known_family
from .pipeline.families import FAMILIES, PIPELINES, Family
from .single_file import model_source

ADAPTERS = {
    "sd3": "visalign.adapters.sd3.policy:SD3Policy",
    "pipeline": "visalign.adapters.pipeline.policy:PipelinePolicy",
}
"""Adapters by name, imported when used."""
DISTILLED = frozenset(("turbo", "schnell", "lightning", "hyper", "lcm", "dmd", "distilled"))
"""Words in the names of models that were distilled to few steps."""
DRAWN_BY = dict.fromkeys(("image_size", "negative_prompt", "num_frames", "call"))
DRAWN_BY |= {"use_t5": True, "max_sequence_length": 256}
"""Options of adapters that change what is drawn -> value in a configuration that sets none."""


def find_adapter(folder_or_id: str | Path, adapter: str | None = None) -> Any:
    """Return the adapter class of a name in `ADAPTERS` or of an own one's path; None: as the model's index asks."""
    if adapter is None:
        kind = pipeline_index(folder_or_id).get("_class_name")
        known_family(kind, str(folder_or_id))
        adapter = "sd3" if kind == "StableDiffusion3Pipeline" else "pipeline"  # sd3's own is faster
    if adapter not in ADAPTERS and ":" not in adapter:
        names = f"{', '.join(ADAPTERS)}, or {CUSTOM_ADAPTER}"
        raise UserError(f"There is no adapter {adapter!r}. {suggestion(adapter, ADAPTERS)}Allowed: {names}.")
    adapter_class = import_by_path(ADAPTERS.get(adapter, adapter), what="adapter")
    missing = [name for name in ("from_pretrained", *METHODS) if not callable(getattr(adapter_class, name, None))]
    if missing:
        raise AdapterError(
            f"protocol: {adapter!r} is no adapter: it lacks the methods {', '.join(missing)}. Add them, or give "
            f"{CUSTOM_ADAPTER}."
        )
    return adapter_class


def load_policy(
    folder_or_id: str | Path,
    *,
    adapter: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    defaults: Mapping[str, Any] | None = None,
    **options: Any,
) -> DiffusionPolicy:
    """Load a model as a policy: a packaged one, a folder, `owner/name` on the hub, or a checkpoint of one file.

    `options` go to the adapter's `from_pretrained`; one at its value in `defaults` is dropped if the adapter lacks it.
    SD3's fast adapter gives way to the general one where an option requires it.
    """
    folder_or_id = resolve_model(folder_or_id)
    described = index_source(folder_or_id, adapter, options.get("config"))
    kind, defaults = find_adapter(described, adapter), defaults or {}
    accepted, refused = _split_options(kind, options, defaults)
    if refused and adapter is None:
        kind = find_adapter(described, "pipeline")
        accepted, refused = _split_options(kind, options, defaults)
    if refused:
        names = [n for n, p in _parameters(kind).items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        similar = "".join(suggestion(name, names) for name in refused)
        raise UserError(
            f"The adapter {kind.__name__} takes no {', '.join(refused)}. {similar}It takes {', '.join(names[1:])}."
        )
    policy = kind.from_pretrained(folder_or_id, dtype=dtype, device=device, **accepted)
    check_members(policy)
    return policy


def index_source(path: str | Path, adapter: str | None = None, config: str | None = None) -> Path | str:
    """Return the folder or hub name whose index describes a model; of one with a custom adapter its own."""
    return model_source(path, config).folder if adapter in (None, *ADAPTERS) else resolve_model(path)


def has_two_halves(folder_or_id: str | Path, adapter: str | None, guidance: float | None) -> bool:
    """Return True if guidance of this scale runs the network twice."""
    if guidance is None or (family := family_of(folder_or_id, adapter)) is None:
        return guidance is not None and guidance > 1
    return guidance > family.off and family.has_halves


class OwnSampling(NamedTuple):
    """Sampling of a model where nothing else is asked for."""

    steps: int = 10
    guidance: float | None = None
    """None: what the adapter takes, no guidance or the usual scale of a network that has it as an input."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


def own_sampling(
    path: str, adapter: str | None, device: str, *, variant: str | None = None, config: str | None = None
) -> OwnSampling:
    """Read steps and guidance from a pipeline's call, the dtype from its weights (from the hub: bfloat16 on a GPU).

    Packaged models and custom adapters sample with ten steps, without guidance, in float32.
    """
    import diffusers

    if Path(path).name in PACKAGED or adapter not in (None, *ADAPTERS):
        return OwnSampling()
    source = model_source(path, config)
    family = family_of(source.folder, None)
    assert family is not None
    index = pipeline_index(source.folder)
    kind = getattr(diffusers, str(index["_class_name"]), None)
    defaults = {} if kind is None else {n: p.default for n, p in inspect.signature(kind.__call__).parameters.items()}
    steps = len(index.get("sample_sigmas") or ()) or defaults.get("num_inference_steps")
    scale = defaults.get(family.scale) if family.has_halves and not index.get("is_distilled") else None
    networks = family.present(index)
    if not networks:
        raise UserError(f"{path} lists none of {', '.join(family.networks)}. Copy the model folder again.")
    local = source.file or Path(source.folder) / networks[0]
    dtype = stored_dtype(local, variant) if local.exists() else "float32" if device == "cpu" else "bfloat16"
    return OwnSampling(
        steps=steps if isinstance(steps, int) else 50,
        guidance=None if scale is None else max(float(scale), family.off),
        dtype="float32" if device == "cpu" and dtype == "float16" else dtype,
    )


def is_distilled(path: str, described_by: str | Path, adapter: str | None) -> bool:
    """Return True of a model that was distilled to few steps, as its index, its network or its name says."""
    if family_of(described_by, adapter) is None and adapter not in (None, "sd3"):
        return False
    index = pipeline_index(described_by)
    marked = index.get("is_distilled") or index.get("sample_sigmas")
    return bool(marked) or bool(DISTILLED & set(re.split(r"[^a-z]+", Path(path).name.lower())))


def is_guided_by_call(path: str, described_by: str | Path, adapter: str | None) -> bool:
    """Return True of a model whose pipeline's call has a guidance of its own, that of two halves.

    Packaged models, distilled ones and custom adapters have none.
    """
    family = family_of(described_by, None if adapter == "sd3" else adapter)
    guides = family is not None and family.has_halves and family.scale != "-"
    return guides and Path(path).name not in PACKAGED and not is_distilled(path, described_by, adapter)


def family_of(folder_or_id: str | Path, adapter: str | None) -> Family | None:
    """Return the family of a model driven by its pipeline's own call, else None."""
    kind = pipeline_index(folder_or_id).get("_class_name") if adapter in (None, "pipeline") else None
    return FAMILIES[PIPELINES[kind]] if kind in PIPELINES else None


def family_name(folder_or_id: str | Path) -> str | None:
    """Return the name of a model's family, None where it has none."""
    return PIPELINES.get(str(pipeline_index(folder_or_id).get("_class_name")))


def edits_of(folder_or_id: str | Path, adapter: str | None) -> Edits:
    """Return whether a model edits an image: its family's `source`, or a custom adapter's `takes_source`."""
    if (family := family_of(folder_or_id, adapter)) is not None:
        return family.source
    takes_source = getattr(find_adapter(folder_or_id, adapter), "takes_source", False)
    if isinstance(takes_source, property):  # depends on the model
        family = family_of(folder_or_id, None)
        return "optional" if family is None else family.source
    return "optional" if takes_source else "none"


def joins_sources(folder_or_id: str | Path, adapter: str | None) -> bool:
    """Return True if an edit may start from several images; a custom adapter checks that itself."""
    family = family_of(folder_or_id, adapter)
    return family is None or family.several


def _split_options(
    kind: type, options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the options to pass to an adapter, without unknown ones at their defaults, and the refused."""
    parameters = _parameters(kind)
    passed = {k: v for k, v in options.items() if k in parameters or k not in defaults or v != defaults[k]}
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    return passed, [] if takes_any else [name for name in passed if name not in parameters]


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of `from_pretrained`, and of the constructor that gets its further options."""
    loader: Any = kind
    parameters = dict(inspect.signature(loader.from_pretrained).parameters)
    rest = [name for name, p in parameters.items() if p.kind == p.VAR_KEYWORD]
    if rest and kind.__init__ is not object.__init__:
        del parameters[rest[0]]
        parameters |= dict([*inspect.signature(kind).parameters.items()][1:])  # the first is the loaded model
    return parameters
