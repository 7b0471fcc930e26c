# SPDX-License-Identifier: Apache-2.0
"""Published weight files read safely and strictly: tensors only, every missing or unexpected key named.

And quietly: without transformers' bars of weights; downloads keep theirs, a user's settings stay.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.rewards.base.contract import RewardError

_SINGLE = ("model.safetensors", "pytorch_model.bin")
_SHARDED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SHOWN = 8
"""How many keys a message names before it only counts them."""
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Of the weights of towers and models; heads and scores are float32 always."""

_BARS = ("Loading weights", "Writing model shards")
_lock = threading.Lock()
_held: list[Any] = []
"""One entry for each `quiet_loading` that is open; the first is the hook that the user had."""


def dtype_of(precision: str, name: str = "", device: str | torch.device | None = None) -> torch.dtype:
    """The dtype of one of `PRECISIONS`; `name` stands before the message of an unknown one. With a device
    also of "auto": float32 on the CPU and bfloat16 elsewhere.
    """
    if precision == "auto" and device is not None:
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    if precision not in PRECISIONS:
        raise ValueError(f"{name}precision is {precision!r}; allowed are {', '.join(PRECISIONS)}.")
    return PRECISIONS[precision]


def read_tensors(file: str | Path, inside: str | None = None, *, optional: bool = False) -> dict[str, Tensor]:
    """The state dict of one weight file on the CPU: .safetensors, or a file of `torch.save` (.bin, .pt,
    .pth), read with weights_only=True. `inside` is the key under which it stands in the file, if it does
    ("state_dict"); `optional`, it may stand there or at the top.
    """
    file = Path(file)
    if not file.is_file():
        raise FileNotFoundError(f"There is no weight file {file}; give the path of the downloaded file.")
    try:
        content = _read(file)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        raise RewardError(
            f"{file} cannot be read as weights ({type(error).__name__}: {first_sentence(error)}). It must be "
            "complete and hold tensors only; download it again, or store its state dict as .safetensors."
        ) from error
    if inside is not None and not (optional and isinstance(content, Mapping) and inside not in content):
        if not isinstance(content, Mapping) or inside not in content:
            found = ", ".join(sorted(map(str, content))[:_SHOWN]) if isinstance(content, Mapping) else ""
            raise RewardError(
                f"{file} has no {inside!r} at its top (found: {found or type(content).__name__}); give the "
                "file as it was published."
            )
        content = content[inside]
    if not isinstance(content, Mapping) or not content:
        raise RewardError(f"{file} holds a {type(content).__name__}, needed is a state dict.")
    wrong = [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
    if wrong:
        raise RewardError(
            f"{file} holds entries that are no tensors ({listed(wrong)}), so it is no state dict; give the "
            "file of the model's weights alone."
        )
    return dict(content)


class _Inert:
    """What stands for an object of a class that a file names: its attributes, none of its code."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


def read_module(file: str | Path) -> dict[str, Tensor]:
    """The state dict of a file that holds a pickled module, or a state dict itself. No class that the file
    names is imported and no function of it is called: an empty class stands for each, of which parameters and
    buffers are collected.
    """
    file = Path(file)
    if not file.is_file() or file.suffix == ".safetensors":
        return read_tensors(file)
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        known: list[Any] = [(type("Inert", (_Inert,), {}), name) for name in named]
        with torch.serialization.safe_globals(known):
            content = _read(file)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise RewardError(
            f"{file} cannot be read as a pickled module without its code ({type(error).__name__}: "
            f"{first_sentence(error)}). Load it where its code is installed, and store module.state_dict() "
            "as .safetensors."
        ) from error
    return _collected(content, "") if isinstance(content, _Inert) else read_tensors(file)


def _collected(module: _Inert, prefix: str) -> dict[str, Tensor]:
    """Parameters and buffers of a module and those inside it."""
    held = {**getattr(module, "_parameters", {}), **getattr(module, "_buffers", {})}
    found = {prefix + key: value.detach() for key, value in held.items() if isinstance(value, Tensor)}
    for key, inside in getattr(module, "_modules", {}).items():
        found |= _collected(inside, f"{prefix}{key}.")
    return found


def read_folder(folder: str | Path) -> dict[str, Tensor]:
    """The state dict of a transformers folder: one file or shards, safetensors before .bin."""
    folder = Path(folder)
    for name in _SINGLE:
        if (folder / name).is_file():
            return read_tensors(folder / name)
    for name in _SHARDED:
        if (folder / name).is_file():
            shards = json.loads((folder / name).read_text(encoding="utf-8"))["weight_map"].values()
            state: dict[str, Tensor] = {}
            for shard in sorted(set(shards)):
                state |= read_tensors(folder / shard)
            return state
    raise FileNotFoundError(
        f"The folder {folder} holds no weights; needed is one of {', '.join(_SINGLE + _SHARDED)}. Download "
        "it again, or give another folder."
    )


def load_strict(module: torch.nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Load a state dict whose keys and shapes must be the module's, all of them and no others; what is
    missing, unexpected or of another shape is named.
    """
    own = module.state_dict()
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    shapes = [
        f"{key} {tuple(value.shape)} instead of {tuple(own[key].shape)}"
        for key, value in state.items()
        if key in own and own[key].shape != value.shape
    ]
    told = [
        f"{what}: {listed(keys)}"
        for what, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
        if keys
    ]
    if told:
        raise RewardError(
            f"The weights of {where} do not fit the model, {'; '.join(told)}. Give the checkpoint that "
            "belongs to this judge; nothing is loaded in part."
        )
    module.load_state_dict(dict(state))


def drop_known(state: Mapping[str, Tensor], suffixes: Sequence[str]) -> dict[str, Tensor]:
    """A state dict without the keys of these endings, which hold nothing that was learned."""
    return {key: value for key, value in state.items() if not key.endswith(tuple(suffixes))}


def _read(file: Path) -> Any:
    if file.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(file)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    return torch.load(file, map_location="cpu", weights_only=True)


def first_sentence(error: Exception) -> str:
    """The first sentence of a library's message."""
    lines = str(error).splitlines() or ["no message"]
    return lines[0].split(". ")[0][:200]


def listed(keys: Sequence[str]) -> str:
    """The first names of a message's list, and how many more there are; "nothing" for none."""
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return (", ".join(sorted(keys)[:_SHOWN]) or "nothing") + more


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Show no bar while transformers reads or writes weight files.

    The hook on transformers' bars that was there before is asked for all other bars, and is put back when the
    last of several loads, in whatever threads, is through.
    """
    from transformers.utils import logging

    replace = getattr(logging, "set_tqdm_hook", None)
    if replace is None:  # transformers before it had the hook
        yield
        return
    with _lock:
        if not _held:
            before = replace(None)
            _held.append(before)
            replace(lambda factory, args, kwargs: _bar(before, factory, args, kwargs))
        else:
            _held.append(None)
    try:
        yield
    finally:
        with _lock:
            before = _held[0]
            _held.pop()
            if not _held:
                replace(before)


def _bar(
    before: Callable[..., Any] | None, factory: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """What stands for a bar."""
    if kwargs.get("desc") in _BARS:
        kwargs = {**kwargs, "disable": True}
    return factory(*args, **kwargs) if before is None else before(factory, args, kwargs)
