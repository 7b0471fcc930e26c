# SPDX-License-Identifier: Apache-2.0
"""Layout of the repository: packages, links, one-way imports, sizes, names, a light `import visalign`."""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import grimp
import pytest

import visalign

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
WINGS = ("rewards", "pipelines")
OUTSIDE_THE_WHEEL = ("tests/", "docs/", "assets/build/")

LOOK_AGAIN_LINES = 500
LOOK_AGAIN_FUNCTION = 60
LOOKED_AT = {
    "visalign/training/text/rl.py:__init__": "a third is its arguments, and each part is built once",
    "pipelines/cli/bench.py:bench": "an option a line, and the calls of two uses",
    "pipelines/cli/collect.py:collect": "an option a line, and the calls of four uses",
    "pipelines/cli/evaluate.py:evaluate": "an option a line, and one call",
    "pipelines/cli/sample.py:sample": "an option a line, and one call",
    "pipelines/cli/score.py:score": "an option a line, and one call",
    "pipelines/evaluate/job.py:evaluate": "two thirds are its arguments",
    "visalign/evaluation/pages/report.py:write_report": "its arguments, and one call of the template",
}
"""File or `file:function` above these limits -> the reason why it is one subject."""
MAX_FILES = 20
"""Modules of one folder, its __init__ apart."""
FORBIDDEN_NAMES = {"utils.py", "util.py", "common.py", "helpers.py", "misc.py"}
BROAD = {"Exception", "BaseException"}
MACHINE_PATH = re.compile(r"(?<![\w.~<$}])/(?:work|farm|root|home|Users|workspace|mnt)/\w")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")  # layout: the rule itself


@cache
def tracked() -> tuple[Path, ...]:
    """List the files that git tracks, or in an unpacked archive all but build products; links left out."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        files = [ROOT / name for name in listed.split("\0") if name]
    else:
        files = [path for path in ROOT.rglob("*") if not set(path.relative_to(ROOT).parts) & {"build", "dist"}]
    return tuple(sorted(path for path in files if path.is_file() and not path.is_symlink() and not _via_link(path)))


def _via_link(path: Path) -> bool:
    return any((ROOT / part).is_symlink() for part in path.relative_to(ROOT).parents)


def sources(*, tests: bool) -> list[Path]:
    """List the tracked Python files; without `tests` only the product's."""
    files = [path for path in tracked() if path.suffix == ".py"]
    return [path for path in files if tests or not _name(path).startswith(OUTSIDE_THE_WHEEL)]


def texts() -> Iterator[tuple[Path, str]]:
    """Yield the tracked files that are text and written by hand."""
    for path in tracked():
        if path.suffix in {".py", ".toml", ".md", ".yaml", ".yml", ".j2", ".sh", ".txt"} or path.name == "run":
            yield path, path.read_text(encoding="utf-8")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def packages_on_disk() -> set[str]:
    """Dotted names of the folders with an __init__.py, the wings under the name they are imported by."""
    mapping = {folder: package for package, folder in SETUPTOOLS["package-dir"].items()}
    packages = set()
    for path in sources(tests=False):
        if path.name == "__init__.py":
            first, *rest = path.parent.relative_to(ROOT).parts
            packages.add(".".join([mapping.get(first, first), *rest]))
    return packages


def test_the_package_list_is_the_folders() -> None:
    listed = SETUPTOOLS["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_on_disk()


@pytest.mark.parametrize("wing", WINGS)
def test_the_links_lead_to_the_wings(wing: str) -> None:
    link = ROOT / "visalign" / wing
    assert link.resolve() == ROOT / wing
    if link.is_symlink():
        assert link.readlink() == Path("..") / wing, "a relative link, so that the checkout can move"
    assert SETUPTOOLS["package-dir"][f"visalign.{wing}"] == wing
    if shutil.which("git") and (ROOT / ".git").exists():
        mode = subprocess.run(
            ["git", "ls-files", "-s", f"visalign/{wing}"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert mode.stdout.startswith("120000 "), f"visalign/{wing} is not committed as a link"


def test_imports_run_one_way() -> None:
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    assert command, 'lint-imports is missing; run: python -m pip install -e ".[test]"'
    child = subprocess.run([command, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr


@dataclass(frozen=True)
class Facts:
    """Properties of a Python file that the rules below check."""

    text: str
    docstring: str
    imports: tuple[tuple[int, str, int], ...]
    """(line, module, level of the relative import), inside functions too."""
    functions: tuple[tuple[str, int], ...]
    """(name, lines)."""
    broad: tuple[int, ...]
    """Lines with a broad except."""
    unfinished: tuple[int, ...]
    """Lines that raise NotImplementedError."""


@cache
def facts(path: Path) -> Facts:
    """Each file is parsed once; a tree is not kept, as all together would be large."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    imports: list[tuple[int, str, int]] = []
    functions: list[tuple[str, int]] = []
    broad: list[int] = []
    unfinished: list[int] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                imports += [(node.lineno, alias.name, 0) for alias in node.names]
            case ast.ImportFrom():
                imports.append((node.lineno, node.module or "", node.level))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                functions.append((node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
            case ast.ExceptHandler() if _is_broad(node.type):
                broad.append(node.lineno)
            case ast.Raise() if "NotImplementedError" in ast.dump(node):
                unfinished.append(node.lineno)
    docstring = ast.get_docstring(tree) or ""
    return Facts(text, docstring, tuple(imports), tuple(functions), tuple(broad), tuple(unfinished))


def test_relative_imports_stay_inside_their_wing() -> None:
    # Under a package-dir mapping `..x` from a wing means another file for pip than for a plain folder.
    bad = [
        f"{_name(path)}:{line}" for path in sources(tests=False) for line, _, level in facts(path).imports if level > 1
    ]
    assert bad == []


def test_wings_are_imported_by_their_full_name() -> None:
    bad = [
        f"{_name(path)}:{line}: {module}"
        for path in sources(tests=True)
        for line, module, level in facts(path).imports
        if level == 0
        and module.split(".")[0] in {*WINGS, "configs", "assets"}
        and not module.startswith("assets.build")  # scripts of a checkout, in no package
    ]
    assert bad == []


HEAVY = {"diffusers", "transformers", "open_clip", "peft", "accelerate", "datasets"}
HEAVY_PLACES = ("visalign/adapters/", "rewards/", "visalign/training/", "pipelines/", "tests/")
HEAVY_PLACES += ("visalign/data/sets/hub_datasets.py",)


def test_heavy_libraries_stay_at_the_leaves() -> None:
    bad = [
        f"{_name(path)}:{line}: {module}"
        for path in sources(tests=False)
        for line, module, level in facts(path).imports
        if level == 0 and module.split(".")[0] in HEAVY and not _name(path).startswith(HEAVY_PLACES)
    ]
    assert bad == []
    core = {
        module.split(".")[0]
        for path in sources(tests=False)
        if _name(path).startswith("visalign/core/")
        for _, module, level in facts(path).imports
        if level == 0
    }
    assert core <= {"torch", "triton", "visalign", *sys.stdlib_module_names}


BY_NAME = {"wandb": "accelerate imports it for run.trackers=[wandb]"}
"""Dependencies that no import statement of the product names, and who needs them."""
BROUGHT = {
    "triton": "torch brings it where it has CUDA",
    "referencing": "jsonschema brings it",
    "sympy": "math-verify does",
}
"""Packages that the product imports and a dependency brings."""


def test_dependencies_are_what_the_code_imports() -> None:
    def named(requirements: list[str]) -> set[str]:
        return {re.split(r"[<>=!~\[ ]", line)[0].lower().replace("_", "-") for line in requirements}

    owners = metadata.packages_distributions()
    imported = {
        module.split(".")[0] for path in sources(tests=False) for _, module, level in facts(path).imports if level == 0
    } - {"visalign", *sys.stdlib_module_names}
    needed = named([owners.get(module, [module])[0] for module in imported - set(BROUGHT)])
    optional = PROJECT["project"]["optional-dependencies"]
    offered = [line for extra, lines in optional.items() if extra not in ("all", "test", "docs") for line in lines]
    assert named([*PROJECT["project"]["dependencies"], *offered]) == needed | set(BY_NAME)


def _long_ones() -> Iterator[tuple[str, int, int]]:
    """(file or file:function, its lines, the number from which one looks again)."""
    for path in sources(tests=False):
        yield _name(path), facts(path).text.count("\n"), LOOK_AGAIN_LINES
        for name, lines in facts(path).functions:
            yield f"{_name(path)}:{name}", lines, LOOK_AGAIN_FUNCTION


def test_long_files_and_functions_are_listed_with_a_reason() -> None:
    long = {name: lines for name, lines, allowed in _long_ones() if lines > allowed}
    new = [f"{name}: {lines} lines" for name, lines in long.items() if name not in LOOKED_AT]
    assert new == [], (
        f"Look again at what has more than {LOOK_AGAIN_LINES} lines (a function: {LOOK_AGAIN_FUNCTION}). Two "
        "subjects become two files; one subject stays whole, and LOOKED_AT says why."
    )
    assert sorted(LOOKED_AT.keys() - long.keys()) == [], "short by now: take it out of LOOKED_AT"


def test_folders_stay_small() -> None:
    files = Counter(path.parent for path in sources(tests=False) if path.name != "__init__.py")
    big = {_name(folder): count for folder, count in files.items() if count > MAX_FILES}
    assert big == {}, "a folder of this size holds more than one subject"


def test_every_folder_has_a_docstring() -> None:
    folders = sorted(packages_on_disk() - {"visalign.assets", "visalign.configs"})
    paths = [ROOT.joinpath(*_folder_of(package), "__init__.py") for package in folders]
    assert [_name(path) for path in paths if not facts(path).docstring] == []


def _folder_of(package: str) -> list[str]:
    """Parts of the folder that holds a package."""
    first, _, rest = package.partition(".")
    wing = rest.partition(".")[0]
    return rest.split(".") if wing in {*WINGS, "assets", "configs"} else [first, *rest.split(".")]


def test_no_file_imports_the_package_above_it() -> None:
    """Together with the contract "no circles of folders" of pyproject.toml this excludes circles of files."""
    graph = grimp.build_graph("visalign", cache_dir=None)
    bad = [
        f"{module} imports {face}"
        for module in graph.modules
        for face in graph.find_modules_directly_imported_by(module)
        if module.startswith(f"{face}.")
    ]
    assert sorted(bad) == []


def test_no_catch_all_file_names() -> None:
    assert [_name(path) for path in tracked() if path.name in FORBIDDEN_NAMES] == []


def test_no_broad_except_and_nothing_unfinished() -> None:
    bad = []
    for path in sources(tests=True):
        if not _name(path).startswith("tests/benchmarks/"):  # these go on with their next row
            bad += [f"{_name(path)}:{number}: broad except" for number in facts(path).broad]
        bad += [f"{_name(path)}:{number}: NotImplementedError" for number in facts(path).unfinished]
        for number, line in enumerate(facts(path).text.splitlines(), 1):
            if UNFINISHED.search(line) and not line.endswith("# layout: the rule itself"):
                bad.append(f"{_name(path)}:{number}: {line.strip()}")
    assert bad == []


def _is_broad(kind: ast.expr | None) -> bool:
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(name is None or (isinstance(name, ast.Name) and name.id in BROAD) for name in names)


def test_no_path_of_a_machine() -> None:
    bad = [
        f"{_name(path)}:{number}: {line.strip()[:80]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert bad == []


def test_every_python_file_has_a_licence_line_and_a_docstring() -> None:
    bad = []
    for path in sources(tests=True):
        if not facts(path).text.startswith("# SPDX-License-Identifier: Apache-2.0\n"):
            bad.append(f"{_name(path)}: no SPDX line")
        if path.name != "__init__.py" and not facts(path).docstring:
            bad.append(f"{_name(path)}: no module docstring")
    assert bad == []


def test_package_data_is_listed() -> None:
    assert "py.typed" in SETUPTOOLS["package-data"]["visalign"] and (ROOT / "visalign/py.typed").is_file()
    endings = {(_name(path).split("/")[0], path.suffix) for path in tracked() if path.suffix != ".py"}
    assert SETUPTOOLS["package-data"]["visalign.assets"] == ["**/*"]
    assert ("configs", ".yaml") not in endings or "*.yaml" in SETUPTOOLS["package-data"]["visalign.configs"]
    for path in tracked():
        if path.suffix == ".j2":
            package = ".".join(path.parent.relative_to(ROOT).parts)
            assert any(path.match(pattern) for pattern in SETUPTOOLS["package-data"].get(package, [])), _name(path)


IMPORT_TIME = """
import time, sys
import torch
begun = time.perf_counter()
import visalign
print(time.perf_counter() - begun, *sorted(set(sys.argv[1].split(",")) & set(sys.modules)))
"""


def test_import_visalign_is_light() -> None:
    code = "import sys, visalign; print(*sorted(set(sys.argv[1].split(',')) & set(sys.modules)))"
    heavy = ",".join(sorted(HEAVY | {"torchvision", "matplotlib", "scipy"}))
    child = subprocess.run([sys.executable, "-c", code, heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert child.stdout.split() == []
    best = float("inf")
    for _ in range(3):  # the least of a few: a busy machine only ever adds
        timed = subprocess.run(
            [sys.executable, "-c", IMPORT_TIME, heavy], cwd=ROOT, capture_output=True, text=True, check=True
        )
        best = min(best, float(timed.stdout.split()[0]))
        if best < 0.3:
            break
    assert best < 0.3


def test_the_package_exports_names_that_exist() -> None:
    face: Any = visalign
    assert len(face.__all__) == 25, "the names that most programs need: a new one replaces another"
    for name in face.__all__:
        assert inspect.getdoc(getattr(face, name)), f"{name} has no docstring"
    with pytest.raises(AttributeError, match=r"no attribute 'load_rewards'.*load_reward"):
        face.load_rewards  # noqa: B018
