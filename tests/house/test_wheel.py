# SPDX-License-Identifier: Apache-2.0
"""An installed wheel, far from the checkout: the README trains an adapter, the site's block draws with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.test_docs import BLOCKS, README, ROOT


def code_with(word: str, page: str) -> str:
    """Return the Python block of a page that has the word."""
    [code] = [b.code for b in BLOCKS if b.language == "python" and b.page.name == page and word in b.code]
    return code


@pytest.mark.slow
def test_the_adapter_of_the_readme_is_trained_and_loaded(tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, *offline, "--target", str(site), str(ROOT)], check=True)  # by a wheel
    away = tmp_path / "away"
    away.mkdir()
    trained = code_with("redness", README.name).replace("iterations=8", "iterations=3")  # redder already
    where = "import os, visalign; print(visalign.__file__); os.rename('runs/red', 'runs/first')"
    drawn = code_with("load_lora_weights", "fine_tune.md").replace("\npipe(", "\n_ = pipe(")
    code = "\n".join([trained, where, drawn, "print(pipe.get_active_adapters(), _.size)"])
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=away, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    file, adapters = process.stdout.splitlines()[-2:]
    assert file.startswith(str(site)) and adapters == "['default_0'] (64, 64)"
