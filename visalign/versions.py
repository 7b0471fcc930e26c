# SPDX-License-Identifier: Apache-2.0
"""Required packages, their installed versions, and the extra that brings a missing one."""

from __future__ import annotations

import sys
from typing import Any

NEEDED = (
    "torch diffusers transformers open-clip-torch accelerate peft safetensors numpy scipy pillow omegaconf "
    "pydantic typer rich"
).split()
"""Required distributions; those that affect numerical results come first."""

IMAGES = frozenset(
    "accelerate diffusers huggingface_hub jinja2 markupsafe omegaconf open_clip peft pyarrow pydantic scipy "
    "transformers typer yaml".split()
)
"""Modules of the extra `images`; the core, text rewards and clients work without them."""
EXTRAS = {"ray": "ray", "gradio": "demo"}  # Module -> its extra


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return the install command for a missing module of an extra, else None.

    >>> missing_extra(ModuleNotFoundError("No module named 'peft'", name="peft"))
    "This needs peft, which is not installed: python -m pip install 'visalign[images]'"
    """
    name = (error.name or "").partition(".")[0]
    extra = "images" if name in IMAGES else EXTRAS.get(name)
    if extra is None:
        return None
    return f"This needs {name}, which is not installed: python -m pip install 'visalign[{extra}]'"


class MissingExtraFinder:
    """Last import finder: names the extra of a missing module; baseless, as `importlib.abc` is slow to import."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Raise an error that names the extra, or return None for Python's own error."""
        if install := missing_extra(ModuleNotFoundError(name=fullname)):
            frame = sys._getframe(1)
            while frame and frame.f_globals.get("__name__") == "importlib._bootstrap":
                frame = frame.f_back  # to the import statement: others probe for packages and go on without
            if frame and str(frame.f_globals.get("__name__")).partition(".")[0] == "visalign":
                raise ModuleNotFoundError(install, name=fullname)


def installed_version(name: str) -> str | None:
    """Return the version of a distribution by its pip name, or None."""
    from importlib import metadata  # half of the time of `import visalign`

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def visalign_version() -> str:
    """Return the installed version of visalign, or that of the checkout's pyproject.toml."""
    if installed := installed_version("visalign"):
        return installed
    import tomllib
    from pathlib import Path

    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]


def versions() -> dict[str, str]:
    """Return versions of Python, the platform, visalign and required packages ("absent" if missing)."""
    import platform

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "visalign": visalign_version(),
        **{name: installed_version(name) or "absent" for name in NEEDED},
    }
