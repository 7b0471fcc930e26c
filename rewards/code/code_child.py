# SPDX-License-Identifier: Apache-2.0
"""The inside of the code sandbox: run as a script by `sandbox`, standard library only.

Three processes. The supervisor gives up root where it can, enters fresh user, mount, network, process and
IPC namespaces, keeps the time, and ends when nothing is left; the init process holds the process namespace,
so that its death is everybody's; the worker drops all capabilities, sets the resource limits, installs the
audit hook, and runs the generated code.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import stat
import struct
import sys
import time
import types
from typing import Any

NAMESPACES = 0x00020000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET of <linux/sched.h>."""
NOBODY = 65534
COVERED = ("/proc", "/run", "/dev/shm")
"""Folders hidden behind empty ones: other processes, sockets of services, shared memory."""
NETWORK = ("connect", "bind", "getaddrinfo", "gethostbyname", "gethostbyaddr", "sendto", "sendmsg")
PROGRAMS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.forkpty", "pty.spawn")
CHANGES = ("remove", "rmdir", "mkdir", "rename", "truncate", "chmod", "chown", "link", "symlink", "utime")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
DEPTH = 50
"""How deep a returned value may nest."""


class Channel:
    """Lines of nonce and JSON on a pipe of their own; what lacks the nonce is not read."""

    def __init__(self, descriptor: int, nonce: str) -> None:
        self.descriptor = descriptor
        self._nonce = nonce

    def send(self, **record: Any) -> None:
        """Write one record; a pipe that is full waits for its reader."""
        line = (self._nonce + json.dumps(record) + "\n").encode()
        while line:
            line = line[os.write(self.descriptor, line) :]


class CatchAll:
    """Keeps whatever the generated code raises, the end of the interpreter included."""

    error: BaseException | None = None

    def __enter__(self) -> CatchAll:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self.error = error
        return True

    def words(self) -> str:
        """The kind of error and the start of its message."""
        with CatchAll() as inner:
            return f"{type(self.error).__name__}: {self.error}"[:300]
        return f"{type(self.error).__name__} ({type(inner.error).__name__} in its message)"


def encode(value: Any, depth: int = 0) -> Any:
    """A plain value as JSON that keeps its type.

    Raises:
        TypeError: something that is no plain value, or too deep.
    """
    if depth > DEPTH:
        raise TypeError(f"nests deeper than {DEPTH}")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        return {"dict": [[encode(part, depth + 1) for part in pair] for pair in dict.items(value)]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            plain: Any = kind(value)
            return {kind.__name__: [encode(part, depth + 1) for part in plain]}
    raise TypeError(f"a {type(value).__name__} is no plain value")


def everybody_reads(path: str) -> bool:
    """Whether a user without rights gets to this file."""
    if not os.stat(path).st_mode & stat.S_IROTH:
        return False
    while (parent := os.path.dirname(path)) != path:
        path = parent
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
    return True


def give_up_root(libc: ctypes.CDLL) -> None:
    """Become nobody, if we are root and Python's library stays readable: root's limits do not bind."""
    if os.getuid() == 0 and everybody_reads(os.path.realpath(os.__file__)):
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        libc.prctl(4, 1, 0, 0, 0)  # dumpable again, or /proc/self/uid_map would be root's


def enter_namespaces(libc: ctypes.CDLL, folder: str, megabytes: int) -> str | None:
    """No network, own processes, a read-only file system with one small writable folder; or why not."""

    def failed(what: str) -> str:
        return f"{what}: {os.strerror(ctypes.get_errno())}"

    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(NAMESPACES) != 0:
        return failed("unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if libc.mount(None, b"/", None, 0x4000 | 0x40000, None) != 0:  # recursive, private
        return failed("mount")
    read_only = ctypes.create_string_buffer(struct.pack("QQQQ", 1, 0, 0, 0))
    if libc.syscall(442, -100, b"/", 0x8000, read_only, 32) != 0:  # mount_setattr, recursive
        return failed("mount_setattr")
    options = f"size={megabytes}m,mode=700".encode()
    if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 2 | 4, options) != 0:  # nosuid, nodev
        return failed("mount of the working folder")
    for cover in COVERED:
        if os.path.isdir(cover) and not os.path.realpath(os.__file__).startswith(cover + "/"):
            libc.mount(b"tmpfs", cover.encode(), b"tmpfs", 2 | 4 | 8, b"size=1m,mode=777")
    return None


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """Nothing inside may undo the mounts, and no program gets rights back by being started."""
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges


def set_limits(limits: dict[str, Any], isolated: bool) -> None:
    """CPU seconds, address space, file size, processes, open files; no core files."""
    cpu = max(1, int(limits["cpu_seconds"] + 0.999))
    memory, size = limits["memory_mb"] * 2**20, limits["file_mb"] * 2**20
    # Without namespaces the count is the user's, over everything that they run.
    tasks = limits["processes"] + (4 if isolated else 4096)
    for name, value in (("AS", memory), ("FSIZE", size), ("CORE", 0), ("NOFILE", 64), ("NPROC", tasks)):
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None:
            continue
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))


def refuse(folder: str, processes: int, isolated: bool, packages: bool) -> None:
    """Install the audit hook: no network, no programs, few forks, and no writing outside the folder."""
    forks = mmap.mmap(-1, 8)  # shared by all descendants
    inside = os.path.realpath(folder)

    def is_inside(path: Any) -> bool:
        if isinstance(path, int):
            return True
        full = os.path.realpath(os.fsdecode(path))
        return full == os.devnull or full.startswith(inside + os.sep)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        family, _, action = event.partition(".")
        if family == "socket" and action in NETWORK:
            raise PermissionError("the sandbox has no network")
        if event in PROGRAMS or (event == "ctypes.dlopen" and not packages):
            raise PermissionError(f"the sandbox refuses {event}")
        if event == "os.fork":
            count = struct.unpack("q", forks[:])[0] + 1
            forks[:] = struct.pack("q", count)
            if count > processes:
                raise PermissionError(f"the sandbox allows {processes} forks")
        if isolated:
            return
        if event in ("os.kill", "os.killpg") and arguments[0] != os.getpid():
            raise PermissionError("the sandbox refuses signals to other processes")
        if event == "open" and (arguments[2] or 0) & WRITING and not is_inside(arguments[0]):
            raise PermissionError("the sandbox refuses to write outside its folder")
        if (family == "os" and action in CHANGES) or event == "shutil.rmtree":
            base = arguments[-1] if action != "truncate" else -1
            start = os.readlink(f"/proc/self/fd/{base}") if isinstance(base, int) and base > 2 else ""
            for path in arguments[: 2 if action in ("rename", "link", "symlink") else 1]:
                if not is_inside(path if isinstance(path, int) else os.path.join(start, os.fsdecode(path))):
                    raise PermissionError("the sandbox refuses changes outside its folder")

    sys.addaudithook(hook)


def run_tests(source: str, tests: list[dict[str, Any]], channel: Channel) -> None:
    """Run the code as a module, then each test; one record per test."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with CatchAll() as load:
        exec(compile(source, "solution.py", "exec"), module.__dict__)
    if load.error is not None:
        channel.send(load_error=load.words())
        return
    for number, test in enumerate(tests):
        with CatchAll() as attempt:
            if "assert" in test:
                exec(compile(test["assert"], f"test {number + 1}", "exec"), module.__dict__)
                value = None
            elif "eval" in test:
                value = encode(eval(compile(test["eval"], f"test {number + 1}", "eval"), module.__dict__))
            else:
                function: Any = module
                for part in test["call"].split("."):
                    function = function() if isinstance(function, type) else function
                    function = getattr(function, part)
                value = encode(function(*test.get("args", ()), **test.get("kwargs", {})))
        if attempt.error is not None:
            channel.send(test=number, error=attempt.words())
        else:
            channel.send(test=number, value=value)


def work(config: dict[str, Any], channel: Channel, libc: ctypes.CDLL | None, isolated: bool) -> None:
    """The worker: lock the doors, then run the generated code."""
    os.setsid()
    os.chdir(config["folder"])
    for descriptor in range(3, 64):
        if descriptor != channel.descriptor:
            with CatchAll():
                os.close(descriptor)
    if libc is not None:
        drop_capabilities(libc)
    set_limits(config["limits"], isolated)
    refuse(config["folder"], config["limits"]["processes"], isolated, config["packages"])
    channel.send(ready=True)
    source = config["source"]
    if config["tests"] is not None:
        run_tests(source, config["tests"], channel)
        return
    os.close(channel.descriptor)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["solution.py"]
    exec(compile(source, "solution.py", "exec"), module.__dict__)


def exit_code(status: int) -> int:
    """Of a process that was waited for; 128 + signal for a killed one."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def supervise(child: int, seconds: float) -> int | None:
    """The exit code of the code's process, None where its time was over. Nothing that it began is left."""
    late: list[bool] = []

    def end(*_: Any) -> None:
        late.append(True)
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    status = os.waitpid(child, 0)[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    with CatchAll():
        os.killpg(child, signal.SIGKILL)
    for _ in range(500):  # orphans come to this process, and so do their children once they are dead
        for orphan in children():
            with CatchAll():
                os.kill(orphan, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            break
    return None if late else exit_code(status)


def children() -> list[int]:
    """Of this process; none where there is no /proc."""
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        with CatchAll(), open(f"/proc/{entry}/stat") as file:
            if file.read().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.append(int(entry))
    return found


def main() -> None:
    """Read the task, build the three processes; only the worker returns from here."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        config = json.load(file)
    channel = Channel(int(sys.argv[2]), config["nonce"])
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    problem: str | None = "needs Linux"
    if libc is not None:
        give_up_root(libc)
        if config["isolation"] != "process":
            with CatchAll() as attempt:
                problem = enter_namespaces(libc, config["folder"], config["limits"]["file_mb"])
            problem = attempt.words() if attempt.error else problem
            if problem and config["isolation"] == "namespaces":
                channel.send(refused=problem)
                os._exit(1)
        else:
            problem = "not asked for"
        libc.prctl(36, 1, 0, 0, 0)  # orphans come to this process
    isolated = problem is None
    channel.send(isolation="namespaces" if isolated else "process", why=problem)
    if child := os.fork():
        channel.send(ended=supervise(child, config["limits"]["wall_seconds"]))
        os._exit(0)
    if libc is not None:
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # die with the supervisor
    if isolated and (worker := os.fork()):
        os._exit(exit_code(os.waitpid(worker, 0)[1]))
    work(config, channel, libc, isolated)


if __name__ == "__main__":
    main()
