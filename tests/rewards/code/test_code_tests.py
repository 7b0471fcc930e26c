# SPDX-License-Identifier: Apache-2.0
"""Unit tests of generated code: what is read, what counts, and what bubblewrap keeps from hostile code."""

from __future__ import annotations

import gc
import json
import math
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from visalign.rewards import CodeTests, RewardError
from visalign.rewards.code import code_tests
from visalign.rewards.code.code_tests import UnreadableTests, read_tests
from visalign.rewards.code.sandbox import SandboxLimits, bubblewrap_problem
from visalign.rewards.text.parsing import extract_code

QUICK = SandboxLimits(wall_seconds=3, cpu_seconds=2, memory_mb=256, processes=8, file_mb=2)
BUBBLEWRAP = pytest.mark.skipif(bool(bubblewrap_problem()), reason=bubblewrap_problem())
ADD = "def add(a, b):\n    return a + b\n"


def judge(code, tests, **options):
    """(value or the reason, remark) of one sample with the code in a fenced block."""
    reward = CodeTests(limits=QUICK, **options)
    scores = reward.score([f"So:\n```python\n{code}\n```\n"], ["?"], [{"tests": tests}])
    return (scores.reason or [None])[0] or scores.value.item(), (scores.text or [""])[0]


def program(code, **limits):
    """Remark on a program that should print nothing."""
    reward = CodeTests(limits={"wall_seconds": 3, "memory_mb": 256, "processes": 8, "file_mb": 2} | limits)
    [result] = reward.run(code, [{"stdin": "", "stdout": ""}])
    return result.remark


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```\nb\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```python\na", None),
        ("no fence", None),
        ("~~~python\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("- so:\n  ```python\n  if a:\n    b\n\n c\n  ```", "if a:\n  b\n\nc\n"),
    ],
)
def test_the_last_closed_python_block_counts(text, code):
    assert extract_code(text) == code


@BUBBLEWRAP
def test_completions_without_code_score_zero():
    record = {"tests": ["assert x == 1"]}
    texts = [
        "```python\nx = 1\n```",
        "</think> none",
        "</think>```python\n\n```",
        "```\nx=2\n```</think>\n```\nx = 1\n```",
    ]
    scores = CodeTests(after="</think>", limits=QUICK).score(texts, ["?"] * 4, [record] * 4)
    assert scores.value.tolist() == [0, 0, 0, 1]
    assert scores.text is not None and list(scores.text[:3]) == ["no </think>", *["no closed code block"] * 2]
    whole_text = CodeTests(whole=True, limits=QUICK)
    assert whole_text.score(["x = 1", "```python\nx = 1"], ["?"] * 2, [record] * 2).value.tolist() == [1, 0]


@BUBBLEWRAP
def test_every_form_of_a_test():
    tests = [
        {"call": "add", "args": [1, 2], "expected": 3},
        {"call": "add", "args": ["a"], "kwargs": {"b": "b"}, "expected": "ab"},
        "assert add((1,), (2,)) == (1, 2)",
        {"assert": "x = add(1, 1)\nassert x == 2"},
        "assert add(1, 1) == 3, 'wrong'",
        {"call": "add", "args": [1], "expected": 3},
        {"call": "sub", "args": [], "expected": 3},
    ]
    results = CodeTests(limits=QUICK).run(ADD, tests)
    assert [result.passed for result in results] == [True] * 4 + [False] * 3
    assert results[4].remark == "it returned '2'"
    assert results[5].remark.startswith("raised TypeError: add() missing 1")
    value, remark = judge(ADD, tests, credit="share")
    assert value == pytest.approx(4 / 7) and remark.startswith("4 of 7 passed; test 5: it returned '2'")
    assert judge(ADD, tests)[0] == 0 and judge(ADD, tests[:4])[0] == 1


@BUBBLEWRAP
def test_values_compare_as_python_in_asserts_and_as_json_in_calls():
    code = (
        "import collections, dataclasses, datetime, decimal, fractions\n"
        "@dataclasses.dataclass\nclass S:\n    k: 'int' = 0\n    def f(self, k):\n"
        "        return [(1, 2), [1, 2], {1: 2.5}, {3}, None, b'a', 1j, True, collections.Counter('a'),\n"
        "            fractions.Fraction(1, 2), 0.1 + 0.2, float('inf'), decimal.Decimal('0.10'),\n"
        "            decimal.Decimal('7.0'), datetime.date(2024, 2, 29), decimal.Decimal('-Infinity')][k]\n"
    )
    expected = ["(1, 2)", "[1, 2]", "{1: 2.5}", "{3}", "None", "b'a'", "1j", "True", "{'a': 1}", "0.5"]
    tests = [f"assert S().f({k}) == {value}" for k, value in enumerate(expected)]
    assert all(result.passed for result in CodeTests(limits=QUICK).run(code, tests))
    assert not any(
        result.passed
        for result in CodeTests(limits=QUICK).run(code, ["assert S().f(0) == [1, 2]", "assert S().f(10) == 0.3"])
    )
    calls = [([0], [1, 2]), ([2], {"1": 2.5}), ([10], 0.3), ([11], math.inf), ([12], 0.1), ([13], 7)]
    calls += [([14], "2024-02-29"), ([15], -math.inf)]
    calls = [{"call": "S.f", "args": args, "expected": value} for args, value in calls]
    assert all(result.passed for result in CodeTests(limits=QUICK).run(code, calls))
    assert not CodeTests(limits=QUICK, tolerance=0).run(code, calls)[2].passed


@BUBBLEWRAP
def test_programs_read_stdin_and_print():
    code = "n = int(input())\nprint('a  ', n)\nprint()\nif n > 1: raise SystemExit(n)"
    tests = {"inputs": ["1\n", "1\n", "2\n", "x"], "outputs": ["a   1\n", "a   2", "a   2", ""]}
    results = CodeTests(limits=QUICK).run(code, tests)
    assert [result.passed for result in results] == [True, False, False, False]
    assert results[1].remark == "it printed 'a   1\\n\\n'" and results[2].remark == "it ended with 2: ''"
    assert "ValueError" in results[3].remark


@pytest.mark.parametrize(
    "tests",
    [
        *([], {}, 3, [3], ["assert ("], [{"stdin": "1"}], [{"call": "f"}]),
        *([{"call": "f", "args": 3, "expected": 1}], [{"call": "f", "args": [{1}], "expected": 1}]),
        {"inputs": [1], "outputs": []},
        *(
            ["f(2) == 4"],
            [""],
            ["x = 2"],
            "if __name__ == '__main__':\n    assert f(2) == 4",
            "def check(f):\n    assert f(2) == 4\n",
        ),  # nothing is checked
    ],
)
def test_tests_that_cannot_be_read_are_no_score(tests, monkeypatch):
    with pytest.raises(UnreadableTests):
        read_tests(tests)
    monkeypatch.setattr(code_tests, "bubblewrap_problem", lambda: "")
    assert str(judge(ADD, tests)[0]).startswith("the tests in 'tests' cannot be read: ")
    assert judge(ADD, None)[0] == "its metadata has no 'tests'"


@BUBBLEWRAP
@pytest.mark.parametrize("setup", ["import no_such_module", "import os\nos._exit(0)", f"x = {'-' * 5000}1"])
@pytest.mark.parametrize("test", ["assert f() == 1", {"stdin": "", "stdout": "1"}])
def test_a_setup_that_cannot_run_is_no_score_of_the_code(setup, test):
    reward = CodeTests(setup_field="setup", limits=QUICK)
    code = "```python\ndef f(): return 1\nprint(1)\n```"
    scores = reward.score([code, code], ["p", "p"], [{"tests": [test], "setup": s} for s in (setup, "x = 1")])
    assert scores.valid.tolist() == [False, True] and scores.value[1] == 1
    assert scores.reason is not None and "the code in 'setup' cannot run" in str(scores.reason[0])


@BUBBLEWRAP
def test_a_setup_comes_first_and_may_be_the_head_of_a_function():
    reward = CodeTests(setup_field="setup", limits=QUICK)
    records = [
        {"tests": ["assert x == 2"], "setup": "from math import sqrt"},
        {"tests": ["assert f(3) == 4"], "setup": "def f(x):"},
    ]
    texts = ["```python\nx = sqrt(4)\n```", "```python\n    return x + 1\n```"]
    assert reward.score(texts, ["?"] * 2, records).value.tolist() == [1, 1]


def test_threads_may_read_tests_at_once():
    """CPython 3.11 counts the depth of all its threads together: without a lock some of these calls fail."""
    test = "assert f(" + "+".join(["g(1, [2, 3])"] * 40) + ") == 4"
    threshold = gc.get_threshold()

    def switch(*_: object) -> None:
        time.sleep(1e-5)

    gc.callbacks.append(switch)
    gc.set_threshold(50)
    try:
        for _ in range(20):
            with ThreadPoolExecutor(4) as pool:
                assert all(test["expected"] == 4 for [test] in pool.map(read_tests, [[test]] * 8))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(switch)


@BUBBLEWRAP
def test_setups_and_layouts_as_datasets_have_them():
    cases = {
        "from __future__ import annotations\ndef f(x: int) -> int: return 2 * x": ["assert f(4) == 8"],
        "def f(x): return sqrt(x)": ["assert f(4) == 2"],
        "def f(s): return s[::-1]": {"fn_name": "f", "inputs": [["abc"], ["ab"]], "outputs": [["cba"], "ba"]},
        "class Solution:\n    def f(self, a, b): return a + b": {"fn_name": "f", "inputs": [[1, 2]], "outputs": [3]},
    }
    records = [{"tests": tests, "setup": ["import math", "from math import sqrt"]} for tests in cases.values()]
    texts = [f"```python\n{code}\n```" for code in cases]
    reward = CodeTests(setup_field="setup", limits=QUICK)
    assert reward.score(texts, ["?"] * 4, records).value.tolist() == [1, 1, 1, 1]
    assert reward.score(texts[:1], ["?"], [records[0] | {"setup": []}]).value == 1
    deep = [{"tests": [f"x = {'+'.join('1' * 600)}\nassert x == 600", "with open('/dev/null'): _ = f(4)"]}]
    assert CodeTests(limits=QUICK).score(texts[:1], ["?"], deep).value == 1
    longer = {"fn_name": "f", "inputs": [[]], "outputs": [[1, 2]]}  # than the only entry of a list
    assert not reward.run("def f(): return 1", longer)[0].passed
    bad = [{"tests": {"fn_name": "f", "inputs": [["abc"]], "outputs": ["c"]}, "setup": 3}, records[3]]
    scores = reward.score([texts[2], texts[2]], ["?"] * 2, bad)
    assert scores.valid.tolist() == [False, True] and scores.value[1] == 0
    assert "give source as text" in str(scores.reason)


LIAR = "class E:\n    __eq__ = lambda *_: True\n    __repr__ = lambda _: '4'\n"


@BUBBLEWRAP
@pytest.mark.parametrize(
    ("code", "remark"),
    [
        ("while True: pass", "the time was over before its result"),
        ("def f(): return object()", "it returned '<object object"),
        (LIAR.replace("'4'", "'5'") + "def f(): return E()", "it returned '5'"),
        ("print('passed')", "raised NameError"),
        ("x = 'a' * 10**9", "the code raised MemoryError"),
    ],
)
def test_code_that_breaks_or_lies_fails_with_its_reason(code, remark):
    value, comment = judge(code, ["assert f() == 4"])
    assert value == 0 and remark in comment


@BUBBLEWRAP
@pytest.mark.parametrize(
    ("code", "remark"),
    [
        ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "ConnectionRefused|unreachable"),
        ("open('/usr/x', 'w')", "Read-only"),
        ("for i in range(9): open(f'/tmp/{i}', 'w').write('x' * (1 << 20))", "No space left"),
        ("print('x' * 100000)", "printed too much"),
        ("while True: print('x' * 100000)", "too large"),
        ("import os, time\nfor _ in range(20):\n    if not os.fork(): time.sleep(2); os._exit(0)", "Resource"),
        ("import os\nos.setuid(0)", "Operation not permitted|Invalid argument"),
    ],
)
def test_the_sandbox_refuses(code, remark):
    assert re.search(remark, program(code))


@BUBBLEWRAP
def test_nothing_of_this_machine_is_seen_and_nothing_survives(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    (tmp_path / "secret").write_text("1")
    code = f"""
import os
assert os.getuid() == 65534 and os.getpid() < 10 and not os.path.exists({str(tmp_path)!r})
assert sorted(p for p in os.listdir('/proc') if p.isdigit())[0] == '1' and len(os.listdir('/tmp')) == 0
assert 'SECRET' not in os.environ and not os.path.exists('/home') and not os.path.exists('/etc/passwd')
"""
    assert program(code) == ""


@BUBBLEWRAP
def test_installed_packages_only_where_allowed():
    code = "import numpy as np\ndef f(): return np.arange(3)"
    tests = ["assert f() == [0, 1, 2]"]
    assert CodeTests(packages=True).run(code, tests)[0].passed
    assert "No module named 'numpy'" in CodeTests().run(code, tests)[0].remark


def test_without_bubblewrap_nothing_is_run(monkeypatch):
    monkeypatch.setenv("PATH", "")
    bubblewrap_problem.cache_clear()
    try:
        with pytest.raises(RewardError, match=r"bwrap is not installed\. Install bubblewrap .*or give the option url"):
            judge(ADD, ["assert True"])
    finally:
        bubblewrap_problem.cache_clear()


def test_a_server_runs_the_code_instead():
    requests = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append(request)
            result = {"status": "Finished", "return_code": 0, "stdout": "3\n", "stderr": ""}
            if "sleep" in request["code"]:
                result = {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""}
            answer = {"status": "Success", "run_result": result}
            if "break" in request["code"]:
                answer = {"status": "SandboxError", "message": "no disk", "run_result": None}
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_): ...

    tests = [{"stdin": "1 2", "stdout": "3"}]
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/run_code"
        assert judge("print(3)", tests, url=url)[0] == 1
        assert judge("sleep", tests, url=url)[1] == "0 of 1 passed; test 1: the time was over"
        assert "failed: 'no disk'" in str(judge("break", tests, url=url)[0])
        server.shutdown()
    assert requests[0]["stdin"] == "1 2" and requests[0]["run_timeout"] == 3 and requests[0]["memory_limit_MB"] == 256
    assert "gave no result: ConnectError" in str(judge("print(3)", tests, url="http://127.0.0.1:9/run_code")[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"credit": "half"}, "credit is 'half'; allowed are all, share"),
        ({"workers": 0}, "workers is 0"),
        ({"tolerance": 1}, "tolerance is 1"),
        ({"limits": {"time": 1}}, r"limits are \{'time': 1\}; allowed are wall_seconds"),
        ({"limits": {"wall_seconds": math.inf}}, "below 1e9"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        CodeTests(**options)
