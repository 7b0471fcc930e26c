# SPDX-License-Identifier: Apache-2.0
"""Page of a bench: every model's numbers, win rates of every two, and the images that differ most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .base import plain, render_page, share, span
from .table_files import FileTable

ALPHA = 0.05  # Largest corrected p-value of a difference that is called one


def bench_page(result: Mapping[str, Any], images: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Render the JSON of `visalign bench`; images as returned by `embedded`, None where unreadable."""
    suite, models = result["suite"] or {}, result["models"]
    facts = {f"suite, {name}": suite[name] for name in ("title", "source", "licence") if suite}
    facts |= {"agreement of the rule with people": suite["people"]} if suite else {}
    facts |= {f"{name} is": reward["provenance"] for name, reward in result["rewards"].items()}
    for model in models:
        entries = {name: model.get(name) for name in ("model", "lora", "images", "steps", "options")}
        facts[model["label"]] = ", ".join(f"{name} {value}" for name, value in entries.items() if value)
    return render_page(
        "bench_page.html.j2",
        title="Who is better",
        command="visalign bench",
        result=result,
        sentences=list(sentences(result)),
        banners=[f"{name}: {reward['warning']}" for name, reward in result["rewards"].items() if reward["warning"]],
        facts_of_bench=[*facts.items(), ("seconds", plain(result["seconds"]))],
        tags=list(next(iter(models[0]["numbers"].values()))["by_category"]),
        images=images,
    )


def sentences(result: Mapping[str, Any]) -> Iterator[str]:
    """Say for every two models and measure who is better, or that the samples do not tell."""
    for pair in result["pairs"]:
        first, second, rate = pair["first"], pair["second"], pair["win_rate"]
        if rate is None:
            yield f"{pair['measure']}: no sample has a score of both {first} and {second}."
            continue
        better, worse = (second, first) if rate["estimate"] > 0.5 else (first, second)
        clear = pair["p_holm"] <= ALPHA and rate["estimate"] != 0.5
        claim = f"{better} is better than {worse}" if clear else f"no clear difference between {first} and {second}"
        test = f"{share(rate['estimate'])}, {span(rate, share)}; p = {plain(pair['p_holm'])}"
        yield f"{pair['measure']}: {claim} (win rate of {second} {test})."
    for model in result["models"]:
        for name, numbers in model["numbers"].items():
            if numbers["failed"]:
                yield f"{name} is missing for {numbers['failed']} of {result['samples']} samples of {model['label']}."


def file_tables(result: Mapping[str, Any]) -> list[FileTable]:
    """Build the tables of every model's numbers and of every two models, in all and by category, for files."""

    def cell(interval: Mapping[str, Any] | None) -> tuple[Any, ...]:
        return tuple((interval or {}).get(name) for name in ("estimate", "low", "high"))

    scores = [
        [model["label"], name, tag, cell(mean), mean.get("failed")]
        for model in result["models"]
        for name, numbers in model["numbers"].items()
        for tag, mean in [("all", numbers), *numbers["by_category"].items()]
    ]
    rates = [
        [pair["first"], pair["second"], pair["measure"], tag, cell(rate)]
        + ([cell(pair["change"]), pair["p_holm"]] if rate is pair["win_rate"] else [cell(None), None])
        for pair in result["pairs"]
        for tag, rate in [("all", pair["win_rate"]), *pair["by_category"].items()]
    ]
    columns = ("first", "second", "measure", "category", "win_rate_of_second", "change", "p_holm")
    return [
        FileTable(name="scores", columns=("model", "measure", "category", "mean", "failed"), rows=scores),
        FileTable(name="win_rates", columns=columns, rows=rates),
    ]
