# SPDX-License-Identifier: Apache-2.0
"""A user's own code by name: `package.module:Name` or `path/to/file.py:Name`, wherever a name is accepted."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from visalign.errors import Caught, UserError, said_by, suggestion
from visalign.versions import missing_extra


def named_object(path: str, *, what: str, error: type[Exception] = UserError) -> Any:
    """The object that `module:Name` or `file.py:Name` names.

    Args:
        path: The name; after the colon it may go on with dots.
        what: A noun for messages, e.g. "reward".
        error: What is raised.

    Raises:
        error: There is no such file, module or attribute; the message says what to correct.

    >>> named_object("pathlib:Path.cwd", what="function").__name__
    'cwd'
    """
    place, _, attribute = path.rpartition(":")
    if not place or not attribute:
        raise error(f"{path!r} names no {what}; write 'package.module:Name' or 'path/to/file.py:Name'.")
    module = _from_file(Path(place), what, error) if place.endswith(".py") else _from_name(place, path, error)
    found: Any = module
    for step in attribute.split("."):
        if not hasattr(found, step):
            public = [key for key in vars(module) if not key.startswith("_")]
            raise error(
                f"{place} has no {attribute!r}. {suggestion(attribute, public)}Correct the part after ':'."
            )
        found = getattr(found, step)
    return found


_PLAIN: Mapping[str, tuple[type, ...]] = {
    "int": (int, float),
    "float": (int, float),
    "str": (str,),
    "bool": (bool, int),
    "None": (type(None),),
}
"""Kinds of values that a configuration writes, by how a signature names them; numbers are one kind."""


def check_options(
    called: str, target: Callable[..., Any], options: Mapping[str, Any], error: type[Exception] = UserError
) -> None:
    """Refuse options that a class or function does not know, or that it lacks, and values of another kind
    than its signature says, where that is a number, a text, true or false, or null.

    Args:
        called: Its name in messages, e.g. "Reward 'ocr'".
        target: The class or function.
        options: What it would be called with.
        error: What is raised.
    """
    signature = inspect.signature(target)
    try:
        signature.bind(**options)
    except TypeError as problem:
        known = signature.parameters
        near = "".join(suggestion(key, known) for key in options if key not in known)
        raise error(f"{called}: {problem}. {near}Its options: {', '.join(known) or 'none'}.") from problem
    for name in [key for key in options if key in signature.parameters]:
        said = signature.parameters[name].annotation
        said = said if isinstance(said, str) else inspect.formatannotation(said)
        kinds = [_PLAIN.get(kind.strip()) for kind in said.split("|")]
        if not any(kind is None or isinstance(options[name], kind) for kind in kinds):
            raise error(f"{called}: {name} is {options[name]!r}; it must be of the kind {said}.")


def _from_file(file: Path, what: str, error: type[Exception]) -> ModuleType:
    if not file.is_file():
        raise error(
            f"There is no file {file}; give the path of your {what}'s file, relative to where you are."
        )
    place = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"visalign_own_{file.stem}_{place}", file)
    if spec is None or spec.loader is None:
        raise error(f"{file} cannot be imported; give a Python file that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    with Caught() as importing:
        spec.loader.exec_module(module)
    if importing.error is not None:
        del sys.modules[spec.name]
        raise _broken(str(file), importing.error, error) from importing.error
    return module


def _broken(what: str, problem: BaseException, error: type[Exception]) -> Exception:
    """A user's module that raised while it was imported."""
    if isinstance(problem, ModuleNotFoundError):
        name = problem.name
        mend = f"It imports {name!r}, which is not installed: python -m pip install {name}"
        return error(f"{what} cannot be imported. {missing_extra(problem) or mend}.")
    return error(f"{what} cannot be imported: it raised {said_by(problem)}.")


def _from_name(module: str, path: str, error: type[Exception]) -> ModuleType:
    with Caught() as importing:
        return importlib.import_module(module)
    problem, named = importing.error, f"{path!r}: the module {module!r}"
    assert problem is not None
    missing = problem.name if isinstance(problem, ModuleNotFoundError) else None
    if missing and (module == missing or module.startswith(missing + ".")):
        raise error(
            f"{named} cannot be imported. Is it installed, or on PYTHONPATH? A file can be named "
            "directly: 'path/to/file.py:Name'."
        ) from problem
    raise _broken(named, problem, error) from problem
