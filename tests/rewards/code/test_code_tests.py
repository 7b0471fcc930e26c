# SPDX-License-Identifier: Apache-2.0
"""Unit tests of generated code: what is read, what counts, and what hostile or broken code can do."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.sandbox import HERE, ISOLATIONS, KERNEL, QUICK, judge
from visalign.rewards import RewardError
from visalign.rewards.code import code_child
from visalign.rewards.code import sandbox as code_sandbox
from visalign.rewards.code.reward import CodeTests, UnreadableTests, read_tests
from visalign.rewards.code.sandbox import SandboxLimits, run_python
from visalign.rewards.text.parsing import extract_code

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is exercised on Linux"),
    pytest.mark.filterwarnings("default:The code sandbox runs code with isolation='process'"),
]

ADD = "def add(a, b):\n    return a + b\n"


def processes_with(word):
    """Command lines that hold the word."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if word in line:
                found.append(line)
    return found


def copied_child(folder):
    """The script of the sandbox and its neighbours in another folder."""
    return Path(shutil.copytree(code_sandbox.CHILD.parent, folder / "inside")) / code_sandbox.CHILD.name


# the code block


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```\nb\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```bash\nls\n```", None),
        ("```python\na", None),
        ("no fence", None),
        ("~~~python\na\n```\nb\n~~~", "a\n```\nb\n"),
        ("  ```python\n  a\n  ```", "  a\n"),
    ],
)
def test_the_last_closed_python_block_counts(text, code):
    assert extract_code(text) == code


def test_completions_without_code_score_zero():
    reward = CodeTests(after="</think>", limits=QUICK, isolation=HERE)
    record = {"tests": ["assert x == 1"]}
    texts = [
        "```python\nx = 1\n```",
        "</think> none",
        "</think>```python\n\n```",
        "```\nx=2\n```</think>\n```\nx = 1\n```",
    ]
    scores = reward.score(texts, ["?"] * 4, [record] * 4)
    assert scores.value.tolist() == [0, 0, 0, 1]
    assert scores.text is not None and list(scores.text[:3]) == ["no </think>", *["no closed code block"] * 2]
    whole = CodeTests(whole=True, limits=QUICK, isolation=HERE).score(
        ["x = 1", "```python\nx = 1"], ["?"] * 2, [record] * 2
    )
    assert whole.value.tolist() == [1, 0]


# the tests


def test_every_form_of_a_test():
    tests = [
        {"call": "add", "args": [1, 2], "expected": 3},
        {"call": "add", "args": ["a"], "kwargs": {"b": "b"}, "expected": "ab"},
        "assert add((1,), (2,)) == (1, 2)",
        "assert {1} == add({1}, 0) if False else True",
        {"assert": "x = add(1, 1)\nassert x == 2"},
        "assert add(1, 1) == 3, 'wrong'",
        {"call": "add", "args": [1], "expected": 3},
        {"call": "sub", "args": [], "expected": 3},
    ]
    results = CodeTests(limits=QUICK, isolation=HERE).run(ADD, tests)
    assert [result.passed for result in results] == [True] * 5 + [False] * 3
    assert results[5].remark == "AssertionError: wrong; the code answered 2 last"
    assert results[6].remark.startswith("TypeError: add() missing 1")
    assert results[7].remark.startswith("AttributeError: module 'solution' has no attribute 'sub'")
    value, remark = judge(ADD, tests, credit="share")
    assert value == 0.625 and remark.startswith(
        "5 of 8 passed; test 6: AssertionError: wrong; the code answered 2 last; test 7"
    )
    assert judge(ADD, tests)[0] == 0 and judge(ADD, tests[:5])[0] == 1


def test_returned_values_keep_their_types():
    code = (
        "import collections\nclass S:\n    def f(self, k):\n"
        "        return [(1, 2), [1, 2], {1: 2.5}, {3}, None, b'a', 1j, "
        "float('inf'), True, collections.Counter('a'), object(), [[]]][k]\nloop = []\nloop.append(loop)\n"
    )
    expected = ["(1, 2)", "[1, 2]", "{1: 2.5}", "{3}", "None", "b'a'", "1j", "1e999", "True", "{'a': 1}"]
    tests = [f"assert S().f({k}) == {value}" for k, value in enumerate(expected)]
    assert all(result.passed for result in CodeTests(limits=QUICK, isolation=HERE).run(code, tests))
    wrong = ["assert S().f(0) == [1, 2]", "assert S().f(10) == 3", {"call": "loop.copy", "expected": 1}]
    remarks = [result.remark for result in CodeTests(limits=QUICK, isolation=HERE).run(code, wrong)]
    assert remarks == [
        "AssertionError; the code answered (1, 2) last",
        "TypeError: a object is no plain value",
        "TypeError: nests deeper than 50",
    ]
    assert (
        CodeTests(limits=QUICK, isolation=HERE)
        .run(code, [{"call": "S.f", "args": [0], "expected": [1, 2]}])[0]
        .passed
    )


def test_programs_read_stdin_and_print():
    code = "n = int(input())\nprint('a  ', n)\nprint()\nif n > 1: raise SystemExit(n)"
    tests = {"inputs": ["1\n", "1\n", "2\n", "x"], "outputs": ["a   1\n", "a   2", "a   2", ""]}
    results = CodeTests(limits=QUICK, isolation=HERE).run(code, tests)
    assert [result.passed for result in results] == [True, False, False, False]
    assert results[1].remark == "it printed 'a   1\\n\\n'" and results[2].remark == "it ended with 2: ''"
    assert "ValueError" in results[3].remark
    functions = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
    assert read_tests(functions) == [{"call": "add", "args": [1, 2], "kwargs": {}, "expected": 3}]


@pytest.mark.parametrize(
    "tests",
    [
        *([], {}, 3, [3], ["assert ("], [{"stdin": "1"}], [{"call": "f"}]),
        *([{"call": "f", "args": 3, "expected": 1}], [{"call": "f", "args": [{1}], "expected": 1}]),
        {"inputs": [1], "outputs": []},
    ],
)
def test_tests_that_cannot_be_read_are_no_score(tests):
    with pytest.raises(UnreadableTests):
        read_tests(tests)
    value, _ = judge(ADD, tests)
    assert isinstance(value, str) and value.startswith("the tests in 'tests' cannot be read: ")


def test_no_tests_and_a_broken_sandbox_are_no_score(monkeypatch):
    assert judge(ADD, None)[0] == "its metadata has no 'tests'"
    monkeypatch.setattr(code_sandbox, "CHILD", Path("no_such_file.py"))
    value, _ = judge(ADD, ["assert True"])
    assert "the sandbox did not start" in value and "no_such_file.py" in value


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        ("import no_such_module", "raised ModuleNotFoundError"),
        ("1 / 0", "raised ZeroDivisionError"),
        ("while True: pass", "did not end in time|ended the process"),
        ("import os\nos._exit(0)", r"ended the process \(0\)"),
        ("import sys\nsys.exit(0)", "raised SystemExit"),
    ],
)
@pytest.mark.parametrize("test", ["assert f() == 1", {"stdin": "", "stdout": "1"}])
def test_a_setup_that_cannot_run_is_no_score_of_the_code(setup, why, test):
    limits = {"cpu_seconds": 1, "wall_seconds": 3}
    reward = CodeTests(setup_field="setup", limits=limits, isolation=HERE)
    code = "```python\ndef f(): return 1\nprint(1)\n```"
    found = reward.score([code, code], ["p", "p"], [{"tests": [test], "setup": s} for s in (setup, "x = 1")])
    assert found.valid.tolist() == [False, True] and found.value[1] == 1
    assert found.reason is not None and "before the code (setup)" in str(found.reason[0])
    if isinstance(test, str):
        assert re.search(why, str(found.reason[0]))


def test_setup_code_comes_first():
    reward = CodeTests(setup_field="setup", limits=QUICK, isolation=HERE)
    scores = reward.score(
        ["```python\nx = sqrt(4)\n```"],
        ["?"],
        [{"tests": ["assert x == 2"], "setup": "from math import sqrt"}],
    )
    assert scores.value.tolist() == [1]


# what code can do


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize(
    ("code", "remark"),
    [
        ("while True: pass", "before its result"),
        ("import time\ntime.sleep(60)", "test 1: the time was over before its result"),
        (
            "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\ntime.sleep(60)",
            "test 1: the time was over before its result",
        ),
        ("import os\nos._exit(0)", "test 1: the program ended (0) before its result"),
        ("import sys\nsys.exit(0)", "test 1: the code raised SystemExit: 0"),
        ("raise KeyboardInterrupt", "test 1: the code raised KeyboardInterrupt: "),
        ("print('x' * 30_000_000)\nadd = 3", "test 1: AssertionError; the code answered 3 last"),
        ("x = bytearray(10**9)", "the code raised MemoryError: "),
        ("open('big', 'w').write('x' * 10**7)", "the code raised OSError: [Errno 27] File too large"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 22))", "the sandbox has no network"),
        ("import socket\nsocket.getaddrinfo('localhost', 1)", "the sandbox has no network"),
        ("import os\nos.system('ls')", "the sandbox refuses os.system"),
        ("import subprocess\nsubprocess.run(['ls'])", "the sandbox refuses subprocess.Popen"),
        ("def add(:", "test 1: the code raised SyntaxError"),
        (
            "class E(Exception):\n    def __str__(self): raise self\nraise E",
            "the code raised E (E in its message)",
        ),
        ("import sys\nsys.setrecursionlimit(10**6)\ndef f(): f()\nf()", "test 1: "),
    ],
)
def test_bad_code_scores_zero_with_its_reason(code, remark, isolation):
    value, said = judge(code, ["assert add == 4"], isolation=isolation)
    assert value == 0 and remark in said


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_success_cannot_be_printed(isolation):
    code = (
        "import os, json\nline = b'\\n' + json.dumps({'test': 0, 'value': None}).encode() + b'\\n'\n"
        "for fd in range(1, 60):\n    try: os.write(fd, line)\n    except OSError: pass\n"
        "print('1 of 1 passed')\nos._exit(0)"
    )
    assert judge(code, [{"assert": "x = 1\nassert False"}], isolation=isolation)[0] == 0
    patched = "import builtins\nbuiltins.AssertionError = None\nclass E:\n    __eq__ = lambda *_: True\nf = E"
    assert judge(patched, ["assert f() == 4"], isolation=isolation) == (
        0,
        "0 of 1 passed; test 1: TypeError: a E is no plain value",
    )


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_nothing_survives_the_run(isolation, tmp_path, monkeypatch):
    child = copied_child(tmp_path)
    monkeypatch.setattr(code_sandbox, "CHILD", child)
    daemon = (
        "import os, sys, time\n"
        "for _ in range(2):\n"
        "    if os.fork() == 0:\n        os.setsid()\n        time.sleep(300)\n        os._exit(0)\n"
    )
    for _ in range(5):  # what has ended counts among its processes for a moment
        run = run_python(daemon, limits=QUICK, isolation=isolation)
        if "temporarily unavailable" not in run.stderr:
            break
        time.sleep(2)
    assert run.exit_code == 0 and not run.timed_out
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    begun = time.monotonic()
    run = run_python(bomb, limits=QUICK, isolation=isolation)
    assert run.timed_out or run.exit_code == 152
    assert time.monotonic() - begun < 30
    assert processes_with(bytes(child)) == []


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_run_ends_by_itself_where_its_caller_was_killed(isolation, tmp_path):
    child = copied_child(tmp_path)
    script = (
        "import os\nfrom pathlib import Path\nfrom visalign.rewards.code import sandbox\n"
        "sandbox.CHILD = Path(os.environ['CHILD'])\n"
        f"sandbox.run_python('import time; time.sleep(60)', isolation={isolation!r},"
        " limits=sandbox.SandboxLimits(wall_seconds=600))"
    )
    surroundings = os.environ | {"CHILD": str(child)}
    caller = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[3], env=surroundings)
    end = time.monotonic() + 60
    while not processes_with(bytes(child)):
        assert time.monotonic() < end
        time.sleep(0.02)
    caller.kill()
    caller.wait()
    end = time.monotonic() + 20  # long before the run's own time is over
    while processes_with(bytes(child)):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_files_outside_the_folder_are_safe(isolation, tmp_path):
    victim = tmp_path / "folder"
    victim.mkdir()
    (victim / "file").write_text("kept")
    code = f"""
import os, shutil, tempfile
actions = [
    lambda: os.remove({str(victim / "file")!r}),
    lambda: shutil.rmtree({str(victim)!r}),
    lambda: os.rename({str(victim / "file")!r}, "mine"),
    lambda: open({str(victim / "file")!r}, "w"),
    lambda: os.unlink("file", dir_fd=os.open({str(victim)!r}, os.O_RDONLY)),
    lambda: os.chmod({str(victim)!r}, 0),
    lambda: os.kill({os.getpid()}, 0),
]
for number, action in enumerate(actions):
    try:
        action()
    except OSError:
        continue
    print("done", number)
with tempfile.TemporaryDirectory() as folder:
    open(folder + "/a", "w").write("x")
    os.rename(folder + "/a", "b")
print(os.listdir("."), sorted(os.environ))
"""
    run = run_python(code, limits=QUICK, isolation=isolation)
    assert run.stdout.splitlines() == [
        "['b'] ['HOME', 'LC_CTYPE', 'PYTHONHASHSEED', 'PYTHONUTF8', 'TMPDIR']"
    ], run
    assert (victim / "file").read_text() == "kept"


@KERNEL
def test_namespaces_isolate_in_the_kernel():
    run = run_python("import os\nprint(os.getpid() < 5, os.getuid() != 0, os.listdir('/proc'))", limits=QUICK)
    assert run.stdout == "True True []\n" and run.isolation == "namespaces"


@KERNEL
def test_nothing_of_the_system_but_python_is_there(tmp_path):
    """Sockets and files under the temporary folder, in homes, and of services."""
    secret = tmp_path / "secret"
    secret.write_text("s")
    paths = [str(secret), tempfile.gettempdir() + "/x", str(Path.home()) + "/.ssh", "/etc/passwd", "/run"]
    code = (
        f"import os\nprint([os.path.exists(p) for p in {paths!r}], os.listdir('.'), len(os.listdir('/tmp')))"
    )
    assert run_python(code, limits=QUICK).stdout == "[False, False, False, False, False] [] 1\n"  # its own
    changes = (
        "import os, sys\n"
        "for place in ('/usr/x', '/x', sys.prefix + '/x', '/dev/x', '/tmp/x'):\n"
        "    try: open(place, 'w')\n    except OSError as error: print(error.errno)\n"
    )
    assert run_python(changes, limits=QUICK).stdout.split() == ["30"] * 5


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="no filter of calls there")
def test_the_kernel_refuses_sockets_and_memory_without_an_address(isolation, tmp_path):
    """Without the interpreter in between: by number, as native code would."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        code = f"""
import ctypes, os, _socket
libc = ctypes.CDLL(None, use_errno=True)
column = 0 if os.uname().machine == "x86_64" else 1
for pair in {sorted(code_child.CALLS.values())}:
    print(libc.syscall(pair[column], 1, 1, 0, 0, 0), ctypes.get_errno())
for what in (lambda: os.memfd_create("x"), lambda: _socket.socket(_socket.AF_UNIX)):
    try: what()
    except PermissionError: print("refused")
print(len(_socket.socketpair()))
"""
        run = run_python(code, limits=QUICK, isolation=isolation, packages=True)
    assert run.stdout.splitlines() == ["-1 1"] * len(code_child.CALLS) + ["refused"] * 2 + ["2"], run


def test_nothing_is_run_where_nothing_isolates_unless_that_was_said(monkeypatch, tmp_path):
    child = copied_child(tmp_path)
    child.write_text(
        code_sandbox.CHILD.read_text().replace("if libc.unshare(", "if libc.unshare(-1) or libc.unshare(")
    )
    monkeypatch.setattr(code_sandbox, "CHILD", child)
    monkeypatch.setattr(code_sandbox.sys, "executable", sys.executable)
    mark = tmp_path / "it ran"
    for isolation in ("auto", "namespaces"):
        with pytest.raises(
            RewardError, match=r"cannot isolate here \(unshare: .*isolation='process' does without"
        ):
            run_python(f"open({str(mark)!r}, 'w')", limits=QUICK, isolation=isolation)
        with pytest.raises(RewardError, match="so it runs nothing"):
            judge(ADD, ["assert add(1, 1) == 2"], isolation=isolation)
    assert not mark.exists()
    with pytest.warns(UserWarning, match=r"runs code with isolation='process'.*has the kernel isolate"):
        assert run_python("print(1)", limits=QUICK, isolation="process").stdout == "1\n"


def test_cpu_seconds_end_a_run_before_its_wall_clock():
    limits = SandboxLimits(wall_seconds=120, cpu_seconds=1)
    run = run_python("while True: pass", isolation=HERE, limits=limits)
    assert run.exit_code == 152 and not run.timed_out  # 128 + SIGXCPU
    ignoring = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert (
        run_python(ignoring, isolation=HERE, limits=limits).exit_code == 137
    )  # one second more, then SIGKILL


def test_output_is_cut_and_a_program_that_floods_fails():
    run = run_python("print('x' * 10**6)", isolation=HERE, limits=QUICK)
    assert len(run.stdout) == 65536 and run.stdout_cut and run.exit_code == 0
    assert judge("print('x' * 10**6)", [{"stdin": "", "stdout": "x"}])[1].endswith(
        "test 1: it printed too much"
    )
    assert judge("while True: print('x')", [{"stdin": "", "stdout": "x"}])[0] == 0


def test_ordinary_code_works_inside():
    code = (
        "import asyncio, threading, dataclasses, random, heapq, re\nfrom multiprocessing import get_context\n"
        "async def f():\n    await asyncio.sleep(0)\n    return 3\n"
        "t = threading.Thread(target=print, args=(4,))\nt.start()\nt.join()\n"
        "if __name__ == '__main__':\n"
        "    print(asyncio.run(f()), get_context('fork').Pool(2).map(abs, [-1, -2]))\n"
        "    print(list({'b', 'a', 'c', 'd'}))"
    )
    limits = SandboxLimits(wall_seconds=60, processes=8)  # threads that have ended count for a moment
    first, second = (run_python(code, isolation=HERE, limits=limits) for _ in range(2))
    assert (
        first.stdout.startswith("4\n3 [1, 2]\n") and first.stdout == second.stdout
    )  # the hash seed is fixed


def test_samples_do_not_wait_for_each_other():
    reward = CodeTests(limits=QUICK, isolation=HERE, workers=4, credit="share")
    codes = ["import time\ntime.sleep(60)", ADD] * 2
    begun = time.monotonic()
    scores = reward.score(
        [f"```\n{code}\n```" for code in codes], ["?"] * 4, [{"tests": ["assert add(1, 1) == 2"]}] * 4
    )
    assert scores.value.tolist() == [0, 1, 0, 1] and scores.parts["all"].tolist() == [0, 1, 0, 1]
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"credit": "half"}, "credit is 'half'; allowed are 'all' and 'share'"),
        ({"isolation": "docker"}, "isolation is 'docker'; allowed are auto, namespaces, process"),
        ({"tolerance": -1}, "tolerance is -1; allowed are numbers from 0 to below 1"),
        ({"workers": 0}, "workers is 0; allowed are whole numbers from 1"),
        ({"limits": {"wall": 3}}, "allowed keys are wall_seconds, cpu_seconds"),
        ({"limits": {"wall_seconds": 0}}, "wall_seconds is 0; allowed are numbers from 0.01"),
        ({"limits": {"memory_mb": -1}}, "memory_mb is -1; allowed are whole numbers from 1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        CodeTests(**options)
