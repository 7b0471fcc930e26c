# SPDX-License-Identifier: Apache-2.0
"""Tables of the site that the code writes itself: settings, metrics, judges, rows, configurations, commands.

A line `{{ name argument ... }}` of a page is replaced by what the function `name` of `MACROS` returns. What a
page says of a key, a name or a file is thereby what the code says; an unknown one stops the build.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import html
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from visalign.config import config_folder, list_configs, read_config
from visalign.data.assets import PACKAGED, assets_folder
from visalign.errors import UserError
from visalign.pipelines.cli.app import app
from visalign.pipelines.cli.show import config_header
from visalign.pipelines.jobs import PIPELINES

ROOT = Path(__file__).resolve().parents[1]
CITED = re.compile(r"^(?P<row>\|.*) \| (?P<names>@[\w.]+(?: @[\w.]+)*) \|$", re.MULTILINE)
MACRO = re.compile(r"^\{\{ (?P<name>\w+)(?P<words>[^}]*) \}\}$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the card of every packaged model as a page."""
    for name in PACKAGED:
        card = (assets_folder() / name / "README.md").read_text(encoding="utf-8")
        files.append(File.generated(config, f"judges/cards/{name}.md", content=card))
    config["validation"]["nav"]["omitted_files"] = 0  # the cards are reached from judges/cards.md
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the macros of a page."""
    try:
        return expand(markdown)
    except (KeyError, ValueError, OSError) as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error


def expand(markdown: str) -> str:
    """The text with every macro replaced.

    Raises:
        ValueError: there is no macro of that name, or it was given something that the code does not have.
    """

    def replaced(match: re.Match[str]) -> str:
        if match["name"] not in MACROS:
            raise ValueError(f"no macro {match['name']!r}; there are: {', '.join(MACROS)}")
        return MACROS[match["name"]](*match["words"].split())

    return CITED.sub(lambda row: cited(row["row"], row["names"].split()), MACRO.sub(replaced, markdown))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |" for line in lines)


def code(value: Any) -> str:
    """A value as inline code that survives a table cell."""
    return f"`{value}`".replace("|", "\\|")


def prose(text: str) -> str:
    """A docstring as the text of a table cell."""
    return " ".join(text.split()).replace("|", "\\|")


# --- the table of papers


def cited(row: str, names: Sequence[str]) -> str:
    """A row of the table of papers with the files of its names, and the tests that mirror their rooms.

    Args:
        row: its cells before.
        names: `@face.name`, `@judge.NAME` of the catalogue, or `@job.PIPELINE`.

    Raises:
        ValueError: the code has no such name.
    """
    places, rooms = [], []
    for name in names:
        found = inspect.unwrap(_named(name.removeprefix("@")))
        file = Path(typing.cast("str", inspect.getsourcefile(found))).resolve().relative_to(ROOT)
        mirrored = Path("tests", *file.parts[file.parts[0] == "visalign" :])
        room = next(parent for parent in mirrored.parents if [*(ROOT / parent).rglob("test_*.py")])
        shown = name.rpartition(".")[2] if inspect.ismodule(found) else found.__name__
        places.append(f"{code(shown)} in {code(file)}")
        rooms.append(code(room))
    return f"{row} | {', '.join(places)} | {', '.join(dict.fromkeys(rooms))} |"


def _named(name: str) -> Any:
    wing, _, rest = name.partition(".")
    try:
        if wing == "judge":
            return {key: kind for key, kind, _, _ in _entries("CATALOGUE")}[rest]
        if wing == "job":
            return importlib.import_module(PIPELINES[rest].partition(":")[0])
        place, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(f"visalign.{place}"), attribute)
    except (AttributeError, KeyError, ImportError) as error:
        raise ValueError(f"the code has no {name!r} ({error})") from error


# --- settings


def field_texts(schema: type) -> dict[str, str]:
    """field -> the docstring below it, inherited fields included."""
    found: dict[str, str] = {}
    for kind in reversed(schema.__mro__):
        if not dataclasses.is_dataclass(kind):
            continue
        body = typing.cast("ast.ClassDef", ast.parse(inspect.getsource(kind)).body[0]).body
        for field, below in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                found[field.target.id] = ""
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                    found[field.target.id] = str(below.value.value)
    return found


def sections(hint: Any) -> Iterator[type]:
    """The dataclasses in an annotation."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for part in typing.get_args(hint):
        yield from sections(part)


def default_of(field: dataclasses.Field[Any]) -> str:
    """The default of a plain field, as YAML writes it; "" where it must be given."""
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return ""
    if dataclasses.is_dataclass(value) or (isinstance(value, Mapping) and value):
        return ""
    if value is None or isinstance(value, bool):
        return code({None: "null", True: "true", False: "false"}[value])
    return code(value if value != "" else '""')


def settings(name: str) -> str:
    """Every key of a job with its default and meaning, section by section.

    Args:
        name: a pipeline of `visalign.pipelines.jobs.PIPELINES`, or `module:Dataclass`.
    """
    module, _, attribute = PIPELINES.get(name, name).partition(":")
    schema = getattr(importlib.import_module(module), attribute)
    return "\n\n".join(_section(schema, "", shown={schema}))


def _section(schema: type, prefix: str, shown: set[type]) -> Iterator[str]:
    hints, texts = typing.get_type_hints(schema), field_texts(schema)
    rows, deeper = [], []
    for field in dataclasses.fields(schema):
        key, inner = f"{prefix}{field.name}", list(sections(hints[field.name]))
        is_free = typing.get_origin(hints[field.name]) is dict
        new = [kind for kind in inner if kind not in shown]
        deeper += [(kind, f"{key}.NAME." if is_free else f"{key}.") for kind in new]
        shown.update(new)
        rows.append((code(key), default_of(field), prose(texts.get(field.name, ""))))
    title = f"**{prefix[:-1]}**" if prefix else "**the run**"
    yield f"{title}: {prose((schema.__doc__ or '').splitlines()[0])}\n\n" + table(
        ("key", "default", "meaning"), rows
    )
    for kind, below in deeper:
        yield from _section(kind, below, shown)


# --- metrics, configurations, expected results


def metrics(*patterns: str) -> str:
    """Keys and meanings of the metrics that match any pattern; all without one.

    Raises:
        ValueError: a pattern that matches no key.
    """
    known = importlib.import_module("visalign.training.loop.metrics").METRICS
    for pattern in patterns:
        if not fnmatch.filter(known, pattern) and pattern not in known:
            raise ValueError(f"no metric matches {pattern!r}")
    chosen = [
        key for key in known if not patterns or any(key == p or fnmatch.fnmatch(key, p) for p in patterns)
    ]
    return table(("metric", "meaning"), [(code(key), prose(known[key])) for key in chosen])


def header(name: str) -> dict[str, str]:
    """The header of a packaged configuration: "what", then Command, Hardware, Duration, Expected and others.

    Raises:
        ValueError: there is no configuration of that name.
    """
    if name not in list_configs():
        raise ValueError(f"no configuration {name!r}")
    lines = config_header((config_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    found, last = {"what": lines[0]}, "what"
    for line in lines[1:]:
        word, colon, rest = line.partition(": ")
        if colon and re.fullmatch(r"[A-Z][\w ]+", word):
            found[word], last = f"{found[word]}\n{rest}" if word in found else rest, word
        else:
            found[last] += f" {line}"
    return found


def configs(*pipelines: str) -> str:
    """The packaged configurations of some pipelines, or all: what each is, how long, what to expect."""
    rows = []
    for name in list_configs():
        if not pipelines or read_config(name).get("pipeline") in pipelines:
            told = header(name)
            rows.append(
                (code(name), *(prose(told.get(word, "")) for word in ("what", "Duration", "Expected")))
            )
    if not rows:
        raise ValueError(f"no configuration of {', '.join(pipelines)}")
    return table(("configuration", "what", "duration", "expected"), rows)


CHANGE = re.compile(r"(?P<measure>[\w -]+?) (?P<before>0?\.\d+) -> (?P<after>0?\.\d+)")
SEEDS = re.compile(r"mean of seeds [\d, ]+: (?P<values>[\d., ]+\d)")
INTERVAL = re.compile(r"95 % interval \+?(?P<low>[\d.]+) to \+?(?P<high>[\d.]+)")


def expected(*names: str) -> str:
    """Before and after of configurations as a drawing, with seeds or interval where the header states them.

    Raises:
        ValueError: a header without "MEASURE BEFORE -> AFTER".
    """
    rows = [(name, _change(name)) for name in names]
    low = min(min(change["before"], change["after"], *change["spread"]) for _, change in rows)
    high = max(max(change["before"], change["after"], *change["spread"]) for _, change in rows)
    left, right, step = 235, 545, 26
    pad = 0.06 * (high - low)

    def x(value: float) -> float:
        return round(left + (value - low + pad) / (high - low + 2 * pad) * (right - left), 1)

    body = []
    for index, (name, change) in enumerate(rows):
        y = 16 + index * step
        before, after = x(change["before"]), x(change["after"])
        body.append(f'<text x="{left - 50}" y="{y + 4}" text-anchor="end">{html.escape(name)}</text>')
        body.append(f'<line class="move" x1="{before}" x2="{after}" y1="{y}" y2="{y}"/>')
        if change["kind"] == "interval":
            a, b = (x(value) for value in change["spread"])
            body.append(f'<line class="interval" x1="{a}" x2="{b}" y1="{y}" y2="{y}"/>')
        if change["kind"] == "seeds":
            body += [f'<circle class="seed" cx="{x(v)}" cy="{y}" r="3.2"/>' for v in change["spread"]]
        body.append(f'<circle class="before" cx="{before}" cy="{y}" r="4.5"/>')
        body.append(f'<line class="after" x1="{after}" x2="{after}" y1="{y - 9}" y2="{y + 9}"/>')
        end = max(after, *(x(value) for value in change["spread"])) + 9
        body.append(f'<text x="{before - 9}" y="{y + 4}" text-anchor="end">{change["before"]:g}</text>')
        body.append(f'<text x="{end}" y="{y + 4}">{change["after"]:g}</text>')
    size = f'viewBox="0 0 600 {6 + step * len(rows)}"'
    caption = (
        f"{rows[0][1]['measure'].strip().capitalize()}: ring before, bar after; dots are seeds, a thick line "
        "a 95 % interval of one run, where the configuration's header states them."
    )
    head = f'<svg class="expected" role="img" {size} xmlns="http://www.w3.org/2000/svg">'
    return f"<figure>{head}{''.join(body)}</svg><figcaption>{caption}</figcaption></figure>"


def _change(name: str) -> dict[str, Any]:
    said = header(name)["Expected"]
    change = CHANGE.search(said)
    if change is None:
        raise ValueError(f"the header of {name!r} has no 'MEASURE BEFORE -> AFTER': {said!r}")
    before = float(change["before"])
    found: dict[str, Any] = {"measure": change["measure"], "before": before, "after": float(change["after"])}
    if seeds := SEEDS.search(said):
        values = [float(value) for value in seeds["values"].split(",")]
        return {**found, "kind": "seeds", "spread": values}
    if interval := INTERVAL.search(said):
        gains = [float(interval["low"]), float(interval["high"])]
        points = [gain / 100 if max(gains) > 1 else gain for gain in gains]
        return {**found, "kind": "interval", "spread": [before + gain for gain in points]}
    return {**found, "kind": "none", "spread": [found["after"]]}


# --- catalogues


def _class_at(path: str) -> type:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def first_sentence(found: Any) -> str:
    """Of a docstring."""
    text = prose(inspect.getdoc(found) or "")
    return re.split(r"(?<=[.;])\s", text, maxsplit=1)[0].rstrip(";") if text else ""


def _entries(name: str) -> Iterator[tuple[str, type, Mapping[str, Any], str]]:
    """(name, class, preset options, file) of a catalogue of `visalign.rewards`."""
    for key, entry in getattr(importlib.import_module("visalign.rewards"), name).items():
        path, options = entry if isinstance(entry, tuple) else (entry, {})
        kind = _class_at(path)
        file = Path(typing.cast("str", inspect.getsourcefile(kind))).resolve().relative_to(ROOT / "rewards")
        yield key, kind, options, file.as_posix()


def judges() -> str:
    """Every judge of pictures by name."""
    units = importlib.import_module("visalign.rewards.scorers.units").JUDGE_UNITS
    rows = []
    for name, kind, options, file in _entries("CATALOGUE"):
        unit = (
            units[name].unit if name in units else getattr(kind(**options) if options else kind, "unit", "")
        )
        has = [word for word in ("score", "compare") if callable(getattr(kind, word, None))]
        starts = [option.default for option in inspect.signature(kind).parameters.values()]
        packaged = [code(value) for value in starts if isinstance(value, str) and value in PACKAGED]
        rows.append(
            (
                code(name),
                first_sentence(kind),
                unit if isinstance(unit, str) and unit else "its own",
                ", ".join(code(word) for word in has),
                ", ".join(packaged),
                code(file),
            )
        )
    return table(("name", "what it is", "unit", "offers", "packaged model", "file in rewards/"), rows)


def text_rewards() -> str:
    """Every reward for text by name."""
    rows = []
    for name, kind, options, _ in _entries("TEXT_CATALOGUE"):
        given = ", ".join(f"{key}={value}" for key, value in options.items() if key != "name")
        rows.append((code(name), first_sentence(kind), code(given) if given else ""))
    return table(("name", "what it is", "preset"), rows)


def algorithms() -> str:
    """The rows of the objective: on what each works, what it takes at each stage, its paper."""
    core = importlib.import_module("visalign.core")
    rows = []
    for name, row in core.NAMED.items():
        stages = [row.advantage, row.level, row.surrogate, row.aggregation]
        terms = {"kl": row.kl, "kl in reward": row.kl_in_reward, "value": row.value, "ptx": row.ptx}
        also = [f"{key} {value:g}" for key, value in terms.items() if value]
        also += [row.selection] if row.selection else []
        fits = ["–" if _refusal(name, kind) else "✓" for kind in TRAINED]
        shown = " · ".join(code(stage) for stage in stages)
        rows.append((code(name), *fits, shown, ", ".join(also), prose(row.source)))
    return table(("row", *TRAINED, "advantage · ratio · surrogate · mean", "also", "source"), rows)


def refusals() -> str:
    """Rows that a trainer refuses, with what it says."""
    names = importlib.import_module("visalign.core").NAMED
    said: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for kind in TRAINED:
            if why := _refusal(name, kind):
                why = why.rpartition("): ")[2].removeprefix(f"objective.algorithm={name} ")
                said.setdefault((kind, why), []).append(code(name))
    rows = [(", ".join(found), kind, prose(why)) for (kind, why), found in said.items()]
    return table(("row", "refused for", "because, and what to take"), rows)


TRAINED = {"pictures": "DiffusionObjectiveSettings", "text": "TextObjectiveSettings"}
"""What is trained -> its settings in `visalign.training`, which know what they refuse."""


def _refusal(row: str, kind: str) -> str:
    try:
        getattr(importlib.import_module("visalign.training"), TRAINED[kind])(algorithm=row)
    except UserError as error:
        return str(error)
    return ""


def cards() -> str:
    """The packaged models with the first paragraph of their cards."""
    rows = []
    for name in PACKAGED:
        card = (assets_folder() / name / "README.md").read_text(encoding="utf-8")
        first = next(part for part in card.split("\n\n") if part and not part.startswith("#"))
        rows.append((f"[`{name}`](cards/{name}.md)", prose(first)))
    return table(("model", "what it is"), rows)


def face(name: str) -> str:
    """The names that a face offers, with the first sentence of each."""
    module = importlib.import_module(name)
    rows = []
    for attribute in sorted(module.__all__, key=str.lower):
        if attribute.startswith("_"):
            continue
        found = getattr(module, attribute)
        place = getattr(found, "__module__", name)
        rows.append((code(attribute), first_sentence(found), code(place)))
    return table(("name", "what it is", "home"), rows)


def api(name: str) -> str:
    """The reference of a face: what it says of itself, its names by the room that has them.

    A face with more names than one wants to meet at once has the others in `ROOMS`, room -> names.
    """
    module = importlib.import_module(name)
    homes = _homes(module)
    others = {room: names.split() for room, names in getattr(module, "ROOMS", {}).items()}
    rooms: dict[str, list[str]] = {}
    elsewhere = []
    for attribute in module.__all__:
        if attribute == "ROOMS":
            continue
        home = homes[attribute]
        if not home.startswith(f"{name}."):
            elsewhere.append(code(f"{home}.{attribute}"))
            continue
        room = "First" if others else home.removeprefix(f"{name}.").split(".")[0]
        rooms.setdefault(room, []).append(f"{home}.{attribute}")
    parts = [inspect.getdoc(module) or ""]
    if others:
        parts.append(f"What one meets first comes first; the rest by room, as in `{name}.ROOMS`.")
    if elsewhere:
        parts.append(f"Offered here, at home elsewhere: {', '.join(elsewhere)}.")
    for place, names in others.items():
        found = rooms.setdefault(place.split(".")[0], [])
        found += [f"{_defined(f'{name}.{place}', attribute)}.{attribute}" for attribute in names]
    for room, paths in sorted(rooms.items()):
        parts.append(f"## {room}")
        parts += [f"::: {path}\n    options: {API}" for path in sorted(paths, key=_last)]
    return "\n\n".join(parts)


API = "{heading_level: 3, show_root_heading: true, show_root_toc_entry: true, show_root_full_path: false}"


def _last(path: str) -> str:
    return path.rpartition(".")[2].lower()


def _homes(module: Any) -> dict[str, str]:
    """Public name -> module that defines it; faces that import at first use have a stub that says so."""
    file = Path(module.__file__)
    stub = file.with_suffix(".pyi")
    found = {name: getattr(getattr(module, name), "__module__", module.__name__) for name in module.__all__}
    for node in ast.walk(ast.parse((stub if stub.is_file() else file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and (node.level or "visalign" in node.module):
            place = f"{module.__name__}.{node.module}" if node.level else node.module
            found |= {alias.asname or alias.name: place for alias in node.names}
    return {name: _defined(place, name) for name, place in found.items() if name in module.__all__}


def _defined(place: str, name: str) -> str:
    """Where a name is defined, if its module only passes it on."""
    home = getattr(getattr(importlib.import_module(place), name), "__module__", None)
    return home if isinstance(home, str) and home.startswith("visalign.") else place


# --- commands, files


def commands() -> str:
    """The command line: every command with its arguments and options."""
    group = typing.cast("Any", typer.main.get_command(app))
    parts = []
    for name, command in group.commands.items():
        rows = []
        for option in command.params:
            if option.name in {"help"}:
                continue
            names = " ".join(option.opts) if option.param_type_name == "option" else option.name.upper()
            rows.append((code(names), prose(getattr(option, "help", None) or "")))
        said = prose(command.help or "")
        parts.append(f"## visalign {name}\n\n{said}\n\n{table(('argument', 'meaning'), rows)}")
    return "\n\n".join(parts)


def include(path: str, start: str = "", end: str = "") -> str:
    """A file of the repository, or its part between two headings (underscores stand for spaces).

    Raises:
        ValueError: the file has no such heading.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    if start:
        wanted = f"## {start.replace('_', ' ')}\n"
        if wanted not in text:
            raise ValueError(f"{path} has no heading {wanted.strip()!r}")
        text = text[text.index(wanted) :]
    if end:
        text = text[: text.index(f"\n## {end.replace('_', ' ')}\n")]
    return text.partition("\n")[2].strip() if text.startswith("# ") else text.strip()


def python(path: str) -> str:
    """The first Python block of a file of the repository."""
    text = (ROOT / path).read_text(encoding="utf-8")
    start = text.index("```python\n")
    return text[start : text.index("\n```", start)] + "\n```"


MACROS: dict[str, Callable[..., str]] = {
    "algorithms": algorithms,
    "api": api,
    "cards": cards,
    "commands": commands,
    "configs": configs,
    "expected": expected,
    "face": face,
    "include": include,
    "judges": judges,
    "metrics": metrics,
    "python": python,
    "refusals": refusals,
    "settings": settings,
    "text_rewards": text_rewards,
}
"""name on a page -> function."""
