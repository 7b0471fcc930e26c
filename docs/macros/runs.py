# SPDX-License-Identifier: Apache-2.0
"""Tables of logged metrics and of the packaged configurations with their expected results."""

from __future__ import annotations

import fnmatch
import importlib
import re

from visalign.config import config_folder, list_configs, read_config
from visalign.pipelines.cli.show import config_header

from .markdown import code, prose, table


def metrics(*patterns: str) -> str:
    """Keys and meanings of the metrics that match any pattern; all without one.

    Raises:
        ValueError: a pattern that matches no key.
    """
    meanings = importlib.import_module("visalign.training.loop.metrics").METRICS
    for pattern in patterns:
        if not fnmatch.filter(meanings, pattern) and pattern not in meanings:
            raise ValueError(f"no metric matches {pattern!r}")
    chosen = [key for key in meanings if not patterns or any(key == p or fnmatch.fnmatch(key, p) for p in patterns)]
    return table(("metric", "meaning"), [(code(key), prose(meanings[key])) for key in chosen])


def header(name: str) -> dict[str, str]:
    """Parse the header of a packaged configuration: "what", then Command, Hardware, Duration, Expected, ...

    Raises:
        ValueError: there is no configuration of that name.
    """
    if name not in list_configs():
        raise ValueError(f"no configuration {name!r}")
    lines = config_header((config_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    fields, last = {"what": lines[0]}, "what"
    for line in lines[1:]:
        word, colon, rest = line.partition(": ")
        if colon and re.fullmatch(r"[A-Z][\w ]+", word):
            fields[word], last = f"{fields[word]}\n{rest}" if word in fields else rest, word
        else:
            fields[last] += f" {line}"
    return fields


def configs(*pipelines: str) -> str:
    """Build the table of packaged configurations, of some pipelines or all, with duration and result."""
    rows = []
    for name in list_configs():
        if not pipelines or read_config(name).get("pipeline") in pipelines:
            fields = header(name)
            rows.append((code(name), *(prose(fields.get(word, "")) for word in ("what", "Duration", "Expected"))))
    if not rows:
        raise ValueError(f"no configuration of {', '.join(pipelines)}")
    return table(("configuration", "what", "duration", "expected"), rows)
