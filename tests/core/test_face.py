# SPDX-License-Identifier: Apache-2.0
"""What `visalign.core` lists first, what it finds in its modules, and that it needs torch alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

import visalign.core as core

HEAVY = ("transformers", "diffusers", "accelerate", "scipy", "PIL", "omegaconf", "typer", "safetensors")


def test_the_first_names_and_those_of_the_rooms_are_there_once() -> None:
    rooms = [name for names in core.MODULES.values() for name in names.split()]
    assert len(core.__all__) <= 30 and len(set(rooms)) == len(rooms) > 100
    assert not set(rooms) & set(core.__all__)
    for name in rooms:
        assert getattr(core, name) is not None
    with pytest.raises(AttributeError, match=r"'visalign\.core' has no attribute 'grpo'"):
        core.grpo  # noqa: B018


def test_torch_is_all_that_it_imports() -> None:
    code = (
        "import sys, visalign.core as c\n"
        "[getattr(c, n) for names in c.MODULES.values() for n in names.split()]\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
