# SPDX-License-Identifier: Apache-2.0
"""Tables and panels of the command line: configurations, plans, the end of a run."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Column, Table
from rich.text import Text

from visalign.atomic import write_atomic
from visalign.config import config_folder, list_configs, read_config
from visalign.errors import UserError, escape_control


def config_header(text: str) -> list[str]:
    """Return the comment at the head of a YAML file, an entry (title, Command and so on) each, without the licence.

    >>> config_header("# SPDX-License-Identifier: Apache-2.0\\n# Counting.\\n# Command: x\\n#   y\\nseed: 1\\n# z\\n")
    ['Counting.', 'Command: x y']
    """
    entries: list[str] = []
    for line in takewhile(lambda line: line.startswith("#"), text.splitlines()):
        content = line.lstrip("#").strip()
        if entries and content and not re.match(r"[A-Z][\w ]*:", content):
            entries[-1] += f" {content}"
        elif content and not content.startswith("SPDX-"):
            entries.append(content)
    return entries


def show_configs(
    console: Console, family: str | None = None, algorithm: str | None = None, search: str | None = None
) -> None:
    """Print a line for each packaged configuration of a family, with an algorithm, that has the words."""
    columns = (Column(head, no_wrap=True) for head in ("name", "algorithm"))
    table = Table(*columns, "what it is", box=None, pad_edge=False)
    for name in list_configs():
        title, *rest = config_header((config_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
        content = read_config(name)
        used = content.get("objective", {}).get("algorithm") or content.get("pipeline", "")
        model, words = f"{name} {content.get('model', {}).get('path', '')}", " ".join([name, used, title, *rest])
        if all(_has_words(*pair) for pair in ((model, family), (f"{name} {used}", algorithm), (words, search))):
            table.add_row(Text(name), Text(used), Text(title, no_wrap=True, overflow="ellipsis"))
    if not table.row_count:
        options = {"--family": family, "--algorithm": algorithm, "--search": search}
        filters = " ".join(f"{option} {words!r}" for option, words in options.items() if words)
        raise UserError(f"No packaged configuration fits {filters}. `visalign configs` alone lists all.")
    console.print(table)
    console.print("Show one: visalign configs NAME. Run one: visalign train NAME.", highlight=False)


def _has_words(text: str, words: str | None) -> bool:
    """Check that each word stands in a text, whatever its case, dots, hyphens and underscores.

    >>> _has_words("sd35_grpo_guard", "SD3.5 grpo-guard")
    True
    """
    plain = re.sub(r"[-_.]", "", text.lower())
    return all(re.sub(r"[-_.]", "", word) in plain for word in (words or "").lower().split())


def show_rewards(console: Console) -> None:
    """Print every name that --reward and rewards.terms take, with its first sentence."""
    from visalign.rewards.catalogue import CATALOGUE, TEXT_CATALOGUE, summary

    for title, names in (("of images", CATALOGUE), ("of text", TEXT_CATALOGUE)):
        table = Table("name", "what it is", title=f"Rewards {title}", title_justify="left")
        for name, entry in sorted(names.items()):
            table.add_row(Text(name), Text(summary(name, entry)))
        console.print(table)
    console.print("Your own: module:Name or file.py:Name, a function or a class.", highlight=False)


def show_probes(console: Console) -> None:
    """Print every probe and its expectation of a reward."""
    from visalign.evaluation.probes.catalogue import PAIR_PROBES, PROBES, WANTED, WANTED_OF_PAIRS
    from visalign.evaluation.probes.text_catalogue import TEXT_PAIR_PROBES, TEXT_PROBES

    kinds = (
        ("that scores", PROBES, WANTED),
        ("that compares", PAIR_PROBES, WANTED_OF_PAIRS),
        ("that scores texts", TEXT_PROBES, WANTED),
        ("that compares texts", TEXT_PAIR_PROBES, WANTED_OF_PAIRS),
    )
    for title, probes, expectations in kinds:
        table = Table("name", "what is changed", "expected", title=f"Probes of a reward {title}", title_justify="left")
        for probe in probes:
            table.add_row(Text(probe.name), Text(probe.title), Text(expectations[probe.wanted]))
        console.print(table)


def show_yaml(console: Console, text: str) -> None:
    """Print YAML, coloured in a terminal and byte for byte elsewhere."""
    if console.is_terminal:
        console.print(Syntax(text, "yaml", background_color="default", word_wrap=True))
    else:
        console.print(text.rstrip("\n"), markup=False, highlight=False, soft_wrap=True)


def show_plan(console: Console, plan: Mapping[str, Any]) -> None:
    """Print a plan: one table for the plain entries, one for each group of entries."""
    from visalign.evaluation.pages.base import duration

    groups = {key: value for key, value in plan.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in plan.items() if key not in groups}
    for title, rows in (({"plan": plain} if plain else {}) | groups).items():
        table = Table("", "", title=title, title_justify="left", show_header=False)
        for name, value in rows.items():
            in_seconds = "seconds" in name and isinstance(value, float)
            is_tiny = isinstance(value, float) and 0 < value < 0.001
            text = duration(value) if in_seconds else "< 0.001" if is_tiny else number(value)
            table.add_row(Text(name.replace("_", " ")), Text(text))
        console.print(table)


def show_summary(console: Console, folder: Path, summary: Mapping[str, Any], next_command: Sequence[str]) -> None:
    """Print the closing panel of a run: held-out numbers before and after, files, the next command."""
    before, after = summary.get("before"), summary.get("after")
    table = [table] if before and after and (table := before_after(before, after)).row_count else []
    files = "\n".join(f"  {path}" for path in result_files(folder))
    ending = cost_line(summary), f"\nResults:\n{files}", f"\nNext:\n  {shlex.join(next_command)}"
    lines = (Text(line) for line in (*gain_lines(summary), *ending) if line)
    console.print(Panel(Group(*table, *lines), title="Done", title_align="left", border_style="green"))


def gain_lines(summary: Mapping[str, Any]) -> list[str]:
    """Describe the change of the held-out accuracy, or without one of each reward, with its interval.

    >>> gain_lines({"changes": {"rewards": {"mine": {"estimate": 0.5, "low": 0.25, "high": 0.75, "level": 0.95}}}})
    ['Held-out mine +0.500, 95% interval +0.250 to +0.750 (paired over prompts).']
    """
    gain, lines = summary.get("gain") or {}, []
    rewards = (summary.get("changes") or {}).get("rewards") or {}
    has_accuracy = gain.get("estimate") is not None
    rows = [("accuracy", gain, 100, 1, " points")] if has_accuracy else [(n, r, 1, 3, "") for n, r in rewards.items()]
    for name, row, unit, digits, noun in rows:
        if row.get("low") is not None:
            change, low, high = (f"{unit * row[key]:+.{digits}f}" for key in ("estimate", "low", "high"))
            interval = f"{row['level']:.0%} interval {low} to {high} (paired over prompts)"
            lines.append(f"Held-out {name} {change}{noun}, {interval}.")
    return lines


HELDOUT = {"accuracy": "accuracy", "ece": "calibration error", "srcc": "SRCC", "mae": "mean absolute error"}
"""Measure of a summary -> its name in the closing panel."""


def before_after(before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
    """Build a table of the held-out measures, per category too, and of the rewards, before and after."""
    rows = [(f"held-out {HELDOUT[key]}", before[key], after[key]) for key in HELDOUT if key in before and key in after]
    for tag, value in (before.get("by_category") or {}).items():
        rows.append((f"  {tag.replace('_', ' ')}", value, (after.get("by_category") or {}).get(tag)))
    for name, reward in (before.get("rewards") or {}).items():
        later = (after.get("rewards") or {}).get(name) or {}
        rows.append((f"{name} ({reward.get('unit')})", reward.get("mean"), later.get("mean")))
    heads = (Column(head, justify="right") for head in ("before", "after", "change"))
    table = Table("", *heads, box=None, pad_edge=False)
    for label, first, second in rows:
        if first is None and second is None:
            continue  # a run without a check of what is right has no accuracy
        change = "" if first is None or second is None else f"{second - first:+.3f}"
        table.add_row(Text(label), number(first), number(second), change)
    return table


def cost_line(summary: Mapping[str, Any]) -> str:
    """Describe the costs of a run that its summary has.

    >>> cost_line({"seconds": 318.2, "peak_memory_bytes": 1.5e9, "forward_equivalents_per_image": None})
    'Cost: 5 min 18 s, 1.5 GB of memory at most.'
    """
    from visalign.evaluation.pages.base import duration

    seconds, memory, forwards = map(summary.get, ("seconds", "peak_memory_bytes", "forward_equivalents_per_image"))
    costs = [] if seconds is None else [duration(seconds)]
    costs += [] if memory is None else [f"{memory / 1e9:.1f} GB of memory at most"]
    costs += [] if forwards is None else [f"{forwards:.1f} forward-equivalents per image"]
    return f"Cost: {', '.join(costs)}." if costs else ""


RESULTS = {
    "report.html": "before and after, opens in a browser",
    "lora": "adapters, loaded by the code in report.html",
    "judge": "the trained reward and its card; give this folder as the model of its reward",
    "model": "for from_pretrained, by the code in report.html",
    "dataset.jsonl": "the chosen completions; data.train of text_sft",
    "samples.jsonl": "what was sampled",
    "points": "the completions of each point of the grid, with their scores",
    "summary.json": "the numbers",
    "metrics.jsonl": "a line per iteration",
}
"""Files and folders of a run -> their meaning."""


def result_files(folder: Path) -> list[str]:
    lines = [f"{folder / name}  ({what})" for name, what in RESULTS.items() if (folder / name).exists()]
    return lines or [str(folder)]


def show_scores(rows: Sequence[Any], form: str, output: Path | None) -> None:
    from visalign.pipelines.score.score import encode_rows

    stream = sys.stdout if output is None else io.StringIO()
    if form == "table":
        Console(file=stream).print(score_table(rows))
    else:
        stream.write(encode_rows(rows, form))
    if output is not None and isinstance(stream, io.StringIO):
        write_atomic(output, stream.getvalue())


def score_table(rows: Sequence[Any]) -> Group:
    """Build a table with a line per image and a column per reward, then the reasons of failed scores."""
    from visalign.evaluation.pages.base import short_names

    columns = {row.reward: f"{row.reward} ({row.unit})" for row in rows}
    names = short_names(row.image for row in rows)
    table = Table(Column("image", overflow="fold"), *(escape(title) for title in columns.values()))
    for start in range(0, len(rows), max(len(columns), 1)):
        by_reward = rows[start : start + len(columns)]
        table.add_row(Text(names[by_reward[0].image]), *(number(row.value) for row in by_reward))
    failed = dict.fromkeys((row.image, row.reason) for row in rows if row.reason)
    return Group(table, *(Text(escape_control(f"! {names[image]}: {reason}")) for image, reason in failed))


def number(value: Any) -> str:
    """Format a value for a table.

    >>> number(0.123456), number(12), number(None), number(1e-5)
    ('0.123', '12', '-', '1e-05')
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.4g}"
    return str(value)


def print_provenance(judges: Mapping[str, Any], prompts: Sequence[str]) -> None:
    """Print each judge's model, revision and identity to the error stream, with a note outside its domain."""
    from visalign.evaluation.pages.base import provenance_sentence
    from visalign.pipelines.score.provenance import domain_note, provenance

    console = Console(stderr=True)
    for label, judge in judges.items():
        console.print(Text(provenance_sentence(label, provenance(judge))), soft_wrap=True)
        if note := domain_note(judge, prompts):
            console.print(Text(f"! {label}: {note}"), soft_wrap=True)
