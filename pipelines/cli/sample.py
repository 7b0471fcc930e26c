# SPDX-License-Identifier: Apache-2.0
"""The command `visalign sample`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, echo

from visalign.errors import UserError, excerpt

from .options import MOST_COUNTED, Device, MapColumns, Repeated

Loras = Annotated[Repeated, Option(help="LoRA: a run, its folder lora or .safetensors; PATH:0.8 weights it. Repeat.")]


def sample(
    prompts: Annotated[
        list[str], Argument(help="Prompts, or files of them (.txt, .csv, .jsonl ...), hf://owner/name.")
    ],
    output: Annotated[Path, Option("--output", "-o", help="Output folder (must not exist).")],
    model: Annotated[
        str, Option("--model", "-m", help="Packaged model, folder, hub id, or .safetensors file.")
    ] = "shapes-sd3",
    config: Annotated[str | None, Option(help="With a file as model: diffusers folder of its family.")] = None,
    variant: Annotated[str | None, Option(help="Variant of the weights' files, such as fp16.")] = None,
    lora: Loras = None,
    columns: MapColumns = None,
    seeds: Annotated[str, Option(help="Seeds such as 0,1,2 or 0-7; one image per prompt and seed.")] = "0-3",
    steps: Annotated[
        int | None, Option(help="Denoising steps. Default: a run's own, else the pipeline's.", min=1, max=10_000)
    ] = None,
    solver: Annotated[
        str | None,
        Option(
            help="Solver: euler, or the second-order dpmpp_2m for 10 steps or more. Default: a run's own, else euler."
        ),
    ] = None,
    timestep_schedule: Annotated[
        str | None,
        Option(help="Noise levels: diffusers (the pipeline's) or plain. Default: a run's own, else diffusers."),
    ] = None,
    reward: Annotated[
        Repeated, Option("--reward", "-r", help="Reward that scores the images; repeat for several.")
    ] = None,
    best_of: Annotated[
        int, Option(help="Draws per seed, of which the best by -r is kept.", min=1, max=MOST_COUNTED)
    ] = 1,
    steer: Annotated[
        str | None, Option(help="Steps, such as 3,5,7, at which draws are resampled by -r (Feynman-Kac).")
    ] = None,
    search: Annotated[
        str | None, Option(help="Noise search by -r: zero_order, or paths (as many as --best-of).")
    ] = None,
    search_options: Annotated[
        Repeated, Option("--search-option", help="NAME=VALUE for the search, such as rounds=3; repeat.")
    ] = None,
    refine: Annotated[
        str | None,
        Option(
            help="Language model that makes prompts richer: adds its image to pairs, or to the worst and best by -r."
        ),
    ] = None,
    strength: Annotated[float, Option(help="With --steer: strength in the weights exp(strength * reward).")] = 10.0,
    device: Device = None,
    dtype: Annotated[str | None, Option(help="Data type: float32, bfloat16 or float16. Default: as stored.")] = None,
    batch_size: Annotated[int, Option(help="Images per batch.", min=1, max=MOST_COUNTED)] = 16,
    options: Annotated[
        Repeated,
        Option("--option", help="NAME=VALUE for the model: image_size=512, guidance=4.5 (default: a run's own)."),
    ] = None,
) -> None:
    """Sample images or videos into a folder, with a table for `visalign score`, a grid and a page."""
    from visalign.adapters.catalogue import edits_of, index_source, joins_sources
    from visalign.data.sets.columns import parse_map
    from visalign.data.sets.prompt_files import is_prompt_source, record_key
    from visalign.pipelines.sample.job import COST, GRID, PAGE, TABLE, SampleSettings, sample_images, search_of
    from visalign.pipelines.sample.triples import TRIPLES, load_pairs, sample_triples
    from visalign.pipelines.shared.parts import build_records
    from visalign.pipelines.shared.reward_options import parse_options
    from visalign.precision import default_device
    from visalign.rewards.catalogue import load_reward

    model_options: dict[str, Any] = parse_options(options or [])
    model_options |= {k: v for k, v in (("config", config), ("variant", variant)) if v is not None}
    if isinstance(model_options.get("image_size"), list):
        model_options["image_size"] = tuple(model_options["image_size"])
    searching = parse_options(search_options or [], "--search-option")
    if search_options and search is None:
        raise UserError(f"--search-option {search_options[0]} belongs to --search, which is not given.")
    choices: dict[str, Any] = {"best_of": best_of, "strength": strength, "steps": steps, "solver": solver}
    choices["timestep_schedule"] = timestep_schedule
    choices |= {"batch_size": batch_size, "dtype": dtype, "device": device or default_device()}
    settings = SampleSettings(
        model=model,
        adapter=model_options.pop("adapter", None),
        lora=lora or [],
        seeds=numbers(seeds),
        resample_after=[] if steer is None else numbers(steer, "--steer"),
        search=None if search is None else search_of(search, searching),
        options=model_options,
        **choices,
    )
    rewards = {name: load_reward(name, run_device=device) for name in dict.fromkeys(reward or [])}
    names, records = parse_map(columns or []), []
    pairs = load_pairs(prompts[0]) if refine is not None and len(prompts) == 1 else None
    for prompt in dict.fromkeys(prompts if pairs is None else ()):
        if not prompt.strip():
            raise UserError("A prompt is blank. Write what the image shows, or leave it out.")
        if is_prompt_source(prompt):
            family = index_source(model, settings.adapter, model_options.get("config")), settings.adapter
            edits, several = edits_of(*family), joins_sources(*family)
            records += build_records(prompt, "The prompts", edits=edits, several=several, names=names)
        else:
            records.append({"prompt": prompt})
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in records:  # files may overlap
        merged.setdefault(record_key(record), {}).update(record)
    records = list(merged.values())
    if refine is not None:
        triples = sample_triples(pairs or records, refine, settings, output, rewards=rewards)
        echo(f"{len(triples)} triples: {output / TRIPLES}, for visalign train-reward shapes_ict data.train=FILE.")
        return
    rows = sample_images(records, settings, output, rewards=rewards)
    files = f"{TABLE} for visalign score, {PAGE} and {GRID} to look at"
    cost = sum(row[COST] for row in rows)
    echo(f"{len(rows)} images in {output}: {files}. Denoising took {cost} forward-equivalents.")


def demo(
    model: Annotated[str, Option("--model", "-m", help="Packaged model, folder, or hub id.")] = "shapes-sd3",
    lora: Loras = None,
    steps: Annotated[
        int | None, Option(help="Denoising steps. Default: a run's own, else the pipeline's.", min=1, max=100)
    ] = None,
    device: Device = None,
    options: Annotated[Repeated, Option("--option", help="NAME=VALUE for the model: image_size=512.")] = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on.", min=1, max=65535)] = 7860,
) -> None:
    """Open a local page that samples from a prompt, with a slider for the strength of the LoRA.

    Needs the extra `demo` of visalign.
    """
    from visalign.pipelines.sample.demo import build_demo
    from visalign.pipelines.sample.job import SampleSettings
    from visalign.pipelines.shared.reward_options import parse_options
    from visalign.precision import default_device

    chosen = {"device": device or default_device(), "options": parse_options(options or [])}
    page = build_demo(SampleSettings(model=model, lora=lora or [], steps=steps, **chosen))
    echo(f"Ready on http://{host}:{port} (Ctrl-C ends it).", err=True)
    try:
        page.launch(server_name=host, server_port=port, quiet=True)
    except OSError as error:
        raise UserError(f"Port {port} of {host} cannot be used ({error}). Give another one with --port.") from error


def numbers(text: str, option: str = "--seeds") -> list[int]:
    """Parse a list of numbers such as 0,1,5 or 0-7."""
    values: list[int] = []
    for part in text.split(","):
        parsed = re.fullmatch(r"(\d{1,10})(?:-(\d{1,10}))?", part.strip())
        first, last = (int(parsed[1]), int(parsed[2] or parsed[1])) if parsed else (0, MOST_COUNTED)
        if first > last or last - first + len(values) >= MOST_COUNTED:
            raise UserError(f"{option} is {excerpt(text)}; give numbers from 0 up, such as 0,1,2 or 0-7.")
        values += range(first, last + 1)
    return values
