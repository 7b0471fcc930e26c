# SPDX-License-Identifier: Apache-2.0
"""Run frozen golden numbers through visalign's public functions: `python tests/golden_runner.py DIR`.

Plug-in contract: each `tests/golden_families/*.py` is loaded by its path, imports nothing from here, and has

    FAMILIES = {"E_sde_steps": sde_steps, ...}       # family name of the JSON file -> function
    TOLERANCES = {"E_sde_steps": tolerance, ...}     # optional

* `sde_steps(case) -> dict[str, Any] | None`: our outputs (tensors, numbers, lists, nested dicts) under the
  names of the case's expected outputs; `None` when the family does not know this variant or when an input or
  a parameter value is outside what we offer (it is then listed as unknown, which is no failure).
  Names beyond the expected ones are ignored; expected ones left out are reported as "not compared".
  An exception makes the case FAIL with its message: return None for what is not ours, never guess.
  Gradients (`grad_<input>`) are outputs like any other; their leaf is `case.tensor(name).requires_grad_()`.
  A key `outputs` or `outputs_*` that names another block of the record is compared with that block.
* `tolerance(case, key) -> tuple[float, float, str] | None`: (rtol, atol, of) for the output `key`; `of` is
  "element" (|ours - theirs| <= atol + rtol |theirs|) or "largest" (<= atol + rtol max|theirs|). None or no
  entry: (1e-6, 1e-8, "element").
* Several files may name one family: they are asked in the order of their file names until one knows the case.

What a `case` offers (read it, change nothing):
    case.family, case.name      "E_sde_steps", "flow_sde_i0_s0"
    case.variant                the name without its `_s<seed>` ending: "flow_sde_i0"
    case.params                 dict, as in the file
    case.inputs                 dict of plain Python values ("NaN" already a float), numpy arrays from .npz
    case.expected               dict: `outputs_paper` if there, else `outputs`, else empty
    case.arrays                 dict: every array of the .npz file under `<case>/`, named in the record or not
    case.record                 the whole JSON record (`outputs_peer`, `notes`, ...)
    case.tensor(name, dtype=torch.float64)   the input `name` as a fresh tensor

Exit: 0 all known cases agree; 1 one is off; 2 nothing to read, or an unreadable file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

FORMAT = "visalign-golden-1"
DEFAULT_TOLERANCE = (1e-6, 1e-8, "element")
SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Case:
    """One case as a family function sees it; the fields are described at the top of this file."""

    family: str
    name: str
    variant: str
    params: Mapping[str, Any]
    inputs: Mapping[str, Any]
    expected: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    record: Mapping[str, Any]

    def tensor(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        """The input `name` as a fresh tensor."""
        return torch.tensor(self.inputs[name], dtype=dtype)


@dataclass(frozen=True)
class Family:
    """What the plug-ins offer for one family name."""

    functions: tuple[Callable[[Case], dict[str, Any] | None], ...]
    tolerance: Callable[[Case, str], tuple[float, float, str] | None] | None


@dataclass(frozen=True)
class Comparison:
    """Outcome of one known case."""

    ok: bool
    absolute: float
    relative: float
    notes: tuple[str, ...]


def load_families(folder: Path) -> dict[str, Family]:
    """Load every plug-in of the folder by its path."""
    families: dict[str, Family] = {}
    for path in sorted(folder.glob("*.py")):
        if path.stem == "__init__":
            continue
        module = _load(path)
        for name, function in module.FAMILIES.items():
            earlier = families.get(name, Family((), None))
            tolerance = getattr(module, "TOLERANCES", {}).get(name, earlier.tolerance)
            families[name] = Family((*earlier.functions, function), tolerance)
    return families


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"golden_family_{path.stem}", path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def read_file(path: Path) -> tuple[str, list[Case]] | None:
    """The family and cases of one file, or None when the file is JSON of another format."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_bare_constant)
    except OSError as error:
        raise ValueError(f"cannot be opened: {error.strerror}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return None
    family, records = document.get("family"), document.get("cases")
    if not isinstance(family, str) or not isinstance(records, list):
        raise ValueError("needs 'family' (a string) and 'cases' (a list)")
    arrays = _read_arrays(path.with_suffix(".npz"))
    return family, [_case(family, record, arrays) for record in records]


def _no_bare_constant(text: str) -> float:
    raise ValueError(f'bare {text} is no strict JSON; write the string "{text}"')


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def _case(family: str, record: Any, arrays: Mapping[str, np.ndarray]) -> Case:
    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        raise ValueError("each case must be an object with a 'name'")
    name = record["name"]
    record = {key: _plain(value, name, arrays) for key, value in record.items()}
    for key in ("params", "inputs"):
        if not isinstance(record.setdefault(key, {}), dict):
            raise ValueError(f"case {name}: '{key}' must be an object")
    return Case(
        family=family,
        name=name,
        variant=re.sub(r"_s\d+$", "", name),
        params=record["params"],
        inputs=record["inputs"],
        expected=record.get("outputs_paper", record.get("outputs", {})),
        arrays={key[len(name) + 1 :]: arrays[key] for key in arrays if key.startswith(f"{name}/")},
        record=record,
    )


def _plain(value: Any, case: str, arrays: Mapping[str, np.ndarray]) -> Any:
    """Decode "NaN" and "Infinity", and put in the arrays that `{"arrays": [names]}` refers to."""
    if isinstance(value, str):
        return SPECIAL.get(value, value)
    if isinstance(value, list):
        return [_plain(item, case, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    result = {key: _plain(item, case, arrays) for key, item in value.items() if key != "arrays"}
    for name in value.get("arrays", []):
        if f"{case}/{name}" not in arrays:
            raise ValueError(f"case {case}: the array {case}/{name} is not in the .npz file")
        result[name] = arrays[f"{case}/{name}"]
    return result


def run_case(family: Family, case: Case) -> Comparison | None:
    """Compute and compare one case; None when no function of the family knows it."""
    for function in family.functions:
        try:
            ours = function(case)
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            return Comparison(False, math.inf, math.inf, (f"{type(error).__name__}: {error}",))
        if ours is not None:
            return _compare(family, case, ours)
    return None


def _compare(family: Family, case: Case, ours: Mapping[str, Any]) -> Comparison:
    groups = {key: value for key, value in ours.items() if key.startswith("outputs") and key in case.record}
    pairs = [({key: value for key, value in ours.items() if key not in groups}, case.expected, "")]
    pairs += [(value, case.record[key], f"{key}.") for key, value in groups.items()]
    notes: list[str] = []
    absolute = relative = 0.0
    compared = 0
    ok = True
    for mine, theirs, prefix in pairs:
        got, expected = dict(_leaves(mine)), dict(_leaves(theirs))
        for key in expected:
            if key not in got:
                notes.append(f"not compared: {prefix}{key}")
                continue
            compared += 1
            tolerance = family.tolerance(case, prefix + key) if family.tolerance else None
            error = difference(got[key], expected[key], tolerance or DEFAULT_TOLERANCE)
            absolute, relative = max(absolute, error.absolute), max(relative, error.relative)
            ok &= error.ok
            if not error.ok:
                notes.insert(0, f"{prefix}{key}: {error.reason}")
    if not compared:
        return Comparison(False, math.inf, math.inf, ("none of our outputs has the name of an expected one",))
    return Comparison(ok, absolute, relative, tuple(notes))


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in nested dicts."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


@dataclass(frozen=True)
class Difference:
    """How far two values are apart."""

    ok: bool
    absolute: float
    relative: float
    reason: str = ""


def difference(ours: Any, theirs: Any, tolerance: tuple[float, float, str]) -> Difference:
    """Compare numbers of any nesting within tolerance (rtol, atol, of); anything else must be equal."""
    mine, expected = _numbers(ours), _numbers(theirs)
    if mine is None or expected is None:
        if isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)) and len(ours) == len(theirs):
            parts = [difference(a, b, tolerance) for a, b in zip(ours, theirs, strict=True)]
            return Difference(
                all(p.ok for p in parts),
                max((p.absolute for p in parts), default=0.0),
                max((p.relative for p in parts), default=0.0),
                next((f"entry {i}: {p.reason}" for i, p in enumerate(parts) if not p.ok), ""),
            )
        same = type(ours) is type(theirs) and ours == theirs
        reason = "" if same else f"got {str(ours)[:60]!r}, expected {str(theirs)[:60]!r}"
        return Difference(same, 0.0 if same else math.inf, 0.0 if same else math.inf, reason)
    if mine.shape != expected.shape:
        return Difference(False, math.inf, math.inf, f"shape {mine.shape}, expected {expected.shape}")
    if not mine.size:
        return Difference(True, 0.0, 0.0)
    rtol, atol, of = tolerance
    same = (mine == expected) | (np.isnan(mine) & np.isnan(expected))
    both = np.isfinite(mine) & np.isfinite(expected)
    error = np.where(same, 0.0, np.inf)
    np.subtract(mine, expected, out=error, where=both & ~same)
    error = np.abs(error)
    size = np.abs(np.where(np.isfinite(expected), expected, 0.0))
    if of == "largest":
        size = np.full_like(size, size.max())
    bound = atol + rtol * size
    relative = error / np.maximum(size, max(atol / rtol if rtol else 0.0, np.finfo(np.float64).tiny))
    worst = int(np.argmax(error - bound))
    reason = f"got {mine.flat[worst]:.9g}, expected {expected.flat[worst]:.9g} (allowed {bound.flat[worst]:.2g})"
    return Difference(bool((error <= bound).all()), float(error.max()), float(relative.max()), reason)


def _numbers(value: Any) -> np.ndarray | None:
    """A float64 array, or None when the value is no rectangular block of numbers."""
    if isinstance(value, Tensor):
        return value.detach().cpu().double().numpy()
    if isinstance(value, (list, tuple)):
        parts = [_numbers(item) for item in value]
        if any(part is None for part in parts) or len({p.shape for p in parts if p is not None}) > 1:
            return None
        return np.array(parts, dtype=np.float64)
    if isinstance(value, (bool, int, float, np.ndarray, np.number)):
        array = np.asarray(value)
        return array.astype(np.float64) if array.dtype.kind in "biuf" else None
    return None


def run_folder(folder: Path, families: Mapping[str, Family], say: Callable[[str], None] = print) -> int:
    """Run all golden files of a folder; returns the exit status named at the top of this file."""
    unknown_families: Counter[str] = Counter()
    unknown_variants: Counter[str] = Counter()
    failed: list[str] = []
    broken: list[str] = []
    files = compared = 0
    for path in sorted(folder.glob("*.json")):
        try:
            content = read_file(path)
        except ValueError as error:
            broken.append(path.name)
            say(f"UNREADABLE {path.name}: {error}")
            continue
        if content is None:
            say(f"skipped {path.name}: its format is not {FORMAT}")
            continue
        files += 1
        name, cases = content
        if name not in families:
            unknown_families[name] += len(cases)
            continue
        for case in cases:
            outcome = run_case(families[name], case)
            if outcome is None:
                unknown_variants[f"{name}/{case.variant}"] += 1
                continue
            compared += 1
            label = f"{name}/{case.name}"
            verdict = "ok  " if outcome.ok else "FAIL"
            if not outcome.ok:
                failed.append(label)
            notes = f"  ({'; '.join(outcome.notes)})" if outcome.notes else ""
            say(f"{verdict} {label}  abs {outcome.absolute:.2e}  rel {outcome.relative:.2e}{notes}")
    for title, counter in (("unknown family", unknown_families), ("unknown variant", unknown_variants)):
        for name, count in sorted(counter.items()):
            say(f"{title} {name}: {count} cases")
    unknown = unknown_families.total() + unknown_variants.total()
    say(f"{compared - len(failed)} ok, {len(failed)} FAIL, {unknown} unknown, {len(broken)} unreadable files")
    if failed:
        say(f"off by more than the tolerance: {', '.join(failed)}")
    if broken or not files:
        if not files:
            say(f"no readable file of format {FORMAT} in {folder}")
        return 2
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Run golden numbers through visalign's public functions.")
    parser.add_argument("folder", type=Path, help="folder with *.json (and *.npz) of format visalign-golden-1")
    folder = parser.parse_args(arguments).folder
    if not folder.is_dir():
        print(f"{folder} is no folder; give one that holds *.json of format {FORMAT}")
        return 2
    return run_folder(folder, load_families(Path(__file__).resolve().parent / "golden_families"))


if __name__ == "__main__":
    sys.exit(main())
