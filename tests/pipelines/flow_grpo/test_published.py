# SPDX-License-Identifier: Apache-2.0
"""Published names of algorithms that are settings here: each is answered, and what is answered loads."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from visalign.config import load_config, resolve_config
from visalign.core import ASCENTS, NAMED, REGRESSIONS
from visalign.errors import ConfigError, UserError
from visalign.pipelines.flow_grpo.config import FlowGRPOConfig
from visalign.training import DiffusionObjectiveSettings
from visalign.training.diffusion.published import PUBLISHED, image_algorithms

SAMPLE_STD = {"ddof": 1, "eps": 1e-8}
MIX = {"algorithm": "flow_grpo", "sde_window": 4, "sde_window_order": "progressive", **SAMPLE_STD}
FIELDS: dict[str, dict[str, Any]] = {
    "mix_grpo": MIX,
    "mix_grpo_flash": {**MIX, "ode_compression": 0.4, "solver": "dpmpp_2m"},
    "flow_grpo_fast": {"algorithm": "flow_grpo", "sde_window": 2, "sde_window_order": "random"},
    "dance_grpo": {"schedule": "dance", "noise_level": 0.3, "shared_noise": True, "kl": 0, "scale": "group"}
    | SAMPLE_STD,
    "flow_cps": {"schedule": "cps", "noise_level": 0.8},
    "cps": {"schedule": "cps", "noise_level": 0.8},
    "precise": {"schedule": "precise", "noise_level": 1.5},
    "flash_grpo": {"step_weight": "inverse_gradient", "sde_window": 1, "schedule": "linear", "noise_level": 1},
    "tempflow_grpo": {"step_weight": "std", "sde_window": 1, "shared_noise": True},
    "uni_grpo": {"algorithm": "grpo_guard", "kl": 0.01, "kl_form": "velocity"},
    "sol_rl": {"algorithm": "diffusion_nft", "group_size": 24, "scouts_per_image": 4},
    "ddpo": {"schedule": "ddim", "noise_level": 1.0, "kl": 0, "scale": "group"},
    "tp_grpo": {"algorithm": "flow_grpo", "credit": "turning_points"},
    "branch_grpo": {"credit": "branches", "at": [0, 2]},
    "marble": {"balance_every": 10},
    "gardo": {"reset_reference_every": 100},
    "nft": {"algorithm": "diffusion_nft"},
    "raft": {"algorithm": "rejection"},
    "rwr": {"algorithm": "reward_weighted"},
    "dpo": {"algorithm": "diffusion_dpo"},
    "best_of_n": {"algorithm": "rejection", "share": 0.01},
}
"""Name -> what a configuration has of it, wherever that stands."""


def _loaded(base: str, *overrides: str) -> FlowGRPOConfig:
    return load_config(FlowGRPOConfig, resolve_config(base), list(overrides))


def _has(config: FlowGRPOConfig, name: str) -> Any:
    objective, rollout = config.objective, config.rollout
    row: Any = objective.regression or objective.build(length=1)
    if name in ("scale", "ddof", "eps", "share"):
        options = row.signal_options if objective.regression else row.advantage_options
        return {"scale": "group", **options}[name]
    if name in ("kl", "kl_form", "step_weight"):
        return getattr(row, name)
    if name == "at":
        return rollout.branch and rollout.branch.at
    return getattr(objective if hasattr(objective, name) else rollout, name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_answered_to_a_published_name_loads(name: str) -> None:
    settings, what = PUBLISHED[name]
    with pytest.raises(ConfigError, match=re.escape(f"algorithm {name!r}. It is settings here: {settings}")):
        _loaded("shapes_flow_grpo", f"objective.algorithm={name}")
    is_regression = shlex.split(settings)[0].removeprefix("objective.algorithm=") in REGRESSIONS
    config = _loaded("shapes_nft" if is_regression else "shapes_flow_grpo", *shlex.split(settings))
    assert {key: _has(config, key) for key in FIELDS[name]} == FIELDS[name] and what


def _whole(name: str) -> list[str]:
    """Configurations that an answer names."""
    return re.findall(r"`(\w+)`", PUBLISHED[name][1])


@pytest.mark.parametrize("name", [name for name in PUBLISHED if _whole(name)])
def test_the_configuration_that_is_named_is_of_the_algorithm(name: str) -> None:
    (recipe,) = _whole(name)
    lines = resolve_config(recipe).read_text().splitlines()
    label = {"mix_grpo_flash": "# Flash: ", "precise": "# Precise: "}.get(name)
    settings = [line.removeprefix(label) for line in lines if label and line.startswith(label)]
    config = _loaded(recipe, *(shlex.split(settings[0]) if label else ()))
    own = {key: value for key, value in FIELDS[name].items() if key not in ("at", "algorithm")}
    assert {key: _has(config, key) for key in own} == own


@pytest.mark.parametrize(("name", "row"), [("MixGRPO", "mix_grpo"), ("best-of-n", "best_of_n")])
def test_a_published_name_is_known_however_it_is_written(name: str, row: str) -> None:
    with pytest.raises(UserError, match=re.escape(PUBLISHED[row][0])):
        DiffusionObjectiveSettings(algorithm=name)


def test_no_published_name_hides_a_row() -> None:
    assert not PUBLISHED.keys() & {*NAMED, *REGRESSIONS, *ASCENTS}


def test_the_list_of_rows_is_of_those_that_images_take() -> None:
    with pytest.raises(UserError, match=r"'diffusion-nft'\. Did you mean 'diffusion_nft'") as caught:
        DiffusionObjectiveSettings(algorithm="diffusion-nft")
    listed = str(caught.value).partition("Choose one of: ")[2].removesuffix(".").split(", ")
    assert listed == image_algorithms()
    for name in listed:
        DiffusionObjectiveSettings(algorithm=name, metric="sharpness" if name == "canon" else None)
    for name in NAMED.keys() - {*listed}:
        with pytest.raises(UserError, match="Take"):
            DiffusionObjectiveSettings(algorithm=name)
