# SPDX-License-Identifier: Apache-2.0
"""The command `visalign collect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Exit, Option, echo

from visalign.errors import UserError

from . import options as opt


def collect(
    votes: Annotated[
        Path, Argument(help="SQLite file of the votes, created if missing. A folder of images first: votes.sqlite.")
    ],
    sources: Annotated[
        opt.Repeated, Argument(help="For a new file: images, folders (of several, pairs across them), tables or sets.")
    ] = None,
    single: Annotated[bool, Option("--single", help="Show one image at a time instead of two.")] = False,
    best_of: Annotated[
        int | None, Option("--best-of", help="Show N images of a prompt, of which one is chosen.", min=3, max=9)
    ] = None,
    prompt: opt.Prompt = None,
    slider: Annotated[
        str | None, Option(help="Words along a slider, separated by commas; --single alone has one too.")
    ] = None,
    question: Annotated[
        opt.Repeated, Option("--question", "-q", help="Checklist question; repeat for several.")
    ] = None,
    boxes: Annotated[bool, Option("--boxes", help="Let voters draw boxes around faults.")] = False,
    text: Annotated[bool, Option("--text", help="Let voters write a comment.")] = False,
    gold: Annotated[str | None, Option(help="Preference set of pairs with a known answer.")] = None,
    votes_each: Annotated[int, Option(help="Votes per task; 0: one from every voter.", min=0)] = 3,
    gold_every: Annotated[int, Option(help="Make every n-th task a gold one; 0: none.", min=0)] = 10,
    repeat_every: Annotated[int, Option(help="Repeat an earlier task every n tasks; 0: never.", min=0)] = 15,
    per_prompt: Annotated[int, Option(help="Most pairs, or groups, per prompt.", min=1, max=opt.MOST_COUNTED)] = 10,
    voter: Annotated[
        opt.Repeated, Option("--voter", help="Name of an allowed voter; repeat. Default: everybody.")
    ] = None,
    seed: opt.Seed = 0,
    host: Annotated[
        str, Option(help="Address to listen on; 0.0.0.0 admits other devices by invitation.")
    ] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on.", min=1, max=65535)] = 8080,
    judge: Annotated[
        str | None, Option(help="Let this judge vote under its name instead of serving the page.")
    ] = None,
    options: opt.LabelOptions = None,
    device: opt.Device = None,
    export: Annotated[Path | None, Option(help="Write the votes as a set (.jsonl) to train on, then stop.")] = None,
    form: Annotated[
        Literal["set", "label-studio", "argilla"],
        Option("--format", help="Format of --export: a set, or the label of every vote as JSON for these tools."),
    ] = "set",
    model: Annotated[
        bool, Option("--model", help="Export labels of the annotator model, not shares of votes.")
    ] = False,
    report: Annotated[Path | None, Option(help="Write a page (.html) on voters and agreement, then stop.")] = None,
    tables: opt.Tables = None,
    leave_out: Annotated[
        opt.Repeated, Option("--leave-out", help="Voter to leave out of --export and --report; repeat.")
    ] = None,
) -> None:
    """Collect votes on images or texts: a local page for people, judges that vote, agreement, a set to train on."""
    from visalign.pipelines.collect.store import Plan, VoteStore
    from visalign.pipelines.collect.tasks import QUALITY_WORDS, Form, gold_tasks, read_tasks

    if votes.is_dir():
        votes, sources = Path("votes.sqlite"), [str(votes), *(sources or [])]
    if model and export is None:
        raise UserError("--model says how --export writes labels. Add --export FILE.jsonl.")
    if form != "set" and (export is None or model):
        raise UserError(f"--format {form} writes the label of every vote: add --export FILE.json, without --model.")
    if sources:
        if best_of and (single or gold or slider or judge):
            raise UserError("--best-of asks for one image of several. Leave --single, --gold, --slider, --judge out.")
        grades = QUALITY_WORDS if slider is None and single and not question else ()
        words = tuple(word.strip() for word in slider.split(",")) if slider else grades
        questions = Form(slider=words, checklist=tuple(question or ()), boxes=boxes, text=text)
        tasks = read_tasks(sources, single=single, best_of=best_of, prompt=prompt, per_prompt=per_prompt, seed=seed)
        tasks += gold_tasks(gold) if gold else []
        every = {"gold_every": gold_every, "repeat_every": repeat_every}
        plan = Plan(votes=votes_each, seed=seed, allowed=tuple(voter or ()), **every)
        store = VoteStore.create(votes, tasks, questions, plan)
    elif any((single, best_of, slider, question, boxes, text, gold, voter, prompt)):
        raise UserError("The questions and voters of a file are fixed at its start. Name another file to ask more.")
    else:
        store = VoteStore(votes)
    try:
        if judge is not None:
            _judge(store, judge, options or [], device)
        if export is not None:
            _export(store, export, model, leave_out or [], form)
        if report is not None or tables is not None:
            _report(store, report, tables, leave_out or [])
        if judge is None and export is None and report is None and tables is None:
            _serve(store, host, port)
    finally:
        store.close()


def _serve(store: Any, host: str, port: int) -> None:
    from visalign.pipelines.collect import server

    def ready(url: str, progress: str) -> None:
        tasks = f"{len(store.tasks)} tasks. Vote at {url} (Ctrl-C ends it; the votes are in {store.path})."
        echo(f"{tasks}\nProgress, for you alone: {progress}", err=True)

    server.serve_votes(store, host=host, port=port, on_ready=ready)
    echo(f"{len(store.votes())} votes are in {store.path}.", err=True)


def _judge(store: Any, name: str, options: list[str], device: str | None) -> None:
    from visalign.pipelines.collect.judge_votes import judge_votes
    from visalign.pipelines.shared.reward_options import load_each
    from visalign.rewards.text.completions import load_any_judge

    with opt.clean_output():
        loaded = load_each([name], options, load_any_judge, device)[name]
        new, reasons = judge_votes(store, loaded, name)
    echo(f"{name} voted on {new} pairs.", err=True)
    for reason in reasons[:5]:
        echo(f"! {reason}", err=True)
    if reasons:
        echo(f"{len(reasons)} pairs could not be judged and have no vote of it.", err=True)
        raise Exit(1)


def _export(store: Any, path: Path, model: bool, leave_out: list[str], form: str) -> None:
    from visalign.data.sets.annotation_tools import to_argilla, to_label_studio
    from visalign.pipelines.collect.votes import export_rows, select_votes, vote_rows, write_rows
    from visalign.pipelines.shared.run_folder import new_file

    build = {"label-studio": to_label_studio, "argilla": to_argilla}.get(form)
    new_file(path, endings=(".jsonl",) if build is None else (".json",))
    votes = select_votes(store, leave_out)
    rows = export_rows(store, votes, model=model) if build is None else vote_rows(store, votes)
    write_rows(path, rows, build)
    echo(f"{len(rows)} {'records' if build is None else 'votes'}: {path}")


def _report(store: Any, path: Path | None, tables: Path | None, leave_out: list[str]) -> None:
    from visalign.evaluation.pages.votes_page import file_tables, votes_page
    from visalign.evaluation.rewards.judged_pairs import IntervalSettings
    from visalign.pipelines.collect.votes import report, select_votes, with_images
    from visalign.pipelines.shared.run_folder import new_file

    new_file(path, endings=(".html", ".json"))
    new_file(tables)
    result = report(store, select_votes(store, leave_out), IntervalSettings())
    show_report(Console(), result)
    opt.write_table_files(tables, lambda: file_tables(result))
    opt.write_page_or_json(path, result, lambda: votes_page(result, with_images(store, result)))


def show_report(console: Console, result: dict[str, Any]) -> None:
    from visalign.evaluation.pages.base import plain, share
    from visalign.evaluation.pages.votes_page import headlines, sentences

    table = Table("voter", "votes", "seconds", "the rest", "repeats", "gold", "reliability")
    for row in result["annotators"]:
        shares = [share((row.get(name) or {}).get("estimate")) for name in ("rest", "repeats", "gold")]
        reliability = plain(row.get("reliability"), 2)
        table.add_row(Text(row["name"]), str(row["votes"]), plain(row["seconds"], 2), *shares, reliability)
    for what, number, more in headlines(result):
        console.print(Text(f"{what}: {number} {more}".rstrip()))
    console.print(table)
    for sentence in [*result["notes"], *sentences(result)]:
        console.print(Text(sentence))
