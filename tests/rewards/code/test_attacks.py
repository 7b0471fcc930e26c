# SPDX-License-Identifier: Apache-2.0
"""Attacks on the default isolation, by code with ctypes and installed packages: none achieves anything.

Each runs as an ordinary user, and where the tests run as root also as root. An attack prints WON where it got
through; what it must be answered with stands beside it, so that a slip in the attack is no success of ours.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.sandbox import KERNEL, QUICK
from visalign.rewards.code import sandbox as code_sandbox
from visalign.rewards.code.code_child import everybody_reads
from visalign.rewards.code.sandbox import run_python

pytestmark = [
    KERNEL,
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls are named by their numbers there"),
]
SOMEBODY = 54321
"""A user that owns nothing."""
PRELUDE = """
import ctypes, errno, mmap, os, shutil, signal, socket, stat, sys, threading, time, _socket
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    found = libc.syscall(number, *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
def reach(address, family=socket.AF_UNIX):
    s = _socket.socket(family, socket.SOCK_STREAM); s.connect(address); return True
def grow(folder):
    total = 0
    for n in range(60):
        try:
            with open(f"{folder}/{n}", "wb", buffering=0) as file:
                for _ in range(19): total += file.write(bytes(100_000))
        except OSError as error:
            if error.errno != errno.ENOSPC: raise
    return total > 6_000_000
def spawned(start):
    count = 0
    try:
        for _ in range(100): start(); count += 1
    except (OSError, RuntimeError): pass
    return count > 20
def piped():
    total = 0
    try:
        while total < 600 << 20: total += max(libc.fcntl(os.pipe()[1], 1031, 1 << 20), 0)
    except OSError: pass
    return total > 64 << 20
def forks():
    if libc.fork() == 0: time.sleep(30)
    elif ctypes.get_errno(): raise OSError(ctypes.get_errno(), "")
def threads():
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
def survive():
    for _ in range(2):
        if libc.fork() == 0: os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)
"""
ATTACKS = {
    # the network and sockets
    "a unix socket under the temporary folder": ("reach(SOCKET)", "PermissionError"),
    "an abstract unix socket": ("reach(ABSTRACT)", "PermissionError"),
    "a port of this machine": ("reach(('127.0.0.1', PORT), socket.AF_INET)", "PermissionError"),
    "a raw packet socket": ("_socket.socket(17, 3, 768)", "PermissionError"),
    "a netlink socket": ("_socket.socket(16, 3, 0)", "PermissionError"),
    "a socket of its own pair connected elsewhere": ("_socket.socketpair()[0].connect(SOCKET)", "Error"),
    # memory and disk without end
    "memfd beyond the limit": ("os.memfd_create('x')", "PermissionError"),
    "memfd_secret": ("call(447, 0)", "Operation not permitted"),
    "System V memory": ("call(29, 0, 600 << 20, 0o1600)", "Operation not permitted"),
    "a message queue": ("call(240, b'x', 66, 384, None)", "Operation not permitted"),
    "shared memory without a name": ("mmap.mmap(-1, 600 << 20)", "Cannot allocate memory"),
    "memory beyond the limit": ("bytearray(600 << 20)", "MemoryError"),
    "/dev/shm growth": ("grow('/dev/shm')", "lost False"),
    "its folder's growth": ("grow('.')", "lost False"),
    "/tmp growth": ("grow('/tmp')", "Read-only file system"),
    "pipes that hold data": ("piped()", "lost False"),
    # processes
    "a fork bomb": ("spawned(forks)", "lost False"),
    "a bomb of threads": ("spawned(threads)", "lost False"),
    "signals to the parent": ("os.kill(os.getppid() or PARENT, 9)", ""),
    "a signal to the trainer": ("os.kill(PARENT, 9)", "ProcessLookupError"),
    "a signal to its init": ("os.kill(1, 9)", ""),
    "kill(-1)": ("libc.kill(-1, 9) and None", ""),
    "orphans that change their session": ("survive()", "lost None"),
    "a higher priority": ("os.nice(-10)", "PermissionError"),
    "higher limits": ("__import__('resource').setrlimit(9, (-1, -1))", "Error"),
    # the neighbours' memory
    "ptrace of the parent": ("call(101, 16, os.getppid() or 1, 0, 0)", "Operation not permitted"),
    "reading a process's memory": ("call(310, 1, 0, 0, 0, 0, 0)", "Operation not permitted"),
    "/proc/PID/environ": ("open(f'/proc/{PARENT}/environ').read()", "FileNotFoundError"),
    "its own /proc": ("os.listdir('/proc')", r"lost \[\]"),
    "a descriptor of another process": ("call(438, call(434, 1, 0), 1, 0)", "Operation not permitted"),
    "the kernel's log": ("call(103, 3, ctypes.create_string_buffer(4096), 4096)", "Operation not permitted"),
    "a trace of performance": ("call(298, 0, 0, -1, -1, 0)", "Operation not permitted"),
    # files
    "a secret": ("open(SECRET).read()", "FileNotFoundError"),
    "the password file": ("open('/etc/passwd').read()", "FileNotFoundError"),
    "the tester's home": ("os.listdir(HOME + '/.ssh')", "Error"),
    "writing to the interpreter": ("open(os.__file__, 'a')", "Error"),
    "writing to site-packages": (
        "[open(p + '/x.pth', 'w') for p in sys.path if 'site-' in p]",
        r"Error|lost \[\]",
    ),
    "a program of the system": ("open(shutil.which('env'), 'ab')", "Error"),
    "a link in its folder": ("os.symlink(os.path.dirname(SECRET), 'link') or os.listdir('link')", "Error"),
    "a hard link": ("os.link(SECRET, 'copy')", "Error"),
    "a device": ("os.mknod('disk', stat.S_IFBLK | 0o666, os.makedev(254, 0))", "PermissionError"),
    "a file by its handle": ("call(304, -100, ctypes.create_string_buffer(64), 0)", "Error"),
    "what its descriptors hold": (
        "[n for n in range(3, 64) if os.path.isfile(f'/dev/fd/{n}') or libc.fcntl(n, 1) >= 0]",
        r"lost \[\]",
    ),
    "the trainer's terminal": ("open('/dev/tty').read()", "Error"),
    "typing into the terminal": ("call(16, 0, 0x5412, b'x')", "Error"),
    "the trainer's stdin": ("sys.stdin.read()", "lost $"),
    # rights
    "unshare inside": ("call(272, 0x10000000)", "Operation not permitted"),
    "clone of a user namespace": ("call(56, 0x10000000 | 17, 0, 0, 0, 0)", "Operation not permitted"),
    "clone of a mount namespace": ("call(56, 0x20000 | 17, 0, 0, 0, 0)", "Operation not permitted"),
    "setns": ("call(308, 0, 0)", "Operation not permitted"),
    "mount": ("call(165, b'x', b'/tmp', b'tmpfs', 0, None)", "Operation not permitted"),
    "mount, written anew": ("call(165, None, b'/', None, 32 | 4096, None)", "Operation not permitted"),
    "the new mount calls": ("call(430, b'proc', 0)", "Operation not permitted"),
    "unmount": ("call(166, b'/proc', 2)", "Operation not permitted"),
    "pivot_root": ("call(155, b'.', b'.')", "Operation not permitted"),
    "chroot and up": ("os.chroot('.')", "PermissionError"),
    "up and out": ("os.chdir('../../../../..') or os.path.exists('/etc/passwd') or None", "lost None"),
    "user 0": ("os.setuid(0)", "Error"),
    "being root": ("os.getuid() == 0 or os.geteuid() == 0", "lost False"),
    "capabilities": (
        "call(126, b'\\x22\\x05\\x08\\x20' + bytes(4), b'\\xff' * 24)",
        "Operation not permitted",
    ),
    "rights by starting a program": ("libc.prctl(39, 0, 0, 0, 0) != 1", "lost False"),
    "another seccomp filter that allows": ("libc.prctl(21, 0, 0, 0, 0) != 2", "lost False"),
    "32-bit calls": ("call(0x40000000 | 165, b'x', b'/tmp', b'tmpfs', 0, None)", "not permitted"),
    "the machine's name": ("socket.sethostname('x')", "Error"),
    "the clock": ("time.clock_settime(0, 0)", "PermissionError"),
    "a kernel module": ("call(175, b'x', 1, b'')", "not permitted|not implemented"),
    # corners of the kernel
    "io_uring": ("call(425, 8, ctypes.create_string_buffer(120))", "Operation not permitted"),
    "userfaultfd": ("call(323, 0)", "Operation not permitted"),
    "the keyring": ("call(248, b'user', b'x', b'y', 1, -3)", "Operation not permitted"),
    "keyctl": ("call(250, 0, -3, 0)", "Operation not permitted"),
    "bpf": ("call(321, 0, 0, 0)", "Operation not permitted"),
    # the interpreter's own hook
    "subprocess": ("__import__('subprocess').run(['ls'])", "refuses subprocess.Popen"),
    "a shell": ("os.system('ls')", "refuses os.system"),
}
"""What is tried -> an expression whose value is true where it succeeded, and what must be said instead."""


@dataclass(frozen=True)
class Victims:
    """What a run must leave alone, and where it stands."""

    words: str
    secret: Path
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    """A socket of each kind, a secret, and a process of the same user."""
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as named:
        folder = Path(place)
        folder.chmod(0o755)
        (folder / "secret").write_text("kept")
        named.bind(str(folder / "s"))
        (folder / "s").chmod(0o777)
        with socket.socket(socket.AF_UNIX) as abstract, socket.create_server(("127.0.0.1", 0)) as port:
            abstract.bind(f"\0visalign{os.getpid()}")
            for server in (named, abstract):
                server.listen()
            given = {
                "HOME": str(Path.home()),
                "SECRET": str(folder / "secret"),
                "SOCKET": str(folder / "s"),
                "ABSTRACT": f"\0visalign{os.getpid()}",
                "PORT": port.getsockname()[1],
            }
            sleep = subprocess.Popen(["sleep", "600"], user=SOMEBODY if os.geteuid() == 0 else None)
            words = "\n".join(f"{name} = {value!r}" for name, value in given.items())
            yield Victims(f"{words}\nPARENT = {sleep.pid}\n", folder / "secret", sleep)
            sleep.kill()
            sleep.wait()


def other_python() -> str | None:
    """An interpreter of the same system that everybody may start."""
    found = map(os.path.realpath, filter(None, (sys.executable, shutil.which("python3", path=os.defpath))))
    return next((path for path in found if everybody_reads(path)), None)


@pytest.fixture(params=["user", "root"])
def as_whom(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sandbox started by an ordinary user, and by root."""
    is_root = os.geteuid() == 0
    if request.param == "root" and not is_root:
        pytest.skip("the tests do not run as root")
    if request.param == "user" and is_root:
        if (python := other_python()) is None:
            pytest.skip("no Python here can be started by an ordinary user")
        start = functools.partial(subprocess.Popen, user=SOMEBODY, group=SOMEBODY, extra_groups=[])
        monkeypatch.setattr(code_sandbox.subprocess, "Popen", start)
        monkeypatch.setattr(code_sandbox.sys, "executable", python)
    return request.param


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_achieves_nothing(name: str, as_whom: str, victims: Victims) -> None:
    expression, answer = ATTACKS[name]
    code = (
        f"{PRELUDE}{victims.words}try:\n    found = {expression}\n"
        "except BaseException as error: print('lost', type(error).__name__, error)\n"
        "else: print('WON' if found else 'lost', found)\n"
    )
    run = run_python(code, limits=QUICK, packages=True)
    assert run.isolation == "namespaces" and run.failure is None, run
    assert "WON" not in run.stdout and re.search(answer, run.stdout), run
    assert victims.secret.read_text() == "kept" and victims.process.poll() is None


@pytest.mark.skipif(shutil.which("fakeroot") is None, reason="fakeroot is not installed")
def test_fakeroot_fools_nobody(victims: Victims) -> None:
    """A caller that only believes to be root: nothing that it lends to the code makes that root either."""
    code = "import os; print(os.getuid(), os.geteuid(), os.environ.get('LD_PRELOAD'), os.path.exists(SECRET))"
    driver = (
        "from visalign.rewards.code.sandbox import run_python\n"
        f"run = run_python({victims.words + code!r})\n"
        "print(run.isolation, run.failure, run.stdout)"
    )
    done = subprocess.run(["fakeroot", sys.executable, "-c", driver], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"namespaces None (?!0 )\d+ (?!0 )\d+ None False\s*", done.stdout), done.stdout
