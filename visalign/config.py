# SPDX-License-Identifier: Apache-2.0
"""Configurations: a frozen dataclass, a YAML file with the differences, `key.sub=value` overrides on top.

The packaged files (the folder `configs/`, installed as `visalign.configs`) are found by name from anywhere.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .errors import ConfigError, suggestion
from .schema import check_content, field_types, section_schema

T = TypeVar("T")

PIPELINE_KEY = "pipeline"
"""The top-level key of a YAML file that names its job; the command line reads it, the schema may lack it."""

_SHAPE = "A configuration is a list of 'key: value' lines."


def config_folder() -> Path:
    """The folder of the packaged configurations: in the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def list_configs() -> list[str]:
    """Names of the packaged configurations, sorted, without the ending `.yaml`."""
    return sorted(path.stem for path in config_folder().glob("*.yaml"))


def resolve_config(name_or_path: str | Path) -> Path:
    """The file that a name or a path stands for.

    Args:
        name_or_path: a path to a YAML file, or a packaged name: `NAME`, `NAME.yaml` or `configs/NAME.yaml`.
            A file that exists under the path as given comes before a packaged one.

    Returns:
        The path of an existing file.

    Raises:
        ConfigError: there is no such file and no packaged configuration of that name.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    name = path.name.removesuffix(".yaml")
    packaged = config_folder() / f"{name}.yaml"
    if path.parent in {Path("."), Path("configs")} and packaged.is_file():
        return packaged
    problem = "is a folder, not a YAML file" if path.is_dir() else "does not exist"
    names = list_configs()
    raise ConfigError(
        f"Configuration '{name_or_path}' {problem}. {suggestion(name, names)}Give a path "
        f"or the name of a packaged configuration: {', '.join(names) or 'there are none'}."
    )


def read_config(path: str | Path) -> dict[str, Any]:
    """The content of one YAML file as plain Python values, not yet checked against a schema.

    Args:
        path: what `resolve_config` takes.

    Returns:
        The mapping of the file; empty for an empty file.

    Raises:
        ConfigError: the file is missing, no valid YAML (names the line), or no mapping at its top.
    """
    file = resolve_config(path)
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"'{file}'{where}: not valid YAML: {what}. Mend that line.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"'{file}' is not text in UTF-8: {error.reason}. Give a YAML file.") from error
    except OSError as error:
        # OmegaConf raises a bare OSError for a file that holds one single value; a real one has an errno.
        raise ConfigError(f"'{file}': {error.strerror or 'it holds a single value'}. {_SHAPE}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"'{file}': its top level is a {type(content).__name__}. {_SHAPE}")
    return {str(key): value for key, value in content.items()}


def load_config(schema: type[T], path: str | Path | None = None, overrides: Sequence[str] = ()) -> T:
    """Build one configuration: the defaults of `schema`, then the YAML file, then the overrides.

    A field that is a dict (say `rewards`) is replaced as a whole by the file's or by an override of the field
    itself; an override with a dotted key edits one entry of it.

    Args:
        schema: a dataclass whose fields all have types OmegaConf knows.
        path: what `resolve_config` takes, or None for the defaults alone.
        overrides: items `key.sub=value`; the value is read as YAML (`1e-4`, `true`, `null`, `[1, 2]`).

    Returns:
        An instance of `schema`.

    Raises:
        ConfigError: an unknown key, a wrong type, an unreadable file or override, or values that the
            dataclass itself refuses; the message names the full key, what was given and what is allowed.
        TypeError: `schema` is no dataclass.
    """
    has_pipeline = PIPELINE_KEY in field_types(schema)
    data = typing.cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.structured(schema)))
    if path is not None:
        content = read_config(path)
        if not has_pipeline:
            content.pop(PIPELINE_KEY, None)
        check_content(content, schema, f"'{resolve_config(path)}'")
        data = _layer(data, content, schema)
    for item in overrides:
        keys, value = _parse_override(item)
        check_content(_set({}, keys, value), schema, f"the override '{item}'")
        data = _set(data, keys, value)
    return _build(schema, data)


def config_to_yaml(config: Any) -> str:
    """The configuration as YAML with every field; `load_config` reads it back to an equal instance.

    Args:
        config: an instance of a configuration dataclass.

    Returns:
        YAML text, keys in the order of the fields.
    """
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_plain(config: Any) -> dict[str, Any]:
    """The configuration as nested dicts of what JSON has: tuples are lists, paths strings.

    Args:
        config: an instance of a configuration dataclass.

    Returns:
        Every field, sections as dicts; enumerations by their names.
    """
    content = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return json.loads(json.dumps(content, default=str))


def flatten(config: Any) -> dict[str, Any]:
    """Every leaf of a configuration under its dotted key, as plain values (for trackers and tables).

    Args:
        config: an instance of a configuration dataclass, or nested mappings.

    Returns:
        dotted key -> value; a list and an empty mapping are leaves.

    >>> flatten({"seed": 1, "reward": {"clip": {"weight": 0.5}}})
    {'seed': 1, 'reward.clip.weight': 0.5}
    """
    return dict(_leaves(to_plain(config) if dataclasses.is_dataclass(config) else config, ""))


def _leaves(node: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _parse_override(item: str) -> tuple[list[str], Any]:
    key, equals, text = item.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"Override '{item}' is not of the form key.sub=value. Write for example: seed=1.")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"Override '{item}': its value '{text}' is not valid YAML. Close its brackets or quote it."
        ) from error
    return keys, typing.cast("dict[str, Any]", parsed)["value"]


def _layer(base: Any, content: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """The file's values over the defaults; sections are merged, dicts with free names are replaced."""
    hints = field_types(schema)
    merged = dict(base) if isinstance(base, Mapping) else {}
    for key, value in content.items():
        section = section_schema(hints[key])
        merged[key] = (
            _layer(merged.get(key), value, section) if section is not None and value is not None else value
        )
    return merged


def _set(data: Any, keys: Sequence[str], value: Any) -> dict[str, Any]:
    copy = dict(data) if isinstance(data, Mapping) else {}
    copy[keys[0]] = value if len(keys) == 1 else _set(copy.get(keys[0]), keys[1:], value)
    return copy


def _build(schema: type[T], data: Mapping[str, Any]) -> T:
    base = OmegaConf.structured(schema)
    _empty_dicts(base, schema)
    try:
        return typing.cast(T, OmegaConf.to_object(OmegaConf.merge(base, data)))
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        raise ConfigError(
            f"Key '{error.full_key}': {message}. Set it in the file or as an override."
        ) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _empty_dicts(node: DictConfig, schema: Any) -> None:
    """Take the default entries out of dicts with free names: merging would bring back what was replaced."""
    OmegaConf.set_readonly(node, False)
    for name, hint in field_types(schema).items():
        if typing.get_origin(hint) is dict:
            node[name] = {}
            continue
        section = section_schema(hint)
        if section is not None and not OmegaConf.is_missing(node, name) and node[name] is not None:
            _empty_dicts(node[name], section)
