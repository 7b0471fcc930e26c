# SPDX-License-Identifier: Apache-2.0
"""`code_tests`: the share of unit tests that generated Python code passes."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from visalign.interfaces import Metadata, Prompt, RewardCapabilities, Scores
from visalign.rewards.base.contract import RewardError, check_choices, check_counts, check_rules
from visalign.rewards.text.contract import TextVerdict, after_marker, read_text_request, shortened, text_scores
from visalign.rewards.text.parsing import extract_code, has_fence
from visalign.text.calculator import parse_python

from .sandbox import NoSandbox, Run, SandboxLimits, bubblewrap_problem, run_bubblewrap, run_server

TEST_FORMS = '{"stdin", "stdout"}, {"call", "args", "expected"}, "assert ..." or {"inputs", "outputs"}'


class UnreadableTests(ValueError):
    """The tests of a sample cannot be read: the ground truth is missing, the code did not fail."""


class Outcome(NamedTuple):
    passed: bool
    remark: str = ""


# Runs in the sandbox. Expected values stay outside, so that code cannot read them or equal everything.
_RUNNER = """
import decimal, fractions, json, numbers, os, sys, types
task = json.load(sys.stdin)
out, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0), os.dup2(null, 1), os.dup2(null, 2)
def report(**record):
    os.write(out, (task["nonce"] + json.dumps(record) + "\\n").encode())
def plain(value):  # subclasses as what they equal: a Counter as a dict, an array as a list, a date as text
    value = value.tolist() if hasattr(value, "tolist") else value
    value = value.isoformat() if hasattr(value, "isoformat") else value
    if isinstance(value, decimal.Decimal):
        value = fractions.Fraction(value) if value.is_finite() else float(value)
    if isinstance(value, dict):
        return {plain(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        kind = next(k for k in (list, tuple, set, frozenset) if isinstance(value, k))
        return set(map(plain, value)) if kind is frozenset else kind(map(plain, value))
    if isinstance(value, numbers.Rational) and not isinstance(value, int):
        return int(value) if value == int(value) else float(value)
    kinds = () if type(value) is bool else (str, float, int)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), value)
module = sys.modules["solution"] = types.ModuleType("solution")
scope = module.__dict__
try:
    exec(compile(task["code"], "solution.py", "exec"), scope)
except BaseException as error:
    report(load_error=f"raised {type(error).__name__}: {error}"[:300])
    task["tests"] = []
for number, test in enumerate(task["tests"]):
    try:
        value = None
        if "assert" in test:
            exec(compile(test["assert"], "test.py", "exec"), scope)
        elif "eval" in test:
            value = eval(compile(test["eval"], "test.py", "eval"), scope)
        else:
            first, _, method = test["call"].partition(".")
            if not method and first not in scope and "Solution" in scope:
                first, method = "Solution", first
            function = getattr(scope[first](), method) if method else scope[first]
            value = function(*test["args"], **test["kwargs"])
        report(test=number, value=repr(plain(value)))
    except BaseException as error:
        report(test=number, error=f"raised {type(error).__name__}: {error}"[:300])
"""
_OUT_OF_TIME = (None, 137)
"""Exit codes of programs that ran out of wall-clock time, or that the limit of CPU time killed (128 + 9)."""
_END = "the setup has ended"
_FUTURE = re.compile(r"^from __future__ import [\w, ]+", re.MULTILINE)
_LONGEST_VALUE = 1 << 20
_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


class _Numbers(ast.NodeTransformer):
    """Replaces the names inf and nan, as repr writes them, by the numbers."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(float(node.id)) if node.id in ("inf", "nan") else node


class CodeTests:
    """Share of the unit tests that the generated code passes, or 1 only where it passes all.

    A record's field holds a list of tests, or one mapping of the last form:

    - {"stdin": text, "stdout": text}: the code is run as a program; trailing blanks do not count;
    - {"call": "name" or "Class.method", "args": [...], "kwargs": {...}, "expected": JSON value}, which equals
      a Decimal or Fraction of that value, and a date or time in ISO 8601;
    - "assert f(2) == 4": Python source, or {"assert": source};
    - {"inputs": [...], "outputs": [...], "fn_name": name or absent}: the layout of APPS, where an output may be
      the only entry of a list, and a class `Solution` may have the function.

    Source that checks nothing when it is run (a comparison without assert, a function that nobody calls) is no test.

    Output, the values of calls, and asserts of the form "... == literal" are compared outside the sandbox:
    the code never meets what is expected. Any other assert runs in the code's process, so that code written
    to cheat (objects that equal everything) can pass it.

    The parts are "share" and "all"; `text` names the tests that failed. Without tests, or where the sandbox
    itself broke, a sample is invalid; code that hangs or is missing scores 0.

    Args:
        field: metadata field with the tests.
        setup_field: metadata field with source, or a list of its lines, that is put before the code (imports,
            helpers, the head of a function), or None. Where it cannot run, the sample is invalid.
        credit: "all" (1 where every test passes, else 0) or "share" (passed / tests).
        after: only code behind the last occurrence of this marker counts, e.g. "</think>".
        whole: take the whole completion as code where it has no fenced block.
        limits: of one run, see `SandboxLimits`.
        url: of a server with the protocol of SandboxFusion, e.g. "http://HOST:8080/run_code"; None runs
            bubblewrap on this machine.
        packages: let the code import the packages installed here (bubblewrap only).
        workers: runs at the same time.
        tolerance: relative, and absolute below 1, of floats that calls return; asserts compare as Python.
    """

    range = (0.0, 1.0)
    higher_is_better = True
    capabilities = RewardCapabilities()

    def __init__(
        self,
        *,
        field: str = "tests",
        setup_field: str | None = None,
        credit: str = "all",
        after: str | None = None,
        whole: bool = False,
        limits: Mapping[str, float] | SandboxLimits | None = None,
        url: str | None = None,
        packages: bool = False,
        workers: int = 4,
        tolerance: float = 1e-9,
        name: str = "code_tests",
    ) -> None:
        values: dict[str, Any] = dict(vars(limits) if isinstance(limits, SandboxLimits) else limits or {})
        keys = SandboxLimits.__dataclass_fields__.keys()
        are_numbers = all(isinstance(value, int | float) and 0 < value < 1e9 for value in values.values())
        check_choices(name, credit=(credit, ("all", "share")))
        check_counts(name, workers=workers)
        bounds = f"limits are {values}; allowed are {', '.join(keys)}, each above 0 and below 1e9"
        rules = {bounds: are_numbers and values.keys() <= keys}
        rules[f"tolerance is {tolerance!r}; allowed are numbers from 0 to below 1"] = 0 <= tolerance < 1
        check_rules(name, rules)
        self.name, self.unit = name, "1 = all tests pass" if credit == "all" else "share of tests"
        self._field, self._setup_field, self._credit = field, setup_field, credit
        self._after, self._whole, self._workers, self._tolerance = after, whole, workers, tolerance
        self._limits, self._url = SandboxLimits(**values), url
        execute = partial(run_server, url) if url else partial(run_bubblewrap, packages=packages)
        self._execute: Callable[[str, str], Run] = partial(execute, limits=self._limits)

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Run the tests of each completion; `NoSandbox` where nothing can run them."""
        request = read_text_request(self.name, completions, prompts, metadata)
        if self._url is None and len(request) and (problem := bubblewrap_problem()):
            raise NoSandbox(problem)
        setups = request.column(self._setup_field) if self._setup_field else [None] * len(request)
        with ThreadPoolExecutor(max_workers=self._workers) as pool:
            results = list(pool.map(self._judge, request.completions, request.column(self._field), setups))
        shares = [share for _, share in results]
        parts = {"share": shares, "all": [float(share == 1) for share in shares]}
        return text_scores([verdict for verdict, _ in results], self.unit, parts=parts)

    def run(self, code: str, tests: Any, setup: str = "") -> list[Outcome]:
        """Return the result of each test (as in a metadata record) of a piece of Python source."""
        tests, source = read_tests(tests), code
        if setup:  # imports from __future__ must come first
            source = "\n".join([*_FUTURE.findall(code), setup, _FUTURE.sub("", code)])
        inside = iter(self._run_inside(source, [test for test in tests if "stdin" not in test]))
        results = [self._run_program(source, test) if "stdin" in test else next(inside) for test in tests]
        if setup and not all(result.passed for result in results) and not _is_open(setup):
            setup_run = self._execute(f"{setup}\nprint({_END!r})", "")
            if _END not in setup_run.stdout:
                last = setup_run.stderr.strip().rpartition("\n")[2] or "it did not reach its end"
                raise RewardError(f"the code in {self._setup_field!r} cannot run: {shortened(last)}")
        return results

    def _run_inside(self, source: str, tests: list[dict[str, Any]]) -> list[Outcome]:
        if not tests:
            return []
        nonce = secrets.token_hex(16)  # the code cannot print a record that it does not know the start of
        questions = [{key: part for key, part in test.items() if key != "expected"} for test in tests]
        run = self._execute(_RUNNER, json.dumps({"nonce": nonce, "code": source, "tests": questions}))
        records: dict[Any, dict[str, Any]] = {}
        for line in run.stdout.splitlines():
            with suppress(ValueError, RecursionError):  # the last line may be cut
                if line.startswith(nonce) and isinstance(record := json.loads(line[len(nonce) :]), dict):
                    records.setdefault(str(record.get("test", next(iter(record), ""))), record)
        if load_error := records.get("load_error"):
            missing = {"error": f"the code {load_error['load_error']}"}
        else:
            ended = "the time was over" if run.exit_code in _OUT_OF_TIME else f"the program ended ({run.exit_code})"
            missing = {"error": f"{ended} before its result"}
        return [self._compare(records.get(str(n), missing), test) for n, test in enumerate(tests)]

    def _compare(self, record: Mapping[str, Any], test: Mapping[str, Any]) -> Outcome:
        if "error" in record or "assert" in test:
            return Outcome("error" not in record, str(record.get("error", "")))
        text = str(record.get("value"))
        passed = False
        if len(text) <= _LONGEST_VALUE:  # hostile values: too deep, too large, or no literals
            with suppress(ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError):
                value = ast.literal_eval(_Numbers().visit(parse_python(text, mode="eval")))
                expected = test["expected"]
                is_wrapped = test.get("layout") == "APPS" and isinstance(expected, list) and len(expected) == 1
                accepted = [expected, *(expected if is_wrapped else [])]
                is_same = partial(is_close, tolerance=self._tolerance) if "call" in test else operator.eq
                passed = any(bool(is_same(value, expected)) for expected in accepted)
        return Outcome(passed, "" if passed else f"it returned {shortened(text)}")

    def _run_program(self, source: str, test: Mapping[str, str]) -> Outcome:
        run = self._execute(source, test["stdin"])
        if run.exit_code in _OUT_OF_TIME:
            return Outcome(False, "the time was over")
        if run.exit_code:
            last = run.stderr.strip().rpartition("\n")[2]
            return Outcome(False, f"it ended with {run.exit_code}: {shortened(last)}")
        if len(run.stdout) > self._limits.output_bytes:
            return Outcome(False, "it printed too much")
        texts = run.stdout, test["stdout"]
        printed, expected = ([line.rstrip() for line in text.rstrip().splitlines()] for text in texts)
        return Outcome(printed == expected, "" if printed == expected else f"it printed {shortened(run.stdout)}")

    def _judge(self, completion: str, tests: Any, setup: Any) -> tuple[TextVerdict, float]:
        if tests is None:
            return TextVerdict(reason=f"its metadata has no {self._field!r}"), math.nan
        if isinstance(setup, list) and all(isinstance(line, str) for line in setup):
            setup = "\n".join(setup)
        if not isinstance(setup, str | None):
            return TextVerdict(reason=f"{self._setup_field!r} is {shortened(setup)}; give source as text"), math.nan
        text = after_marker(completion, self._after)
        code = extract_code(text or "")
        if code is None and self._whole and text and not has_fence(text):
            code = text
        try:
            tests = read_tests(tests)
            if not (code or "").strip():
                remark = f"no {self._after}" if text is None else "no closed code block"
                return TextVerdict(value=0.0, remark=remark), 0.0
            results = self.run(code or "", tests, setup or "")
        except UnreadableTests as error:
            return TextVerdict(reason=f"the tests in {self._field!r} cannot be read: {error}"), math.nan
        except RewardError as error:
            return TextVerdict(reason=str(error)), math.nan
        share = sum(result.passed for result in results) / len(results)
        failed = [f"test {n}: {result.remark}" for n, result in enumerate(results, 1) if not result.passed]
        remark = "; ".join([f"{len(results) - len(failed)} of {len(results)} passed", *failed[:3]])
        return TextVerdict(value=share if self._credit == "share" else float(share == 1), remark=remark), share


def read_tests(tests: Any) -> list[dict[str, Any]]:
    """Read tests in any of the forms of `CodeTests`, or a JSON string of one.

    Each becomes one of {"stdin", "stdout"}, {"call", "args", "kwargs", "expected"}, {"eval", "expected"} and
    {"assert"}; another form, or no test, is `UnreadableTests`.
    """
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError):
            tests = [tests]
    if isinstance(tests, Mapping) and "inputs" in tests:
        inputs, outputs, function = tests["inputs"], tests.get("outputs"), tests.get("fn_name")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise UnreadableTests("inputs and outputs must be lists of one length")
        names = ("args", "expected") if function else ("stdin", "stdout")
        call = {"call": function, "layout": "APPS"} if function else {}
        tests = [dict(zip(names, pair, strict=True)) | call for pair in zip(inputs, outputs, strict=True)]
    if isinstance(tests, Mapping | str) or not isinstance(tests, Sequence) or not tests:
        raise UnreadableTests(f"{shortened(tests)} is not a list of at least one test; a test is {TEST_FORMS}")
    return [_read_test({"assert": test} if isinstance(test, str) else test) for test in tests]


def _read_test(test: Any) -> dict[str, Any]:
    match test:
        case {"stdin": str(), "stdout": str()} if len(test) == 2:
            return dict(test)
        case {"assert": str(source)} if len(test) == 1:
            try:
                tree = parse_python(source)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise UnreadableTests(f"{shortened(source)} is not Python ({error})") from error
            if not any(map(_can_fail, tree.body)):
                raise UnreadableTests(f"{shortened(source)} checks nothing when it is run; a test is {TEST_FORMS}")
            return _as_comparison(tree) or dict(test)
        case {"call": str(), "expected": _} | {"eval": str(), "expected": _}:
            call = {"args": [], "kwargs": {}, **test}
            plain = isinstance(call["args"], list | tuple) and isinstance(call["kwargs"], Mapping)
            if plain and set(call) <= {"call", "eval", "args", "kwargs", "expected", "layout"}:
                with suppress(TypeError, ValueError):
                    json.dumps([call["args"], call["kwargs"]])  # as they go into the sandbox
                    return call
    raise UnreadableTests(f"{shortened(test)} is not a test; a test is {TEST_FORMS}")


def _can_fail(node: ast.AST) -> bool:
    """Return True for a statement that can fail a test as it runs: assert, raise, with, or one that calls something.

    A comparison without assert checks nothing, nor does a branch that asks for `__main__`, which is not run.
    """
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Expr(value=ast.Compare()):
            return False
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return False
        case ast.Assert() | ast.Raise() | ast.With() | ast.AsyncWith():
            return True
        case ast.Expr() | ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            return any(isinstance(part, ast.Call) for part in ast.walk(node))
    children = (child for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS))
    return any(map(_can_fail, children))


def _is_open(setup: str) -> bool:
    """Return True for source that needs more to run, such as the head of a function."""
    try:
        parse_python(setup)
    except SyntaxError:
        return "\0" not in setup
    except (ValueError, RecursionError, MemoryError):
        return False
    return False


def _as_comparison(tree: ast.Module) -> dict[str, Any] | None:
    """Split "assert EXPRESSION == LITERAL" into the expression and its expected value; else None."""
    match tree.body:
        case [ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]))]:
            for expression, literal in ((left, right), (right, left)):
                with suppress(ValueError, TypeError, MemoryError, RecursionError):
                    return {"eval": ast.unparse(expression), "expected": ast.literal_eval(literal)}
    return None


def is_close(value: Any, expected: Any, tolerance: float) -> bool:
    """Compare as JSON: tuples equal lists, keys equal their text; floats within the tolerance."""
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        pairs = zip(value, expected, strict=False)
        return len(value) == len(expected) and all(is_close(a, b, tolerance) for a, b in pairs)
    if isinstance(value, dict) and isinstance(expected, dict):
        value, expected = _text_keys(value), _text_keys(expected)
        same_keys = value.keys() == expected.keys()
        return same_keys and all(is_close(value[key], expected[key], tolerance) for key in value)
    if isinstance(value, int | float) and isinstance(expected, int | float):
        if float in (type(value), type(expected)):
            return value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(value == expected)


def _text_keys(record: dict[Any, Any]) -> dict[Any, Any]:
    is_plain = (type(None), bool, int, float)
    return {json.dumps(key) if isinstance(key, is_plain) else key: part for key, part in record.items()}
