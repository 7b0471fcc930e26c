# SPDX-License-Identifier: Apache-2.0
"""Keys of a job, from its dataclasses and the texts below their fields."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from visalign.pipelines.jobs import PIPELINES

from .markdown import code, prose, table


def field_texts(schema: type) -> dict[str, str]:
    """Return field -> the docstring below it, inherited fields included."""
    texts: dict[str, str] = {}
    for kind in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(kind):
            continue
        body = typing.cast("ast.ClassDef", ast.parse(inspect.getsource(kind)).body[0]).body
        for field, below in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                texts[field.target.id] = ""
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    texts[field.target.id] = str(below.value.value)
    return texts


def sections(hint: Any) -> Iterator[type]:
    """Yield the dataclasses in an annotation."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from sections(part)


def default_of(field: dataclasses.Field[Any]) -> str:
    """Return the default of a plain field, as YAML writes it; "" where it must be given."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return ""
    if dataclasses.is_dataclass(value) or (isinstance(value, Mapping) and value):
        return ""
    if value is None or isinstance(value, bool):
        return code({None: "null", True: "true", False: "false"}[value])
    return code(value if value != "" else '""')


HEAD = ("key", "default", "meaning")


def settings(name: str, *keys: str) -> str:
    """Build the tables of the keys of a job with their defaults and meanings, by section.

    Args:
        name: a pipeline of `visalign.pipelines.jobs.PIPELINES`, or `module:Dataclass`.
        keys: build one table of these keys, in this order.

    Raises:
        ValueError: the job has no such key.
    """
    module, _, attribute = PIPELINES.get(name, name).partition(":")
    schema = getattr(importlib.import_module(module), attribute)
    tables = "\n\n".join(_section(schema, "", visited={schema}))
    if not keys:
        return tables
    rows = {line.split("`")[1]: line for line in tables.splitlines() if line.startswith("| `")}
    if missing := [key for key in keys if key not in rows]:
        raise ValueError(f"{name} has no setting {', '.join(missing)}")
    return "\n".join([table(HEAD, []), *(rows[key] for key in keys)])


def _section(schema: type, prefix: str, visited: set[type]) -> Iterator[str]:
    hints, texts = typing.get_type_hints(schema), field_texts(schema)
    rows, deeper = [], []
    for field in dataclasses.fields(schema):
        key, inner = f"{prefix}{field.name}", list(sections(hints[field.name]))
        is_free = typing.get_origin(hints[field.name]) is dict
        new = [kind for kind in inner if kind not in visited]
        deeper += [(kind, f"{key}.NAME." if is_free else f"{key}.") for kind in new]
        visited.update(new)
        rows.append((code(key), default_of(field), prose(texts.get(field.name, ""))))
    title = f"**{prefix[:-1]}**" if prefix else "**the run**"
    yield f"{title}: {prose((schema.__doc__ or '').splitlines()[0])}\n\n" + table(HEAD, rows)
    for kind, below in deeper:
        yield from _section(kind, below, visited)
