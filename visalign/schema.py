# SPDX-License-Identifier: Apache-2.0
"""Keys and types that a configuration dataclass allows, and the message for the first one it refuses."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, ValidationError

from .errors import ConfigError, did_you_mean, excerpt, nearest, suggestion
from .other_names import our_names

STRICT: ConfigDict = {"extra": "forbid", "coerce_numbers_to_str": True}  # pydantic's settings for all configurations

Source = tuple[tuple[str, ...], str]  # (keys that were written, where they stand); of a file () and its name

_UNKNOWN = ("unexpected_keyword_argument", "invalid_key")


def field_types(schema: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, name -> resolved type, in their order."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def section_schema(hint: Any, *values: Any) -> Any:
    """Return the dataclass D of a field of type D or D | None, of a union the one that `values` choose, else None.

    Of `float | D` it is D where the first value is a mapping.
    """
    key, variants = _union(hint)
    for value in values if key else ():
        choice = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
        if choice is not None:
            return next((kind for name, kind in variants.items() if name == choice), None)
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        if len(parts) > 1 and not (values and isinstance(values[0], Mapping)):
            return None
        sections = [part for part in parts if dataclasses.is_dataclass(part)]
        hint = sections[0] if len(sections) == 1 else parts[0] if len(parts) == 1 else None
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def entry_schema(hint: Any) -> Any:
    """Return the dataclass D of a field of type dict[str, D], else None."""
    parts = typing.get_args(hint) if typing.get_origin(hint) is dict else ()
    return section_schema(parts[1]) if len(parts) == 2 else None


def allowed_keys(schema: Any, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key below `prefix` that a schema allows; `*` stands for a free name."""
    for name, hint in field_types(schema).items():
        yield f"{prefix}{name}"
        variants = [*_union(hint)[1].values()] or [section_schema(hint)]
        for section in dict.fromkeys(variants):
            yield from allowed_keys(section, f"{prefix}{name}.") if section is not None else ()
        if (entry := entry_schema(hint)) is not None:
            yield from allowed_keys(entry, f"{prefix}{name}.*.")


def refusal(error: ValidationError, schema: Any, data: Any, sources: Sequence[Source]) -> ConfigError:
    """Describe an error by its full key: unknown keys, wrong values, rules; `sources` say where keys were written."""
    order = {**dict.fromkeys(_UNKNOWN, 0), "value_error": 2}
    # an unknown key is often the cause of the other errors, and a dataclass cannot check itself before its values
    errors = [
        e for e in error.errors() if e["type"] != "float_type" or not isinstance(e["input"], dict)
    ]  # `float | D`
    first = min(errors or error.errors(), key=lambda entry: order.get(entry["type"], 1))
    if first["type"] == "value_error":
        return ConfigError(str(first.get("ctx", {})["error"]))
    location = _Location(schema, data, first["loc"][1:])
    where = next((name for keys, name in reversed(sources) if location.meets(keys)), "the defaults")
    if first["type"] in _UNKNOWN:
        unknown = [str(entry["loc"][-1]) for entry in (first, *error.errors()) if entry["type"] in _UNKNOWN]
        return _unknown_key(location, schema, where, unknown)
    key, value = ".".join(location.keys) + location.item, location.value
    if first["type"] == "missing":
        return ConfigError(f"Key '{key}': missing mandatory value. Set it in the file or as an override.")
    shown_value = "null" if value is None else f"{excerpt(value, 300)} ({type(value).__name__})"
    if first["type"].startswith(("greater", "less", "too_", "string_too_", "finite")):
        return ConfigError(f"Key '{key}' in {where}: got {shown_value}. {first['msg']}.")
    choices = typing.get_args(location.hint) if typing.get_origin(location.hint) is typing.Literal else ()
    hint = suggestion(str(value), map(str, choices))
    if isinstance(value, Mapping) and any(":" in str(name) and entry is None for name, entry in value.items()):
        hint = "YAML wants a blank after a colon: {name: value}."
    return ConfigError(
        f"Key '{key}' in {where}: got {shown_value}, expected {_type_name(location.hint)}. {hint}".strip()
    )


class _Location:
    """Location of a pydantic error; its `loc` also names variants of unions and members of containers."""

    def __init__(self, schema: Any, data: Any, loc: Sequence[str | int]) -> None:
        self.keys, self.item, self.value, self.hint = list[str](), "", data, schema
        self.section, self.union = schema, schema
        """Dataclass of the last key, and the type it was chosen from."""
        full, parts = schema, iter(loc)
        for part in parts:
            name = str(next(parts) if _union(full)[0] else part)
            section, entry = section_schema(full, self.value), entry_schema(full)
            if section is not None and name == section.__name__:  # the variant of `float | D`
                continue
            if section is not None:
                self.section, self.union, full = section, full, field_types(section).get(name)
                self.hint = typing.get_type_hints(section).get(name)
            elif entry is not None:
                self.hint = full = entry
            elif isinstance(part, int):
                self.item = f"[{part}]"
                self.value, self.hint = self.value[part], _items(self.hint)
                break
            else:
                break
            self.keys.append(name)
            self.value = self.value.get(name)
        key, variants = _union(full)
        if key and isinstance(self.value, Mapping):  # its discriminator is none of the variants'
            self.keys.append(key)
            self.value, self.hint = self.value.get(key), typing.Literal[tuple(variants)]

    def meets(self, keys: Sequence[str]) -> bool:
        """Return whether a value written under `keys` contains this location or lies in it."""
        return all(key == other for key, other in zip(self.keys, keys, strict=False))


def _unknown_key(location: _Location, root: Any, where: str, unknown: Sequence[str]) -> ConfigError:
    """Describe the first of the unknown keys, with our settings for all that other libraries know."""
    *above, key = location.keys
    prefix = "".join(f"{name}." for name in above)
    allowed = list(field_types(location.section))
    kind, variants = _union(location.union)
    readers = [str(name) for name, part in variants.items() if key in field_types(part)]
    names = {full: full.rpartition(".")[2] for full in allowed_keys(root)}
    translated = our_names(unknown, names)
    if readers:
        hint = f"It is read where {prefix}{kind} is {' or '.join(readers)}. "
    elif translated:
        hint = f"Here {translated}. "
    else:
        similar = [prefix + name for name in nearest(key, allowed)]
        if not similar:
            alike = nearest(key, set(names.values()), limit=1, cutoff=0.7)
            similar = [full for full, name in names.items() if name in alike]
        hint = did_you_mean(similar)
    level = f"under '{'.'.join(above)}'" if above else "at the top level"
    return ConfigError(f"Unknown key '{prefix}{key}' in {where}. {hint}Allowed {level}: {', '.join(allowed)}.")


def _union(hint: Any) -> tuple[str, dict[Any, Any]]:
    """Return (discriminator field, its value -> dataclass) of an annotated union of dataclasses, else ("", {})."""
    discriminators = (getattr(part, "discriminator", None) for part in getattr(hint, "__metadata__", ()))
    key = str(next(filter(None, discriminators), ""))
    parts = typing.get_args(hint.__origin__) if key else ()
    return key, {name: part for part in parts for name in typing.get_args(typing.get_type_hints(part)[key])}


def _items(hint: Any) -> Any:
    parts = typing.get_args(hint)
    return _items(parts[0]) if type(None) in parts else (parts or (Any,))[0]


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(value) for value in typing.get_args(hint))
    section, entry = section_schema(hint), entry_schema(hint)
    if section is not None:
        return f"a mapping with the keys {', '.join(field_types(section))}"
    if entry is not None:
        return f"a mapping from names to mappings with the keys {', '.join(field_types(entry))}"
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        return " or ".join(map(_type_name, typing.get_args(hint)))
    if typing.get_origin(hint) is dict:
        return "a mapping such as {name: value}"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
