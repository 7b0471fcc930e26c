# SPDX-License-Identifier: Apache-2.0
"""The packages that visalign needs, and which versions of them are installed."""

from __future__ import annotations

import platform
import sys
import tomllib
from importlib import metadata
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

NEEDED = (
    "torch",
    "diffusers",
    "transformers",
    "open-clip-torch",
    "accelerate",
    "peft",
    "safetensors",
    "numpy",
    "scipy",
    "pillow",
    "omegaconf",
    "pydantic",
    "typer",
    "rich",
)
"""Distributions without which something here fails, the ones that decide what a run computes first."""

IMAGES = frozenset(
    {
        "accelerate",
        "diffusers",
        "huggingface_hub",
        "jinja2",
        "markupsafe",
        "omegaconf",
        "open_clip",
        "peft",
        "pyarrow",
        "pydantic",
        "scipy",
        "tokenizers",
        "transformers",
        "typer",
        "yaml",
    }
)
"""Modules that come with the extra `images`: all but the core, judges of text, and clients need them."""


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """What to install where a module of the extra `images`, or `ray`, was not found; None for any other.

    >>> missing_extra(ModuleNotFoundError("No module named 'peft'", name="peft"))
    "This needs peft, which is not installed: python -m pip install 'visalign[images]'"
    """
    name = (error.name or "").partition(".")[0]
    if name not in IMAGES | {"ray"}:
        return None
    extra = "images" if name in IMAGES else name
    return f"This needs {name}, which is not installed: python -m pip install 'visalign[{extra}]'"


class ExtraNamed(MetaPathFinder):
    """Asked after all other finders: says which extra has a module that a file of this package wants.

    Anybody else who asks, for example whether a module is there, hears nothing.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Refuse by name, or leave it to Python's own error."""
        mend = missing_extra(ModuleNotFoundError(name=fullname))
        if mend and (importing_file() or "").partition(".")[0] == "visalign":
            raise ModuleNotFoundError(mend, name=fullname)


def importing_file() -> str | None:
    """Name of the module whose import statement runs."""
    frame = sys._getframe(1)
    while frame and frame.f_globals.get("__name__") in (__name__, "importlib._bootstrap"):
        frame = frame.f_back
    return frame.f_globals.get("__name__") if frame else None


def installed_version(name: str) -> str | None:
    """The version of a distribution, named as in `pip install NAME`; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """The version of visalign: the installed one, in a checkout that nobody installed the one to be."""
    if installed := installed_version("visalign"):
        return installed
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]


def versions() -> dict[str, str]:
    """Python, platform, visalign and every needed package -> version; "absent" where not installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    found["visalign"] = own_version()
    return found | {name: installed_version(name) or "absent" for name in NEEDED}
