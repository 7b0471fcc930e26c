# SPDX-License-Identifier: Apache-2.0
"""Import user code named by `package.module:Name` or `path/to/file.py:Name`.

The import runs that code, also from a configuration: one from others is to be read before it is started.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from visalign.errors import CaughtError, UserError, describe_error, excerpt, suggestion
from visalign.versions import missing_extra


def import_by_path(path: str, *, what: str, error: type[Exception] = UserError) -> Any:
    """Import the object that `module:Name` or `file.py:Name` names; `what` is a noun for messages.

    >>> import_by_path("pathlib:Path.cwd", what="function").__name__
    'cwd'
    """
    module_path, _, attribute = path.rpartition(":")
    if not module_path or not attribute:
        raise error(f"{path!r} names no {what}; write 'package.module:Name' or 'path/to/file.py:Name'.")
    is_file = module_path.endswith(".py")
    if is_file and not Path(module_path).is_file():
        raise error(f"{module_path} does not exist; give the path of the file with your {what}.")
    with CaughtError() as importing:
        module = _import_file(Path(module_path)) if is_file else importlib.import_module(module_path)
    if (problem := importing.error) is not None:
        source = module_path if is_file else f"{path!r}: the module {module_path!r}"
        raise error(f"{source} cannot be imported{_import_hint(problem, module_path)}") from problem
    try:
        return attrgetter(attribute)(module)
    except AttributeError as problem:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise error(f"{module_path} has no {attribute!r}. {suggestion(attribute, public)}") from problem


def _import_file(file: Path) -> ModuleType:
    # two files of one name must not share a module
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"visalign_user_{file.stem}_{digest}", file)
    assert spec is not None and spec.loader is not None  # a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up their module there
    with ExitStack() as on_error:
        on_error.callback(sys.modules.pop, spec.name)
        spec.loader.exec_module(module)
        on_error.pop_all()
    return module


def _import_hint(problem: BaseException, module: str) -> str:
    """Describe why a user's module could not be imported, and what to do."""
    if not isinstance(problem, ModuleNotFoundError):
        return f": it raised {describe_error(problem)}."
    name = problem.name or ""
    if f"{module}.".startswith(f"{name}."):
        return ". Is it installed, or on PYTHONPATH? A file can be named directly: 'path/to/file.py:Name'."
    install = f"It imports {name!r}, which is not installed: python -m pip install {name}"
    return f". {missing_extra(problem) or install}."


_PLAIN: Mapping[str, tuple[type, ...]] = {
    "int": (int, float),
    "float": (int, float),
    "str": (str,),
    "bool": (bool, int),
    "None": (type(None),),
}
"""Types that a configuration can write, by their annotation; int and float are interchangeable."""
_LISTS = ("Sequence[", "list[", "tuple[", "Iterable[")  # Annotations of which a text would be the list of its letters


def check_options(
    called: str, target: Callable[..., Any], options: Mapping[str, Any], error: type[Exception] = UserError
) -> None:
    """Raise for unknown or missing options of a callable, `called` so in messages, and for wrong plain types."""
    signature = inspect.signature(target)
    try:
        signature.bind(**options)
    except TypeError as problem:
        names = signature.parameters
        hint = "".join(suggestion(key, names) for key in options if key not in names)
        raise error(f"{called}: {problem}. {hint}Its options: {', '.join(names) or 'none'}.") from problem
    for name in [key for key in options if key in signature.parameters]:
        annotation = signature.parameters[name].annotation
        annotation = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        types = [_PLAIN.get(part.strip()) for part in annotation.split("|")]
        is_letters = isinstance(options[name], str) and annotation.startswith(_LISTS) and "| str" not in annotation
        if is_letters or not any(kind is None or isinstance(options[name], kind) for kind in types):
            raise error(f"{called}: {name} is {excerpt(options[name], 300)}; it must be of type {annotation}.")
