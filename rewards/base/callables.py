# SPDX-License-Identifier: Apache-2.0
"""A user's own function as a reward, in the call signatures that flow_grpo and TRL users write.

The parameters' names decide what a function is given:

- `images` or `completions`, `prompts`, `metadata`: B images, prompts, and records (None where missing);
- any other name, and all that fits into `**kwargs`: a column of the metadata, as TRL passes its dataset's: a list with
  an entry per image, None where a record lacks the key;
- three unknown names: (images, prompts, metadata) in flow_grpo's order;
- flow_grpo's factories (no parameter, or only `device`) are called once and return the function.

It may return a list, array or tensor of B numbers: None for an image that it is not for, NaN for one that it could not
judge; flow_grpo's pair (scores, info); or its mapping name -> B numbers, of which "avg" (or the only entry) is the
value and the others become parts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visalign.errors import Naming
from visalign.interfaces import NOT_FOR_SAMPLE, Metadata, Scores, copy_records

from .contract import Request, RewardError, check_choices, make_scores, read_request, scatter
from .images import to_pil, to_uint8

Parameters = Mapping[str, inspect.Parameter]


def read_signature(name: str, function: Callable[..., Any], *, forms: str, wrapped: str) -> Parameters:
    """Read the parameters of a user's function; messages name the calls allowed, and how a coroutine is wrapped."""
    if not callable(function):
        raise TypeError(f"Reward {name!r} is a {type(function).__name__}, not a function. Allowed: {forms}.")
    if any(map(inspect.iscoroutinefunction, (function, function.__call__))):  # an object's call may be one
        raise TypeError(f"Reward {name!r} is a coroutine function; wrap it: {wrapped}.")
    try:
        return inspect.signature(function).parameters
    except ValueError as error:
        raise TypeError(f"Reward {name!r} has no readable signature; wrap it into a function: {forms}.") from error


def pick_arguments(
    name: str, parameters: Parameters, offered: dict[str, Any], arguments: Sequence[str]
) -> dict[str, Any]:
    """Select the offered values that the signature asks for, all with `**kwargs`; `arguments` are not metadata."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return offered
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if missing := [key for key in needed if key not in offered]:
        keys = [key for key in offered if key not in arguments]
        raise RewardError(
            f"Reward {name!r} asks for {', '.join(missing)}; offered are {', '.join(arguments)} and the metadata's "
            f"keys ({', '.join(keys) or 'none'}). Rename it, or give it a default."
        )
    return {key: offered[key] for key in parameters if key in offered}


def read_numbers(name: str, answer: Any, size: int, noun: str) -> list[float | None]:
    """Read what a function returned for a batch as `size` numbers or None; `noun` names a sample."""
    form = f"a {type(answer).__name__}"
    if isinstance(answer, Tensor | np.ndarray):
        form, answer = f"the shape {list(answer.shape)}", answer.tolist() if answer.ndim == 1 else None
    is_list = isinstance(answer, Sequence) and not isinstance(answer, str)
    if not is_list or len(answer) != size:
        raise RewardError(
            f"Reward {name!r} returned {f'{len(answer)} scores' if is_list else form} for {size} {noun}s; return a "
            f"list of one number per {noun}, None where it is not for it, NaN where it could not judge."
        )
    return [read_number(name, item, f"for {noun} {index}") for index, item in enumerate(answer)]


def read_number(name: str, item: Any, position: str) -> float | None:
    if isinstance(item, Tensor | np.ndarray | np.generic) and item.ndim == 0:
        item = item.item()
    if item is not None and not isinstance(item, int | float):
        raise RewardError(
            f"Reward {name!r} returned {item!r} ({type(item).__name__}) {position}; give a number, or None."
        )
    try:
        return None if item is None else float(item)
    except OverflowError:  # a whole number beyond 1e308
        return math.inf


def unjudged(name: str, number: float | None, range: tuple[float, float]) -> str | None:
    """Return why a number is no score, None for a score; one outside the range is the function's error."""
    if number is None:
        return f"{name} returned None: {NOT_FOR_SAMPLE}"
    if not abs(number) <= torch.finfo(torch.float32).max:  # scores are float32
        return f"{name} returned {'NaN' if math.isnan(number) else number} for it"
    if not range[0] <= number <= range[1]:
        raise RewardError(f"Reward {name!r} returned {number:g}, outside its declared range {range}; mend either.")
    return None


_IMAGE_NAMES = ("images", "completions")
_KNOWN = (*_IMAGE_NAMES, "prompts", "metadata")
_CALL_FORMS = "fn(images, prompts, metadata), fn(prompts, completions, **kwargs), or those names in any order"
_WRAPPED = "lambda images, ...: asyncio.run(...)"


class FunctionReward:
    """Reward that calls a plain function.

    Args:
        function: the user's function, or a flow_grpo factory of one, which may ask for `device`.
        range: smallest and largest possible number; one outside is an error of the function.
        images_as: "tensor" ([B, 3, H, W] float32 in [0, 1]; a list of [3, H, W] when sizes differ), "pil"
            (list of RGB images) or "uint8" (list of [H, W, 3] arrays).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        unit: str = "user units",
        range: tuple[float, float] = (-math.inf, math.inf),
        higher_is_better: bool = True,
        images_as: str = "tensor",
        device: str = "cpu",
    ) -> None:
        self.name = name or getattr(function, "__name__", type(function).__name__)
        check_choices(self.name, images_as=(images_as, ("tensor", "pil", "uint8")))
        self.unit, self.range, self.higher_is_better, self._images_as = unit, range, higher_is_better, images_as
        parameters = read_signature(self.name, function, forms=_CALL_FORMS, wrapped=_WRAPPED)
        if not set(parameters) - {"device"}:  # a factory
            with Naming(self.name):
                function = function(**({"device": device} if parameters else {}))
            parameters = read_signature(self.name, function, forms=_CALL_FORMS, wrapped=_WRAPPED)
        self._function, self._parameters = function, parameters
        self._positional = _is_positional(self.name, parameters)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Call the function on the readable images; rows that it answers with None or NaN are invalid."""
        request = read_request(self.name, images, prompts, metadata)
        rows = request.rows
        reasons = list(request.images.reasons)
        answer = self._call(request, rows) if rows else []
        if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Mapping):
            answer = answer[0]  # flow_grpo's (scores, info)
        columns: Mapping[str, Any] = answer if isinstance(answer, Mapping) else {"avg": answer}
        main = "avg" if "avg" in columns else next(iter(columns), "")
        if main != "avg" and len(columns) != 1:
            raise RewardError(
                f'Reward {self.name!r} returned the keys {", ".join(map(str, columns))}; call the reward "avg".'
            )
        parts: dict[str, Tensor] = {}
        for key, column in columns.items():
            numbers = read_numbers(self.name, column, len(rows), "image")
            parts[str(key)] = scatter([math.nan if n is None else n for n in numbers], rows, len(request))
            if key == main:
                for row, number in zip(rows, numbers, strict=True):
                    reasons[row] = unjudged(self.name, number, self.range)
        return make_scores(parts.pop(str(main)), reasons, self.unit, parts=parts)

    def _call(self, request: Request, rows: list[int]) -> Any:
        """Call the function with copies of the readable rows, never with the caller's own data."""
        images = self._convert([image for _, image in request.images.readable()])
        _, prompts, records = request.select(rows, stack=False)
        keys = dict.fromkeys(key for record in records if record for key in record)
        columns: dict[str, Any] = {key: [(record or {}).get(key) for record in records] for key in keys}
        columns |= {"images": images, "completions": images, "prompts": prompts, "metadata": records}

        def call_rows(start: int, stop: int) -> Any:
            offered = {key: column[start:stop] for key, column in columns.items()}
            if self._positional:
                return self._function(*(copy_records(offered[key]) for key in ("images", "prompts", "metadata")))
            return self._function(**copy_records(pick_arguments(self.name, self._parameters, offered, _KNOWN)))

        with Naming(self.name, call_rows, len(rows)):
            return call_rows(0, len(rows))

    def _convert(self, images: list[Tensor]) -> Any:
        if self._images_as != "tensor":
            return list(map(to_pil if self._images_as == "pil" else to_uint8, images))
        same = len({image.shape for image in images}) == 1
        return torch.stack(images) if same else [image.clone() for image in images]


def _is_positional(name: str, signature: Parameters) -> bool:
    """Return True for flow_grpo's order under other names; refuse signatures without an image."""
    parameters = signature.values()
    names = {p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY}
    if any(p.kind is p.VAR_KEYWORD for p in parameters) or names & set(_IMAGE_NAMES):
        return False
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(plain) == len(parameters) == 3 and not names & set(_KNOWN):
        return True
    raise ValueError(
        f"Reward {name!r}: which of {', '.join(p.name for p in parameters)} are the images? Use {_CALL_FORMS}."
    )
