# SPDX-License-Identifier: Apache-2.0
"""`Stage`: a function of an objective's stage, with its inputs by name and its options with their ranges."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from visalign.errors import suggestion

_INTERVALS = {
    "[0, 1]": "between_ddof canon.mu ddof gae.gamma gae.lam max_fraction p quantile rate ratio "
    "reinforce_pp.gamma",
    "(0, 1]": "best.share eps_low fraction level_up w_min",
    "(0, 1)": "level_down",
    "[0, inf)": "a alpha beta bound_low eps gamma k k_bonus k_neg k_pos lam lambda_neg lambda_pos low "
    "min_range mu smoothing tail_weight zeta",
    "[0, inf]": "bound_high high limit_high limit_low",
    "(0, inf)": "bound crd.beta dpo.beta f_norm gdro.beta kappa nft.beta par.k tau "
    "tau_neg tau_pos temperature w_max",
    "(0, inf]": "cap eps_high eta gmpo.eps_low",
    "(1, inf]": "delta dual_clip",
    "[1, inf)": "block bundle over references stride window",
    "[2, inf)": "pass_at_k.k",
    "(-inf, 0]": "worst",
    "[-inf, inf]": "cov_high cov_low",
}
RANGES = {option: interval for interval, options in _INTERVALS.items() for option in options.split()}
"""Option, or choice.option -> interval of its numbers; every finite number where it has none."""

PAIRS = (
    *(("low", "high"), ("low_end", "high_end"), ("bound_low", "bound_high"), ("cov_low", "cov_high")),
    *(("level_down", "level_up"), ("w_min", "w_max")),
)
"""Options of which the first must not exceed the second."""


class Stage:
    """A choice of a stage: a function that takes fields of a step by the names of its parameters.

    A keyword-only parameter is an option unless it is a tensor; every other parameter is an input.

    Args:
        function: takes inputs and options.
        inputs: parameter -> what fills it where its name is not that of a field: another field, a `Stage`
            that computes it, or None to leave the default.
    """

    def __init__(self, function: Callable[..., Any], /, **inputs: str | Stage | None) -> None:
        self.function = function
        self.inputs: dict[str, str | Stage] = {}
        self._own: dict[str, inspect.Parameter] = {}
        needs: list[str] = []
        for name, parameter in inspect.signature(function).parameters.items():
            source = inputs.get(name, name)
            if parameter.kind is parameter.KEYWORD_ONLY and "Tensor" not in str(parameter.annotation):
                self._own[name] = parameter
            elif source is not None:
                self.inputs[name] = source
                if isinstance(source, Stage):
                    needs += source.needs
                elif parameter.default is parameter.empty and "None" not in str(parameter.annotation):
                    needs.append(source)
        self.needs = tuple(dict.fromkeys(needs))
        """Fields without which the function cannot be called."""

    def __call__(self, step: Any, options: Mapping[str, Any]) -> Any:
        """Call the function on the fields (attributes) of a step."""
        values: dict[str, Any] = {}
        for name, source in self.inputs.items():
            if isinstance(source, Stage):
                values[name] = source(step, {k: v for k, v in options.items() if k in source.options})
            elif (value := getattr(step, source, _ABSENT)) is not _ABSENT:
                values[name] = value
        return self.function(**values, **{k: v for k, v in options.items() if k in self._own})

    @cached_property
    def options(self) -> dict[str, Any]:
        """Option -> default, those of computed inputs included; `inspect.Parameter.empty` without one."""
        computed = [stage.options for stage in self.inputs.values() if isinstance(stage, Stage)]
        defaults = {name: parameter.default for name, parameter in self._own.items()}
        return {name: default for options in (*computed, defaults) for name, default in options.items()}

    @cached_property
    def types(self) -> dict[str, tuple[Any, ...]]:
        """Option -> the alternatives of its annotated type."""
        computed = [stage.types for stage in self.inputs.values() if isinstance(stage, Stage)]
        hints = get_type_hints(self.function)
        alternatives = {name: _alternatives(hints[name]) for name in self._own}
        return {name: hint for types in (*computed, alternatives) for name, hint in types.items()}

    def check(self, label: str, name: str, options: Mapping[str, Any]) -> None:
        """Refuse options that do not exist, are missing, or are outside their type and range.

        Args:
            label: the stage, for messages.
            name: the choice.
            options: to be checked.

        Raises:
            ValueError: with the allowed options or values.
        """
        for option, value in options.items():
            if option not in self.options:
                raise ValueError(
                    f"{label} {name!r} has no option {option!r}. {suggestion(option, self.options)}Its "
                    f"options: {', '.join(sorted(self.options)) or 'none'}."
                )
            interval = RANGES.get(f"{name}.{option}", RANGES.get(option, "(-inf, inf)"))
            if problem := _problem(value, self.types[option], interval):
                raise ValueError(f"{option} must be {problem}; got {value!r} ({label} {name!r}).")
        values = {**self.options, **options}
        for bound in ("low", "high"):  # a bound without an end stays where it starts
            if values.get(f"{bound}_end", 0) is None:
                values[f"{bound}_end"] = values[bound]
        for low, high in PAIRS:
            if (
                all(isinstance(values.get(k), int | float) for k in (low, high))
                and values[low] > values[high]
            ):
                raise ValueError(
                    f"{low} must be ≤ {high}; got {values[low]} and {values[high]} ({label} {name!r})."
                )
        required = [k for k, default in self.options.items() if default is inspect.Parameter.empty]
        if missing := [option for option in required if option not in options]:
            raise ValueError(
                f"{label} {name!r} needs the options {', '.join(required)}; missing: {', '.join(missing)}."
            )


_ABSENT = object()


def pick(label: str, name: str, table: Mapping[str, Stage], options: Mapping[str, Any]) -> Stage:
    """Look up a choice and check its options; see `Stage.check`.

    Raises:
        ValueError: an unknown choice, with the nearest name and all that are allowed, or a refused option.
    """
    if name not in table:
        raise ValueError(
            f"there is no {label} {name!r}. {suggestion(name, table)}Choose one of: {', '.join(table)}."
        )
    table[name].check(label, name, options)
    return table[name]


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return (hint,) if get_origin(hint) is Literal or not get_args(hint) else get_args(hint)


def _problem(value: Any, types: tuple[Any, ...], interval: str) -> str:
    """Describe the allowed values if `value` is none of them, else an empty string."""
    names = [name for kind in types if get_origin(kind) is Literal for name in get_args(kind)]
    integer_only = int in types and float not in types
    allowed = [f"one of {', '.join(map(str, names))}"] if names else []
    allowed += ["True or False"] if bool in types else []
    allowed += (
        [f"a {'whole ' if integer_only else ''}number in {interval}"] if {int, float} & {*types} else []
    )
    allowed += ["a name"] if str in types else []
    allowed += ["None"] if NoneType in types else []
    number = value if isinstance(value, int if integer_only else int | float) else math.nan
    fits = (
        (isinstance(value, str) and (value in names or str in types))
        or (value is None and NoneType in types)
        or (isinstance(value, bool) and bool in types)
        or (not isinstance(value, bool) and bool({int, float} & {*types}) and _inside(number, interval))
    )
    return "" if fits else " or ".join(allowed)


def _inside(value: float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below and not math.isnan(value)
