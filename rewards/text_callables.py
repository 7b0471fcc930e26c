# SPDX-License-Identifier: Apache-2.0
"""A user's own function as a reward for text, in the shapes of call that TRL's users have written theirs in.

The parameters' names decide what a function is given:

- `completions` or `prompts` (or `**kwargs`): TRL's form, called once with the lists of B; any other name is a
  column of the metadata, a list with None where a record lacks the key;
- `completion`: called once per sample; any other name is `prompt` or the sample's entry of that column;
- one parameter of any other name: it is the completion of one sample.

It returns one number per completion (a batch: a list, array or tensor of B); None or NaN for one that it
could not judge. TRL's async functions and its `trainer_state`, `log_extra` and `log_metric` are not offered.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from visalign.interfaces import Metadata, Scores

from .contract import RewardError
from .probes import Attempt
from .text_contract import Prompt, TextRequest, Verdict, read_text_request, text_scores

_FORMS = "fn(prompts, completions, **columns) with lists, or fn(completion) with one text"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class TextFunctionReward:
    """A plain function with the contract of a text reward around it."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        unit: str = "user units",
        range: tuple[float, float] = (-math.inf, math.inf),
        higher_is_better: bool = True,
        completions_as: str = "text",
        on_error: str = "raise",
    ) -> None:
        """Look at the signature and decide how the function is called.

        Args:
            function: the user's function.
            name: for messages and logs; the function's own name when None.
            unit: unit of the numbers.
            range: smallest and largest possible number; one outside is an error of the function.
            higher_is_better: the direction.
            completions_as: "text", or "messages": each completion as TRL passes it for conversations, a
                list with one message of the role "assistant".
            on_error: when the function raises, "raise" stops with its name; "mask" makes the samples of
                that call invalid (one sample, or the batch of a function that takes lists).

        Raises:
            TypeError: not a function, a coroutine function, or without a readable signature.
            ValueError: an unknown option, or parameters that cannot be matched.
        """
        if completions_as not in ("text", "messages"):
            raise ValueError(f"completions_as is {completions_as!r}; allowed are 'text' and 'messages'.")
        if on_error not in ("raise", "mask"):
            raise ValueError(f"on_error is {on_error!r}; allowed are 'raise' and 'mask'.")
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.unit = unit
        self.range = (float(range[0]), float(range[1]))
        self.higher_is_better = higher_is_better
        self._as_messages = completions_as == "messages"
        self._mask = on_error == "mask"
        self._function = function
        self._parameters = _parameters(self.name, function)
        self._batched = _takes_lists(self.name, self._parameters)

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """Call the function; rows that it answers with None or NaN are invalid.

        Raises:
            RewardError: the function raised (unless masked), returned the wrong number of answers, something
                that is no number, or one outside its range.
        """
        request = read_text_request(self.name, completions, prompts, metadata)
        if not len(request):
            return text_scores([], self.unit)
        answers = self._all(request) if self._batched else self._each(request)
        return text_scores([self._verdict(answer) for answer in answers], self.unit)

    def _all(self, request: TextRequest) -> list[float | str]:
        """One number per sample from one call with lists, or the reason why there is none."""
        size = len(request)
        columns = {key: request.column(key) for key in _keys(request)}
        given = [self._shown(completion) for completion in request.completions]
        arguments = self._arguments(
            columns | {"prompts": list(request.prompts), "completions": given}, "prompts, completions"
        )
        with Attempt() as attempt:
            answer = self._function(**arguments)
        if attempt.error is not None:
            return [self._failed(attempt.error)] * size
        return _numbers(self.name, answer, size)

    def _each(self, request: TextRequest) -> list[float | str]:
        """One number per sample from a call each."""
        keys = _keys(request)
        answers: list[float | str] = []
        only = next(iter(self._parameters)) if len(self._parameters) == 1 else None
        for row, completion in enumerate(request.completions):
            record = request.metadata[row] or {}
            offered = {key: record.get(key) for key in keys}
            offered |= {"prompt": request.prompts[row], "completion": self._shown(completion)}
            with Attempt() as attempt:
                if only is not None and self._parameters[only].kind in _POSITIONAL:
                    answer = self._function(offered["completion"])
                else:
                    answer = self._function(**self._arguments(offered, "prompt, completion"))
            if isinstance(attempt.error, RewardError):
                raise attempt.error
            if attempt.error is not None:
                answers.append(self._failed(attempt.error))
            else:
                answers.append(_number(self.name, answer, row))
        return answers

    def _shown(self, completion: str) -> Any:
        return [{"role": "assistant", "content": completion}] if self._as_messages else completion

    def _arguments(self, offered: dict[str, Any], known: str) -> dict[str, Any]:
        """What the signature asks for out of what there is."""
        if any(one.kind is one.VAR_KEYWORD for one in self._parameters.values()):
            return offered
        missing = [
            key
            for key, one in self._parameters.items()
            if key not in offered and one.default is one.empty and one.kind is not one.VAR_POSITIONAL
        ]
        if missing:
            keys = [key for key in offered if key not in known.split(", ")]
            raise RewardError(
                f"Reward {self.name!r} asks for {', '.join(missing)}, which is neither one of {known} nor a "
                f"key of the metadata (keys: {', '.join(keys) or 'none'}). Rename the parameter, give it a "
                "default, or put the key into the prompts' metadata."
            )
        return {key: offered[key] for key in self._parameters if key in offered}

    def _failed(self, error: Exception) -> str:
        """The reason of a masked call, or the error that names the reward."""
        if self._mask:
            return f"{self.name} raised {type(error).__name__}: {error}"
        raise RewardError(
            f"Reward {self.name!r} raised {type(error).__name__}: {error}. See the cause above for the line; "
            "for a completion that cannot be judged return None, or set on_error='mask'."
        ) from error

    def _verdict(self, answer: float | str) -> Verdict:
        if isinstance(answer, str):
            return Verdict(reason=answer)
        if not math.isfinite(answer):
            return Verdict(
                reason=f"{self.name} returned {'None or NaN' if math.isnan(answer) else answer} for it"
            )
        if not self.range[0] <= answer <= self.range[1]:
            raise RewardError(
                f"Reward {self.name!r} returned {answer:g}, outside its declared range {self.range}; correct "
                "the function or declare the true range."
            )
        return Verdict(value=answer)


def _keys(request: TextRequest) -> list[str]:
    return list(dict.fromkeys(key for record in request.metadata if record for key in record))


def _parameters(name: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    if not callable(function):
        raise TypeError(f"Reward {name!r} is a {type(function).__name__}, not a function. Allowed: {_FORMS}.")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # the method of an object, not whether there is one
    ):
        raise TypeError(
            f"Reward {name!r} is a coroutine function; wrap it: lambda prompts, completions, **columns: "
            "asyncio.run(...)."
        )
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError as error:
        raise TypeError(
            f"Reward {name!r} has no readable signature; wrap it into a Python function: {_FORMS}."
        ) from error


def _takes_lists(name: str, parameters: dict[str, inspect.Parameter]) -> bool:
    """Whether the function is called once for all samples; refuses signatures that fit no form."""
    if {"completions", "prompts"} & set(parameters):
        return True
    kinds = [one.kind for one in parameters.values()]
    if "completion" in parameters or (len(kinds) == 1 and kinds[0] in _POSITIONAL):
        return False
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return True
    raise ValueError(
        f"Reward {name!r} has the parameters ({', '.join(parameters)}) and it cannot be told which is the "
        f"completion. Allowed: {_FORMS}; rename them."
    )


def _numbers(name: str, answer: Any, size: int) -> list[float | str]:
    if isinstance(answer, Tensor | np.ndarray):
        answer = answer.tolist() if answer.ndim == 1 else [answer.tolist()]
    if isinstance(answer, str) or not isinstance(answer, Sequence):
        raise RewardError(
            f"Reward {name!r} returned a {type(answer).__name__}; needed is a list of {size} numbers, one "
            "per completion."
        )
    if len(answer) != size:
        raise RewardError(
            f"Reward {name!r} returned {len(answer)} scores for {size} completions; return one number per "
            "completion, None where it could not judge."
        )
    return [_number(name, item, index) for index, item in enumerate(answer)]


def _number(name: str, item: Any, index: int) -> float:
    if isinstance(item, Tensor | np.ndarray | np.generic) and item.ndim == 0:
        item = item.item()
    if item is not None and not isinstance(item, int | float):
        raise RewardError(
            f"Reward {name!r} returned {item!r} ({type(item).__name__}) for completion {index}; needed is a "
            "number, or None for one that it could not judge."
        )
    return math.nan if item is None else float(item)
