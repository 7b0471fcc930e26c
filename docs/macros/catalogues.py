# SPDX-License-Identifier: Apache-2.0
"""Tables of judges, rewards for text, algorithms of the objective and packaged models, read from the code."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from visalign.data.assets import PACKAGED, assets_folder
from visalign.errors import UserError

from .markdown import code, first_sentence, prose, table


def _class_at(path: str) -> type:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def entries(name: str) -> Iterator[tuple[str, type, Mapping[str, Any]]]:
    """(name, class, preset options) of a catalogue of `visalign.rewards`."""
    for key, entry in getattr(importlib.import_module("visalign.rewards"), name).items():
        path, options = entry if isinstance(entry, tuple) else (entry, {})
        yield key, _class_at(path), options


def judges() -> str:
    """Build the table of rewards for images."""
    statistics = importlib.import_module("visalign.rewards.statistics").STATISTICS
    rows = []
    for name, kind, options in entries("CATALOGUE"):
        unit = getattr(kind(**options) if options else kind, "unit", "")
        has = [word for word in ("score", "compare", "score_with_gradient") if callable(getattr(kind, word, None))]
        starts = [option.default for option in inspect.signature(kind).parameters.values()]
        packaged = [code(value) for value in starts if isinstance(value, str) and value in PACKAGED]
        rows.append(
            (
                code(name),
                first_sentence(statistics[name][0] if name in statistics else kind).partition(": scalar")[0],
                unit if isinstance(unit, str) and unit else "its own",
                ", ".join(code(word) for word in has),
                ", ".join(packaged),
            )
        )
    return table(("name", "what it is", "unit", "offers", "packaged model"), rows)


def suites() -> str:
    """Build the table of the suites of `visalign bench`."""
    from visalign.pipelines.bench.suites import read_suite, suite_files

    rows = []
    for name in suite_files():
        suite = read_suite(name)
        use = code(name if suite.prompts else f"{name}:FILE")
        rules = ", ".join(code(reward) for reward in suite.rewards) or "none"
        rows.append((use, suite.title, rules, suite.licence, suite.source, suite.people))
    return table(("--suite", "prompts", "rule", "licence", "from", "agreement with people"), rows)


def families() -> str:
    """Build the table of diffusers pipeline families."""
    from visalign.adapters.pipeline.families import FAMILIES

    rows = []
    for name, family in FAMILIES.items():
        usual = "" if family.usual is None else f"{family.usual:g}"
        off = "" if family.guidance in ("embedded", "none") else f"{family.off:g}"
        makes = "images" if family.frames is None else "videos"
        times = "any" if family.mixed else "one"
        kinds = ", ".join(code(kind) for kind in family.pipelines)
        rows.append((code(name), kinds, makes, family.guidance, off, usual, times))
    header = ("family", "pipelines", "makes", "guidance", "off at", "usual", "noise levels in one pass")
    return table(header, rows)


def text_rewards() -> str:
    """Build the table of rewards for text."""
    rows = []
    for name, kind, options in entries("TEXT_CATALOGUE"):
        preset = ", ".join(f"{key}={value}" for key, value in options.items() if key != "name")
        rows.append((code(name), first_sentence(kind), code(preset) if preset else ""))
    return table(("name", "what it is", "preset"), rows)


def trl_names() -> str:
    """Build the table of names in TRL, diffusers and kohya's scripts, and ours."""
    names: dict[str, tuple[str, ...]] = importlib.import_module("visalign.other_names").OTHER_NAMES
    rows = []
    for name, settings in names.items():
        parts = [setting.partition(" (") for setting in settings]
        rows.append((code(name), ", or ".join(code(ours) + space + note for ours, space, note in parts)))
    return table(("elsewhere", "in visalign"), rows)


def algorithms() -> str:
    """Build the table of algorithms: kinds of policy, choice at each stage, paper."""
    core = importlib.import_module("visalign.core")
    rows = []
    for name, row in core.NAMED.items():
        stages = [row.advantage, row.level, row.surrogate, row.aggregation]
        terms = {
            "kl": row.kl,
            "kl in reward": row.kl_in_reward,
            "value": row.value,
            "ptx": row.ptx,
            "entropy": row.entropy,
        }
        also = [f"{key} {value:g}" for key, value in terms.items() if value]
        also += [row.selection] if row.selection else []
        also += [row.entropy_term] if row.entropy else []
        options = [
            row.advantage_options,
            row.surrogate_options,
            row.selection_options,
            row.entropy_term_options,
        ]
        also += [f"{key} {value}" for entry in options for key, value in entry.items()]
        fits = ["–" if _refusal(name, kind) else "✓" for kind in TRAINED]
        cell = " · ".join(code(stage) for stage in stages)
        rows.append((code(name), *fits, cell, ", ".join(also), prose(row.source)))
    return table(("algorithm", *TRAINED, "advantage · ratio · surrogate · mean", "also", "source"), rows)


def choices() -> str:
    """Build the table of choices per stage: formula, options with their defaults, paper and deviations."""
    core = "visalign.core.objective"
    stages = importlib.import_module(f"{core}.stages")
    tables = {
        "advantage": stages.ADVANTAGES,
        "surrogate": stages.SURROGATES,
        "selection": stages.SELECTIONS,
        "entropy_term": importlib.import_module(f"{core}.entropy_stage").ENTROPY_TERMS,
    }
    rows = []
    for stage, table_of in tables.items():
        for name, chosen in table_of.items():
            lead, tail = [], []
            for function in _documented(chosen):
                parts = (inspect.getdoc(function) or "").split("\n\n")
                sections = [i for i, part in enumerate(parts) if part.startswith(SECTIONS)]
                lead += parts[: sections[0]] if sections else parts[:1]
                tail += parts[sections[-1] + 1 :] if sections else parts[1:]
            options = [n if v is inspect.Parameter.empty else f"{n}={v}" for n, v in chosen.options.items()]
            cells = (prose(" ".join(lead)), ", ".join(map(code, options)), prose(" ".join(tail)))
            rows.append((stage, code(name), *cells))
    return table(("stage", "choice", "what it does", "options", "paper, and what differs from it"), rows)


def _documented(stage: Any) -> Iterator[Any]:
    """Yield the function of a stage, and those of its computed inputs that have options."""
    yield stage.function
    for source in stage.inputs.values():
        if not isinstance(source, str) and source.options:
            yield from _documented(source)


SECTIONS = ("Args:", "Returns:", "Raises:", "Example:")
"""Beginnings of the sections of a docstring."""


def regressions() -> str:
    """Build the table of velocity regressions: anchor, cost of an image, paper."""
    rows = []
    for name, row in importlib.import_module("visalign.core").REGRESSIONS.items():
        levels = "T − 1" if row.levels is None else str(row.levels)
        also = [f"kl {row.kl:g}"] if row.kl else []
        also += ["old policy kept"] if row.keeps_old else []
        also += [f"one noise per {row.noise}"] if row.noise != "sample" else []
        cells = (code(row.loss), row.anchor, code(row.signal), levels, ", ".join(also), prose(row.source))
        rows.append((code(name), *cells))
    return table(("algorithm", "loss", "anchor", "signal", "levels", "also", "source"), rows)


def published() -> str:
    """Build the table of published image algorithms that are settings here, or have another name."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, entry in importlib.import_module("visalign.training.diffusion.published").PUBLISHED.items():
        names.setdefault(entry, []).append(code(name))
    rows = [(", ".join(aliases), code(settings), prose(what)) for (settings, what), aliases in names.items()]
    return table(("name", "what to set", "what it is"), rows)


def ascents() -> str:
    """Build the table of algorithms that use the reward's gradient: steps that carry it, cost of an image."""
    rows = []
    for name, row in importlib.import_module("visalign.core").ASCENTS.items():
        carries = f"the last {row.last}" if row.last > 1 else "the last step"
        carries += f", and {row.renoised} predictions from its image noised again" if row.renoised else ""
        if row.stop_range is not None:
            carries = "one step in the {:.0%} to {:.0%} of the way".format(*row.stop_range)
        free, carried = row.counted(10)
        rows.append((code(name), carries, f"{free + 3 * carried:g}", prose(row.source)))
    return table(("algorithm", "steps with gradient", "forward-equivalents of 10 steps", "source"), rows)


def preference_losses() -> str:
    """Build the table of direct preference optimisation: reward, loss, published constants."""
    rows = []
    for name, row in importlib.import_module("visalign.core").DIRECT.items():
        reward = "β log π/π_ref" if row.reference else "β log π"
        reward = "β (log π + 1)" if row.weighted_entropy else reward
        reward += " per token" if row.per_token else ""
        rows.append((code(name), reward, row.formula, f"{row.beta:g}", f"{row.gamma:g}", prose(row.source)))
    return table(("`loss.row`", "reward r", "loss, with m = r_w − r_l − γ", "β", "γ", "source"), rows)


def refusals() -> str:
    """Build the table of algorithms that a trainer refuses, with its messages."""
    names = importlib.import_module("visalign.core").NAMED
    reasons: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for kind in TRAINED:
            if why := _refusal(name, kind):
                why = why.rpartition("): ")[2].removeprefix(f"objective.algorithm={name} ")
                reasons.setdefault((kind, why), []).append(code(name))
    rows = [(", ".join(refused), kind, prose(why)) for (kind, why), refused in reasons.items()]
    return table(("algorithm", "refused for", "because, and what to take"), rows)


TRAINED = {"images": "DiffusionObjectiveSettings", "text": "TextObjectiveSettings"}
"""Kind of policy -> its settings in `visalign.training`, which refuse what does not fit."""


def _refusal(row: str, kind: str) -> str:
    try:
        getattr(importlib.import_module("visalign.training"), TRAINED[kind])(algorithm=row)
    except UserError as error:
        return str(error)
    return ""


def cards() -> str:
    """Build the table of packaged models with the first paragraph of their cards."""
    rows = []
    for name in PACKAGED:
        card = (assets_folder() / name / "README.md").read_text(encoding="utf-8")
        first = next(part for part in card.split("\n\n") if part and not part.startswith("#"))
        rows.append((f"[`{name}`](cards/{name}.md)", prose(first)))
    return table(("model", "what it is"), rows)
