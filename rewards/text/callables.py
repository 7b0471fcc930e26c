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

from visalign.interfaces import Metadata, Prompt, Scores
from visalign.rewards.base.callables import (
    Parameters,
    pick_arguments,
    read_number,
    read_numbers,
    read_signature,
    unjudged,
)
from visalign.rewards.base.failure import Naming

from .contract import TextRequest, TextVerdict, read_text_request, text_scores

_FORMS = "fn(prompts, completions, **columns) with lists, or fn(completion) with one text"
_WRAPPED = "lambda prompts, completions, **columns: asyncio.run(...)"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class TextFunctionReward:
    """Text reward that calls a plain function.

    Args:
        function: the user's function.
        unit: unit of the numbers.
        range: smallest and largest possible number; one outside is an error of the function.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        unit: str = "user units",
        range: tuple[float, float] = (-math.inf, math.inf),
        higher_is_better: bool = True,
    ) -> None:
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.unit, self.higher_is_better = unit, higher_is_better
        self.range = (float(range[0]), float(range[1]))
        self._function = function
        self._parameters = read_signature(self.name, function, forms=_FORMS, wrapped=_WRAPPED)
        self._batched = _takes_lists(self.name, self._parameters)

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Call the function; rows for which it returns None or NaN are invalid."""
        request = read_text_request(self.name, completions, prompts, metadata)
        if not len(request):
            return text_scores([], self.unit)
        keys = list(dict.fromkeys(key for record in request.metadata if record for key in record))
        call = self._call_once if self._batched else self._call_each
        verdicts = []
        for number in call(request, keys):
            reason = unjudged(self.name, number, self.range)
            verdicts.append(TextVerdict(value=number, reason=reason))
        return text_scores(verdicts, self.unit)

    def _call_once(self, request: TextRequest, keys: list[str]) -> list[float]:
        columns = {key: request.column(key) for key in keys}
        offered = columns | {"prompts": list(request.prompts), "completions": list(request.completions)}
        arguments = pick_arguments(self.name, self._parameters, offered, ("prompts", "completions"))
        with Naming(self.name):
            answer = self._function(**arguments)
        return read_numbers(self.name, answer, len(request), noun="completion", position="for completion")

    def _call_each(self, request: TextRequest, keys: list[str]) -> list[float]:
        only = next(iter(self._parameters.values())) if len(self._parameters) == 1 else None
        numbers = []
        for row, completion in enumerate(request.completions):
            record = request.metadata[row] or {}
            offered = {key: record.get(key) for key in keys}
            offered |= {"prompt": request.prompts[row], "completion": completion}
            with Naming(self.name):
                if only is not None and only.kind in _POSITIONAL:
                    answer = self._function(completion)
                else:
                    names = ("prompt", "completion")
                    answer = self._function(**pick_arguments(self.name, self._parameters, offered, names))
            numbers.append(read_number(self.name, answer, f"for completion {row}"))
        return numbers


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
