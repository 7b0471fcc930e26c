# SPDX-License-Identifier: Apache-2.0
"""The command `visalign`. Heavy modules are imported inside the command that needs them: --help is quick."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Exit, Option, Typer, echo

from visalign.errors import UserError
from visalign.versions import visalign_version

from . import options as opt
from .bench import bench
from .collect import collect
from .compare import agree, compare, rank
from .diagnose import diagnose
from .evaluate import evaluate
from .messages import user_messages
from .probe import probe_reward
from .sample import demo, sample
from .score import score

app = Typer(
    name="visalign",
    help="Align visual generation: train with rewards, score images, inspect the results.",
    epilog="Errors are shown without a traceback; set VISALIGN_TRACEBACK=1 to see it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # it prints local values, tokens of servers among them
    context_settings={"help_option_names": ["-h", "--help"]},
)

TRAIN, REWARD, EVALUATE, DATA, PROJECT = "Train", "Reward", "Evaluate", "Data", "Project"
"""Groups of commands in --help."""


def command(group: str, example: str, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a command of a group, with an example below its help."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        first_sentence = (function.__doc__ or "").split(". ")[0].strip().rstrip(".")
        options: Any = {"rich_help_panel": group, "epilog": f"Example: visalign {example}"}
        return app.command(name, cls=opt.Command, short_help=f"{first_sentence}.", **options)(function)

    return register


Output = Annotated[Path | None, Option("--output", "-o", help="Results folder. Default: a dated folder in runs/.")]
Resume = Annotated[bool, Option("--resume", help="Continue the run in the output folder.")]


def main() -> None:
    """Entry point of the installed command and of `python -m visalign`."""
    try:
        app(prog_name="visalign")
    finally:
        if processes := sys.modules.get("visalign.training.loop.runtime"):
            processes.end_processes()


def _version(show_version: bool) -> None:
    if show_version:
        echo(visalign_version())
        raise Exit


@app.callback()
def _options(
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Options before the command."""
    for stream in (sys.stdout, sys.stderr):  # file names may be no text, and terminals know not every letter
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@command(TRAIN, "quickstart --output runs/first")
def quickstart(
    overrides: opt.Overrides = None,
    output: Output = None,
    seed: Annotated[int, Option(help="Random seed.")] = 0,
) -> None:
    """Improve the packaged text-to-image model in a few minutes on a CPU, and show what changed."""
    changes = [f"seed={seed}", *(overrides or [])]
    _train("shapes_quickstart", changes, output, next_command=["visalign", "train", "shapes_flow_grpo"])


@command(TRAIN, "train shapes_flow_grpo optimizer.lr=1e-3 --output runs/flow")
def train(
    config: opt.Config = None,
    overrides: opt.Overrides = None,
    output: Output = None,
    resume: Resume = False,
    dry_run: opt.DryRun = False,
) -> None:
    """Run the job of a configuration file."""
    _train(*opt.config_and_overrides(config, overrides), output, resume=resume, dry_run=dry_run)


@command(REWARD, "train-reward shapes_hpsv3 data.train=pairs.jsonl --output runs/reward", "train-reward")
def train_reward(
    config: opt.Config = None,
    overrides: opt.Overrides = None,
    columns: opt.MapColumns = None,
    labels: opt.Labels = None,
    output: Output = None,
    resume: Resume = False,
    dry_run: opt.DryRun = False,
) -> None:
    """Train a reward model, of images or of texts, on pairs, rankings, votes or scores."""
    from visalign.data.sets.columns import parse_map

    config, overrides = opt.config_and_overrides(config, overrides)
    changes = [f"data.map.{ours}={json.dumps(theirs)}" for ours, theirs in parse_map(columns or []).items()]
    changes += [] if labels is None else [f"data.coding={json.dumps(labels)}"]
    pipelines = ("train_reward", "text_reward")
    _train(config, changes + overrides, output, resume=resume, dry_run=dry_run, pipelines=pipelines)


def _train(
    config: str,
    overrides: list[str],
    output: Path | None,
    *,
    resume: bool = False,
    dry_run: bool = False,
    pipelines: Sequence[str] = (),
    next_command: Sequence[str] = (),
) -> None:
    from visalign.config import config_to_yaml
    from visalign.pipelines.jobs import load_job
    from visalign.pipelines.shared.run_folder import output_folder, resume_command
    from visalign.rewards.weights.checkpoint_files import quiet_loading

    from .show import show_plan, show_summary, show_yaml

    console = Console()
    folder = Path() if dry_run else output_folder(output, Path(config).stem, resume=resume)  # before loading
    job = load_job(config, overrides, pipelines=pipelines)
    if dry_run:
        show_yaml(console, config_to_yaml(job.config))
        show_plan(console, job.plan(job.config))
        return
    with user_messages(resume=resume_command(config, overrides, folder), folder=folder), quiet_loading():
        summary = job.run(job.config, output=folder, resume=resume)
    if int(os.environ.get("RANK", "0")) == 0:
        show_summary(console, folder, summary, next_command or summary.next_command)


@command(TRAIN, "init MODEL_FOLDER --output mine.yaml")
def init(
    model: Annotated[str, Argument(help="Model: a folder of diffusers or transformers, a hub id, a packaged name.")],
    images: Annotated[str | None, Option(help="Images with captions, to fine-tune on instead of a reward.")] = None,
    prompts: Annotated[str | None, Option(help="Prompts of an image model's samples. Default: packaged.")] = None,
    memory: Annotated[
        float | None, Option(help="Memory of the device in GB. Default: this GPU's, else 24.", min=0.1, max=1e6)
    ] = None,
    output: Annotated[Path, Option("--output", "-o", help="YAML file to write.")] = Path("visalign.yaml"),
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a configuration for a model, by looking at its files, and check it as `visalign plan` does."""
    from visalign.atomic import write_atomic
    from visalign.pipelines.shared.run_folder import new_file
    from visalign.pipelines.start import draft_config

    new_file(None if overwrite and not output.is_dir() else output, endings=(".yaml",))
    with opt.clean_output():
        text = draft_config(model, images=images, prompts=prompts, memory=memory)
    write_atomic(output, text)
    echo("\n".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#")))
    echo(f"{output}: change it, then visalign plan {output}; visalign train {output}.")


@command(TRAIN, "plan sd35_flow_grpo rollout.group_size=16 --images 100000")
def plan(
    config: opt.Config = None,
    overrides: opt.Overrides = None,
    processes: Annotated[
        int | None, Option(min=1, max=opt.MOST_COUNTED, help="Number of devices; memory is reported per device.")
    ] = None,
    images: Annotated[
        int | None, Option(min=1, help="Plan as many iterations as draw this many images, in place of run.iterations.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Estimate a run without loading its model: memory, forward-equivalents, hours by device.

    Hours are from shares of a device's peak that were measured; the plan says which.
    """
    if processes is not None:
        os.environ["WORLD_SIZE"] = str(processes)  # as torchrun says it
    from visalign.pipelines.jobs import load_job, until_images

    from .show import show_plan

    job = load_job(*opt.config_and_overrides(config, overrides))
    if images is not None:
        job = until_images(job, images)
    with opt.clean_output():
        estimate = job.estimate(job.config)
    opt.print_result(estimate, show_plan, as_json)


@command(TRAIN, "watch runs/flow")
def watch(
    runs: Annotated[list[Path], Argument(help="Run folders, or a folder of run folders.")],
    port: Annotated[int, Option(help="Port to listen on.", min=1, max=65535)] = 8090,
) -> None:
    """Show runs on a local page while they train: curves, sample grids, state. It reloads by itself."""
    from visalign.pipelines.watch import serve_page

    with suppress(KeyboardInterrupt):
        serve_page(runs, port=port, on_ready=lambda url: echo(f"Watch at {url} (Ctrl-C ends the page).", err=True))


command(TRAIN, "sample 'a red circle' --lora runs/flow/lora --output drawn")(sample)
command(TRAIN, "demo --lora runs/flow/lora")(demo)


@command(TRAIN, "export-lora runs/flow --output flow.safetensors", "export-lora")
def export_lora(
    run: Annotated[Path, Argument(help="Run folder, or the folder of its LoRA.")],
    output: Annotated[Path, Option("--output", "-o", help="Output .safetensors file (must not exist).")],
    model: Annotated[
        str | None, Option("--model", "-m", help="Model that the LoRA is for. Default: the run's.")
    ] = None,
) -> None:
    """Write a run's LoRA for ComfyUI and A1111; diffusers reads the run's own file."""
    from visalign.adapters.catalogue import family_name, index_source
    from visalign.adapters.pipeline.lora_export import export_lora as export
    from visalign.pipelines.shared.run_folder import model_of, new_file

    new_file(output, endings=(".safetensors",))
    if (run / "model").is_dir() and not (run / "lora").is_dir():
        raise UserError(f"{run} trained the whole model, so it has no LoRA. Load {run / 'model'} itself.")
    path, config = (model, None) if model else model_of(run)
    family = None
    with suppress(*(() if model else (ValueError, OSError))):  # the run's model may be on another machine
        family = path and family_name(index_source(path, config=config))
    for file, layers in export(run, output, family).items():
        echo(f"{layers} layers for ComfyUI{f' ({family})' if family else ''}: {file}")


@command(TRAIN, "push runs/flow me/flow-lora --license apache-2.0")
def push(
    run: Annotated[Path, Argument(help="Run folder.")],
    name: Annotated[str, Argument(help="Name on the hub: owner/name.")],
    license: Annotated[str | None, Option(help="Licence, such as apache-2.0. Default: the base model's.")] = None,
    private: Annotated[bool, Option("--private", help="Make a new repository private.")] = False,
    dry_run: opt.DryRun = False,
) -> None:
    """Upload a run's result and its model card to the Hugging Face hub.

    With --dry-run the card is written and the files are listed, without network.
    """
    from visalign.pipelines.shared.model_card import check_name, check_push, push_run, result_of, write_card

    result_of(run)
    check_name(name)
    if dry_run:
        folder = write_card(run, license=license, repo=name)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        echo(f"Would be uploaded to {name}, {sum(file.stat().st_size for file in files) / 1e6:.1f} MB:")
        echo("\n".join(f"  {file}" for file in files))
        return
    check_push(name, then=f"To see what would be uploaded: visalign push {run} {name} --dry-run.")
    echo(f"Uploaded to {push_run(run, name, license=license, private=private)}.")


command(REWARD, "score images/ -r hpsv3 -r clip_score --output scores.jsonl")(score)
command(REWARD, "compare a.png b.png -r hpsv3 --prompt 'a red circle'")(compare)
command(REWARD, "rank images/ -r hpsv3 --prompt 'a red circle'")(rank)


@command(REWARD, "serve-reward hpsv3 --port 8000", "serve-reward")
def serve_reward(
    reward: Annotated[str, Argument(help="Name of a reward, module:Name or file.py:Name.")],
    options: opt.Options = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    token_env: Annotated[
        str | None, Option(help="Environment variable with the token that clients must send.")
    ] = None,
    max_batch: Annotated[int, Option(help="Images scored together.", min=1, max=opt.MOST_COUNTED)] = 64,
    timeout: Annotated[float, Option(help="Time limit per batch, in seconds.", min=1.0, max=1e6)] = 120.0,
    threads: Annotated[int | None, Option(help="CPU threads of the reward.", min=1, max=1_024)] = None,
    memory: Annotated[
        float | None, Option(help="Memory for requests and scoring in GiB. Default: half of the free memory.", min=0.0)
    ] = None,
    max_pixels: Annotated[int | None, Option(help="Pixels scored together. Default: from the memory.", min=1)] = None,
    max_connections: Annotated[int, Option(help="Maximum number of connections.", min=1, max=opt.MOST_COUNTED)] = 256,
) -> None:
    """Serve a reward over HTTP. Clients use it as the reward `remote` with the option url."""
    from visalign.pipelines.serve_reward import serve_reward as serve
    from visalign.pipelines.shared.places import say_place
    from visalign.pipelines.shared.reward_options import parse_options

    def ready(limits: Any) -> None:
        pixels, size = limits.max_pixels / 1e6, limits.max_total_bytes / 2**20
        address = f"Ready on http://{host}:{port} (Ctrl-C ends it)"
        echo(f"{address}: {pixels:.0f} megapixels at once, {size:.0f} MiB under way.", err=True)

    echo(f"Loading {reward}.", err=True)
    listening = {"host": host, "port": port, "token_env": token_env, "max_connections": max_connections}
    limits = {"max_batch": max_batch, "timeout": timeout, "memory": memory, "max_pixels": max_pixels}
    chosen = parse_options(options or [])
    hooks = {"on_ready": ready, "on_load": partial(say_place, reward, chosen)}
    serve(reward, chosen, threads=threads, **hooks, **listening, **limits)


command(EVALUATE, "evaluate pairs.jsonl -r hpsv3 -r clip_score --output agreement")(evaluate)
command(EVALUATE, "bench shapes-sd3 runs/flow --suite world --output runs/bench")(bench)
command(EVALUATE, "agree shapes:pairs --limit 200 -r clip_score -r saturation --output agree")(agree)
command(EVALUATE, "probe-reward clip_score --count 64 --output probe")(probe_reward)
command(EVALUATE, "diagnose runs/text --samples 32")(diagnose)
command(DATA, "collect votes.sqlite drawn_by_a drawn_by_b")(collect)


@command(PROJECT, "doctor")
def doctor() -> None:
    """Check this installation and print what to paste into an issue."""
    from visalign.doctor import examine

    report = examine()
    echo(report.text)
    raise Exit(0 if report.passed else 1)


@command(PROJECT, "configs --family sd3.5 --search guard")
def configs(
    name: Annotated[str | None, Argument(help="Configuration to show as YAML.")] = None,
    family: Annotated[str | None, Option(help="Only of this model family: sd3.5, flux, shapes, text.")] = None,
    algorithm: Annotated[str | None, Option(help="Only with this algorithm: flow_grpo, nft, ppo.")] = None,
    search: Annotated[str | None, Option(help="Only with these words in name or description.")] = None,
) -> None:
    """List the packaged configurations, or show one."""
    from visalign.config import resolve_config

    from .show import show_configs, show_yaml

    if name is None:
        show_configs(Console(), family, algorithm, search)
    else:
        show_yaml(Console(), resolve_config(name).read_text(encoding="utf-8"))


@command(PROJECT, "rewards")
def rewards() -> None:
    """List the rewards by name."""
    from .show import show_rewards

    show_rewards(Console())


@command(PROJECT, "probes")
def probes() -> None:
    """List the probes of probe-reward."""
    from .show import show_probes

    show_probes(Console())
