# SPDX-License-Identifier: Apache-2.0
"""Configurations: a frozen dataclass, a YAML file with the differences, `key.sub=value` overrides on top.

YAML and its `${interpolation}` are OmegaConf's; types are checked by pydantic.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from .errors import ConfigError, excerpt, suggestion
from .schema import STRICT, Source, entry_schema, field_types, refusal, section_schema

T = TypeVar("T")

PIPELINE_KEY = "pipeline"
"""The top-level key of a YAML file that names its job; the command line reads it, the schema may lack it."""

UNREADABLE = (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError)
"""Errors of YAML that cannot be read; Python raises the last two at 4,301 digits and at deep nesting."""
MAX_DEPTH = 32  # Depth to which lists and mappings of a configuration may be nested
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")

_SHAPE = "A configuration is a list of 'key: value' lines."


class OutOfBounds(ConfigError):
    """A value that no setting can hold."""


def config_folder() -> Path:
    """Return the folder of the packaged configurations: in the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def list_configs() -> list[str]:
    """Return the names of the packaged configurations, sorted, without the ending `.yaml`."""
    return sorted(path.stem for path in config_folder().glob("*.yaml"))


def resolve_config(name_or_path: str | Path) -> Path:
    """Return the file of a path, else of a packaged name: `NAME`, `NAME.yaml` or `configs/NAME.yaml`."""
    path = Path(os.path.expanduser(name_or_path))
    if path.is_file():
        return path
    name = path.name.removesuffix(".yaml")
    packaged = config_folder() / f"{name}.yaml"
    if path.parent in {Path("."), Path("configs")} and packaged.is_file():
        return packaged
    problem = "is a folder, not a YAML file" if path.is_dir() else "does not exist"
    names = list_configs()
    begun = [other for other in names if name and other.startswith(f"{name}_")]
    similar = f"Names that begin so: {', '.join(begun)}. " if begun else suggestion(name, names)
    raise ConfigError(
        f"Configuration '{name_or_path}' {problem}. {similar}Give the path of a YAML file, or one of the {len(names)} "
        "names that `visalign configs` lists."
    )


def read_config(path: str | Path) -> dict[str, Any]:
    """Return the content of one YAML file as plain Python values, not yet checked against a schema."""
    file = resolve_config(path)
    try:
        content = OmegaConf.to_container(OmegaConf.load(file))
        check_bounds(content)
    except (*UNREADABLE, OSError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error)  # OmegaConf's OSError names a single value
        raise ConfigError(f"'{file}'{where}: not valid YAML: {what:.300}. {_SHAPE}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"'{file}': its top level is a {type(content).__name__}. {_SHAPE}")
    return {str(key): value for key, value in content.items()}


def load_config(schema: type[T], path: str | Path | None = None, overrides: Sequence[str] = ()) -> T:
    """Build one configuration: the defaults of the dataclass `schema`, then the YAML file, then the overrides.

    A union of dataclasses is told apart by one field, `Field(discriminator=...)`. An override is `key.sub=value`, its
    value read as YAML (`1e-4`, `true`, `null`, `[1, 2]`). A field that is a dict (say `rewards`) is replaced as a
    whole by the file's or by an override of the field itself; an override with a dotted key edits one entry of it.
    """
    values: dict[str, Any] = {}
    sources: list[Source] = []
    if path is not None:
        values = read_config(path)
        if PIPELINE_KEY not in field_types(schema):
            values.pop(PIPELINE_KEY, None)
        sources.append(((), f"'{resolve_config(path)}'"))
    for item in overrides:
        keys, value = _parse_override(item)
        values = _set(values, keys, value)
        sources.append((tuple(keys), f"the override {excerpt(item, 300)}"))
    return _build(schema, _over_defaults(values, schema, dataclasses.MISSING), sources)


def config_to_yaml(config: Any) -> str:
    """Write the configuration as YAML with every field; `load_config` reads it back to an equal instance."""
    return OmegaConf.to_yaml(OmegaConf.create(to_plain(config)))


def to_plain(config: Any) -> dict[str, Any]:
    """Convert the configuration to nested dicts of JSON types: tuples become lists, paths strings."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))  # as a file of it would be read


def flatten(config: Any) -> dict[str, Any]:
    """Return the leaves of a configuration by dotted key; a list and an empty mapping are leaves.

    >>> flatten({"seed": 1, "reward": {"clip": {"weight": 0.5}}})
    {'seed': 1, 'reward.clip.weight': 0.5}
    """
    leaves: dict[str, Any] = {}
    for key, value in (to_plain(config) if dataclasses.is_dataclass(config) else config).items():
        if isinstance(value, Mapping) and value:
            leaves |= {f"{key}.{name}": leaf for name, leaf in flatten(value).items()}
        else:
            leaves[str(key)] = value
    return leaves


def _parse_override(item: str) -> tuple[list[str], Any]:
    key, equals, text = item.partition("=")
    keys = key.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"Override {excerpt(item, 300)} is not of the form key.sub=value, such as seed=1.")
    try:
        return keys, parse_value(text)
    except UNREADABLE as error:
        reason = f": {error}" if isinstance(error, OutOfBounds) else ""
        raise ConfigError(
            f"Override {excerpt(item)}: its value {excerpt(text)} is not valid YAML{reason}. Close its brackets, "
            "shorten its numbers, put a blank behind each colon of a mapping ({key: value}), or quote it."
        ) from error


def parse_value(text: str) -> Any:
    """Parse one value as OmegaConf reads YAML, which knows 1e-4 as a number."""
    parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    check_bounds(parsed)
    return parsed["value"]


def check_bounds(value: Any, depth: int = 0) -> None:
    """Refuse values that no setting can hold and that would fail far below: deep nests, long numbers, odd text."""
    if isinstance(value, Mapping | list):
        if depth > MAX_DEPTH:
            raise OutOfBounds(f"it is nested more than {MAX_DEPTH} deep")
        for part in (*value, *value.values()) if isinstance(value, Mapping) else value:
            check_bounds(part, depth + 1)
    elif isinstance(value, int) and abs(value) > 10**30:
        raise OutOfBounds("a whole number has more than 30 digits")
    elif isinstance(value, str) and _UNWRITABLE.search(value):
        raise OutOfBounds("a text holds a NUL or half of a character")


class _Entries(dict[str, Any]):
    """A mapping written only by dotted overrides: it edits the default mapping, which others replace."""


def _set(data: Any, keys: Sequence[str], value: Any) -> dict[str, Any]:
    copy = type(data)(data) if isinstance(data, dict) else _Entries()
    copy[keys[0]] = value if len(keys) == 1 else _set(copy.get(keys[0]), keys[1:], value)
    return copy


def _over_defaults(values: Any, hint: Any, default: Any) -> Any:
    """Merge written values over the defaults; for dicts with free names see `load_config`."""
    section, entry = section_schema(hint, values, default), entry_schema(hint)
    if isinstance(values, Mapping) and (section is not None or entry is not None):
        edits = isinstance(values, _Entries) and isinstance(default, Mapping)
        defaults = _defaults(section, default) if section is not None else dict(default) if edits else {}
        hints = field_types(section) if section is not None else dict.fromkeys(values, entry)
        merged = {name: _over_defaults(value, hints.get(name), defaults.get(name)) for name, value in values.items()}
        return {**_plain(defaults), **merged}
    if isinstance(values, _Entries) and isinstance(default, Mapping):
        return {**default, **values}
    if any(kind in str(hint) for kind in ("bool", "Any")):  # annotations of unions have no other common form
        return values
    if isinstance(values, list):
        return [str(part) if isinstance(part, bool) else part for part in values]
    return str(values) if isinstance(values, bool) else values  # else pydantic takes true for 1


def _defaults(section: Any, default: Any) -> dict[str, Any]:
    """Return the fields of `default` if it is such a section, else the section's own defaults."""
    if type(default) is section:
        return {field.name: getattr(default, field.name) for field in dataclasses.fields(section)}
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(section)
        if (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
    }


def _plain(value: Any) -> Any:
    """Convert dataclasses and mappings of any class to dicts."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


def _build(schema: type[T], data: Mapping[str, Any], sources: Sequence[Source]) -> T:
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(_plain(data)), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        message = str(error).splitlines()[0]
        raise ConfigError(f"Key '{error.full_key}': {message}. Set it in the file or as an override.") from error
    try:
        # in a tuple: a dataclass itself takes no settings of pydantic here
        return TypeAdapter(tuple[schema], config=STRICT).validate_python((resolved,))[0]  # type: ignore[valid-type]
    except ValidationError as error:
        raise refusal(error, schema, resolved, sources) from error
