# SPDX-License-Identifier: Apache-2.0
"""Notebooks as pages of the site: their text, their code, and the output that they were saved with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def notebook_page(path: Path) -> str:
    """Write a notebook as Markdown; outputs are text or PNG images."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_output(output) for output in cell.get("outputs", ())]
    title, *rest = parts
    download = f"[Download the notebook]({path.name}). Run it with `jupyter lab {path.name}`."
    return "\n\n".join([title, download, *rest])


def _output(output: Mapping[str, Any]) -> str:
    if "text" in output:  # a stream
        return f"```text\n{''.join(output['text']).rstrip()}\n```"
    data = output["data"]
    if "image/png" in data:
        encoded = "".join(data["image/png"]).strip()
        return f'<img class="output" alt="Output of the cell above" src="data:image/png;base64,{encoded}">'
    if "text/html" in data:
        html = "".join(line.strip() for line in data["text/html"])
        return f'<div class="output">{html}</div>'
    return f"```text\n{''.join(data['text/plain'])}\n```"
