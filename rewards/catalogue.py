# SPDX-License-Identifier: Apache-2.0
"""Rewards by name, of images and of text: a dict each, and dotted paths for a user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from visalign import dotted_path
from visalign.errors import did_you_mean, nearest
from visalign.interfaces import PairwiseReward, PointwiseReward, TextReward, with_capabilities
from visalign.precision import check_device, default_device
from visalign.rewards.base.contract import RewardError

Entry = str | tuple[str, Mapping[str, Any]]
"""module:class, or that and its options, which a caller's override. A module is imported at its first use."""

CATALOGUE: dict[str, Entry] = {
    "shapes_verifier": "visalign.rewards.verifiers.shapes_verifier:ShapesVerifier",
    "clip_score": "visalign.rewards.scorers.clip_score:ClipScore",
    "pick_score": "visalign.rewards.scorers.pick_score:PickScore",
    "hps_v2": "visalign.rewards.scorers.hps_v2:HpsV2",
    "laion_aesthetic": "visalign.rewards.scorers.laion_aesthetic:LaionAesthetic",
    "image_reward": "visalign.rewards.scorers.image_reward:ImageReward",
    "mps": "visalign.rewards.scorers.mps:Mps",
    "iqa": "visalign.rewards.scorers.iqa:Iqa",
    "ict": "visalign.rewards.scorers.ict:Ict",
    "hp": "visalign.rewards.scorers.hp:Hp",
    "artefact": "visalign.rewards.scorers.hp:Artefact",
    "ict_hp": "visalign.rewards.scorers.ict_hp:IctHp",
    **{
        name: ("visalign.rewards.statistics:ImageStatistic", {"statistic": name})
        for name in ("brightness", "contrast", "saturation", "colourfulness", "edge_density")
    },
    "adversarial": "visalign.rewards.scorers.adversarial:Adversarial",
    "hpsv3": "visalign.rewards.hpsv3.judge:HPSv3",
    "visual_quality_r1": "visalign.rewards.questions.visual_quality_r1:VisualQuality",
    "edit_reward": "visalign.rewards.hpsv3.edit_reward:EditReward",
    "lora_ensemble": "visalign.rewards.hpsv3.ensemble_judge:LoraEnsembleReward",
    "reward_dance": "visalign.rewards.questions.reward_dance:RewardDance",
    "reward_dance_pairs": "visalign.rewards.questions.reward_dance:RewardDancePairs",
    "vqa_score": "visalign.rewards.questions.vqa:VqaScore",
    "q_align": "visalign.rewards.questions.q_align:QAlign",
    "soft_tifa": "visalign.rewards.questions.vqa:SoftTifa",
    "vision_reward": "visalign.rewards.questions.vision_reward:VisionReward",
    "heie": "visalign.rewards.heie.judge:Heie",
    "geneval": "visalign.rewards.verifiers.geneval:GenEval",
    "ocr": "visalign.rewards.verifiers.ocr:OcrReward",
    "jpeg_size": "visalign.rewards.statistics:JpegSize",
    "sharpness": "visalign.rewards.statistics:Sharpness",
    "vendi_gain": "visalign.rewards.scorers.set_gain:VendiGain",
    "frechet_gain": "visalign.rewards.scorers.set_gain:FrechetGain",
    "calibrated": "visalign.rewards.combine.calibrated:Calibrated",
    "corrected": "visalign.rewards.combine.calibrated:Corrected",
    "frames": "visalign.rewards.combine.frames:Frames",
    "video_align": "visalign.rewards.hpsv3.video_align:VideoAlign",
    "remote": "visalign.rewards.serve.client:RemoteReward",
    "unified_reward": "visalign.rewards.chat.unified_reward:UnifiedReward",
    "unified_reward_pairs": "visalign.rewards.chat.unified_reward_pairs:UnifiedRewardPairs",
    "lift": "visalign.rewards.chat.lift:Lift",
    "edit_score": "visalign.rewards.chat.edit_score:EditScore",
    "rational_rewards": "visalign.rewards.chat.rational_rewards:RationalRewards",
    "rubric": "visalign.rewards.chat.rubric:Rubric",
    "deepseek_grm": "visalign.rewards.chat.deepseek_grm:DeepSeekGRM",
    "yes_no_server": "visalign.rewards.chat.yes_no:YesNoServer",
}
"""Rewards and pairwise judges of images."""

_ANSWERS = "visalign.rewards.text.verifiable:VerifiableAnswer"

TEXT_CATALOGUE: dict[str, Entry] = {
    "exact_answer": (_ANSWERS, {"compare": "exact", "name": "exact_answer"}),
    "numeric_answer": (_ANSWERS, {"compare": "number", "extract": "last_number", "name": "numeric_answer"}),
    "boxed_answer": (_ANSWERS, {"compare": "math", "extract": "boxed", "normalise": "latex", "name": "boxed_answer"}),
    "list_answer": (_ANSWERS, {"compare": "list", "extract": "last_line", "name": "list_answer"}),
    "text_format": "visalign.rewards.text.format:TextFormat",
    "json_format": "visalign.rewards.text.format:JsonFormat",
    "task_answer": "visalign.rewards.text.verifiable:TaskAnswer",
    "length": "visalign.rewards.text.length:LengthReward",
    "repetition": "visalign.rewards.text.length:RepetitionPenalty",
    "random": "visalign.rewards.text.length:RandomReward",
    "rating": "visalign.rewards.text.rating:RatingReward",
    "verdict": "visalign.rewards.text.rating:VerdictReward",
    "spct": "visalign.rewards.text.rating:ScoresReward",
    "code_tests": "visalign.rewards.code.code_tests:CodeTests",
    "text_judge": "visalign.rewards.chat.text_judge:TextJudge",
    "text_grm": ("visalign.rewards.chat.text_judge:TextJudge", {"form": "list", "answers": 8}),
    "reward_model": "visalign.rewards.text.reward_model:RewardModel",
    "reward_fusion": "visalign.rewards.text.reward_fusion:RewardFusion",
    "process_reward": "visalign.rewards.text.process_reward:ProcessRewardModel",
    "ensemble": "visalign.rewards.text.combine:TextEnsemble",
    "environment": "visalign.rewards.text.environment:EnvironmentReward",
    "refusal": "visalign.rewards.text.format:Refusal",
    "tool_calls": "visalign.rewards.text.environment:ToolCalls",
    "constraints": "visalign.rewards.text.constraints:Constraints",
}
"""Rewards for text."""

_IMAGE_FUNCTION = "visalign.rewards.base.callables:FunctionReward"
_TEXT_FUNCTION = "visalign.rewards.text.callables:TextFunctionReward"
_DECLARED = ("name", "unit", "range", "higher_is_better", "score")


def summary(name: str, entry: Entry) -> str:
    """Return the first sentence about a reward, and the options that its name stands for.

    Example:
        >>> summary("sharpness", CATALOGUE["sharpness"])
        'Variance of the Laplacian; higher means more and harder edges (noise counts as edges, too).'
    """
    path, options = (entry, {}) if isinstance(entry, str) else entry
    sentence = " ".join((inspect.getdoc(find_target(path)) or name).split("\n\n")[0].split())
    preset = ", ".join(f"{key}={value}" for key, value in options.items() if key != "name")
    return sentence.split(". ")[0].rstrip(".") + "." + (f" ({preset})" if preset else "")


def load_reward(name: str, *, run_device: str | None = None, **options: Any) -> PointwiseReward:
    """Load a reward that scores one image at a time; arguments and errors are those of `load_judge`.

    Example:
        >>> load_reward("jpeg_size", quality=90).unit
        'kB'
    """
    reward = load_judge(name, run_device=run_device, **options)
    if isinstance(reward, PointwiseReward):
        return reward
    raise RewardError(
        f"{name!r} compares two images and gives no score of one. Use it where pairs are judged (compare, "
        "rank, Pref-GRPO), or score groups by win rates: visalign.rewards.as_pointwise(load_judge(...))."
    )


def load_judge(name: str, *, run_device: str | None = None, **options: Any) -> PointwiseReward | PairwiseReward:
    """Load a reward or pairwise judge by name or dotted path.

    Args:
        name: a name of the catalogue; `package.module:Name`; or `path/to/file.py:Name`. The latter two run
            the code that they name, a class or an object with the reward contract
            (`visalign.interfaces.PointwiseReward`), or a function in one of the forms of
            `visalign.rewards.base.callables`.
        run_device: where a judge that takes `device` runs unless its options say otherwise, such as "cuda:0".
            None: the GPU where there is one, else the CPU.
        **options: arguments of the class; for a function those of `FunctionReward` (unit, range, ...).
    """
    judge = _make("reward", name, CATALOGUE, options, run_device, _IMAGE_FUNCTION)
    if not isinstance(judge, PointwiseReward | PairwiseReward):
        raise _incomplete(name, judge, "reward", "PointwiseReward")
    judge = _with_options(judge, options)
    if options.get("max_tokens_per_batch") == "auto":
        _ = judge.identity  # some load at their first score, and a run measures the batches of loaded ones
    if judge.capabilities.takes_gpu_images and str(options.get("device", run_device)).startswith("cpu"):
        judge.capabilities = replace(judge.capabilities, takes_gpu_images=False)
    return judge


def load_text_reward(name: str, *, run_device: str | None = None, **options: Any) -> TextReward:
    """Load a reward for text by name or dotted path.

    As `load_judge`, with the names of `TEXT_CATALOGUE`, the contract `visalign.interfaces.TextReward`, and
    functions in the forms of `visalign.rewards.text.callables` (options: those of `TextFunctionReward`).

    Example:
        >>> load_text_reward("boxed_answer", after="</think>").unit
        '1 = correct'
    """
    reward = _make("text reward", name, TEXT_CATALOGUE, options, run_device, _TEXT_FUNCTION)
    if any(not hasattr(reward, key) for key in _DECLARED):
        raise _incomplete(name, reward, "text reward", "TextReward")
    if next(iter(inspect.signature(reward.score).parameters), "") == "images":
        raise RewardError(f"{name!r} judges images: its score() takes them first. Load it with load_reward.")
    return _with_options(reward, options)


def _with_options(reward: Any, options: Mapping[str, Any]) -> Any:
    """Declare what a reward leaves out; one without an identity is known by its options, see `reward_identity`."""
    with suppress(AttributeError, TypeError):  # slots
        loading_options = {name: value for name, value in options.items() if name != "device"}
        object.__setattr__(reward, "loading_options", loading_options)
    return with_capabilities(reward)


def _make(
    kind: str,
    name: str,
    catalogue: Mapping[str, Entry],
    options: Mapping[str, Any],
    run_device: str | None,
    function: str,
) -> Any:
    """Construct the class that a name stands for, or wrap its function by the class at `function`."""
    if name not in catalogue and ":" not in name:
        hint = did_you_mean(nearest(name, catalogue, limit=1))
        raise RewardError(
            f"There is no {kind} {name!r}. {hint}Allowed: {', '.join(catalogue)}, or module:Name, file.py:Name."
        )
    entry = catalogue.get(name, name)
    path, preset = (entry, {}) if isinstance(entry, str) else entry
    target, options = find_target(path), {**preset, **options}
    if isinstance(target, type):
        target, options = _construct(name, target, options, run_device), {}
    if callable(target) and not hasattr(target, "score") and not hasattr(target, "compare"):
        options = {"function": target, "name": name.rpartition(":")[2], **options}
        return _construct(name, find_target(function), options, run_device)
    if options:
        raise RewardError(
            f"{kind.capitalize()} {name!r} is an object, without options ({', '.join(options)}). Name its class."
        )
    return target


def _construct(name: str, kind: Callable[..., Any], options: dict[str, Any], run_device: str | None) -> Any:
    device, model = options.get("device"), options.get("model")
    if isinstance(model, str | Path) and (result := Path(model) / "judge").is_dir():  # of a run of train-reward
        options = {**options, "model": str(result)}
    if "device" in inspect.signature(kind).parameters:
        options = {"device": run_device or default_device(), **options}
    check_options(name, kind, options)
    if isinstance(device, str):
        check_device(device, RewardError)
    return kind(**options)


def _incomplete(name: str, reward: Any, kind: str, contract: str) -> RewardError:
    missing = ", ".join(key for key in _DECLARED if not hasattr(reward, key))
    remedy = f"Add these (visalign.interfaces.{contract} says what they are), or name a plain function."
    return RewardError(f"{name!r} is a {type(reward).__name__} without {missing}, so it is no {kind}. {remedy}")


def find_target(path: str) -> Any:
    """Import the object that `module:Name` or `file.py:Name` names."""
    return dotted_path.import_by_path(path, what="reward", error=RewardError)


def check_options(name: str, target: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse options that the constructor does not know, or that it lacks."""
    dotted_path.check_options(f"Reward {name!r}", target, options, RewardError)
