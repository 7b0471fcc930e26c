# SPDX-License-Identifier: Apache-2.0
"""What is written is true: docstring examples, the README's code and commands, paper table, config headers.

A block of the README below a line `<!-- not run -->` is not run; it shows as skipped in the summary.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main

import visalign.core
from visalign.config import config_folder, list_configs, read_config
from visalign.errors import ConfigError
from visalign.pipelines.cli.app import app
from visalign.pipelines.cli.show import config_header
from visalign.pipelines.jobs import PIPELINES, load_job

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
CORE_README = ROOT / "visalign/core/README.md"
TEST_COMMAND = 'python -m pip install -e ".[test]" && python -m pytest'
HEADER_WORDS = ("Command", "Hardware", "Duration", "Expected")
BLOCK = re.compile(
    r"^(?P<skip><!-- not run -->\n+)?```(?P<language>\w*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)


def _modules_with_examples() -> list[str]:
    """Dotted names of the modules with a docstring that holds `>>>`."""
    folders = {"visalign": ROOT / "visalign", "visalign.rewards": ROOT / "rewards"}
    folders["visalign.pipelines"] = ROOT / "pipelines"
    found = []
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            is_wing = package == "visalign" and parts[0] in {"rewards", "pipelines"}
            if not is_wing and ">>> " in path.read_text(encoding="utf-8"):
                found.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return found


@pytest.mark.parametrize("name", _modules_with_examples())
def test_docstring_examples(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0, f"{name}: `>>>` stands outside its docstrings"
    assert result.failed == 0


@dataclass(frozen=True)
class Block:
    """One fenced block of the README."""

    language: str
    code: str
    line: int
    """Number of its first line of code, from 1."""
    is_run: bool

    def __str__(self) -> str:
        return f"{self.language or 'text'}-line-{self.line}"


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order."""
    found = []
    for match in BLOCK.finditer(text):
        line = text[: match.start("code")].count("\n") + 1
        found.append(Block(match["language"], match["code"], line, is_run=match["skip"] is None))
    return found


def commands_of(text: str) -> list[list[str]]:
    """The `visalign` commands of a shell text, as argument lists, from the word after `visalign` on."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        for part in line.split("&&"):
            words = shlex.split(part, comments=True)
            if words[:3] == ["python", "-m", "visalign"]:
                words = words[2:]
            if words[:1] == ["visalign"]:
                found.append(words[1:])
    return found


README_TEXT = README.read_text(encoding="utf-8") if README.is_file() else ""
CORE_TEXT = CORE_README.read_text(encoding="utf-8")
BLOCKS = blocks_of(README_TEXT)
NAMESPACE: dict[str, object] = {"__name__": "readme"}
"""The README's Python blocks are one story: a later one may use what an earlier one made."""


def test_the_readme_holds_the_test_command_on_a_line_of_its_own() -> None:
    assert README.is_file()
    shell = [block for block in BLOCKS if block.language == "bash"]
    assert TEST_COMMAND in [line for block in shell for line in block.code.splitlines()]
    assert [block for block in BLOCKS if block.language == "python" and block.is_run]


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "python"], ids=str)
def test_readme_python(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not block.is_run:
        pytest.skip("marked <!-- not run --> in the README")
    monkeypatch.chdir(tmp_path)
    code = compile(
        "\n" * (block.line - 1) + block.code, str(README), "exec"
    )  # true line numbers in a traceback
    exec(code, NAMESPACE)
    assert ast.parse(block.code).body, "an empty block shows nothing"


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
    if words[0] == "train":
        load_job(context.params["config"], context.params["overrides"] or [])
    if words[0] == "configs" and context.params["name"]:
        read_config(context.params["name"])


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "bash"], ids=str)
def test_readme_commands(block: Block) -> None:
    if not block.is_run:
        pytest.skip("marked <!-- not run --> in the README")
    for words in commands_of(block.code):
        check_command(words)
    assert block.code.strip(), "an empty block shows nothing"


def core_functions() -> dict[str, list[str]]:
    """module of visalign.core -> its public functions."""
    found = {}
    for info in pkgutil.walk_packages(visalign.core.__path__, "visalign.core."):
        module = importlib.import_module(info.name)
        members = inspect.getmembers(module, inspect.isfunction)
        found[info.name.removeprefix("visalign.core.")] = [
            name for name, function in members if function.__module__ == module.__name__ and name[0] != "_"
        ]
    return found


def quoted_names(text: str) -> set[str]:
    """Every identifier that stands in backticks, the last part of dotted ones too."""
    return {
        name for quoted in re.findall(r"`([^`\n]+)`", text) for name in re.findall(r"[A-Za-z_]\w*", quoted)
    }


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


def test_the_files_that_the_readmes_name_exist() -> None:
    assert README_TEXT
    text = README_TEXT + CORE_TEXT
    named = set(re.findall(r"`((?:visalign|rewards|pipelines|configs|tests|assets)/[\w./-]+\.\w+)`", text))
    named |= {path for path in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in path}
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


@pytest.mark.parametrize("name", list_configs())
def test_a_config_says_how_it_is_run_and_loads(name: str) -> None:
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


def test_every_pipeline_offers_what_the_command_line_calls() -> None:
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
