# SPDX-License-Identifier: Apache-2.0
"""What a configuration dataclass allows: plain values are checked and refused by their full key."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .errors import ConfigError, did_you_mean, nearest


def field_types(schema: Any) -> dict[str, Any]:
    """The fields of a dataclass with their resolved types.

    Args:
        schema: a dataclass (the class).

    Returns:
        name -> type, in the order of the fields.

    Raises:
        TypeError: `schema` is no dataclass.
    """
    if not (isinstance(schema, type) and dataclasses.is_dataclass(schema)):
        raise TypeError(f"A configuration schema is a dataclass; got {schema!r}.")
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def section_schema(hint: Any) -> Any:
    """The dataclass D of a field of type D or D | None, else None."""
    if typing.get_origin(hint) in {typing.Union, types.UnionType}:
        parts = [part for part in typing.get_args(hint) if part is not type(None)]
        hint = parts[0] if len(parts) == 1 else None
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None


def entry_schema(hint: Any) -> Any:
    """The dataclass D of a field of type dict[str, D], else None."""
    parts = typing.get_args(hint) if typing.get_origin(hint) is dict else ()
    return section_schema(parts[1]) if len(parts) == 2 else None


def check_content(content: Mapping[str, Any], schema: Any, source: str) -> None:
    """Refuse the first unknown key or wrong type in plain values.

    Args:
        content: nested mappings, as a YAML file holds them.
        schema: the dataclass they are meant for.
        source: where they come from, for the message.

    Raises:
        ConfigError: the message names the full key, the nearest and all allowed names, or the value and the
            expected type.
    """
    _check_section(content, schema, "", source, schema)


def _check_section(content: Any, schema: Any, prefix: str, source: str, root: Any) -> None:
    if not isinstance(content, Mapping):
        raise _wrong_type(prefix.removesuffix("."), content, schema, source)
    hints = field_types(schema)
    for key, value in content.items():
        if key not in hints:
            raise _unknown_key(str(key), schema, prefix, source, root)
        section, entry = section_schema(hints[key]), entry_schema(hints[key])
        if section is not None and value is not None:
            _check_section(value, section, f"{prefix}{key}.", source, root)
        elif entry is not None and isinstance(value, Mapping):
            for name, part in value.items():
                _check_section(part, entry, f"{prefix}{key}.{name}.", source, root)
        else:
            _check_leaf(schema, key, value, hints[key], prefix, source)


def _check_leaf(schema: Any, key: str, value: Any, hint: Any, prefix: str, source: str) -> None:
    try:
        OmegaConf.merge(OmegaConf.structured(schema), {key: value})
    except OmegaConfBaseException as error:
        place = str(error.full_key or key)  # such as "seeds[2]" for one bad item of a list
        raise _wrong_type(f"{prefix}{place}", value, hint, source) from error


def _unknown_key(key: str, schema: Any, prefix: str, source: str, root: Any) -> ConfigError:
    here = list(field_types(schema))
    offered = [prefix + name for name in nearest(key, here)]
    if not offered:
        everywhere = list(allowed_keys(root))
        alike = nearest(key, {full.rpartition(".")[2] for full in everywhere}, limit=1)
        offered = [full for full in everywhere if full.rpartition(".")[2] in alike]
    place = f"under '{prefix.removesuffix('.')}'" if prefix else "at the top level"
    return ConfigError(
        f"Unknown key '{prefix}{key}' in {source}. {did_you_mean(offered)}Allowed {place}: {', '.join(here)}."
    )


def _wrong_type(full_key: str, value: Any, hint: Any, source: str) -> ConfigError:
    given = "null" if value is None else f"{value!r} ({type(value).__name__})"
    return ConfigError(f"Key '{full_key}' in {source}: got {given}, expected {_type_name(hint)}.")


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(value) for value in typing.get_args(hint))
    section, entry = section_schema(hint), entry_schema(hint)
    if section is not None:
        return f"a mapping with the keys {', '.join(field_types(section))}"
    if entry is not None:
        return f"a mapping from names to mappings with the keys {', '.join(field_types(entry))}"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def allowed_keys(schema: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key that a schema allows; `*` stands for a free name.

    Args:
        schema: a dataclass.
        prefix: what stands before each key.

    Yields:
        The keys, sections before what they hold.
    """
    for name, hint in field_types(schema).items():
        section, entry = section_schema(hint), entry_schema(hint)
        yield f"{prefix}{name}"
        if section is not None:
            yield from allowed_keys(section, f"{prefix}{name}.")
        if entry is not None:
            yield from allowed_keys(entry, f"{prefix}{name}.*.")
