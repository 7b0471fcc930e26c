# SPDX-License-Identifier: Apache-2.0
"""`Stage`: a function of an objective's stage, with its inputs by name and its options with their ranges."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from visalign.errors import suggestion

Choice = TypeVar("Choice")

_INTERVALS = {
    "[0, 1]": "between_ddof canon.mu ddof few_step.guidance_share gae.gamma gae.lam max_fraction p "
    "prime.gamma quantile rate ratio reinforce_pp.gamma smallest",
    "(0, 1]": "best.share eps_low fraction level_up search.radius w_min",
    "(0, 1)": "few_step.level_high few_step.level_low level_down",
    "[0, 1)": "few_step.slow_decay_end",
    "[0, inf)": "a alpha beta bound_low eps gamma k k_bonus k_neg k_pos lam lambda_neg lambda_pos limit low min_range "
    "mu smoothing tail_weight zeta few_step.anchor few_step.clip few_step.guidance_scale few_step.warmup ascent.kl "
    "ascent.renoised objective.entropy objective.kl objective.kl_in_reward objective.off_policy_delta objective.ptx "
    "objective.value regression.average_kl regression.kl regression.reference_guidance",
    "[0, inf]": "bound_high high limit_high limit_low",
    "(0, inf)": "bound budget crd.beta dgpo.beta dpo.beta epsilon f_norm gdro.beta kappa kto.beta nft.beta par.k tau "
    "tau_neg tau_pos temperature w_max few_step.advantage_clip few_step.beta few_step.huber "
    "few_step.min_snr few_step.shift few_step.std few_step.role_rate few_step.threshold objective.advantage_clamp "
    "objective.value_clip regression.clamp regression.clamp_to regression.soft_clip",
    "(0, inf]": "cap dgpo.eps_low eps_high eta gmpo.eps_low",
    "(1, inf]": "delta dual_clip",
    "[1, inf)": "ascent.last block bundle few_step.critic_updates few_step.teacher_guidance objective.length over "
    "references regression.kl_until regression.levels search.back search.branches search.candidates search.rounds "
    "search.start stride window",
    "[2, inf)": "pass_at_k.k search.forward",
    "(-inf, 0]": "worst",
    "[-inf, inf]": "cov_high cov_low",
}
RANGES = {option: interval for interval, options in _INTERVALS.items() for option in options.split()}
"""Option, or choice.option -> interval of its numbers; every finite number where it has none."""

PAIRS = (
    *(("low", "high"), ("low_end", "high_end"), ("bound_low", "bound_high"), ("cov_low", "cov_high")),
    *(("level_down", "level_up"), ("level_low", "level_high"), ("w_min", "w_max")),
)
"""Options of which the first must not exceed the second."""


_ABSENT = object()


class Stage:
    """A choice of a stage: a function that takes fields of a step by the names of its parameters.

    A keyword-only parameter is an option unless it is a tensor; every other parameter is an input. `inputs`
    says what fills a parameter that has not the name of its field: another field, a `Stage` that computes it,
    or None to leave the default, of options too.
    """

    def __init__(self, function: Callable[..., Any], /, **inputs: str | Stage | None) -> None:
        self.function = function
        self.inputs: dict[str, str | Stage] = {}
        self._defaults: dict[str, Any] = {}
        needs: list[str] = []
        for name, parameter in inspect.signature(function).parameters.items():
            source, annotation = inputs.get(name, name), str(parameter.annotation)
            if source is None:
                continue
            if parameter.kind is parameter.KEYWORD_ONLY and "Tensor" not in annotation:  # a tensor is no setting
                self._defaults[name] = parameter.default
                continue
            self.inputs[name] = source
            if isinstance(source, Stage):
                needs += source.needs
            elif parameter.default is parameter.empty and "None" not in annotation:  # else the step may lack it
                needs.append(source)
        self._computed = [source for source in self.inputs.values() if isinstance(source, Stage)]
        self.needs = tuple(dict.fromkeys(needs))  # Fields without which the function cannot be called
        self.options = {k: v for stage in self._computed for k, v in stage.options.items()} | self._defaults
        """Option -> default, those of computed inputs included; `inspect.Parameter.empty` without one."""

    def __call__(self, step: Any, options: Mapping[str, Any]) -> Any:
        """Call the function on the fields (attributes) of a step."""
        values = {k: v for k, v in options.items() if k in self._defaults}
        for name, source in self.inputs.items():
            if isinstance(source, Stage):
                values[name] = source(step, options)
            elif (value := getattr(step, source, _ABSENT)) is not _ABSENT:
                values[name] = value
        return self.function(**values)

    @cached_property
    def types(self) -> dict[str, tuple[Any, ...]]:
        """Option -> the alternatives of its annotated type."""
        types = {k: v for stage in self._computed for k, v in stage.types.items()}
        for name, hint in get_type_hints(self.function).items():
            if name in self._defaults:
                types[name] = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        return types

    def check(self, label: str, name: str, options: Mapping[str, Any]) -> None:
        """Refuse options of a choice that do not exist, are missing, or are outside their type or range."""
        for option, value in options.items():
            if option not in self.options:
                raise ValueError(
                    f"{label} {name!r} has no option {option!r}. {suggestion(option, self.options)}Its "
                    f"options: {', '.join(sorted(self.options)) or 'none'}."
                )
            interval = RANGES.get(f"{name}.{option}", RANGES.get(option, "(-inf, inf)"))
            kinds = self.types[option]
            if not any(_fits(value, kind, interval) for kind in kinds):
                names = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
                got = f"got {value!r} ({label} {name!r}). {suggestion(str(value), names)}".rstrip()
                raise ValueError(f"{option} must be {_describe(kinds, names, interval)}; {got}")
        values = {**self.options, **options}
        open_ends = [bound for bound in ("low", "high") if values.get(f"{bound}_end", 0) is None]
        values |= {f"{bound}_end": values[bound] for bound in open_ends}  # a bound without an end stays
        required = [option for option, value in values.items() if value is inspect.Parameter.empty]
        for low, high in PAIRS:
            a, b = values.get(low), values.get(high)
            if isinstance(a, int | float) and isinstance(b, int | float) and a > b:
                raise ValueError(f"{low} must be ≤ {high}; got {a} and {b} ({label} {name!r}).")
        if values.get("dual_clip") is not None and values.get("delta") is not None:
            raise ValueError(f"dual_clip and delta both bound r where A < 0; give one ({label} {name!r}).")
        if required:
            raise ValueError(f"{label} {name!r} needs the options {', '.join(required)}.")


def check_row(name: str, row: Any) -> None:
    """Refuse the first field of a dataclass that is outside its type or range; entries of a field are not checked."""
    _stage_of(type(row)).check("the settings of", name, vars(row))


_stage_of = cache(Stage)


def pick(label: str, name: str, table: Mapping[str, Choice]) -> Choice:
    if name not in table:
        raise ValueError(f"there is no {label} {name!r}. {suggestion(name, table)}Choose one of: {', '.join(table)}.")
    return table[name]


def change_row(kind: str, table: Mapping[str, Choice], name: str, changes: Mapping[str, Any]) -> Choice:
    """Change fields of a table's row. A mapping is merged key by key; where the choice that it belongs to changes,
    it replaces the row's, and without one there are no options: the row's mean nothing to another choice.
    """
    row: Any = pick(kind, name, table)
    merged = {**changes}
    for field in fields(row):
        options, choice = field.name, field.name.removesuffix("_options")
        if choice != options and changes.get(choice, getattr(row, choice)) != getattr(row, choice):
            merged.setdefault(options, {})
        elif isinstance(merged.get(options), Mapping):
            merged[options] = {**(getattr(row, options) or {}), **merged[options]}
    names = [field.name for field in fields(row)]
    for key in merged.keys() - names:
        raise ValueError(
            f"{kind} {name!r} has no field {key!r}. {suggestion(key, names)}Its fields: {', '.join(sorted(names))}."
        )
    return replace(row, **merged)


def _fits(value: Any, kind: Any, interval: str) -> bool:
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if kind not in (int, float):
        return isinstance(value, get_origin(kind) or kind)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)  # NaN is in none


def _describe(kinds: Sequence[Any], names: Sequence[str], interval: str) -> str:
    words = {bool: "True or False", str: "a name", NoneType: "None", Mapping: "a mapping", tuple: "a list"}
    words |= {int: f"a whole number in {interval}", float: f"a number in {interval}"}
    type_names = [words[get_origin(kind) or kind] for kind in kinds if get_origin(kind) is not Literal]
    return " or ".join([f"one of {', '.join(names)}"] * bool(names) + type_names)
