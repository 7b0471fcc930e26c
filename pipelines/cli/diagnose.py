# SPDX-License-Identifier: Apache-2.0
"""The command `visalign diagnose`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from .options import MOST_COUNTED, AsJson, LabelOptions, Repeated, Seed, clean_output, print_result


def diagnose(
    run: Annotated[Path, Argument(help="Folder of a finished run of a text policy.")],
    second: Annotated[Path | None, Argument(help="Later run to compare; RUN's policy is then the base.")] = None,
    samples: Annotated[int, Option(help="Completions per prompt and policy.", min=2, max=MOST_COUNTED)] = 32,
    prompts: Annotated[
        int | None, Option(help="Maximum number of held-out prompts. Default: all.", min=2, max=MOST_COUNTED)
    ] = None,
    reward: Annotated[
        Repeated, Option("--reward", "-r", help="Additional text reward to report; repeat for several.")
    ] = None,
    options: LabelOptions = None,
    right_at: Annotated[
        float | None,
        Option(help="Reward from which a completion is right. Default: the verdict of the run's evaluation."),
    ] = None,
    margin: Annotated[
        float, Option(help="Largest gap in nats between the two likeliest tokens of a near tie.", min=0)
    ] = 0.1,
    noise: Annotated[float, Option(help="Scale of the Gumbel noise on the logits of greedy answers.", min=1e-3)] = 0.1,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compare a trained text policy with its base: pass@k, the prompts each solves, reward against KL."""
    from visalign.pipelines.text.diagnose import diagnose as compared

    sampling = {"samples": samples, "prompts": prompts, "margin": margin, "noise": noise, "seed": seed}
    with clean_output():
        result = compared(run, second, rewards=reward or (), options=options or (), right_at=right_at, **sampling)
    print_result(result, show_diagnosis, as_json)


def show_diagnosis(console: Console, result: Mapping[str, Any]) -> None:
    line = f"{result['tuned']} against {result['base']}: {result['prompts']} held-out prompts, {result['samples']} "
    verdict = result["correctness"] and f", solved by {result['correctness']}"
    console.print(Text(f"{line}completions each{verdict or '; no reward says right or wrong (--right-at)'}"))
    if result["support"] is not None:
        _show_support(console, result["support"])
    _show_best_of_n(console, result["best_of_n"])
    _show_distances(console, result["rewards"])
    _show_greedy(console, result["greedy"])
    if (clip := result["clip"]) is not None:
        line = (
            f"Of the trained decisions the clip took {clip['low']:.3%} with A < 0, {clip['high']:.3%} with A > 0 "
            f"(net {clip['net']:+.3%}), in {clip['iterations']:.0%} of the iterations."
        )
        if (stake := clip["advantage_at_stake"]) is not None:
            advantage = f"{stake['estimate']:.2f} of advantage from the right ones of {result['samples']} completions"
            line += f" Rewards by lot would withhold {advantage}."
        console.print(Text(line))


def _three_decimals(number: Mapping[str, Any]) -> str:
    from visalign.evaluation.pages.base import signed, span

    return f"{signed(number['estimate'], 3)} ({span(number)})"


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", box=None)


def _show_support(console: Console, support: Mapping[str, Any]) -> None:
    from visalign.evaluation.pages.base import share, whole_percent, with_span

    table = _table("Support", "k", "pass@k, base", "tuned", "change")
    for point in support["pass_at_k"]:
        rates = [with_span(point[name], share, whole_percent) for name in ("base", "tuned")]
        table.add_row(str(point["k"]), *rates, _three_decimals(point["change"]))
    console.print(table)
    k, is_shown = support["crossing"]["k"], support["crossing"]["shown"]
    crossed = "do not cross" if k is None else f"cross at k = {k}{'' if is_shown else ', within the intervals'}"
    line = (
        f"The curves {crossed}. Of {support['problems']} prompts both solve {support['preserved']}, "
        f"the tuned policy alone {support['expanded']}, the base alone {support['shrunk']}."
    )
    console.print(Text(line))


def _show_best_of_n(console: Console, result: Mapping[str, Any]) -> None:
    table = _table("Reward against KL (nats)", "policy", "reward", "KL", "KL at most")
    for point in result["base"]:
        numbers = _three_decimals(point["reward"]), f"{point['kl_estimate']:.3f}", f"{point['kl_bound']:.3f}"
        table.add_row(f"base, best of {point['n']}", *numbers)
    table.add_row("tuned", *(_three_decimals(result["tuned"][key]) for key in ("reward", "kl")), "")
    console.print(table)
    n, is_cheaper = result["equal_n"], result["cheaper_than_bound"]
    moved = "as far as its bound, within the interval" if is_cheaper is None else "less" if is_cheaper else "more"
    than = "" if is_cheaper is None else " than its bound"
    line = f"Best of {n} of the base reaches it; the tuned policy moved {moved}{than}."
    console.print(Text("No best of n of the base reaches the tuned policy's reward." if n is None else line))


def _show_distances(console: Console, pairs: Sequence[Mapping[str, Any]]) -> None:
    from visalign.evaluation.pages.base import with_span

    if not pairs:
        console.print(Text("Only one reward; add another with -r NAME."))
        return
    title = "STARC distance within a prompt (0: same up to scale and offset, 2: opposite)"
    table = _table(title, "rewards", "distance", "prompts")
    for pair in pairs:
        table.add_row(Text(f"{pair['first']} · {pair['second']}"), with_span(pair), str(pair["prompts"]))
    console.print(table)


def _show_greedy(console: Console, result: Mapping[str, Any]) -> None:
    from visalign.evaluation.pages.base import share, signed, whole_percent, with_span

    tie, noise = f"near a tie (< {result['margin']:g} nats)", f"other under noise {result['noise']:g}"
    table = _table("Greedy answers", "policy", tie, noise, "reward", "its change", "size of it")
    for name, row in result["policies"].items():
        shares = [with_span(row[key], share, whole_percent) for key in ("near_tie", "changed")]
        paid = [signed(row[key]["estimate"], 3) for key in ("reward", "reward_change", "reward_change_abs")]
        table.add_row(name, *shares, *paid)
    console.print(table)
