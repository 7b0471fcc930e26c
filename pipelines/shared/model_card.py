# SPDX-License-Identifier: Apache-2.0
"""Model card of a run (README.md, images and a curve next to its weights), and its upload to the Hugging Face hub."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData, constants, get_token, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image
from yaml import YAMLError

from visalign.atomic import write_atomic
from visalign.data.assets import PACKAGED, resolve_model
from visalign.errors import UserError
from visalign.evaluation import HeldoutResult, load_heldout
from visalign.evaluation.pages.base import duration
from visalign.evaluation.pages.curves import known_curves, panels
from visalign.hub import go_offline_if_unreachable
from visalign.training.loop.metrics import read_metrics

from .parts import evenly_spaced
from .run_folder import resume_command
from .sections import check_license

CARD, CURVE, CONFIG, IMAGES = "README.md", "curve.svg", "config.yaml", "images"
RESULTS = ("lora", "model", "judge")  # Folders of a run that hold its result
HUB_ID = r"\w[\w.-]*/[\w.-]+"
Samples = list[tuple[str, str, str]]  # Prompt, image before, image after
SHOWN = 4
_STYLE = (
    "svg{background:#fff}text{font:14px sans-serif;fill:#555}.grid{stroke:#ddd}path{fill:none;stroke:#2563eb}"
    ".line{stroke-width:2.25}.raw{opacity:.4}.dot,.last{fill:#2563eb}"
)


def result_of(run: Path) -> Path:
    """Return the folder of a run's result; a run that has not ended has none."""
    if not (run / CONFIG).is_file():
        raise UserError(f"{run} is no run folder: it has no {CONFIG}. Give the folder that visalign train wrote.")
    folder = next((run / name for name in RESULTS if (run / name).is_dir()), None)
    if folder is None or not (run / "summary.json").is_file():
        again = resume_command(str(run / CONFIG), [], run)
        raise UserError(f"The run {run} has not ended, so it has no result. Finish it: {again}.")
    return folder


def write_card(run: Path, *, license: str | None = None, repo: str | None = None) -> Path:
    """Write the model card of a run that has ended; return the folder of its result, which holds the card.

    `license` None takes the one of the base model's card; `repo` is the name on the hub in the code that loads it.
    """
    folder = result_of(run)
    shutil.copyfile(run / CONFIG, folder / CONFIG)
    if folder.name == "judge":  # a trained reward writes a card of its own
        return folder
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    config = summary["config"]
    before, after = (load_heldout(run / f"{when}.npz") for when in ("before", "after"))
    samples = _save_images(before, after, folder)
    stated = config["run"].get("license") if license is None else check_license(license)
    fields: dict[str, Any] = base_model(config["model"]["path"])
    if stated is not None:
        fields = {key: value for key, value in fields.items() if key == "base_model"} | {"license": stated}
    algorithm = (config.get("objective") or {}).get("algorithm") or "supervised fine-tuning"
    is_lora, is_text = folder.name == "lora", bool(before.completions)
    if samples:
        fields["widget"] = [{"text": prompt, "output": {"url": image}} for prompt, _, image in samples]
    header = ModelCardData(
        library_name=("peft" if is_lora else "transformers") if is_text else "diffusers",
        tags=["visalign", algorithm.replace(" ", "-"), *(["lora"] if is_lora else [])],
        pipeline_tag="text-generation" if is_text else "text-to-image",
        **fields,
    )
    terms = (config.get("rewards") or {}).get("terms") or {}
    rewards = ", ".join(label for label, term in terms.items() if term.get("weight")) or "stored data"
    parent = fields.get("base_model") or Path(str(config["model"]["path"])).name
    kind = "LoRA" if is_lora else "fine-tuned model"
    written = rf"(?:[^\"'\n]*/)?{re.escape(run.absolute().name)}/{folder.name}(?=[\"'])"  # as the run named it
    code = re.sub(written, lambda _: repo or str(folder), summary.get("load_code", ""))
    if samples and not before.sources and re.search(r"^pipe\b", code, re.MULTILINE):
        call = f"pipe({json.dumps(samples[0][0])}{', **settings' if 'settings = ' in code else ''})"
        code += (
            f"\nvideo = {call}.frames[0]" if re.search("[\"']num_frames[\"']", code) else f"\nimage = {call}.images[0]"
        )
    licence = "No licence is stated (run.license, visalign push --license). Ask the owner before you use this model."
    if name := fields.get("license_name", fields.get("license")):
        licence = f"{name}, {'the licence of the base model' if stated is None else 'stated for this model'}."
    text = [
        f"---\n{header.to_yaml()}\n---\n",
        f"# {(repo or run.absolute().name).rpartition('/')[2]}\n",
        f"A {kind} of {parent}, trained with {algorithm} of visalign on {rewards}.\n",
        *_before_after(samples),
        *_results(summary),
        *_curve(run, folder),
        f"## Use\n\n```python\n{code}\n```\n",
        *_training(config, summary),
        f"## Licence\n\n{licence}\n",
    ]
    write_atomic(folder / CARD, "\n".join(text))
    return folder


def base_model(path: str) -> dict[str, Any]:
    """Return base_model and licence of a model for a card's header, as far as the machine knows them."""
    folder, entries, card = Path(resolve_model(path)), {}, None
    if Path(path).name in PACKAGED:
        return {"license": "apache-2.0"}
    if not folder.exists() and re.fullmatch(HUB_ID, path):
        entries["base_model"], card = path, try_to_load_from_cache(path, CARD)
    elif folder.is_dir():  # one file names neither
        card = folder / CARD
        if cached := re.search(r"models--([\w.-]+)--([\w.-]+)/snapshots", str(folder.absolute())):
            entries["base_model"] = "/".join(cached.groups())
        for index in ("model_index.json", "config.json"):
            if (folder / index).is_file():
                source = str(json.loads((folder / index).read_text(encoding="utf-8")).get("_name_or_path", ""))
                if re.fullmatch(HUB_ID, source) and not Path(source).exists():
                    entries["base_model"] = source
    if isinstance(card, str | Path) and Path(card).is_file():
        names = ("license", "license_name", "license_link") + (() if "base_model" in entries else ("base_model",))
        with suppress(ValueError, YAMLError):  # a README that is no card
            header = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
            entries |= {key: header[key] for key in names if header.get(key)}
    return entries


def _save_images(before: HeldoutResult, after: HeldoutResult, folder: Path) -> Samples:
    rows_after = {row: i for i, row in enumerate(after.image_index.tolist())}
    first: dict[str, tuple[int, int]] = {}
    for i, row in enumerate(before.image_index.tolist()):
        if row in rows_after:
            first.setdefault(before.prompts[row], (i, rows_after[row]))
    samples: Samples = []
    for number, (prompt, rows) in enumerate(evenly_spaced(list(first.items()), SHOWN)):
        (folder / IMAGES).mkdir(exist_ok=True)
        names = f"{IMAGES}/before_{number}.png", f"{IMAGES}/after_{number}.png"
        for name, result, row in zip(names, (before, after), rows, strict=True):
            Image.fromarray(result.images[row]).save(folder / name)
        samples.append((prompt, *names))
    return samples


def _before_after(samples: Samples) -> Iterator[str]:
    if samples:
        yield "| prompt | before | after |\n|---|---|---|"
        for prompt, *names in samples:
            cells = [" ".join(prompt.split()).replace("|", "\\|"), *(f"![image]({name})" for name in names)]
            yield f"| {' | '.join(cells)} |"
        yield "\nHeld-out prompts, the same seed before and after training.\n"


def _results(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of the held-out measures before and after, with intervals of the change."""
    before, after, changes = (summary.get(key) or {} for key in ("before", "after", "changes"))
    rows = [("accuracy", before.get("accuracy"), after.get("accuracy"), changes.get("accuracy"))]
    for label, reward in (before.get("rewards") or {}).items():
        later = (after.get("rewards") or {}).get(label) or {}
        change = (changes.get("rewards") or {}).get(label)
        rows.append((f"{label} ({reward.get('unit')})", reward.get("mean"), later.get("mean"), change))
    seeds = len(before.get("seeds") or ())
    yield f"## Results\n\nMeans over {before.get('prompts')} held-out prompts, seeds of each: {seeds}.\n"
    yield "| reward | before | after | change (95 % interval) |\n|---|---|---|---|"
    for label, first, last, change in rows:
        if first is not None and last is not None:
            interval = change and change.get("low") is not None
            span = f" ({change['low']:+.4g} to {change['high']:+.4g})" if change and interval else ""
            yield f"| {label} | {first:.4g} | {last:.4g} | {last - first:+.4g}{span} |"
    yield ""


def _curve(run: Path, folder: Path) -> Iterator[str]:
    """Write the curve of the held-out reward, or of the training reward; yield its line."""
    metrics = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    drawn, _ = panels(metrics, known_curves(metrics))
    panel = next((panel for panel in drawn if panel.curve.keys[0].startswith("heldout/")), next(iter(drawn), None))
    if panel is not None:
        svg = str(panel.svg).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
        write_atomic(folder / CURVE, svg.replace(">", f"><style>{_STYLE}</style>", 1))
        yield f"![{panel.curve.title}]({CURVE})\n\n{panel.curve.title} ({panel.curve.unit}) over the iterations.\n"


def _training(config: Mapping[str, Any], summary: Mapping[str, Any]) -> Iterator[str]:
    data, terms = config.get("data") or {}, (config.get("rewards") or {}).get("terms") or {}
    yield "## Training\n\n| | |\n|---|---|"
    yield f"| prompts | {Path(str(data.get('train'))).name}; held out: {Path(str(data.get('heldout'))).name} |"
    for label, term in terms.items():
        if isinstance(weight := term.get("weight"), Mapping):
            weight = "{start:g} to {end:g} over {iterations} iterations, {shape}".format_map(weight)
        weight = f"weight {weight}" if weight else "recorded only"
        yield f"| reward {label} | {Path(str(term.get('name') or label)).name}, {weight} |"
    yield f"| iterations | {summary.get('iterations')}, in {duration(summary.get('seconds') or 0.0)} |"
    yield f"| command | `visalign train {CONFIG}` with [{CONFIG}]({CONFIG}) |"
    versions = summary["versions"]
    names = [name for name in ("visalign", "torch", "diffusers", "transformers", "peft") if name in versions]
    yield f"| versions | {', '.join(f'{name} {versions[name]}' for name in names)} |\n"


def check_name(name: str) -> None:
    if not re.fullmatch(r"([\w][\w.-]*/)?[\w][\w.-]*", name):
        raise UserError(f"The name on the hub is {name!r}. Give owner/name, such as me/my-lora.")


def check_push(name: str, *, then: str) -> None:
    """Refuse an upload that cannot succeed: the name, the token, the network; `then` says how to upload later."""
    check_name(name)
    if not get_token():
        raise UserError(f"No token for {constants.ENDPOINT} is stored. Run `hf auth login`, or set HF_TOKEN. {then}")
    if reason := go_offline_if_unreachable():
        raise UserError(f"{constants.ENDPOINT} cannot be reached ({reason}). Connect to the network. {then}")


def push_run(run: Path, name: str, *, license: str | None = None, private: bool = False) -> str:
    """Write the model card and upload the result's folder; return its address."""
    folder, api = write_card(run, license=license, repo=name), HfApi()
    try:
        repo = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message="Upload with visalign")
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{name} was not uploaded ({reason}). Check that the token may write there: hf auth whoami."
        ) from error
    return str(repo)
