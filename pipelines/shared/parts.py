# SPDX-License-Identifier: Apache-2.0
"""From a configuration to objects: where policies, prompts, rewards and evaluation meet."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visalign.config import flatten
from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.prompt_files import load_prompts
from visalign.errors import UserError, excerpt, suggestion
from visalign.interfaces import PairwiseReward, PointwiseReward, TextReward
from visalign.rewards.base.identity import fingerprint as file_fingerprint
from visalign.rewards.base.images import load_images
from visalign.rewards.combine.routed import Routed, matches
from visalign.rewards.combine.uncertainty import UncertaintyUsed
from visalign.seeds import sample_seed
from visalign.versions import versions

from .sections import MachineConfig, RewardsConfig, RewardTerm, RunConfig, WeightSchedule

if TYPE_CHECKING:
    from accelerate import Accelerator

    from visalign.evaluation import HeldoutResult

Records = Sequence[Mapping[str, Any]]
T = TypeVar("T")

MOST_HELD_OUT = 100  # Prompts of a run's own that are held out where it names none
PATIENCE = timedelta(hours=12)
"""Time that processes wait for each other; a judge may take hours over the images of one process."""


def build_accelerator(config: Any, folder: Path) -> Accelerator:
    """Build device, processes (without CUDA on the CPU) and trackers; the model's `autocast` sets the precision."""
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.utils import gather_object, parse_flag_from_env

    from visalign.training.loop.machines import watch_machines
    from visalign.training.loop.processes import check_engine
    from visalign.training.loop.sharding import check_several

    run: RunConfig = config.run
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if getattr(run, "sharding", False):
        check_several(processes)
    engines = ("FSDP", "DEEPSPEED", "MEGATRON_LM")
    check_engine(kind for kind in engines if parse_flag_from_env(f"ACCELERATE_USE_{kind}"))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`log_with=")  # an error below
            accelerator = Accelerator(
                cpu=run.device == "cpu" or (processes > 1 and not torch.cuda.is_available()),
                mixed_precision="no",
                log_with=list(run.trackers) or None,
                project_dir=str(folder),
                kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
            )
    except ValueError as error:
        if not run.trackers:
            raise
        raise UserError(f"run.trackers is {run.trackers}: {error}") from error
    except torch.distributed.DistNetworkError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {str(error).splitlines()[0]}"
        remedy = "If the port is in use, give another: torchrun --master_port, accelerate launch --main_process_port."
        raise UserError(f"The processes cannot meet at {where} {remedy}") from error
    available = [str(tracker) for tracker in accelerator.log_with]  # accelerate drops those not installed
    if names := " ".join(name for name in run.trackers if name not in ("all", *available)):
        raise UserError(f"run.trackers names {names}, which is not installed: python -m pip install {names}.")
    if accelerator.num_processes > 1:
        watch_machines(accelerator)
        packages = {name: version for name, version in versions().items() if name != "platform"}  # kernels may differ
        check_alike(gather_object([{**flatten(asdict(config)), "--output": str(folder), **packages}]))
    return accelerator


def check_alike(processes: Sequence[Mapping[str, Any]]) -> None:
    """Refuse processes that were started with other settings or packages than the first."""
    first = processes[0]
    differing = [
        f"{name}: {first.get(name)!r} in process 0, {other.get(name)!r} in process {number}"
        for number, other in enumerate(processes)
        for name in sorted(first.keys() | other.keys())
        if first.get(name) != other.get(name)
    ]
    if differing:
        keys = "; ".join(differing[:6])
        raise UserError(f"The {len(processes)} processes of this run differ: {keys}. Start all with one command.")


def spread(accelerator: Accelerator, count: int, evaluate: Callable[..., HeldoutResult]) -> HeldoutResult:
    """Divide an evaluation of `count` items among all processes by its `share` (r, w); all get the whole result."""
    from accelerate.utils import gather_object

    from visalign.evaluation import joined

    rank, shares = accelerator.process_index, min(accelerator.num_processes, count)
    return joined(gather_object([evaluate(share=(rank, shares))] if rank < shares else []))


@contextmanager
def no_loading_bars() -> Iterator[None]:
    """Hide the libraries' loading bars and reports of new heads, which would break the run's own display."""
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    active = [log for log in (diffusers_logging, transformers_logging) if log.is_progress_bar_enabled()]
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    for log in active:
        log.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        for log in active:
            log.enable_progress_bar()


def load_classifier(kind: Any, folder: str, *, seed: int, hollow: bool, dtype: Any, **labels: Any) -> tuple[Any, Any]:
    """Load a model of a transformers class, a new head by the seed, and its tokenizer; `hollow`: without weights."""
    from transformers import AutoConfig, AutoTokenizer

    from visalign.adapters.causal_lm.loading import from_pretrained
    from visalign.rewards.weights.checkpoint_files import quiet_loading

    with quiet_loading(), no_loading_bars(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = from_pretrained(AutoTokenizer, folder)
        if not hollow:
            return from_pretrained(kind, folder, **labels, dtype=dtype), tokenizer
        with torch.device("meta"):
            config = from_pretrained(AutoConfig, folder, **labels)
            return kind.from_config(config, dtype=dtype, trust_remote_code=False), tokenizer


def load_terms(terms: Mapping[str, RewardTerm], load: Callable[..., Any], device: str | None) -> dict[str, Any]:
    """Load the rewards of a section by label, on the run's device where their options name no other."""
    for label, term in terms.items():  # most judges read their weights at the first score, after the model was loaded
        model = term.options.get("model")
        if isinstance(model, str) and model.startswith(("/", "./", "../")) and not Path(model).exists():
            raise UserError(f"The reward {label}: its option model is {model!r}, which does not exist. Correct it.")
    rewards = {label: load(term.name or label, run_device=device, **term.options) for label, term in terms.items()}
    for label, term in terms.items():
        if term.references:
            rewards[label] = _with_references(label, rewards[label], term)
    for label in (label for label, term in terms.items() if term.where):
        if not isinstance(rewards[label], PointwiseReward | TextReward):
            raise UserError(f"rewards.terms.{label}.where is set, and {label} only compares images. Leave it out.")
        rewards[label] = Routed(rewards[label], terms[label].where)
    return rewards


def _with_references(label: str, judge: Any, term: RewardTerm) -> Any:
    """Make a score against reference images of a pairwise judge."""
    from visalign.rewards.questions.reward_dance_reference import ReferenceReward

    key = f"rewards.terms.{label}.references"
    if not isinstance(judge, PairwiseReward):
        raise UserError(
            f"{key}: {judge.name} compares with no reference. Leave it out, or take reward_dance_pairs or its like."
        )
    if term.where:
        raise UserError(f"{key}: references are drawn for all prompts, and {label}.where chooses some. Leave one out.")
    assert term.references is not None
    return ReferenceReward(judge, value=term.references.value, name=judge.name)


def prompt_strata(records: Records, balance: bool) -> list[str] | None:
    """Return the tag (else the task) of each prompt, with data.balance, which gives each as many groups."""
    return [str(record.get("tag", record.get("task", ""))) for record in records] if balance else None


def first_routed(records: Records, term: RewardTerm) -> Mapping[str, Any]:
    """Return the first record that a reward is for; the first of all where it is for none."""
    return next((record for record in records if matches(record, term.where)), records[0])


def check_routes(terms: Mapping[str, RewardTerm], records: Records) -> None:
    """Refuse a reward that no record of data.train is for, and records that no optimized reward is for."""
    for label, where in ((label, term.where) for label, term in terms.items()):
        if any(matches(record, where) for record in records):
            continue
        name = next(iter(where))
        values = Counter(excerpt(record[name], 40) for record in records if name in record)
        listed = ", ".join(f"{value} ({count})" for value, count in values.most_common(8))
        fields = list(dict.fromkeys(name for record in records for name in record))
        missing = f"None has the field {name!r}. {suggestion(name, fields)}Their fields are {', '.join(fields)}."
        raise UserError(
            f"rewards.terms.{label}.where is {where}, which no record of data.train has. "
            f"{f'Their values of {name} are {listed}.' if values else missing}"
        )
    for end, when in enumerate(("at the start", "at the end")):
        optimized = [term.where for term in terms.values() if term.weights[end] > 0]
        unrewarded = [record for record in records if not any(matches(record, where) for where in optimized)]
        if optimized and unrewarded:
            count = f"{len(unrewarded)} of {len(records)} records of data.train"
            why = f"{when} of the run, as each has a where or a weight of 0"
            first = excerpt(dict(unrewarded[0]), 200)
            raise UserError(f"{count} have no reward {why}; the first is {first}. Add one, or drop them.")


def code_fingerprints(config: Any) -> dict[str, str]:
    """Hash the files of code (of rewards, adapters, tools) and of options that a configuration names, by its keys."""
    prints: dict[str, str] = {}
    for key, text in _texts(asdict(config)):
        module = text.rpartition(":")[0]
        code = module if module.endswith(".py") else vars(sys.modules.get(module, object)).get("__file__")
        if code or (".options." in key and os.path.isfile(text)):
            prints[key] = file_fingerprint(code or text)
    return prints


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of all texts and keys of nested mappings and lists; a label may name the reward."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping | list | tuple):
        for name, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            inner = f"{key}.{name}".lstrip(".")
            yield inner, str(name)
            yield from _texts(entry, inner)


def pointwise_only(judges: Mapping[str, Any], *, needed: Iterable[str] = ()) -> dict[str, Any]:
    """Select the judges that score single images; the `needed` labels must be among them."""
    pointwise = {label: judge for label, judge in judges.items() if isinstance(judge, PointwiseReward)}
    if missing := [label for label in needed if label not in pointwise]:
        raise UserError(
            f"{', '.join(missing)} only compares images. Take pipeline: pref_grpo, or rewards.terms.LABEL.references."
        )
    return pointwise


def weighted_sum(config: RewardsConfig, rewards: Mapping[str, Any], kind: Any) -> Any:
    """Build the weighted sum of loaded rewards, of the `kind` for images or for text."""
    terms, summands = config.terms, {}
    strengths = {label: term.strength for label, term in terms.items() if term.uncertainty == "advantage"}
    if strengths and kind.noun == "image":
        key = f"rewards.terms.{next(iter(strengths))}.uncertainty"
        raise UserError(f"{key} is advantage, which weighs texts only. Take weight or lower_bound.")
    for label, term in terms.items():
        reward, how = rewards[label], term.uncertainty
        if term.where and (term.bound is not None or how == "advantage"):
            key = f"rewards.terms.{label}.where"
            raise UserError(f"{key} chooses records, and its bound or uncertainty=advantage reads all. Leave one out.")
        if how not in ("none", "advantage"):  # the trainer weighs advantages itself
            reward = UncertaintyUsed(reward, how=how, strength=term.strength, reference=term.reference)
        summands[label] = reward, term.largest_weight
    fixed = {label: (term.mean, term.std) for label, term in terms.items()}
    return kind(
        summands,
        bounds={label: term.bound for label, term in terms.items() if term.bound is not None},
        schedules={label: t.weight.at for label, t in terms.items() if isinstance(t.weight, WeightSchedule)},
        advantage_weights=strengths,
        normalise=fixed if config.normalise == "fixed" else config.normalise,
        allow_mixed_units=config.allow_mixed_units,
        allow_missing=config.allow_missing,
    )


@contextmanager
def name_key(key: str) -> Iterator[None]:
    """Prefix user errors within the context by a configuration key."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}: {error}") from error


def build_records(source: str, key: str, **options: Any) -> Records:
    """Load prompt records by `load_prompts`; `key` is the setting that names the set or file."""
    with name_key(key):
        return check_texts(load_prompts(source, **options))


def check_texts(records: Records) -> Records:
    """Return the records if every prompt can be written as UTF-8."""
    for record in records:
        try:
            str(record["prompt"]).encode()
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            prompt = f"{record['prompt']!r:.80}"
            raise UserError(f"The prompt {prompt} holds half a character. Correct it or leave it out.") from error
    return records


def split_records(
    records: Sequence[T], share: float, seed: int, prompt_of: Callable[[T], Any] = itemgetter("prompt")
) -> tuple[list[T], list[T]]:
    """Split records by prompt into (trained, heldout); of two prompts or more at least one is held out."""
    keys = [json.dumps(prompt_of(record), sort_keys=True) for record in records]
    distinct = list(dict.fromkeys(keys))
    count = min(max(1, round(share * len(distinct))), len(distinct) - 1) if share else 0
    # by prompt, since a policy that learnt one completion to a prompt is better at telling its others apart
    order = np.random.default_rng(sample_seed(seed, "pairs", 0)).permutation(len(distinct))
    heldout, pairs = {distinct[i] for i in order[:count]}, list(zip(records, keys, strict=True))
    return [r for r, key in pairs if key not in heldout], [r for r, key in pairs if key in heldout]


def own_heldout(records: Sequence[Mapping[str, Any]], seed: int) -> tuple[Records, Records]:
    """Split a run's own prompts into (trained, held out): a tenth, at most 100; a single prompt is both."""
    trained, heldout = split_records(records, min(0.1, MOST_HELD_OUT / len(records)), seed)
    distinct = {json.dumps([r["prompt"], r.get("source")], default=str): r for r in heldout or trained}
    return trained, [*distinct.values()]  # a prompt of several stored pairs is evaluated once


class Row(NamedTuple):
    where: str  # The row in words, for messages
    prompt: str | None  # None: the set has no prompts
    images: tuple[str, ...]  # References, as `resolve_image` takes them


def read_images(references: Sequence[str], where: str) -> tuple[Tensor, ...]:
    batch = load_images([resolve_image(reference) for reference in references])
    for name, reason in zip(references, batch.reasons, strict=True):
        if reason is not None:
            raise UserError(f"The image '{name}' in {where} cannot be read: {reason}. Repair it or take the row out.")
    return tuple(image for image in batch.images if image is not None)


def check_images(rows: Iterable[Row], key: str) -> None:
    """Refuse rows with a file that begins like no image; `key` is the setting that names the set."""
    where = {reference: row.where for row in rows for reference in row.images if "://" not in reference}
    for reference, row in where.items():
        try:
            Image.open(reference).close()
        except (OSError, ValueError, Image.DecompressionBombError):
            with name_key(key):
                read_images([reference], row)  # raises with the reason


def run_device(run: MachineConfig) -> torch.device:
    """Return the device of a job of one process, which needs no accelerator."""
    return torch.device("cuda" if run.device == "auto" and torch.cuda.is_available() else "cpu")


def evenly_spaced(records: Sequence[T], limit: int | None) -> Sequence[T]:
    """Return at most `limit` records, evenly spaced over all, so that every category keeps its share."""
    if limit is None or limit >= len(records):
        return records
    return [records[i * len(records) // limit] for i in range(limit)]  # files are often sorted by category


def ends_by(run: Any, iteration: float | None = None) -> str:
    """Describe the limit that ends a run, given the seconds of an iteration where known."""
    count, limit = run.iterations, run.max_seconds
    if limit is None:
        return f"run.iterations = {count}"
    if iteration is None:
        return f"run.iterations = {count} or run.max_seconds = {limit:g}, whichever comes first"
    if iteration * count <= limit:
        return f"run.iterations = {count} (run.max_seconds = {limit:g} leaves time)"
    return f"run.max_seconds = {limit:g}, after about {math.ceil(limit / iteration)} of {count} iterations"
