# SPDX-License-Identifier: Apache-2.0
"""Published image algorithms that are settings here, or have another name."""

from __future__ import annotations

import re
from contextlib import suppress

from visalign.core.objective.algorithms import NAMED
from visalign.core.objective.decisions import check_decisions
from visalign.core.regression.ascents import ASCENTS
from visalign.core.regression.few_step import FEW_STEP
from visalign.core.regression.rows import REGRESSIONS
from visalign.errors import suggestion

_FLOW = "objective.algorithm=flow_grpo"
_BY_SAMPLE_STD = "'objective.changes.advantage_options={scale: group, ddof: 1, eps: 1.0e-8}'"
_MIX = f"{_FLOW} {_BY_SAMPLE_STD} rollout.sde_window=4 rollout.sde_window_order=progressive"
_BY_GROUP = f"{_FLOW} objective.changes.kl=0 objective.changes.advantage_options.scale=group"

PUBLISHED: dict[str, tuple[str, str]] = {
    "mix_grpo": (_MIX, "MixGRPO, arXiv 2507.21802; `flux1_mix_grpo` is a whole configuration"),
    "mix_grpo_flash": (
        f"{_MIX} rollout.ode_compression=0.4 rollout.solver=dpmpp_2m",
        "MixGRPO-Flash, arXiv 2507.21802; the header of `flux1_mix_grpo` has its settings",
    ),
    "flow_grpo_fast": (
        f"{_FLOW} rollout.sde_window=2 rollout.sde_window_order=random",
        "Flow-GRPO-Fast, arXiv 2505.05470; `sd35_flow_grpo_fast` is a whole configuration",
    ),
    "dance_grpo": (
        f"{_FLOW} objective.changes.kl=0 {_BY_SAMPLE_STD} rollout.schedule=dance rollout.noise_level=0.3 "
        "rollout.shared_noise=true",
        "DanceGRPO, arXiv 2505.07818; `flux1_dance_grpo` is a whole configuration",
    ),
    **dict.fromkeys(
        ("flow_cps", "cps"),
        (
            f"{_FLOW} rollout.schedule=cps rollout.noise_level=0.8",
            "Flow-CPS, arXiv 2509.05952; `sd35_flow_cps` is a whole configuration",
        ),
    ),
    "precise": (
        f"{_FLOW} rollout.schedule=precise rollout.noise_level=1.5",
        "the sampler of arXiv 2605.23522; the header of `sd35_flow_cps` has its settings",
    ),
    "flash_grpo": (
        f"{_FLOW} objective.changes.step_weight=inverse_gradient rollout.sde_window=1 rollout.schedule=linear "
        "rollout.noise_level=1",
        "Flash-GRPO, arXiv 2605.15980; `wan_flash_grpo` is a whole configuration",
    ),
    "tempflow_grpo": (
        f"{_FLOW} objective.changes.step_weight=std rollout.sde_window=1 rollout.shared_noise=true",
        "TempFlow-GRPO, arXiv 2508.04324: paths of a prompt part at one step",
    ),
    "uni_grpo": (
        "objective.algorithm=grpo_guard 'objective.changes={kl: 0.01, kl_form: velocity}' model.guidance=1",
        "the image part of UniGRPO, arXiv 2603.23500: no guidance, normed ratio, KL of velocities",
    ),
    "sol_rl": (
        "objective.algorithm=diffusion_nft 'rollout.scout={pool: 96, steps: 6}' rollout.group_size=24",
        "Sol-RL, arXiv 2604.06916, with any regression at noised end points",
    ),
    "ddpo": (
        f"{_BY_GROUP} rollout.schedule=ddim rollout.noise_level=1.0",
        "DDPO, arXiv 2305.13301, with groups; `sd15_ddpo` is a whole configuration",
    ),
    "tp_grpo": (
        f"{_FLOW} objective.credit=turning_points",
        "TP-GRPO, arXiv 2602.06422; `sd35_tp_grpo` is a whole configuration",
    ),
    "branch_grpo": (
        f"{_FLOW} objective.credit=branches 'rollout.branch={{at: [0, 2], children: 2}}'",
        "BranchGRPO, arXiv 2509.06040; `flux1_branch_grpo` is a whole configuration",
    ),
    "marble": (
        f"{_FLOW} objective.balance_every=10",
        "MARBLE, arXiv 2605.06507, of several rewards; also with diffusion_nft, as `sd35_marble` has it",
    ),
    "gardo": (
        f"{_FLOW} objective.reset_reference_every=100",
        "the moving reference of GARDO, arXiv 2512.24138; with any algorithm that has a KL term",
    ),
    "nft": (
        "objective.algorithm=diffusion_nft",
        "DiffusionNFT, arXiv 2509.16117; `sd35_diffusion_nft` is a whole configuration",
    ),
    "raft": ("objective.algorithm=rejection", "RAFT, arXiv 2304.06767"),
    "rwr": ("objective.algorithm=reward_weighted", "arXiv 2302.12192"),
    "dpo": (
        "objective.algorithm=diffusion_dpo",
        "Diffusion-DPO, arXiv 2311.12908, of stored pairs with data.pairs=FILE rollout.group_size=2, else online; "
        "`sd35_diffusion_dpo` is a whole configuration; online_dpo is DPO on log-probs of steps",
    ),
    "best_of_n": (
        "objective.algorithm=rejection objective.changes.signal_options.share=0.01",
        "learns from the best image of each group; without training: `visalign sample --best-of N`",
    ),
}
"""Name -> (overrides as on the command line, description with the packaged configuration)."""


SUPPLIED = ("reference_reward", "log_z", "bundle", "entropy")
"""Fields of trajectories that the image trainers make for every algorithm that needs them."""


def image_algorithms() -> list[str]:
    """List every `objective.algorithm` that works on images."""
    names = []
    for name, row in NAMED.items():
        with suppress(ValueError):  # it means nothing on denoising steps
            check_decisions(row, "denoising_steps", name=name, available=["metric", *SUPPLIED])
            names.append(name)
    return [*names, *REGRESSIONS, *ASCENTS, *FEW_STEP]


def published_alternative(name: str) -> str:
    """Name what to set instead of an algorithm that does not exist, as sentences.

    >>> published_alternative("MixGRPO")  # doctest: +ELLIPSIS
    "It is settings here: objective.algorithm=flow_grpo ... (MixGRPO, arXiv 2507.21802; ..."
    """
    separators = re.compile("[-_ ]")
    for key, (overrides, description) in PUBLISHED.items():
        if separators.sub("", key) == separators.sub("", name.lower()):
            return f"It is settings here: {overrides} ({description})."
    names = image_algorithms()
    return f"{suggestion(name, names)}Choose one of: {', '.join(names)}."
