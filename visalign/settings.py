# SPDX-License-Identifier: Apache-2.0
"""Declare a section of settings once: ranges and choices in the field types, cross-setting rules in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field
from functools import wraps
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from .errors import UserError, excerpt, suggestion
from .schema import STRICT

T = TypeVar("T")

MOST = 2**32 - 1  # Largest whole number of a setting: products of seeds and sizes must fit into 64 bits
MOST_COUNTED = 2**20
"""Largest size of a batch, group or generated set, of which lists are made before the first sample is drawn."""
Count = Annotated[int, Field(ge=1, le=MOST_COUNTED)]
Records = Annotated[int, Field(ge=1, le=MOST)]  # Number of records that are read from a file of any length
Steps = Annotated[int, Field(ge=1, le=10_000)]  # Number of denoising steps; diffusion models are trained on 1000
MOST_PIXELS = 16_384  # Largest number of pixels along a side of an image
Side = Annotated[int, Field(ge=1, le=MOST_PIXELS)]
Natural = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
MOST_FLOAT = 1e30  # Largest number of a setting: a few products of it must fit into float32, which ends at 3.4e38
Positive = Annotated[float, Field(gt=0, le=MOST_FLOAT, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=MOST_FLOAT, allow_inf_nan=False)]
Finite = Annotated[float, Field(ge=-MOST_FLOAT, le=MOST_FLOAT, allow_inf_nan=False)]


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def settings(section: str) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen, keyword-only pydantic dataclass; errors are `UserError`s that begin with the section."""

    def decorate(cls: type[T]) -> type[T]:
        schema: Any = dataclass(frozen=True, kw_only=True, config=STRICT)(cls)
        validate = schema.__init__

        @wraps(validate)
        def construct(self: Any, **values: Any) -> None:
            try:
                validate(self, **values)
            except ValidationError as error:
                raise _user_error(section, error, schema) from error

        schema.__init__ = construct
        return schema

    return decorate


def refuse(messages: Iterable[str]) -> None:
    """Raise the first of the messages, which a generator yields for the rules that settings break."""
    for message in messages:
        raise UserError(message)


def _user_error(section: str, error: ValidationError, schema: Any) -> UserError:
    """Translate pydantic's first error; a rule of the settings comes with its own message."""
    first = max(error.errors(), key=lambda entry: len(entry["loc"]))  # of a union, the variant that fits best
    if isinstance(rule_error := first.get("ctx", {}).get("error"), UserError):
        return rule_error
    keys = [str(key) for key in first["loc"] if isinstance(key, int) or key.isidentifier()]
    name, allowed = ".".join(keys), schema.__dataclass_fields__
    if first["type"] == "unexpected_keyword_argument":
        return UserError(
            f"{section} has no setting {name!r}. {suggestion(name, allowed)}Allowed: {', '.join(allowed)}."
        )
    return UserError(f"{section}.{name} is {excerpt(first['input'], 300)}. {first['msg']}.")
