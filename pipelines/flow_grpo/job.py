# SPDX-License-Identifier: Apache-2.0
"""The Flow-GRPO job: evaluate, train, evaluate again, save the LoRA, write summary and report."""

from __future__ import annotations

import inspect
import json
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from visalign.adapters.catalogue import DRAWN_BY, OwnSampling, family_of, is_guided_by_call
from visalign.adapters.model_folder import pipeline_index
from visalign.adapters.pipeline.families import Family
from visalign.data.assets import PACKAGED, resolve_model
from visalign.data.sets.prompt_files import record_key
from visalign.evaluation import HeldoutResult
from visalign.model_files import read_object
from visalign.pipelines.shared.grids import SampleGrids
from visalign.pipelines.shared.job import PolicyRun, policy_run, result_folder, run_job
from visalign.pipelines.shared.parts import build_accelerator, evenly_spaced
from visalign.pipelines.shared.run_folder import BATCHES
from visalign.training.diffusion.samples import Stored
from visalign.training.loop.progress import POLICY_COLUMNS, SUPERVISED_COLUMNS

from .batches import find_batches, note_batches
from .config import FlowGRPOConfig, PrefGRPOConfig, SFTImagesConfig
from .encoded_cache import added_guidance, cached_latents, fill_prompts, open_prompts
from .inputs import Inputs, prepare
from .parts import build_drift, build_evaluator, build_policy, load_teacher, write_images
from .plan import estimate, plan
from .stored_pairs import stored_latents

__all__ = ["FlowGRPOConfig", "PrefGRPOConfig", "SFTImagesConfig", "estimate", "plan", "run"]


def _build(config: FlowGRPOConfig, output: Path) -> PolicyRun:
    accelerator = build_accelerator(config, output)
    inputs = prepare(config, accelerator.num_processes, str(accelerator.device))
    prompt_cache = open_prompts(config, [*inputs.records, *inputs.heldout], accelerator.device.type)
    policy = build_policy(config.with_batches().model, accelerator.device, config.seed, prompt_cache)
    notes = inputs.notes
    if prompt_cache is not None:
        notes = (*notes, fill_prompts(policy, prompt_cache, accelerator, added_guidance(config)))
    stored = read_object(output / BATCHES) if (output / BATCHES).is_file() else {}
    batches = find_batches(config, policy, inputs, accelerator, stored)
    measured = bool(stored) or accelerator.device.type == "cuda"
    config, notes = config.with_batches(batches), (*notes, *note_batches(batches, measured=measured))
    algorithm = _build_algorithm(config, policy, inputs, accelerator, output)
    rollout, evaluation, row = config.rollout, config.evaluation, config.objective.regression
    sampling = {"steps": rollout.steps, "timestep_schedule": rollout.timestep_schedule}
    measure = build_evaluator(evaluation, policy, inputs.rewards, accelerator=accelerator, **sampling)
    prompts = evenly_spaced(inputs.heldout, evaluation.prompts_on_the_way)
    sizes: dict[str, Any] = {"seed": evaluation.seeds[0], "columns": evaluation.grid}
    grids = SampleGrids(output=output, accelerator=accelerator, heldout=prompts, **sizes)
    features = inputs.features if accelerator.is_main_process else None  # the others do not have the file `before`
    drift = None if features is None else build_drift(features, output / "before.npz")

    def more_metrics(iteration: int, result: HeldoutResult) -> dict[str, float]:
        grids.keep(iteration, result)
        return {} if drift is None else drift(result)

    return policy_run(
        config,
        output,
        algorithm,
        measure=measure,
        heldout=inputs.heldout,
        more=more_metrics,
        notes=notes,
        recorded=config.rewards.recorded,
        optimized=[n for n in config.rewards.optimized if n in inputs.rewards] if config.rewarded else (),
        columns=POLICY_COLUMNS if config.rewarded or (row and not row.learns_alike) else SUPERVISED_COLUMNS,
        fingerprints=inputs.fingerprints,
        title=f"{config.objective.algorithm} on {config.model.path}",
        policy=policy,
        samples="images",
        load_code=load_code(config, output),
        next_command=sample_command(config, output, edits=any(len(record_key(r)) > 1 for r in inputs.heldout)),
        counts=_image_counts,
        heldout_trained_on=inputs.heldout_trained_on,
        grids=grids,
        batches=batches,
    )


run = partial(run_job, build=_build)


def _build_algorithm(config: FlowGRPOConfig, policy: Any, inputs: Inputs, accelerator: Any, output: Path) -> Any:
    from visalign.training import FewStepDistillation, FlowGRPO, RewardGradient, VelocityRegression

    objective = config.objective
    kind = VelocityRegression if objective.regression else RewardGradient if objective.ascent else FlowGRPO
    kind = FewStepDistillation if objective.few_step else kind
    keeps = config.rollout.keep_images and accelerator.is_main_process
    return kind(
        policy,
        inputs.reward,
        inputs.records,
        rollout=config.rollout,
        objective=objective,
        seed=config.seed,
        accelerator=accelerator,
        strata=inputs.strata,
        cycle=config.data.cycle,
        sharding=config.run.sharding,
        features=inputs.features,
        stored=_stored(config, policy, inputs.records[0]),
        caption_dropout=config.data.caption_dropout,
        dynamic=config.dynamic,
        references=inputs.references,
        self_imitation=config.self_imitation,
        keep_images=partial(write_images, output / "rollouts") if keeps else None,
        teacher=None if objective.teacher is None else load_teacher(objective.teacher, policy),
    )


def _stored(config: FlowGRPOConfig, policy: Any, first: Any) -> Stored | None:
    """Return what makes latents of stored images, None where the policy samples its own."""
    if not config.data.is_stored:
        return None
    latents = stored_latents(policy)
    if config.data.cache is not None:
        latents = cached_latents(latents, policy, config)
    latents(first["candidates"][:1])  # an adapter that cannot do it fails now and not after the first evaluation
    return latents


def _image_counts(c: Any) -> dict[str, float]:
    return {"images": c.samples, "forward_equivalents_per_image": c.forward_equivalents / max(1, c.samples)}


def sample_command(config: FlowGRPOConfig, output: Path, *, edits: bool = False) -> list[str]:
    """Build the `visalign sample` command whose images are as in the run's evaluation (but: `is_used_as_before`)."""
    model, result = config.model, str(result_folder(config, output))
    source = config.data.heldout or config.data.train
    has_sources = edits and Path(source).suffix not in (".txt", "")  # without them nothing can be edited
    prompts = [source, "--seeds", "0"] if has_sources else ["a red circle"]
    options, sampling, drawing = sampling_options(config), [], evaluation_drawing(config)
    files = {f"--{name}": options.pop(name) for name in ("config", "variant") if name in options}
    trained = [model.path, *chain(*files.items()), "--lora", result]
    weights = ["--model", *([result] if model.lora is None else trained)]
    if model.lora is None or Path(model.path).name not in PACKAGED or drawing["steps"] != OwnSampling().steps:
        sampling = ["--dtype", model.dtype]
        if not is_used_as_before(config):
            options.setdefault("guidance", None)
            sampling = ["--steps", str(drawing["steps"]), *sampling]
    for name, default in {"solver": "euler", "timestep_schedule": "diffusers"}.items():
        if drawing[name] != default:
            sampling += [f"--{name.replace('_', '-')}", drawing[name]]
    words = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    flags = [word for option in words for word in ("--option", option)]
    return ["visalign", "sample", *prompts, *weights, *sampling, *flags, "--output", str(output / "images")]


def is_used_as_before(config: FlowGRPOConfig) -> bool:
    """Return True of a guided model that learns stored images without guidance, and is evaluated likewise.

    Its pipeline's own steps and guidance keep their meaning.
    """
    model, evaluation = config.model, config.evaluation
    is_unset = (model.guidance, evaluation.guidance, evaluation.steps) == (None, None, None)
    return config.data.is_stored and is_unset and is_guided_by_call(model.path, model.described_by, model.adapter)


def evaluation_drawing(config: FlowGRPOConfig) -> dict[str, Any]:
    """Return the fields of `SampleSettings` under which images are drawn as in the run's evaluation."""
    drawing = {name: getattr(config.rollout, name) for name in ("steps", "timestep_schedule")}
    drawing |= {"solver": config.evaluation.solver, "dtype": config.model.dtype}
    return drawing if config.evaluation.steps is None else drawing | {"steps": config.evaluation.steps}


def sampling_options(config: FlowGRPOConfig) -> dict[str, Any]:
    """Return the options by which a model samples as in a run's evaluation, without those that are null."""
    model = config.model
    options = {name: getattr(model, name) for name in ("config", "variant", "adapter", "guidance")}
    chosen = {**model.options, **vars(model)}
    options |= {name: chosen[name] for name, default in DRAWN_BY.items() if chosen.get(name, default) != default}
    options |= {} if config.evaluation.guidance is None else {"guidance": config.evaluation.guidance}
    return {name: value for name, value in options.items() if value is not None}


def load_code(config: FlowGRPOConfig, output: Path) -> str:
    """Write Python that loads the result into diffusers, for the job's working directory, and `settings` of a call."""
    from visalign.adapters.pipeline.lora import loading_code
    from visalign.adapters.sd3.policy import T5_PARTS
    from visalign.adapters.single_file import holds_pipeline

    result, model = result_folder(config, output), config.model.described_by
    folder, path, adapter = (json.dumps(str(n)) for n in (result, config.model.path, config.model.adapter))
    if ":" in adapter:
        return (
            "from visalign.adapters import load_policy\n\n"
            f"policy = load_policy({path}, adapter={adapter})\n"
            f"policy.load({folder})  # not every adapter has it"
        )
    index, family = pipeline_index(model), family_of(model, None)
    assert family is not None
    kind, parts = ("ModularPipeline", "\npipe.load_components()") if family.modular else ("DiffusionPipeline", "")
    imports, code = [f"from diffusers import {kind}"], ""
    # diffusers refuses an SD3 without T5 that is not told so, and use_t5=false trained without it
    absent = [part for part in T5_PARTS if part in index and not (config.model.use_t5 and any(index[part]))]
    source = folder
    if config.model.lora is not None:
        source = f"resolve_model({path})"
        code = "\n" + loading_code(index["_class_name"], family.present(index), result)
        imports += ["from peft import PeftModel"] if "PeftModel" in code else []
        imports.append("from visalign.data.assets import resolve_model")
    arguments, load = [source, *(f"{part}=None" for part in absent)], "from_pretrained"
    if config.model.lora is not None and (file := Path(resolve_model(config.model.path))).is_file():
        arguments, network = [json.dumps(str(model)), *arguments[1:]], family.present(index)[0]
        kind, network_kind, described = index["_class_name"], index[network][1], f"config={arguments[0]}"
        imports[0] = f"from diffusers import {kind}"
        if holds_pipeline(file):
            arguments, load = [source, described, *arguments[1:]], "from_single_file"
        else:
            imports[0] += f", {network_kind}"
            read = f"{source}, {described}, subfolder={json.dumps(network)}"
            imports.append(f"\nnetwork = {network_kind}.from_single_file({read})")
            arguments.append(f"{network}=network")
    elif config.model.lora is not None and config.model.variant is not None:
        arguments.append(f"variant={json.dumps(config.model.variant)}")
    settings = "" if family.modular else f"\n\n{_call_settings(config, family, index['_class_name'])}"
    return "\n".join(imports) + f"\n\npipe = {kind}.{load}({', '.join(arguments)}){parts}{code}{settings}"


def _call_settings(config: FlowGRPOConfig, family: Family, kind: str) -> str:
    """Write the arguments of a pipeline's call that draw as the run's evaluation; the rest is the call's own."""
    import diffusers

    model, options = config.model, sampling_options(config)
    scale = options.get("guidance", family.off if family.usual is None else family.usual)
    settings: dict[str, Any] = {}
    if not is_used_as_before(config):
        settings["num_inference_steps"] = evaluation_drawing(config)["steps"]
        settings |= {} if family.scale == "-" else {family.scale: scale}
    guides = scale > family.off or is_used_as_before(config)
    negative = options.get("negative_prompt", family.negative if guides else None)
    settings |= {} if negative is None else {"negative_prompt": negative}
    if (size := model.image_size) is not None:
        height, width = (size, size) if isinstance(size, int) else size
        settings |= {"height": height, "width": width}
        if "max_area" in inspect.signature(getattr(diffusers, kind).__call__).parameters:
            settings["max_area"] = height * width
    if family.frames is not None:
        settings["num_frames"] = options.get("num_frames", family.frames)
    settings |= {name: options[name] for name in ("max_sequence_length",) if name in options}
    settings |= {**options.get("call", {}), **family.fixed}
    unset = "steps and guidance are the pipeline's own"
    about = unset if is_used_as_before(config) else "of the run's evaluation"
    return f"# {about}, for pipe(prompt, **settings)\nsettings = {settings!r}"
