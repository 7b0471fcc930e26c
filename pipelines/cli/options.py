# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have, with their help, and how a command prints and writes its result."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, redirect_stdout
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from rich.console import Console
from typer import Argument, Option, echo
from typer.core import TyperCommand, TyperOption

from visalign.errors import UserError

from .messages import user_messages

MOST_COUNTED = 2**20  # Largest count of an option, as in `visalign.settings`; its import would slow --help

Repeated = list[str] | None  # Values of an option that may be given several times

Config = Annotated[str | None, Argument(help="Name from `visalign configs`, or YAML file. Default: visalign.yaml.")]
Overrides = Annotated[Repeated, Argument(help="Settings to change: key.sub=value ...")]
ImageFiles = Annotated[
    list[Path],
    Argument(help="Image files, folders of images or clips, tables with the columns image (or completion), prompt."),
]
Rewards = Annotated[list[str], Option("--reward", "-r", help="Name of a reward; repeat for several.")]
OptionalRewards = Annotated[Repeated, Option("--reward", "-r", help="Name of a reward; repeat for several.")]
Scores = Annotated[
    Repeated,
    Option(
        "--scores",
        "-s",
        help="Scores in a column NAME, or NAME_left and NAME_right; NAME=COLUMN, NAME=LEFT,RIGHT; repeat.",
    ),
]
LowerIsBetter = Annotated[Repeated, Option(help="Names of --scores where lower is better; repeat.")]
Prompt = Annotated[str | None, Option("--prompt", "-p", help="Prompt of all images; in a table, of rows without one.")]
LabelOptions = Annotated[Repeated, Option("--option", help="LABEL.NAME=VALUE for a reward; repeat for several.")]
Options = Annotated[Repeated, Option("--option", help="NAME=VALUE for the reward; repeat for several.")]
Cache = Annotated[Path | None, Option("--cache", help="Folder of cached scores, reused by later commands.")]
MapColumns = Annotated[Repeated, Option("--map", help="OURS=THEIRS: a column's name, such as mos=score; repeat.")]
Labels = Annotated[
    str | None,
    Option("--labels", help="Meaning of the labels: share, margin, or words, such as 1=left,2=right,0=tie."),
]
NewFolder = Annotated[
    Path | None, Option("--output", "-o", help="New folder for page and JSON. Default: print to the terminal.")
]
NewFile = Annotated[Path | None, Option("--output", "-o", help="Output file, a new one: .html (a page) or .json.")]
Device = Annotated[
    str | None,
    Option("--device", help="Device to compute on: cpu, cuda, cuda:1. Default: the GPU where there is one."),
]
Tables = Annotated[Path | None, Option("--tables", help="New folder for every table as CSV and LaTeX.")]
Resume = Annotated[bool, Option("--resume", help="Continue the stopped command in --output.")]
Batch = Annotated[int, Option(help="Images or pairs per batch.", min=1, max=2**32 - 1)]
Seed = Annotated[int, Option(help="Random seed.", min=0, max=2**32 - 1)]
AsJson = Annotated[bool, Option("--json", help="Print JSON instead of a table.")]
DryRun = Annotated[bool, Option("--dry-run", help="Show configuration and plan, then stop.")]


VALUE_NAMES = ((Path, "PATH"), (int, "N"), (float, "X"), (str, "TEXT"))
"""Type of an option -> name of its value in --help."""


class Command(TyperCommand):
    """A command that prints errors as messages, and refuses an option given twice that takes one value."""

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters with short value names: typer writes <list[str]> and <int range>."""
        types = {} if self.callback is None else get_type_hints(self.callback)
        parameters: Any = super().get_params(ctx)
        for parameter in parameters:
            words = str(types.get(parameter.name, bool))
            label = next((label for kind, label in VALUE_NAMES if kind.__name__ in words), "")
            if not isinstance(parameter, TyperOption):
                parameter.display_type = lambda ctx: ""  # the name says it
                parameter.metavar = parameter.metavar or parameter.name.upper()
            elif "Literal" not in words:  # typer lists the choices
                parameter.metavar = parameter.metavar or label
        return parameters

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help without the bounds of numbers: an error names them."""
        import typer.rich_utils

        typer.rich_utils.RANGE_STRING = ""
        super().format_help(ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        with user_messages():
            return super().invoke(ctx)

    def make_parser(self, ctx: Any) -> Any:
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def parse_once(args: list[str]) -> Any:
            self._refuse_dashed_settings(ctx, args)
            values, rest, order = parse(args=args)
            for option in dict.fromkeys(order):
                single = isinstance(option, TyperOption) and not (option.multiple or option.is_flag)
                if single and order.count(option) > 1:  # click would take the last one without a word
                    names = " / ".join(f"'{name}'" for name in option.opts)
                    ctx.fail(f"Option {names} was given {order.count(option)} times; it takes one value.")
            return values, rest, order

        parser.parse_args = parse_once
        return parser

    def _refuse_dashed_settings(self, ctx: Any, args: list[str]) -> None:
        """Answer --learning_rate, as TRL's scripts have it, by our setting."""
        parameters = self.get_params(ctx)
        option_names = {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
        dashed_names = [arg.partition("=")[0] for arg in args if arg.startswith("--") and arg != "--"]
        wrong = [name for name in dashed_names if name not in option_names]
        if wrong and any(parameter.name == "overrides" for parameter in parameters):
            from visalign.other_names import OTHER_NAMES

            keys = [name.lstrip("-").replace("-", "_") for name in wrong]
            ours = "; ".join(f"{key} is {' or '.join(OTHER_NAMES[key])}" for key in keys if key in OTHER_NAMES)
            hint = f": {ours}" if ours else ", such as optimizer.lr=1e-5; visalign configs NAME lists them"
            ctx.fail(f"There is no option {wrong[0]}. Settings are written KEY=VALUE, without dashes{hint}.")


def config_and_overrides(config: str | None, overrides: list[str] | None) -> tuple[str, list[str]]:
    """Return configuration and overrides; where none is named, visalign.yaml of the working folder."""
    changes = overrides or []
    if config is not None and ("=" not in config or Path(config).is_file()):
        return config, changes
    if not Path("visalign.yaml").is_file():
        raise UserError("No configuration named; this folder has no visalign.yaml. visalign configs lists names.")
    return "visalign.yaml", changes if config is None else [config, *changes]


def resume_line(resume: bool) -> str:
    return shlex.join(["visalign", *sys.argv[1:], *([] if resume else ["--resume"])])


def clean_output() -> AbstractContextManager[Any]:
    """Send what a reward prints to the error stream, so that the output stays JSON."""
    return redirect_stdout(sys.stderr)


def print_result(result: Any, show: Callable[[Console, Any], None], as_json: bool) -> None:
    from visalign.pipelines.shared.run_folder import pretty

    if as_json:
        echo(pretty(result), nl=False)
    else:
        show(Console(), result)


def write_page_or_json(path: Path | None, result: Any, page: Callable[[], str], as_json: bool = False) -> None:
    """Write a result by the file's ending if a file is given, and report it; beside JSON on the error stream."""
    from visalign.atomic import write_atomic
    from visalign.pipelines.shared.run_folder import pretty

    if path is not None:
        is_page = path.suffix.lower() == ".html"
        write_atomic(path, page() if is_page else pretty(result))
        echo(f"{'Page' if is_page else 'JSON'}: {path}", err=as_json)


def write_table_files(folder: Path | None, tables: Callable[[], Iterable[Any]]) -> None:
    from visalign.evaluation.pages.table_files import write_tables

    if folder is not None:
        write_tables(folder, tables())
        echo(f"CSV and LaTeX: {folder}", err=True)
