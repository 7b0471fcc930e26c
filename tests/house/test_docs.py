# SPDX-License-Identifier: Apache-2.0
"""Documentation is checked: docstring examples, code and commands of README, contributing and site, paper
table, config headers; and the site builds.

A block below a line `<!-- not run -->` is not run; it shows as skipped in the summary.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import mkdocs.commands.build
import mkdocs.config
import pytest
import typer.main
from lunr import lunr

import visalign.core
from visalign.config import config_folder, list_configs, read_config
from visalign.errors import ConfigError, UserError
from visalign.pipelines.cli.app import app
from visalign.pipelines.cli.show import config_header
from visalign.pipelines.jobs import PIPELINES, load_job
from visalign.training import METRICS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
SITE = ROOT / "docs"
ISSUES = ROOT / ".github/ISSUE_TEMPLATE"
CORE_README = ROOT / "visalign/core/README.md"
TEST_COMMAND = 'python -m pip install -e ".[test]" && python -m pytest'
GUIDES = {
    "+lora": "start/",
    "+resume": "start/fine_tune/",
    "+learning +rate": "start/fine_tune/",
    "+out +memory": "help/",
    "+system +prompt": "start/text/",
}
"""Search -> page that comes first; before the reference, which has each word in a title."""
HEADER_WORDS = ("Command", "Hardware", "Duration", "Expected")
BLOCK = re.compile(r"^(?P<skip><!-- not run -->\n+)?```(?P<language>\w*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def _modules_with_examples() -> list[str]:
    """Dotted names of the modules with a docstring that holds `>>>`."""
    folders = {"visalign": ROOT / "visalign", "visalign.rewards": ROOT / "rewards"}
    folders["visalign.pipelines"] = ROOT / "pipelines"
    names = []
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            is_wing = package == "visalign" and parts[0] in {"rewards", "pipelines"}
            if not is_wing and ">>> " in path.read_text(encoding="utf-8"):
                names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return names


@pytest.mark.parametrize("name", _modules_with_examples())
def test_docstring_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0, f"{name}: `>>>` is outside its docstrings"
    assert result.failed == 0


@dataclass(frozen=True)
class Block:
    """Fenced block of a page."""

    language: str
    code: str
    line: int
    """Number of its first line of code, from 1."""
    is_run: bool
    page: Path = README

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(text: str, page: Path = README) -> list[Block]:
    """Return the fenced blocks of a Markdown text, in order."""
    blocks = []
    for match in BLOCK.finditer(text):
        line = text[: match.start("code")].count("\n") + 1
        blocks.append(Block(match["language"], match["code"], line, match["skip"] is None, page))
    return blocks


def commands_of(text: str) -> list[list[str]]:
    """Return the `visalign` commands of a shell text as lists of the words after `visalign`."""
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            if words[:1] in (["python"], ["torchrun"]) and "-m" in words:  # of what -m names
                words = words[words.index("-m") + 1 :]
            if words[:1] == ["visalign"]:
                commands.append(words[1:])
    return commands


PAGES = {
    page: page.read_text(encoding="utf-8")
    for page in (README, ROOT / ".github/CONTRIBUTING.md", *sorted(SITE.rglob("*.md")))
}
CORE_TEXT = CORE_README.read_text(encoding="utf-8")
BLOCKS = [block for page, text in PAGES.items() for block in blocks_of(text, page)]
NAMESPACES: dict[Path, dict[str, object]] = defaultdict(lambda: {"__name__": "page"})
"""Shared namespace per page: a later Python block may use names of an earlier one."""


def test_the_readme_holds_the_test_command_on_a_line_of_its_own() -> None:
    shell = [block for block in BLOCKS if block.language == "bash" and block.page == README]
    assert TEST_COMMAND in [line for block in shell for line in block.code.splitlines()]
    assert len([b for b in BLOCKS if b.language == "python" and b.page == README and b.is_run]) == 1


def test_no_block_escapes() -> None:
    languages = {"bash", "diff", "python", "text", "yaml"}
    assert {str(block): block.language for block in BLOCKS if block.language not in languages} == {}
    fences = {str(page): len(re.findall(r"^\s*```", text, re.MULTILINE)) for page, text in PAGES.items()}
    read = {str(page): 2 * sum(block.page == page for block in BLOCKS) for page in PAGES}
    assert fences == read, "an indented block is not run"


@pytest.mark.parametrize(
    "block",  # the README's is run by test_wheel.py, with what was installed
    [block for block in BLOCKS if block.language == "python" and block.page != README],
    ids=str,
)
def test_python_blocks(
    block: Block, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not block.is_run:
        pytest.skip("marked <!-- not run -->")
    monkeypatch.chdir(_folder_for(block.page, tmp_path_factory))
    numbered = "\n" * (block.line - 1) + block.code  # true line numbers in a traceback
    exec(compile(numbered, str(block.page), "exec"), NAMESPACES[block.page])
    assert ast.parse(block.code).body, "an empty block shows nothing"


_FOLDERS: dict[Path, Path] = {}


def _folder_for(page: Path, factory: pytest.TempPathFactory) -> Path:
    """Return the working directory that a page's blocks share."""
    if page not in _FOLDERS:
        _FOLDERS[page] = factory.mktemp(page.stem)
    return _FOLDERS[page]


def test_the_worked_example_of_a_setting_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch = "".join(block.code for block in BLOCKS if block.language == "diff")
    files = re.findall(r"^--- a/(\S+)$", patch, re.MULTILINE)
    assert len(files) == 1, "a rollout setting touches one file of the product"
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch, text=True, check=True)
    edited = next(tmp_path / file for file in files if file.endswith("rollout_settings.py"))
    name = "visalign.training.diffusion.rollout_settings_with_eta"
    spec = importlib.util.spec_from_file_location(name, edited)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    assert module.RolloutSettings(schedule="ddim", sde_steps=[0, 1], eta=0.5).eta == 0.5
    with pytest.raises(UserError, match=r"rollout\.eta is 0\.5; only rollout\.schedule=ddim"):
        module.RolloutSettings(eta=0.5)


def check_command(words: list[str]) -> None:
    """Raise where a documented command does not parse or names a configuration that does not load."""
    group = typer.main.get_command(app)
    commands = group.commands  # pyright: ignore[reportAttributeAccessIssue]  # an app with several commands is a group
    if words[:1] and words[0].startswith("-"):
        return
    assert words and words[0] in commands, f"no such command: visalign {shlex.join(words)}"
    arguments = [word for word in words[1:] if word not in {"--help", "-h"}]
    if arguments != words[1:]:
        return
    context = commands[words[0]].make_context(words[0], arguments)
    if words[0] in {"train", "train-reward"} and "=" not in (context.params["config"] or "="):  # else visalign.yaml
        load_job(context.params["config"], context.params["overrides"] or [])
    if words[0] == "configs" and context.params["name"]:
        read_config(context.params["name"])


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "bash"], ids=str)
def test_commands(block: Block) -> None:
    if not block.is_run:
        pytest.skip("marked <!-- not run -->")
    for words in commands_of(block.code):
        check_command(words)
    assert block.code.strip(), "an empty block shows nothing"


def test_commands_within_a_sentence() -> None:
    """A training that a page names between backticks loads; "..." stands for more of the same."""
    quoted = re.findall(r"`(visalign train(?:-reward)? [a-z][^`]*)`", "\n".join(PAGES.values()))
    commands = [words for text in quoted for words in commands_of(text.replace("...", ""))]
    assert len(commands) > 15
    for words in commands:
        check_command(words)


def core_functions() -> dict[str, list[str]]:
    """module of visalign.core -> its public functions."""
    functions = {}
    for info in pkgutil.walk_packages(visalign.core.__path__, "visalign.core."):
        module = importlib.import_module(info.name)
        members = inspect.getmembers(module, inspect.isfunction)
        functions[info.name.removeprefix("visalign.core.")] = [
            name for name, function in members if function.__module__ == module.__name__ and name[0] != "_"
        ]
    return functions


def quoted_names(text: str) -> set[str]:
    """Return every identifier in backticks, the last part of dotted ones too."""
    return {name for quoted in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"[A-Za-z_]\w*", quoted)}


def test_the_paper_table_names_every_function_of_the_core() -> None:
    functions = core_functions()
    assert functions["advantages.group"]
    rows = "\n".join(line for line in CORE_TEXT.splitlines() if line.startswith("|"))
    missing = {name for names in functions.values() for name in names} - quoted_names(rows)
    assert missing == set()


@pytest.mark.parametrize("block", [b for b in blocks_of(CORE_TEXT) if b.language == "python"], ids=str)
def test_core_readme_python(block: Block) -> None:
    assert "\nassert " in block.code, "the block shows a result and checks none"
    exec(compile("\n" * (block.line - 1) + block.code, str(CORE_README), "exec"), {"__name__": "core"})


def test_the_files_that_pages_name_exist() -> None:
    folders = "visalign|rewards|pipelines|configs|tests|assets|docs"
    bad = []
    for page, text in {**PAGES, CORE_README: CORE_TEXT}.items():
        paths = set(re.findall(rf"(?<![\w/.])((?:{folders})/[\w./-]+\.(?:py|md|yaml))\b", text))
        bad += [f"{page.relative_to(ROOT)}: {path}" for path in sorted(paths) if not (ROOT / path).exists()]
        links = {path for path in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) if "://" not in path}
        if page.is_relative_to(SITE):
            continue  # mkdocs checks the links of the site, anchors included
        bad += [f"{page.relative_to(ROOT)}: {link}" for link in links if not (page.parent / link).exists()]
    assert bad == []


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SITE))  # as MkDocs does
    return importlib.import_module("hooks")


def test_the_keys_and_metrics_that_pages_name_exist(hooks: ModuleType) -> None:
    tables = "".join(hooks.MACROS["settings"](pipeline) for pipeline in PIPELINES)
    keys = set(re.findall(r"^\| `([\w.]+)` \|", tables, re.MULTILINE))
    sections = {key.split(".")[0] for key in keys if "." in key}
    bad = []
    for page, text in PAGES.items():
        for quoted in re.findall(r"`([^`\n]+)`", text):
            for key in re.findall(r"(?:^|(?<=\s))([a-z_]+(?:\.[a-z_0-9]+)+)(?=$|[=\s])", quoted):
                if key.split(".")[0] in sections and key not in keys and not key.endswith((".jsonl", ".txt")):
                    bad.append(f"{page.relative_to(ROOT)}: {key}")
    assert bad == []
    symptoms = PAGES[SITE / "help/index.md"]
    plain = set(re.findall(r"^\| [^|]*?`([a-z_]+)`", symptoms, re.MULTILINE))
    assert plain and plain - set(METRICS) == set(), "a symptom names a metric that no run logs"


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    config = mkdocs.config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
    python = config.plugins["mkdocstrings"].config["handlers"]["python"]["options"]
    python["line_length"] = 10_000  # or each longer signature starts ruff
    config.plugins.on_startup(command="build", dirty=False)
    mkdocs.commands.build.build(config)
    pages = {path: path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.html")}
    assert len(pages) > 40
    assert [str(path) for path, html in pages.items() if "{{ " in html] == []
    outside = [  # a page must be whole without a network
        f"{path.relative_to(tmp_path)}: {tag}"
        for path, html in pages.items()
        for tag in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(?:https?:)?//[^"]+"', html)
    ]
    assert outside == []
    documents = json.loads((tmp_path / "site/search/search_index.json").read_text(encoding="utf-8"))["docs"]
    fields = [{"field_name": "title", "boost": 1000}, "text"]  # as the theme weighs them
    index = lunr("location", fields, [(document, {"boost": document["boost"]}) for document in documents])
    for words, guide in GUIDES.items():
        assert index.search(words)[0]["ref"].startswith(guide), (words, index.search(words)[:3])
    for face in ("core", "rewards", "training", "adapters", "flow", "text", "evaluation"):
        html = pages[tmp_path / "site/reference" / face / "index.html"]
        names = importlib.import_module(f"visalign.{face}").__all__
        assert [name for name in names if f".{name}" not in html] == [], face


def test_macros_name_unknown_arguments(hooks: ModuleType) -> None:
    for text, message in (
        ("{{ tables }}", "no macro 'tables'"),
        ("{{ metrics reward_men }}", "no metric matches 'reward_men'"),
        ("{{ configs flow_grop }}", "no configuration of flow_grop"),
        ("{{ settings flow_grpo rollout.step }}", "flow_grpo has no setting rollout.step"),
        ("{{ curves text_sample }}", "BEFORE -> AFTER"),
        ("{{ include README.md Nothing }}", "no heading '## Nothing'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            hooks.expand(text)


def test_a_curve_is_of_kept_runs_else_of_the_header(
    hooks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = importlib.import_module("macros.curves")
    monkeypatch.setattr(drawn, "FOLDER", tmp_path)
    html = hooks.expand("{{ curves text_ppo }}")
    assert 'class="change"' in html and 'class="band"' not in html and "visalign train text_ppo<" in html
    assert hooks.expand("{{ curves shapes_ram text_dpo }}").count("<figure>") == 1, "one measure, one figure"
    folders = []
    for seed, rewards in enumerate(([0.1, 0.3, 0.5], [0.3, 0.3])):
        folder = tmp_path / str(seed)
        folder.mkdir()
        rows = [{"iteration": k, "reward_mean": reward} for k, reward in enumerate(rewards, 1)]
        (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        sides = {"before": {"accuracy": 0.2}, "after": {"accuracy": 0.5 + seed / 10}}
        (folder / "summary.json").write_text(json.dumps({**sides, "config": {"seed": seed}}))
        folders.append(folder)
    drawn.keep("text_ppo", folders)
    curve = drawn.curve_of("text_ppo")
    assert curve.points == [[1, 0.2, 0.1, 0.3], [2, 0.3, 0.3, 0.3]], "iterations that both runs have"
    assert (curve.before, curve.after, curve.seeds) == ([0.2, 0.2], [0.5, 0.6], [0, 1])
    html = hooks.expand("{{ curves text_ppo }}")
    assert 'class="band"' in html and html.count("<circle") == 4 and "mean of seeds 0, 1" in html


@pytest.mark.parametrize("name", list_configs())
def test_a_config_states_its_command_and_loads(name: str) -> None:
    header = config_header((config_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    for word in HEADER_WORDS:
        assert any(re.match(rf"{word}\b.*:", line) for line in header), f"{name}: no line '# {word}: ...'"
    assert not header[0].startswith(HEADER_WORDS), f"{name}: the first line says what it is"
    commands = commands_of("\n".join(line.partition(":")[2] for line in header if line.startswith("Command")))
    assert commands, f"{name}: its Command is no visalign command"
    for words in commands:
        check_command(words)
    assert any(name in words[1:2] or words[0] == "quickstart" for words in commands)
    assert load_job(name).config is not None


def test_every_pipeline_has_the_functions_that_the_command_line_calls() -> None:
    for pipeline in PIPELINES.values():
        module_name, _, schema = pipeline.partition(":")
        module = importlib.import_module(module_name)
        assert inspect.isclass(getattr(module, schema))
        assert list(inspect.signature(module.run).parameters)[:3] == ["config", "output", "resume"]
        assert len(inspect.signature(module.plan).parameters) >= 1


def test_how_blocks_and_commands_are_read() -> None:
    text = (
        "# Title\n\n```python\nx = 1\n```\n\n<!-- not run -->\n```bash\npip x && visalign quickstart\n"
        "python -m visalign train a \\\n  seed=1  # comment\n```\n"
    )
    first, second = blocks_of(text)
    assert first == Block("python", "x = 1\n", 4, is_run=True)
    assert (second.language, second.line, second.is_run) == ("bash", 9, False)
    assert commands_of(second.code) == [["quickstart"], ["train", "a", "seed=1"]]
    assert quoted_names("| `core.group_advantages(x)` and `b` |") == {"core", "group_advantages", "x", "b"}
    usage_error = typer.BadParameter.__mro__[1]
    with pytest.raises(usage_error, match="--sead"):
        check_command(["quickstart", "--sead", "1"])
    with pytest.raises(AssertionError, match="no such command: visalign trian"):
        check_command(["trian"])
    with pytest.raises(ConfigError, match="does not exist"):
        check_command(["train", "no-such-config"])
