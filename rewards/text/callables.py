# SPDX-License-Identifier: Apache-2.0
"""A user's own function as a reward for text, in the call signatures that TRL users write.

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

from visalign.errors import CaughtError, describe_error
from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.callables import (
    Parameters,
    pick_arguments,
    read_number,
    read_numbers,
    read_signature,
    unjudged,
)
from visalign.rewards.base.contract import RewardError, check_choices

from .contract import Prompt, TextRequest, TextVerdict, read_text_request, text_scores

_FORMS = "fn(prompts, completions, **columns) with lists, or fn(completion) with one text"
_WRAPPED = "lambda prompts, completions, **columns: asyncio.run(...)"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class TextFunctionReward:
    """Text reward that calls a plain function."""

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
        """Read the signature and decide how the function is called.

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
        """
        self.name = name or getattr(function, "__name__", type(function).__name__)
        check_choices(
            self.name,
            completions_as=(completions_as, ("text", "messages")),
            on_error=(on_error, ("raise", "mask")),
        )
        self.unit, self.higher_is_better = unit, higher_is_better
        self.range = (float(range[0]), float(range[1]))
        self._as_messages = completions_as == "messages"
        self._mask = on_error == "mask"
        self._function = function
        self._parameters = read_signature(self.name, function, forms=_FORMS, wrapped=_WRAPPED)
        self._batched = _takes_lists(self.name, self._parameters)

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """Call the function; rows for which it returns None or NaN are invalid. Exceptions (unless masked),
        and an answer of another form or outside the range, raise a `RewardError` with the reward's name.
        """
        request = read_text_request(self.name, completions, prompts, metadata)
        if not len(request):
            return text_scores([], self.unit)
        answers = self._call_once(request) if self._batched else self._call_each(request)
        return text_scores([self._verdict(answer) for answer in answers], self.unit)

    def _call_once(self, request: TextRequest) -> list[float | str]:
        """Numbers (or reasons why there is none) of all samples from one call with lists."""
        size = len(request)
        columns = {key: request.column(key) for key in _keys(request)}
        completions = [self._convert(completion) for completion in request.completions]
        offered = columns | {"prompts": list(request.prompts), "completions": completions}
        arguments = pick_arguments(self.name, self._parameters, offered, ("prompts", "completions"))
        with CaughtError() as attempt:
            answer = self._function(**arguments)
        if attempt.error is not None:
            return [self._failed(attempt.error)] * size
        return [*read_numbers(self.name, answer, size, noun="completion", position="for completion")]

    def _call_each(self, request: TextRequest) -> list[float | str]:
        """Numbers (or reasons why there is none) from one call per sample."""
        keys = _keys(request)
        answers: list[float | str] = []
        only = next(iter(self._parameters)) if len(self._parameters) == 1 else None
        for row, completion in enumerate(request.completions):
            record = request.metadata[row] or {}
            offered = {key: record.get(key) for key in keys}
            offered |= {"prompt": request.prompts[row], "completion": self._convert(completion)}
            with CaughtError() as attempt:
                if only is not None and self._parameters[only].kind in _POSITIONAL:
                    answer = self._function(offered["completion"])
                else:
                    names = ("prompt", "completion")
                    answer = self._function(**pick_arguments(self.name, self._parameters, offered, names))
            if isinstance(attempt.error, RewardError):
                raise attempt.error
            if attempt.error is not None:
                answers.append(self._failed(attempt.error))
            else:
                answers.append(read_number(self.name, answer, f"for completion {row}"))
        return answers

    def _convert(self, completion: str) -> Any:
        return [{"role": "assistant", "content": completion}] if self._as_messages else completion

    def _failed(self, error: BaseException) -> str:
        """Reason for a masked call; else raise an error that names the reward."""
        if self._mask:
            return f"{self.name} raised {describe_error(error)}"
        raise RewardError(
            f"Reward {self.name!r} raised {describe_error(error)}. For a completion that cannot be judged "
            "return None, or set on_error='mask'."
        ) from error

    def _verdict(self, answer: float | str) -> TextVerdict:
        if isinstance(answer, str):
            return TextVerdict(reason=answer)
        reason = unjudged(self.name, answer, self.range)
        return TextVerdict(value=answer) if reason is None else TextVerdict(reason=reason)


def _keys(request: TextRequest) -> list[str]:
    return list(dict.fromkeys(key for record in request.metadata if record for key in record))


def _takes_lists(name: str, parameters: Parameters) -> bool:
    """True for a function that is called once for all samples; refuse signatures that fit no form."""
    if {"completions", "prompts"} & set(parameters):
        return True
    kinds = [parameter.kind for parameter in parameters.values()]
    if "completion" in parameters or (len(kinds) == 1 and kinds[0] in _POSITIONAL):
        return False
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return True
    raise ValueError(
        f"Reward {name!r} has the parameters ({', '.join(parameters)}) and it cannot be told which is the "
        f"completion. Allowed: {_FORMS}; rename them."
    )
