# SPDX-License-Identifier: Apache-2.0
"""The command `visalign export-lora`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export_lora(
    run: Annotated[Path, typer.Argument(help="Run folder, or the folder of its LoRA.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Output .safetensors file (must not exist).")],
) -> None:
    """Write a run's LoRA under kohya's keys, for ComfyUI and A1111; diffusers reads the run's own file."""
    from visalign.adapters.pipeline.kohya import export_kohya
    from visalign.pipelines.shared.run_folder import new_file

    new_file(output, endings=(".safetensors",))
    folder = run / "lora" if (run / "lora").is_dir() else run
    output.parent.mkdir(parents=True, exist_ok=True)
    layers = export_kohya(folder, output)
    typer.echo(f"{layers} layers under kohya's keys: {output}")
