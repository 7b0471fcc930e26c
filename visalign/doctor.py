# SPDX-License-Identifier: Apache-2.0
"""`python -m visalign doctor`: what is installed here and whether it works, to paste into an issue."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from visalign.data.assets import PACKAGED, assets_folder

from .versions import NEEDED, installed_version, visalign_version

_BROKEN = (ImportError, AttributeError, ValueError, TypeError, KeyError, RuntimeError, OSError)
"""Errors of a damaged installation; a check that raises one has failed."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Facts about the machine and the result of every check."""

    facts: dict[str, str]
    checks: dict[str, tuple[bool, str]]  # Name -> (passed, what works, or what is wrong and how to fix it)

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(passed for passed, _ in self.checks.values())

    @property
    def text(self) -> str:
        """Plain text, with ~ for the user's home folder, so that it can be shown to strangers."""
        lines = [f"{name + ':':<14}{fact}" for name, fact in self.facts.items()]
        lines += [f"{'PASS' if ok else 'FAIL'}  {name}: {detail}" for name, (ok, detail) in self.checks.items()]
        failed = sum(not passed for passed, _ in self.checks.values())
        lines.append(f"{failed} of {len(self.checks)} checks failed." if failed else "All checks passed.")
        return re.sub(re.escape(str(Path.home())) + r"(?![\w.-])", "~", "\n".join(lines))


def examine(assets: Path | None = None) -> Report:
    """Collect the facts and run the checks; `assets` is the folder of the packaged models, None for this one's."""
    checks = {
        "packages": _packages,
        "wings": _wings,
        "configurations": _configurations,
        **{f"model {name}": lambda name=name: _model((assets or assets_folder()) / name) for name in PACKAGED},
        "advantages": _advantages,
        "one SDE step": _sde_step,
        "verifier": _verifier,
    }
    results = {}
    for name, check in checks.items():
        try:
            results[name] = check()
        except _BROKEN as error:
            results[name] = False, f"{type(error).__name__}: {error}"
    facts = {
        "visalign": f"{visalign_version()} at {Path(__file__).resolve().parent}",
        "python": f"{platform.python_version()} at {sys.executable}",
        "platform": f"{platform.platform()}, {os.cpu_count()} CPU cores",
        "devices": _devices(),
        "packages": ", ".join(f"{name} {version}" for name in NEEDED if (version := installed_version(name))),
    }
    return Report(facts=facts, checks=results)


def _devices() -> str:
    try:
        import torch

        from visalign.precision import multiplies_bfloat16
    except _BROKEN as error:
        return f"unknown, torch cannot be imported: {error}"
    bf16 = "with" if multiplies_bfloat16(torch.device("cpu")) else "without"
    devices = [f"cpu ({torch.backends.cpu.get_cpu_capability()}, {bf16} bf16 arithmetic)"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    return "; ".join(devices)


def _packages() -> tuple[bool, str]:
    if missing := [name for name in NEEDED if installed_version(name) is None]:
        install = "Run: python -m pip install 'visalign[images]'; the core, judges of text and clients go without"
        return False, f"not installed: {', '.join(missing)}. {install}"
    return True, "all are installed"


def _wings() -> tuple[bool, str]:
    """Check that `visalign.rewards` and `visalign.pipelines` exist: links in a checkout, else folders."""
    for wing in ("rewards", "pipelines"):
        folder = Path(__file__).resolve().parent / wing
        if not folder.is_dir():
            return False, (
                f"'{folder}' should be a link to ../{wing}, and is none: editors will not find the wing. "
                f"Restore it: git config core.symlinks true && git checkout -- visalign/{wing}"
            )
    return True, "rewards and pipelines are found"


def _configurations() -> tuple[bool, str]:
    from .config import config_folder, list_configs

    return bool(list_configs()), f"{len(list_configs())} YAML files in '{config_folder()}'"


def _model(folder: Path) -> tuple[bool, str]:
    """Open the weights of a packaged model: a file that was cut short cannot be opened."""
    from safetensors import SafetensorError, safe_open

    weights = sorted(folder.rglob("*.safetensors")) if folder.is_dir() else []
    for file in weights:
        try:
            with safe_open(file, framework="numpy") as opened:
                opened.keys()
        except SafetensorError as error:
            return False, f"'{file}' is damaged ({error}). Install visalign again."
    return bool(weights), f"{len(weights)} weight files in '{folder}'"


def _advantages() -> tuple[bool, str]:
    import torch

    from visalign.core.advantages.group import group_advantages

    got = group_advantages(torch.tensor([1.0, 3.0, 7.0, 7.0]), torch.tensor([0, 0, 1, 1]), scale="none")
    return got.tolist() == [-1.0, 1.0, 0.0, 0.0], f"rewards 1, 3 | 7, 7 give {got.tolist()}"


def _sde_step() -> tuple[bool, str]:
    import torch

    from visalign.flow.transitions import sde_step

    x, v, noise = torch.randn(3, 4, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    step = sde_step(x, v, 0.8, 0.7, schedule="flow", noise_level=0.7)
    x_next = step.sample(noise).bfloat16()
    new = []
    for i in range(4):  # a replay in batches of one
        row = sde_step(x[i : i + 1], v[i : i + 1], 0.8, 0.7, schedule="flow", noise_level=0.7)
        new.append(row.log_prob(x_next[i : i + 1], log_prob_reduction="sum"))
    old = step.log_prob(x_next, log_prob_reduction="sum")
    worst = float((torch.cat(new) - old).exp().sub(1).abs().max())
    return worst < 1e-3, f"ratio 1 under replay, within {worst:.0e}"


def _verifier() -> tuple[bool, str]:
    import numpy as np

    from visalign.data.shapes.prompts import parse_prompt
    from visalign.data.shapes.render import render
    from visalign.data.shapes.scenes import sample_scene
    from visalign.data.shapes.verifier import verify

    record, other = parse_prompt("two red circles"), parse_prompt("three blue squares")
    image = render(sample_scene(record, np.random.default_rng(0), style="flat"))
    right, wrong = verify(np.stack([image, image]), [record, other])
    return right.correct and not wrong.correct, "tells two red circles from three blue squares"
