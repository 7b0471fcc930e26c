# SPDX-License-Identifier: Apache-2.0
"""Results of frozen encoders on disk: prompt embeddings and clean latents that steps, processes and runs share."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import recursively_apply, send_to_device

from visalign.atomic import write_atomic


class TensorCache:
    """Nested tensors in a folder, a file per key, written whole or not at all and read memory-mapped.

    `context` is all that changes a result besides its key, such as the weights of the encoder.
    """

    def __init__(self, folder: Path, context: Mapping[str, Any]) -> None:
        self.folder, self._context = folder, json.dumps(context, sort_keys=True)

    def get(self, key: str) -> Any:
        """Read the result of a key on the CPU; None if there is none, or its file is damaged."""
        try:
            return torch.load(self._file(key), mmap=True, weights_only=True)
        except (FileNotFoundError, RuntimeError, UnpicklingError, EOFError):
            return None

    def put(self, key: str, result: Any) -> None:
        """Store the result of a key."""
        torch.save(recursively_apply(lambda tensor: tensor.cpu().clone(), result), content := io.BytesIO())
        write_atomic(self._file(key), content.getvalue())

    def _file(self, key: str) -> Path:
        digest = hashlib.sha256(f"{self._context}\n{key}".encode(errors="surrogatepass")).hexdigest()
        return self.folder / digest[:2] / f"{digest[2:]}.pt"


class PromptCache(TensorCache):
    """Results of a pipeline's `encode_prompt`.

    With `frees` its text encoders are not loaded once all `prompts` are there. A pipeline that is saved whole keeps
    them.
    """

    def __init__(
        self, folder: Path, context: Mapping[str, Any], prompts: Sequence[str], *, frees: bool = True
    ) -> None:
        super().__init__(folder, context)
        self.prompts, self.frees = list(dict.fromkeys(["", *prompts])), frees
        self._mark = f"all of {json.dumps(sorted(self.prompts))}"

    @property
    def is_whole(self) -> bool:
        """True once `mark_whole` was called for these prompts."""
        return self.get(self._mark) is not None

    def mark_whole(self) -> None:
        """Record that all prompts are there."""
        self.put(self._mark, torch.empty(0))

    def attach(self, pipe: Any) -> None:
        """Have a pipeline's `encode_prompt` answer from the cache, which gets the results that it lacks.

        Of a prompt that is given several times only the first row is kept, and returned.
        """
        pipe.encode_prompt = partial(self._answer, pipe, pipe.encode_prompt)

    def _answer(self, pipe: Any, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = dict(inspect.signature(encode).bind(*args, **kwargs).arguments)
        device = arguments.pop("device", None) or pipe._execution_device
        try:
            key = json.dumps(arguments, sort_keys=True)
        except TypeError:  # embeddings that are encoded already
            return encode(*args, **kwargs)
        if (result := self.get(key)) is None:
            if not text_encoders(pipe.components):
                raise FileNotFoundError(
                    f"data.cache: {self.folder} has lost files, and the text encoders that would make them are "
                    "not loaded. Delete the folder, and start or resume again: it is filled anew."
                )
            several = len(arguments["prompt"]) > 1
            result = recursively_apply(lambda tensor: tensor[: 1 if several else None], encode(*args, **kwargs))
            self.put(key, result)
        return send_to_device(result, device)


def has_prompt_cache(pipe: Any) -> bool:
    """Say whether a `PromptCache` answers for a pipeline's text encoders."""
    encode = vars(pipe).get("encode_prompt")
    return isinstance(encode, partial) and encode.func.__qualname__ == PromptCache._answer.__qualname__


def text_encoders(parts: Mapping[str, Any]) -> list[str]:
    """List the text encoders among the parts of a pipeline or of its index."""
    return [name for name, part in parts.items() if name.startswith("text_encoder") and part not in (None, [None] * 2)]


def drop_encoders(pipe: Any) -> int:
    """Take the text encoders out of a pipeline, and return their bytes."""
    names = text_encoders(pipe.components)
    freed = sum(weight.nbytes for name in names for weight in getattr(pipe, name).parameters())
    for name in names:
        setattr(pipe, name, None)
    return freed
