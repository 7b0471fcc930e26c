# SPDX-License-Identifier: Apache-2.0
"""The command `visalign diagnose`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .options import AsJson, Seed, clean_output, print_result


def diagnose(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run of a text policy.")],
    second: Annotated[
        Path | None,
        typer.Argument(help="Later run to compare; RUN's policy is then the base.", show_default=False),
    ] = None,
    samples: Annotated[int, typer.Option(help="Completions per prompt and policy.", min=2)] = 32,
    prompts: Annotated[
        int | None,
        typer.Option(help="Maximum number of held-out prompts. Default: all.", min=2, show_default=False),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option("--reward", "-r", help="Additional text reward to report; repeat for several."),
    ] = None,
    margin: Annotated[
        float, typer.Option(help="Largest gap in nats between the two likeliest tokens of a near tie.", min=0)
    ] = 0.1,
    noise: Annotated[
        float, typer.Option(help="Scale of the Gumbel noise on the logits of greedy answers.", min=1e-3)
    ] = 0.1,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare a trained text policy with its base: pass@k, the prompts each solves, reward against KL."""
    from visalign.pipelines.text.diagnose import diagnose as compared

    with clean_output():
        result = compared(
            run,
            second,
            samples=samples,
            prompts=prompts,
            rewards=reward or (),
            margin=margin,
            noise=noise,
            seed=seed,
        )
    print_result(result, show_diagnosis, as_json)


def show_diagnosis(console: Console, result: Mapping[str, Any]) -> None:
    """Print a table for each question, and its answer."""
    console.print(
        Text(
            f"{result['tuned']} against {result['base']}: {result['prompts']} held-out prompts, "
            f"{result['samples']} completions each, solved by {result['correctness']}"
        )
    )
    _show_support(console, result["support"])
    _show_best_of_n(console, result["best_of_n"])
    _show_distances(console, result["rewards"])
    _show_greedy(console, result["greedy"])
    if result["clip"] is not None:
        console.print(Text(_clip_line(result["clip"], result["samples"])))


def _clip_line(clip: Mapping[str, Any], samples: int) -> str:
    return (
        f"Of the trained decisions the clip took {clip['low']:.3%} with A < 0, {clip['high']:.3%} with A > 0 "
        f"(net {clip['net']:+.3%}), in {clip['iterations']:.0%} of the iterations. Rewards by lot would "
        f"withhold {clip['advantage_at_stake']['estimate']:.2f} of advantage from the right ones of "
        f"{samples} completions."
    )


def _show_support(console: Console, support: Mapping[str, Any]) -> None:
    from visalign.evaluation.pages.base import share, signed, span, whole

    table = Table("k", "pass@k, base", "tuned", "change", title="Support", title_justify="left", box=None)
    for point in support["pass_at_k"]:
        rates = [point[name] for name in ("base", "tuned")]
        cells = [f"{share(rate['estimate'])} ({span(rate, whole)})" for rate in rates]
        change = f"{signed(point['change']['estimate'], 3)} ({span(point['change'])})"
        table.add_row(str(point["k"]), *cells, change)
    console.print(table)
    where = support["crossing"]
    crossed = "do not cross" if where["k"] is None else f"cross at k = {where['k']}"
    if where["k"] is not None and not where["shown"]:
        crossed += ", within the intervals"
    console.print(
        Text(
            f"The curves {crossed}. Of {support['problems']} prompts both solve {support['preserved']}, "
            f"the tuned policy alone {support['expanded']}, the base alone {support['shrunk']}."
        )
    )


def _show_best_of_n(console: Console, result: Mapping[str, Any]) -> None:
    from visalign.evaluation.pages.base import signed, span

    tuned, title = result["tuned"], "Reward against KL (nats)"
    table = Table("policy", "reward", "KL", "KL at most", title=title, title_justify="left", box=None)
    for point in result["base"]:
        reward = f"{signed(point['reward']['estimate'], 3)} ({span(point['reward'])})"
        name = f"base, best of {point['n']}"
        table.add_row(name, reward, f"{point['kl_estimate']:.3f}", f"{point['kl_bound']:.3f}")
    cells = [f"{signed(tuned[key]['estimate'], 3)} ({span(tuned[key])})" for key in ("reward", "kl")]
    table.add_row("tuned", *cells, "")
    console.print(table)
    if result["equal_n"] is None:
        console.print(Text("No best of n of the base reaches the tuned policy's reward."))
    else:
        less = "less" if result["cheaper_than_bound"] else "more"
        n = result["equal_n"]
        console.print(Text(f"Best of {n} of the base reaches it; the tuned policy moved {less} than its bound."))


def _show_distances(console: Console, pairs: Sequence[Mapping[str, Any]]) -> None:
    from visalign.evaluation.pages.base import signed, span

    if not pairs:
        console.print(Text("Only one reward; add another with -r NAME."))
        return
    title = "STARC distance within a prompt (0: same up to scale and offset, 2: opposite)"
    table = Table("rewards", "distance", "prompts", title=title, title_justify="left", box=None)
    for pair in pairs:
        distance = f"{signed(pair['estimate'])} ({span(pair)})"
        table.add_row(Text(f"{pair['first']} · {pair['second']}"), distance, str(pair["prompts"]))
    console.print(table)


def _show_greedy(console: Console, result: Mapping[str, Any]) -> None:
    from visalign.evaluation.pages.base import share, signed, span, whole

    tie, noise = f"near a tie (< {result['margin']:g} nats)", f"other under noise {result['noise']:g}"
    title = "Greedy answers"
    table = Table("policy", tie, noise, "reward", "its change", "size of it", title=title, box=None)
    table.title_justify = "left"
    for name, row in result["policies"].items():
        shares = [f"{share(row[key]['estimate'])} ({span(row[key], whole)})" for key in ("near_tie", "changed")]
        paid = [signed(row[key]["estimate"], 3) for key in ("reward", "reward_change", "reward_change_abs")]
        table.add_row(name, *shares, *paid)
    console.print(table)
