# SPDX-License-Identifier: Apache-2.0
"""The notebook of the site runs from top to bottom, and its page shows the evaluation's results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.house.test_docs import SITE

NOTEBOOK = SITE / "notebooks/judges.ipynb"


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "it is kept without what it printed"
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells, 1):
        exec(compile(cell, f"{NOTEBOOK.name}, cell {number}", "exec"), names)
    assert len(names["frame"]) == 12 and names["frame"]["clip_score"].between(-1, 1).all()
    found = {judge["judge"]["name"]: judge for judge in names["result"]["judges"]}
    assert set(found) == {"clip_score", "saturation"}
    shown = names["Page"]()._repr_html_()
    assert shown.startswith("<iframe") and "clip_score" in shown and "<table" not in shown, "escaped"
