# SPDX-License-Identifier: Apache-2.0
"""Read published weight files safely and strictly: tensors only, missing and unexpected keys named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.data.sets.tables import listed
from visalign.model_files import LOADING_ERRORS, read_object
from visalign.precision import multiplies_bfloat16
from visalign.rewards.base.contract import RewardError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of towers and models; heads and scores are always float32."""

_BARS = ("Loading weights", "Writing model shards")
_lock = threading.Lock()
_open_hooks: list[Any] = []
"""One entry per active `quiet_loading`; the first is the user's own hook."""


def dtype_of(precision: str, name: str = "", device: str | torch.device | None = None) -> torch.dtype:
    """Return the dtype of a precision; with a device, "auto" is float32 on the CPU and bfloat16 elsewhere.

    `name` precedes the message for an unknown precision.
    """
    if precision == "auto" and device is not None:
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    if precision not in PRECISIONS:
        raise ValueError(f"{name}precision is {precision!r}; allowed are {', '.join(PRECISIONS)}.")
    return PRECISIONS[precision]


def precision_on(device: str | torch.device, precision: str = "auto") -> str:
    """Return the precision of frozen weights; "auto" is "bf16" on a GPU that multiplies it, else "fp32"."""
    if precision != "auto":
        return precision
    place = torch.device(device)
    return "bf16" if place.type == "cuda" and multiplies_bfloat16(place) else "fp32"


def read_tensors(file: str | Path, key: str | None = None, *, optional: bool = False) -> dict[str, Tensor]:
    """Read the state dict of a .safetensors file, or of one of `torch.save` with weights_only=True, on the CPU.

    `key` names it inside the file, e.g. "state_dict"; a file without that key is accepted if it is optional.
    """
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"There is no weight file {file}; give the path of the downloaded file.")
    try:
        content = _read(file)
    except LOADING_ERRORS as error:
        raise RewardError(
            f"{file} cannot be read as weights ({type(error).__name__}: {first_sentence(error)}). Download it again "
            "or store its state dict as .safetensors."
        ) from error
    if isinstance(content, Mapping) and key in content:
        content = content[key]
    elif key is not None and not optional:
        raise RewardError(f"{file} has no {key!r} at its top level; give the file as it was published.")
    if not isinstance(content, Mapping) or not content:
        raise RewardError(f"{file} contains a {type(content).__name__}; it must contain a state dict.")
    if entries := [str(name) for name, value in content.items() if not isinstance(value, Tensor)]:
        raise RewardError(
            f"{file} contains entries that are no tensors ({listed(sorted(entries))}); give weights alone."
        )
    return dict(content)


class _Inert:
    """Placeholder for an object of a pickled class: its attributes, none of its code."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


def read_module(file: str | Path) -> dict[str, Tensor]:
    """Read the state dict of a file with a pickled module, or with a state dict.

    No class of the file is imported and none of its code runs: placeholders stand in for pickled classes, and
    parameters and buffers are collected from them.
    """
    file = Path(file)
    if not file.is_file() or file.suffix == ".safetensors":
        return read_tensors(file)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        placeholders: list[Any] = [(type("Inert", (_Inert,), {}), name) for name in names]
        with torch.serialization.safe_globals(placeholders):
            content = _read(file)
    except LOADING_ERRORS as error:
        raise RewardError(
            f"{file} cannot be read without its code ({type(error).__name__}: {first_sentence(error)}). Load it where "
            "that is installed, and store module.state_dict() as .safetensors."
        ) from error

    def collect(module: _Inert, prefix: str) -> dict[str, Tensor]:
        tensors = {**getattr(module, "_parameters", {}), **getattr(module, "_buffers", {})}
        state = {prefix + key: value.detach() for key, value in tensors.items() if isinstance(value, Tensor)}
        for key, child in getattr(module, "_modules", {}).items():
            state |= collect(child, f"{prefix}{key}.")
        return state

    return collect(content, "") if isinstance(content, _Inert) else read_tensors(file)


def read_folder(folder: str | Path) -> dict[str, Tensor]:
    """Read the state dict of a transformers folder, from one file or shards; safetensors take precedence."""
    names = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")
    file = next((file for name in names if (file := Path(folder, name)).is_file()), None)
    if file is None:
        raise FileNotFoundError(f"The folder {folder} contains no weights; it needs one of {', '.join(names)}.")
    if file.suffix != ".json":
        return read_tensors(file)
    shards = read_object(file).get("weight_map", {}).values()
    return {key: tensor for shard in sorted(set(shards)) for key, tensor in read_tensors(file.parent / shard).items()}


def load_strict(module: torch.nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Load a state dict with exactly the module's keys and shapes; the error names all differences."""
    check_fit(module.state_dict(), state, where)
    module.load_state_dict(dict(state))


def check_fit(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], where: str) -> None:
    """Raise RewardError that names each missing, unexpected or ill-shaped tensor."""
    shapes = [(key, value.shape, expected[key].shape) for key, value in state.items() if key in expected]
    differences = {
        "missing": [key for key in expected if key not in state],
        "unexpected": [key for key in state if key not in expected],
        "of another shape": [f"{key} {tuple(a)} instead of {tuple(b)}" for key, a, b in shapes if a != b],
    }
    if any(differences.values()):
        problems = "; ".join(f"{problem}: {listed(sorted(keys))}" for problem, keys in differences.items() if keys)
        raise RewardError(
            f"The weights of {where} do not fit the model, {problems}. Give the checkpoint and config of this reward."
        )


def drop_suffixes(state: Mapping[str, Tensor], suffixes: Sequence[str]) -> dict[str, Tensor]:
    """Drop the keys with these suffixes, which contain nothing learned."""
    return {key: value for key, value in state.items() if not key.endswith(tuple(suffixes))}


def _read(file: Path) -> Any:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, map_location="cpu", weights_only=True)


def first_sentence(error: Exception) -> str:
    """Return the first sentence of an error message."""
    lines = str(error).splitlines() or ["no message"]
    return lines[0].split(". ")[0][:200]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide transformers' progress bars for weight files inside the block, in all threads.

    A hook that the user had set still receives all other bars and is restored at the end.
    """
    from transformers.utils import logging

    replace = getattr(logging, "set_tqdm_hook", None)
    if replace is None:  # an older transformers
        yield
        return
    with _lock:
        if not _open_hooks:
            previous = replace(None)

            def make_bar(factory: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
                kwargs = {**kwargs, "disable": True} if kwargs.get("desc") in _BARS else kwargs
                return factory(*args, **kwargs) if previous is None else previous(factory, args, kwargs)

            replace(make_bar)
            _open_hooks.append(previous)
        else:
            _open_hooks.append(None)
    try:
        yield
    finally:
        with _lock:
            outermost = _open_hooks[0]
            _open_hooks.pop()
            if not _open_hooks:
                replace(outermost)
