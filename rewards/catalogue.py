# SPDX-License-Identifier: Apache-2.0
"""Rewards by name: one dict, and dotted paths for a user's own classes, objects and functions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from visalign import dotted_path
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.rewards.base.contract import RewardError

CATALOGUE = {
    "shapes_verifier": "visalign.rewards.verifiers.shapes_verifier:ShapesVerifier",
    "clip_score": "visalign.rewards.scorers.clip_score:ClipScore",
    "pick_score": "visalign.rewards.scorers.pick_score:PickScore",
    "hps_v2": "visalign.rewards.scorers.hps_v2:HpsV2",
    "laion_aesthetic": "visalign.rewards.scorers.laion_aesthetic:LaionAesthetic",
    "image_reward": "visalign.rewards.scorers.image_reward:ImageReward",
    "ict": "visalign.rewards.scorers.ict:Ict",
    "hp": "visalign.rewards.scorers.hp:Hp",
    "ict_hp": "visalign.rewards.scorers.ict_hp:IctHp",
    "brightness": "visalign.rewards.statistics.image_statistics:Brightness",
    "contrast": "visalign.rewards.statistics.image_statistics:Contrast",
    "saturation": "visalign.rewards.statistics.image_statistics:Saturation",
    "colourfulness": "visalign.rewards.statistics.image_statistics:Colourfulness",
    "edge_density": "visalign.rewards.statistics.image_statistics:EdgeDensity",
    "hpsv3": "visalign.rewards.hpsv3.judge:HPSv3",
    "visual_quality_r1": "visalign.rewards.questions.visual_quality_r1:VisualQuality",
    "lora_ensemble": "visalign.rewards.hpsv3.ensemble_judge:LoraEnsembleReward",
    "reward_dance": "visalign.rewards.questions.reward_dance:RewardDance",
    "reward_dance_pairs": "visalign.rewards.questions.reward_dance_pairs:RewardDancePairs",
    "vision_reward": "visalign.rewards.questions.vision_reward:VisionReward",
    "heie": "visalign.rewards.heie.judge:Heie",
    "geneval": "visalign.rewards.verifiers.geneval:GenEval",
    "ocr": "visalign.rewards.verifiers.ocr:OcrReward",
    "jpeg_size": "visalign.rewards.statistics.jpeg_size:JpegSize",
    "sharpness": "visalign.rewards.statistics.sharpness:Sharpness",
    "calibrated": "visalign.rewards.combine.calibrated:Calibrated",
    "remote": "visalign.rewards.serve.client:RemoteReward",
    "unified_reward": "visalign.rewards.chat.unified_reward:UnifiedReward",
    "unified_reward_pairs": "visalign.rewards.chat.unified_reward_pairs:UnifiedRewardPairs",
    "lift": "visalign.rewards.chat.lift:Lift",
    "deepseek_grm": "visalign.rewards.chat.deepseek_grm:DeepSeekGRM",
    "yes_no_server": "visalign.rewards.chat.yes_no:YesNoServer",
}
"""name -> module:class. A module is imported when its reward is loaded."""


def load_reward(name: str, **options: Any) -> PointwiseReward:
    """The reward of that name, or the user's own; it scores one image at a time.

    Arguments, and errors besides the one below, are those of `load_judge`.

    Raises:
        RewardError: what was found only compares images.

    Example:
        >>> load_reward("jpeg_size", quality=90).unit
        'kB'
    """
    found = load_judge(name, **options)
    if isinstance(found, PointwiseReward):
        return found
    raise RewardError(
        f"{name!r} compares two images and gives no score of one. Use it where pairs are judged (compare, "
        "rank, Pref-GRPO), or score groups by win rates: visalign.rewards.as_pointwise(load_judge(...))."
    )


def load_judge(name: str, **options: Any) -> PointwiseReward | PairwiseReward:
    """The reward or pairwise judge of that name, or the user's own.

    Args:
        name: a name of the catalogue; `package.module:Name`; or `path/to/file.py:Name`. The latter two may
            name a class or an object with the reward contract (`visalign.interfaces.PointwiseReward`), or a
            function in one of the forms of `visalign.rewards.base.callables`.
        **options: arguments of the class; for a function those of `FunctionReward` (unit, range, ...).

    Returns:
        An object with the reward contract, or one that compares (`visalign.interfaces.PairwiseReward`).

    Raises:
        RewardError: unknown name, module or attribute; wrong options; or what was found is no reward.
    """
    if name not in CATALOGUE and ":" not in name:
        nearest = nearest_name(name, CATALOGUE)
        raise RewardError(
            f"There is no reward {name!r}.{nearest} Allowed: {', '.join(CATALOGUE)}, or your own as "
            "'package.module:Name' or 'path/to/file.py:Name'."
        )
    found = find_target(CATALOGUE.get(name, name))
    if isinstance(found, type):
        found = _construct(name, found, options)
    elif options and not inspect.isroutine(found):
        raise RewardError(
            f"Reward {name!r} is an object already, so it takes no options; given: {', '.join(options)}. "
            "Name its class instead."
        )
    if isinstance(found, PointwiseReward | PairwiseReward):
        return found
    missing = [
        key for key in ("name", "unit", "range", "higher_is_better", "score") if not hasattr(found, key)
    ]
    if callable(found) and not hasattr(found, "score"):
        return _wrap(name, found, options)
    raise RewardError(
        f"{name!r} is a {type(found).__name__} without {', '.join(missing)}, so it is no reward. Add these "
        "(visalign.interfaces.PointwiseReward says what they are), or name a plain function."
    )


def _wrap(name: str, function: Callable[..., Any], options: dict[str, Any]) -> PointwiseReward:
    from visalign.rewards.base.callables import FunctionReward

    options = {"name": name.rpartition(":")[2], **options}
    check_options(name, FunctionReward, {"function": function, **options})
    return FunctionReward(function, **options)


def find_target(path: str) -> Any:
    """The object that `module:Name` or `file.py:Name` names."""
    return dotted_path.named_object(path, what="reward", error=RewardError)


def _construct(name: str, kind: type, options: dict[str, Any]) -> Any:
    check_options(name, kind, options)
    return kind(**options)


def check_options(name: str, target: Callable[..., Any], options: dict[str, Any]) -> None:
    """Refuse options that the constructor does not know, or that it lacks."""
    dotted_path.check_options(f"Reward {name!r}", target, options, RewardError)


def nearest_name(given: str, allowed: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(allowed), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
