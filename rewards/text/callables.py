# SPDX-License-Identifier: Apache-2.0
"""A user's own function as a reward for text, in the call signatures that TRL users write.

The parameters' names decide what a function is given:

- `completions` or `prompts` (or `**kwargs`): TRL's form, called once with the lists of B; any other name is a column
  of the metadata, a list with None where a record lacks the key;
- `completion`: called once per sample; any other name is `prompt` or the sample's entry of that column;
- one parameter of any other name: it is the completion of one sample.

It returns one number per completion (a batch: a list, array or tensor of B); None for one that it is not for, and NaN
for one that it could not judge. TRL's async functions, `trainer_state`, `log_extra` and `log_metric` are not offered.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from visalign.errors import Naming
from visalign.interfaces import Metadata, Prompt, Scores, copy_records
from visalign.rewards.base.callables import pick_arguments, read_number, read_numbers, read_signature, unjudged
from visalign.rewards.base.contract import check_choices

from .contract import TextRequest, TextVerdict, read_text_request, text_scores

_FORMS = "fn(prompts, completions, **columns) with lists, or fn(completion) with one text"
_WRAPPED = "lambda prompts, completions, **columns: asyncio.run(...)"
_LISTS = ("prompts", "completions")


class TextFunctionReward:
    """Text reward that calls a plain function.

    Args:
        range: smallest and largest possible number; one outside is an error of the function.
        completions_as: "text", or "messages": [{"role": "assistant", "content": text}], as TRL has conversations.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        unit: str = "user units",
        range: tuple[float, float] = (-math.inf, math.inf),
        higher_is_better: bool = True,
        completions_as: str = "text",
    ) -> None:
        check_choices(name or "function", completions_as=(completions_as, ("text", "messages")))
        self._as_messages = completions_as == "messages"
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.unit, self.higher_is_better = unit, higher_is_better
        self.range = (float(range[0]), float(range[1]))
        self._function = function
        self._parameters = read_signature(self.name, function, forms=_FORMS, wrapped=_WRAPPED)
        names, kinds = list(self._parameters), [parameter.kind for parameter in self._parameters.values()]
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._takes_text = len(kinds) == 1 and kinds[0] in positional
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds and "completion" not in names
        self._takes_lists = not set(_LISTS).isdisjoint(names) or takes_any
        if not (self._takes_lists or self._takes_text or "completion" in names):
            raise ValueError(
                f"Reward {self.name!r} has ({', '.join(names)}); which is the completion? Allowed: {_FORMS}."
            )

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Call the function; rows for which it returns None or NaN are invalid."""
        request = read_text_request(self.name, completions, prompts, metadata)
        numbers = self._call(request) if len(request) else []
        reasons = [unjudged(self.name, number, self.range) for number in numbers]
        verdicts = [TextVerdict(value=n or 0.0, reason=reason) for n, reason in zip(numbers, reasons, strict=True)]
        return text_scores(verdicts, self.unit)

    def _call(self, request: TextRequest) -> list[float | None]:
        """Call the function, once with the lists or once per completion."""
        keys = dict.fromkeys(key for record in request.metadata if record for key in record)
        columns: dict[str, Any] = {key: request.column(key) for key in keys}
        names = _LISTS if self._takes_lists else ("prompt", "completion")
        completions: list[Any] = request.completions
        if self._as_messages:
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        columns |= zip(names, (request.prompts, completions), strict=True)

        def call(index: int | slice) -> Any:
            if self._takes_text:
                return self._function(completions[index])
            offered = {key: column[index] for key, column in columns.items()}
            return self._function(**copy_records(pick_arguments(self.name, self._parameters, offered, names)))

        def call_rows(start: int, stop: int) -> Any:
            return call(slice(start, stop)) if self._takes_lists else [call(row) for row in range(start, stop)]

        with Naming(self.name, call_rows, len(request)):
            answer = call_rows(0, len(request))
        if self._takes_lists:
            return read_numbers(self.name, answer, len(request), "completion")
        return [read_number(self.name, number, f"for completion {row}") for row, number in enumerate(answer)]
