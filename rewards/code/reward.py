# SPDX-License-Identifier: Apache-2.0
"""Unit tests of generated code, run in the sandbox of `sandbox`.

What a test can be (a record's field holds a list of them, or one mapping of the last form):

- {"stdin": text, "stdout": text}: the code is run as a program; line ends and trailing blanks do not count;
- {"call": "name" or "Class.method", "args": [...], "kwargs": {...}, "expected": value}: plain values;
- "assert f(2) == 4": Python source, or {"assert": source};
- {"inputs": [...], "outputs": [...], "fn_name": name or absent}: the layout of APPS and its followers.

Nothing of this enters the process of the code but the inputs: output is compared here, and asserts and calls
are judged in a process that never imports or executes the code and sees it through plain values (see
`code_judge`), so a program that ends early, prints "passed", patches the interpreter or returns objects that
equal everything earns nothing. Helpers that a test takes from the code are the code's word: what judges is
defined in the test or by `setup_field`, whose functions and plain values the judge makes itself.

Expected values of calls are JSON: tuples are lists, keys are text, and floats are equal within `tolerance`.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError
from visalign.rewards.text.contract import (
    Prompt,
    TextVerdict,
    after_marker,
    read_text_request,
    shortened,
    text_scores,
)
from visalign.rewards.text.parsing import extract_code, has_fence

from .code_values import Codec
from .sandbox import ISOLATIONS, NoIsolation, Run, SandboxLimits, run_python

_FORMS = '{"stdin", "stdout"}, {"call", "args", "expected"}, "assert ..." or {"inputs", "outputs"}'


class UnreadableTests(ValueError):
    """The tests of a sample cannot be read: a missing ground truth, not a failure of the code."""


@dataclass(frozen=True)
class TestResult:
    """One test of one completion."""

    __test__ = False  # for pytest: no test class

    passed: bool
    remark: str = ""


class CodeTests:
    """Share of the unit tests that the generated code passes, or 1 only where it passes all."""

    range = (0.0, 1.0)
    higher_is_better = True

    def __init__(
        self,
        *,
        field: str = "tests",
        setup_field: str | None = None,
        credit: str = "all",
        after: str | None = None,
        whole: bool = False,
        limits: Mapping[str, float] | SandboxLimits | None = None,
        isolation: str = "auto",
        packages: bool = False,
        workers: int = 4,
        tolerance: float = 1e-9,
        name: str = "code_tests",
    ) -> None:
        """Choose what counts and what a run may take.

        Args:
            field: metadata field with the tests.
            setup_field: metadata field with source that is put before the code (imports, helpers), or None.
                It runs before the code is there; where it cannot, the sample is invalid.
                For the tests its functions with a body and its plain values are as it made them, its classes
                and their objects as the code left them.
            credit: "all" (1 where every test passes, else 0) or "share" (passed / tests).
            after: only code behind the last occurrence of this marker counts, e.g. "</think>".
            whole: take the whole completion as code where it has no fenced block.
            limits: of one run, see `SandboxLimits`.
            isolation: "auto" or "namespaces" (the kernel isolates, or nothing is run), or "process", see
                `sandbox`.
            packages: whether the code may import installed packages.
            workers: runs at the same time.
            tolerance: relative, and absolute below 1, of floats that calls return; asserts compare as Python.
            name: for messages and logs.

        Raises:
            ValueError: an option that is not allowed.
        """
        if credit not in ("all", "share"):
            raise ValueError(f"{name}: credit is {credit!r}; allowed are 'all' and 'share'.")
        if isolation not in ISOLATIONS:
            raise ValueError(f"{name}: isolation is {isolation!r}; allowed are {', '.join(ISOLATIONS)}.")
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ValueError(f"{name}: workers is {workers!r}; allowed are whole numbers from 1.")
        if isinstance(tolerance, bool) or not 0 <= tolerance < 1:
            raise ValueError(f"{name}: tolerance is {tolerance!r}; allowed are numbers from 0 to below 1.")
        self.name = name
        self._tolerance = float(tolerance)
        self.unit = "1 = all tests pass" if credit == "all" else "share of tests"
        self._field, self._setup_field, self._credit = field, setup_field, credit
        self._after, self._whole, self._workers = after, whole, workers
        self._limits = limits if isinstance(limits, SandboxLimits) else _limits(name, limits)
        self._isolation, self._packages = isolation, packages

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """Run the tests of each completion.

        Returns:
            Scores with the parts "share" and "all"; `text` names the tests that failed. Without tests, or
            where the sandbox itself broke, a sample is invalid; code that hangs or is missing scores 0.

        Raises:
            RewardError: the system refuses namespaces, and isolation is not "process".
        """
        request = read_text_request(self.name, completions, prompts, metadata)
        setups = request.column(self._setup_field) if self._setup_field else [None] * len(request)
        with ThreadPoolExecutor(max_workers=self._workers) as pool:
            judged = list(pool.map(self._judge, request.completions, request.column(self._field), setups))
        shares = [share for _, share in judged]
        parts = {"share": shares, "all": [float(share == 1) for share in shares]}
        return text_scores([verdict for verdict, _ in judged], self.unit, parts=parts)

    def run(self, code: str, tests: Any) -> list[TestResult]:
        """The result of each test (as in a metadata record) of a piece of Python source."""
        return self._results(code, read_tests(tests))

    def _results(self, code: str, listed: list[dict[str, Any]], setup: str = "") -> list[TestResult]:
        results: list[TestResult | None] = [None] * len(listed)
        inside = [index for index, test in enumerate(listed) if "stdin" not in test]
        if inside:
            run = self._run(code, setup=setup, tests=[_without_answer(listed[index]) for index in inside])
            ended = "did not end in time" if run.timed_out else f"ended the process ({run.exit_code})"
            if setup and (why := next((entry["setup"] for entry in run.records if "setup" in entry), ended)):
                raise RewardError(f"what stands before the code ({self._setup_field}) {why}")
            for number, index in enumerate(inside):
                results[index] = _test_result(run, number, listed[index], self._tolerance)
        for index, test in enumerate(listed):
            if "stdin" in test:
                run = self._run(code, setup=setup, stdin=test["stdin"])
                if setup and not _program_result(run, test["stdout"]).passed:
                    self._check_program(setup, test["stdin"])
                results[index] = _program_result(run, test["stdout"])
        return [result for result in results if result is not None]

    def _check_program(self, setup: str, stdin: str) -> None:
        """Refuse a setup that ends by itself the program which it begins."""
        try:
            ast.parse(setup)
        except SyntaxError:  # the head of a function whose body is the code
            return
        alone = self._run(f"{setup}\nprint({END!r})", stdin=stdin)
        if END not in alone.stdout:
            ended = "did not end in time" if alone.timed_out else f"ended the process ({alone.exit_code})"
            raise RewardError(f"what stands before the code ({self._setup_field}) {ended}")

    def _run(self, code: str, **what: Any) -> Run:
        run = run_python(
            code, limits=self._limits, isolation=self._isolation, packages=self._packages, **what
        )
        if run.failure is not None:
            raise RewardError(f"Reward {self.name!r}: {run.failure}")
        return run

    def _judge(self, completion: str, tests: Any, setup: Any) -> tuple[TextVerdict, float]:
        """A verdict with the share of passed tests."""
        if tests is None:
            return TextVerdict(reason=f"its metadata has no {self._field!r}"), math.nan
        code, problem = self._code(completion)
        try:
            listed = read_tests(tests)
            if problem:
                return TextVerdict(value=0.0, remark=problem), 0.0
            results = self._results(code, listed, str(setup or ""))
        except UnreadableTests as error:
            return TextVerdict(reason=f"the tests in {self._field!r} cannot be read: {error}"), math.nan
        except NoIsolation:
            raise
        except RewardError as error:
            return TextVerdict(reason=str(error)), math.nan
        share = sum(result.passed for result in results) / len(results)
        failed = [
            f"test {number}: {result.remark}" for number, result in enumerate(results, 1) if not result.passed
        ]
        remark = "; ".join([f"{len(results) - len(failed)} of {len(results)} passed", *failed[:3]])
        return TextVerdict(
            value=share if self._credit == "share" else float(share == 1), remark=remark
        ), share

    def _code(self, completion: str) -> tuple[str, str | None]:
        text = after_marker(completion, self._after)
        if text is None:
            return "", f"no {self._after}"
        code = extract_code(text)
        if code is None and self._whole and not has_fence(text):
            code = text
        return (code, None) if code is not None and code.strip() else ("", "no closed code block")


END = "the setup has ended"
"""Printed behind a setup by itself."""


def _limits(name: str, given: Mapping[str, float] | None) -> SandboxLimits:
    try:
        return SandboxLimits(**(given or {}))  # type: ignore[arg-type]  # its own check speaks of the values
    except TypeError as error:
        allowed = ", ".join(entry.name for entry in fields(SandboxLimits))
        raise ValueError(f"{name}: limits are {given!r}; allowed keys are {allowed}.") from error


def _without_answer(test: dict[str, Any]) -> dict[str, Any]:
    return {key: part for key, part in test.items() if key != "expected"}


def _test_result(run: Run, number: int, test: dict[str, Any], tolerance: float) -> TestResult:
    """The verdict on a test that was run inside: its record, and the comparison that is made here."""
    record = next((entry for entry in run.records if entry.get("test") == number), None)
    if record is None:
        load = next((entry["load_error"] for entry in run.records if "load_error" in entry), None)
        if load is not None:
            return TestResult(False, f"the code raised {load}")
        ended = "the time was over" if run.timed_out else f"the program ended ({run.exit_code})"
        return TestResult(False, f"{ended} before its result")
    if "error" in record:
        return TestResult(False, str(record["error"]))
    if "assert" in test:
        return TestResult(True)
    try:
        value = Codec().decode(record["value"])
        passed = _is_same(_listed(value), _listed(test["expected"]), tolerance)
    except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError):
        return TestResult(False, "it returned what cannot be compared")
    return TestResult(passed, "" if passed else f"it returned {shortened(value)}")


def _program_result(run: Run, expected: str) -> TestResult:
    if run.timed_out:
        return TestResult(False, "the time was over")
    if run.exit_code:
        last = run.stderr.strip().rpartition("\n")[2]
        return TestResult(False, f"it ended with {run.exit_code}: {shortened(last)}")
    if run.stdout_cut:
        return TestResult(False, "it printed too much")
    passed = _lines(run.stdout) == _lines(expected)
    return TestResult(passed, "" if passed else f"it printed {shortened(run.stdout)}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _listed(value: Any) -> Any:
    """Tuples as lists and keys as text, all the way down, as JSON has them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_listed(part) for part in value]
    if isinstance(value, dict):
        named = {key if isinstance(key, str) else _key(key): _listed(part) for key, part in value.items()}
        return named if len(named) == len(value) else {key: _listed(part) for key, part in value.items()}
    return value


def _key(key: Any) -> Any:
    """A key of a mapping as JSON writes it; others stay."""
    return json.dumps(key) if key is None or isinstance(key, bool | int | float) else key


def _is_same(value: Any, expected: Any, tolerance: float) -> bool:
    """Equal, floats within the tolerance."""
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(
            _is_same(one, other, tolerance) for one, other in zip(value, expected, strict=True)
        )
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            _is_same(part, expected[key], tolerance) for key, part in value.items()
        )
    if (
        isinstance(value, float | int)
        and isinstance(expected, float | int)
        and float in map(type, (value, expected))
    ):
        return value == expected or math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
    return bool(value == expected)


def read_tests(given: Any) -> list[dict[str, Any]]:
    """Tests in any of the allowed forms as a list of mappings.

    Args:
        given: see the module; a string that holds JSON is read first.

    Returns:
        At least one of {"stdin", "stdout"}, {"call", "args", "kwargs", "expected"} and {"assert"}.

    Raises:
        UnreadableTests: another form, or none.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = [given]
    if isinstance(given, Mapping) and "inputs" in given:
        given = _apps(given)
    if isinstance(given, Mapping | str) or not isinstance(given, Sequence) or not given:
        raise UnreadableTests(f"{shortened(given)} is no list of at least one test; a test is {_FORMS}")
    return [_read_test(test) for test in given]


def _apps(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs, function = given["inputs"], given.get("outputs"), given.get("fn_name")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise UnreadableTests("inputs and outputs must be lists of one length")
    if function:
        return [
            {"call": function, "args": arguments, "expected": expected}
            for arguments, expected in zip(inputs, outputs, strict=True)
        ]
    return [{"stdin": text, "stdout": expected} for text, expected in zip(inputs, outputs, strict=True)]


def _read_test(test: Any) -> dict[str, Any]:
    if isinstance(test, str):
        test = {"assert": test}
    if not isinstance(test, Mapping):
        raise UnreadableTests(f"{shortened(test)} is no test; a test is {_FORMS}")
    if set(test) == {"stdin", "stdout"} and all(isinstance(part, str) for part in test.values()):
        return dict(test)
    if set(test) == {"assert"} and isinstance(test["assert"], str):
        try:
            ast.parse(test["assert"])
        except (SyntaxError, ValueError, RecursionError) as error:
            raise UnreadableTests(f"{shortened(test['assert'])} is no Python ({error})") from error
        return dict(test)
    named = isinstance(test.get("call"), str) and "expected" in test
    if not named or not set(test) <= {"call", "args", "kwargs", "expected"}:
        raise UnreadableTests(f"{shortened(dict(test))} is no test; a test is {_FORMS}")
    call = {"args": [], "kwargs": {}, **test}
    if not isinstance(call["args"], list | tuple) or not isinstance(call["kwargs"], Mapping):
        raise UnreadableTests(f"args must be a list and kwargs a mapping in {shortened(dict(test))}")
    try:
        json.dumps([call["args"], call["kwargs"]])
    except (TypeError, ValueError) as error:
        raise UnreadableTests(f"the arguments of {shortened(call['call'])} are no JSON ({error})") from error
    return call
