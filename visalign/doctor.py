# SPDX-License-Identifier: Apache-2.0
"""`python -m visalign doctor`: what is installed here and whether it works, to paste into an issue."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from visalign.data.assets import PACKAGED, assets_folder

from .errors import UserError
from .versions import NEEDED, installed_version, visalign_version

OPTIONAL = ("wandb", "math-verify", "hypothesis", "ruff", "pyright")
"""Optional distributions."""

_BROKEN = (ImportError, AttributeError, ValueError, TypeError, KeyError, RuntimeError, OSError)
"""Errors of a damaged installation; a check that raises one has failed."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A check and its result."""

    name: str
    passed: bool
    detail: str
    """What works, or what is wrong and how to fix it."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Facts about the machine and the result of every check."""

    facts: tuple[tuple[str, str], ...]
    """(name, what was found)."""
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def text(self) -> str:
        """Plain text without the user's home folder in it."""
        lines = [f"{name + ':':<14}{what}" for name, what in self.facts]
        lines += [
            f"{'PASS' if check.passed else 'FAIL'}  {check.name}: {check.detail}" for check in self.checks
        ]
        failed = sum(not check.passed for check in self.checks)
        lines.append(f"{failed} of {len(self.checks)} checks failed." if failed else "All checks passed.")
        return hide_home("\n".join(lines))


def hide_home(text: str, home: Path | None = None) -> str:
    """Replace the home folder by ~, so that the text can be shown to strangers.

    Args:
        text: any text.
        home: the folder to hide; the user's own by default.

    >>> hide_home("/users/ada/x, /users/adam/y", Path("/users/ada"))
    '~/x, /users/adam/y'
    """
    prefix = str(home or Path.home()).rstrip("/\\")
    return re.sub(re.escape(prefix) + r"(?![\w.-])", "~", text) if prefix else text


def examine(assets: Path | None = None) -> Report:
    """Collect the facts and run the checks (two seconds, and what importing torch takes).

    Args:
        assets: folder of the packaged models; None for the one of this installation.

    Returns:
        The report; nothing is printed.
    """
    checks = [
        _run("packages", _packages),
        _run("wings", _wings),
        _run("configurations", _configurations),
        *(
            _run(f"model {name}", lambda name=name: _model((assets or assets_folder()) / name))
            for name in PACKAGED
        ),
        _run("advantages", _advantages),
        _run("one SDE step", _sde_step),
        _run("verifier", _verifier),
    ]
    return Report(facts=_facts(), checks=tuple(checks))


def _run(name: str, check: Callable[[], str]) -> Check:
    begun = time.perf_counter()
    try:
        detail, passed = check(), True
    except _BROKEN as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        detail, passed = f"{kind}{error}", False
    return Check(name=name, passed=passed, detail=f"{detail} ({time.perf_counter() - begun:.2f} s)")


def _facts() -> tuple[tuple[str, str], ...]:
    optional = [f"{name} {installed_version(name) or 'absent'}" for name in OPTIONAL]
    return (
        ("visalign", f"{visalign_version()} at {Path(__file__).resolve().parent}"),
        ("python", f"{platform.python_version()} at {sys.executable}"),
        ("platform", f"{platform.platform()}, {os.cpu_count()} CPU cores, {_memory()}"),
        *_torch_facts(),
        (
            "packages",
            ", ".join(f"{name} {installed_version(name)}" for name in NEEDED if installed_version(name)),
        ),
        ("optional", ", ".join(optional)),
        ("code sandbox", _sandbox()),
    )


def _sandbox() -> str:
    """Name the sandbox of generated code, or the reason for having none."""
    try:
        from visalign.rewards.code.sandbox import bubblewrap_problem

        return bubblewrap_problem() or "bubblewrap"
    except _BROKEN as error:
        return f"{error}"


def _torch_facts() -> tuple[tuple[str, str], ...]:
    try:
        import torch
    except _BROKEN as error:
        return (("devices", f"unknown, torch cannot be imported: {error}"),)
    devices = [f"cpu ({torch.backends.cpu.get_cpu_capability()}, {_cpu_bf16()})"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        has_bf16 = "with" if torch.cuda.is_bf16_supported() else "without"
        devices.append(
            f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB, {has_bf16} bf16"
        )
    if torch.backends.mps.is_available():
        devices.append("mps")
    return (("devices", "; ".join(devices)), ("threads", f"{torch.get_num_threads()} of torch"))


def _cpu_bf16() -> str:
    import torch

    from visalign.precision import multiplies_bfloat16

    return f"{'with' if multiplies_bfloat16(torch.device('cpu')) else 'without'} bf16 arithmetic"


def _memory() -> str:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return "memory unknown"
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB memory"


def _packages() -> str:
    missing = [name for name in NEEDED if installed_version(name) is None]
    if missing:
        raise UserError(
            f"not installed: {', '.join(missing)}. Run: python -m pip install 'visalign[images]'; the core, "
            "judges of text and clients go without"
        )
    return f"all {len(NEEDED)} needed are installed"


def _wings() -> str:
    """Check that `visalign.rewards` and `visalign.pipelines` exist: links in a checkout, else folders."""
    messages = []
    for wing, module in {"rewards": "base.contract", "pipelines": "cli.app"}.items():
        if importlib.util.find_spec(f"visalign.{wing}.{module}") is None:
            raise UserError(f"visalign.{wing} is incomplete. Install it again: python -m pip install -e .")
        folder = Path(__file__).resolve().parent / wing
        if not folder.is_dir():
            raise UserError(
                f"'{folder}' should be a link to ../{wing}, and is none: editors will not find the wing. "
                f"Restore it: git config core.symlinks true && git checkout -- visalign/{wing}"
            )
        messages.append(f"{wing} {'linked' if folder.is_symlink() else 'installed'}")
    return ", ".join(messages)


def _configurations() -> str:
    from .config import config_folder, list_configs

    names = list_configs()
    if not names:
        raise UserError(f"no YAML file in '{config_folder()}'. Install visalign again.")
    return f"{len(names)} in '{config_folder()}'"


def _model(folder: Path) -> str:
    """Presence and wholeness of a packaged model: a weight file that was cut short cannot be opened."""
    from safetensors import SafetensorError, safe_open

    weights = sorted(folder.rglob("*.safetensors")) if folder.is_dir() else []
    if not weights:
        raise UserError(f"no weights in '{folder}'. Install visalign again.")
    for file in weights:
        try:
            with safe_open(file, framework="numpy") as opened:
                opened.keys()
        except SafetensorError as error:
            raise UserError(f"'{file}' is damaged ({error}). Install visalign again.") from error
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"{size / 1e6:.1f} MB, {len(weights)} weight files"


def _advantages() -> str:
    import torch

    from visalign.core.advantages.group import group_advantages

    got = group_advantages(torch.tensor([1.0, 3.0, 7.0, 7.0]), torch.tensor([0, 0, 1, 1]), scale="none")
    if got.tolist() != [-1.0, 1.0, 0.0, 0.0]:
        raise UserError(f"rewards 1, 3 | 7, 7 gave {got.tolist()}, not -1, 1 | 0, 0. Report this.")
    return "centred per group, exactly zero where all are equal"


def _sde_step() -> str:
    import torch

    from visalign.flow.transitions import sde_step

    generator = torch.Generator().manual_seed(0)
    x, v, noise = torch.randn(3, 4, 8, 8, 8, generator=generator)
    step = sde_step(x, v, 0.8, 0.7, schedule="flow", noise_level=0.7)
    x_next = step.sample(noise).bfloat16()
    old = step.log_prob(x_next, log_prob_reduction="sum")
    rows = [
        sde_step(x[i : i + 1], v[i : i + 1], 0.8, 0.7, schedule="flow", noise_level=0.7) for i in range(4)
    ]
    new = torch.cat([row.log_prob(x_next[i : i + 1], log_prob_reduction="sum") for i, row in enumerate(rows)])
    worst = float((new - old).exp().sub(1).abs().max())
    if not worst < 1e-3:
        raise UserError(f"replayed one by one, a step's ratio is off 1 by {worst:.1e}. Report this.")
    return f"ratio 1 under replay, within {worst:.0e}"


def _verifier() -> str:
    import numpy as np

    from visalign.data.shapes.prompts import parse_prompt
    from visalign.data.shapes.render import render
    from visalign.data.shapes.scenes import sample_scene
    from visalign.data.shapes.verifier import verify

    record, other = parse_prompt("two red circles"), parse_prompt("three blue squares")
    image = render(sample_scene(record, np.random.default_rng(0), style="flat"))
    right, wrong = verify(np.stack([image, image]), [record, other])
    if not right.correct or wrong.correct:
        raise UserError(f"an image of two red circles: right is {right}, wrong is {wrong}. Report this.")
    return "tells two red circles from three blue squares"
