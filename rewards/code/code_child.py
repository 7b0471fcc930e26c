# SPDX-License-Identifier: Apache-2.0
"""The inside of the code sandbox: run as a script by `sandbox`, standard library only.

Three processes. The supervisor gives up root, enters fresh user, mount, network, process and IPC namespaces,
keeps the time, and ends when nothing is left or its caller is dead; the init process holds the process
namespace, so that its death is everybody's; the worker drops all capabilities, has the kernel refuse what
code of this kind has no use for, sets the resource limits, installs the audit hook, and runs the code.
"""

from __future__ import annotations

import ast
import builtins
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

NEW_USERS = 0x10000000
NAMESPACES = 0x00020000 | 0x08000000 | NEW_USERS | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET of <linux/sched.h>."""
NOBODY = 65534
SEEN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime")
"""What is there of the system besides Python's own folders, read-only: no home, no sockets, no secrets."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> its number in <linux/audit.h>, its column in `CALLS`."""
CALLS = {
    "socket": (41, 198),
    "memfd_create": (319, 279),  # memory that no limit of a process counts, as the next three
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "mq_open": (240, 180),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "move_mount": (429, 429),
    "pivot_root": (155, 41),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
"""System calls that the kernel refuses to the worker: (x86_64, aarch64)."""
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


def give_up_root(libc: ctypes.CDLL | None) -> None:
    """Become nobody, if we are root: root's limits do not bind, and its files are its own."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        if libc is not None:
            libc.prctl(4, 1, 0, 0, 0)  # dumpable again: /proc/self is ours


def die_with(parent: int, libc: ctypes.CDLL) -> None:
    """SIGALRM, upon which `supervise` ends everything, when the trainer dies, however it does."""
    libc.prctl(1, signal.SIGALRM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def seen_paths(packages: bool) -> list[str]:
    """Files and folders of the system that the code may read, none inside another."""
    own = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.__file__)}
    own |= {path for path in sys.path[1:] if packages}
    own |= {os.path.realpath(path) for path in own} | {os.path.realpath(sys.executable)}
    found: list[str] = []
    for path in [*SEEN, *sorted(own)]:
        if os.path.lexists(path) and not any(f"{path}/".startswith(f"{known}/") for known in found):
            found.append(path)
    return found


def make_root(libc: ctypes.CDLL, root: str, folder: str, megabytes: int, packages: bool) -> str | None:
    """A file system of Python, the system's libraries and one small writable folder; or what failed."""
    small = b"size=1m,mode=755"
    if libc.mount(b"tmpfs", root.encode(), b"tmpfs", 2 | 4, small) != 0:  # nosuid, nodev
        return "mount of the root"
    for path in [*seen_paths(packages), *DEVICES]:
        place = root + path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), place)
            continue
        if os.path.isdir(path):
            os.makedirs(place, exist_ok=True)
        elif os.path.exists(path):
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
        else:
            continue
        if (
            libc.mount(os.fsencode(path), os.fsencode(place), None, 0x1000 | 0x4000, None) != 0
        ):  # bind, all of it
            return f"bind of {path}"
    for path in (folder, "/proc", "/tmp", "/dev/shm"):
        os.makedirs(root + path, exist_ok=True)
    read_only = ctypes.create_string_buffer(struct.pack("QQQQ", 1, 0, 0, 0))
    if libc.syscall(442, -100, root.encode(), 0x8000, read_only, 32) != 0:  # mount_setattr, recursive
        return "mount_setattr"
    options = f"size={megabytes}m,mode=777".encode()
    if libc.mount(b"tmpfs", os.fsencode(root + folder), b"tmpfs", 2 | 4, options) != 0:
        return "mount of the working folder"
    if libc.mount(b"tmpfs", os.fsencode(root + "/dev/shm"), b"tmpfs", 2 | 4 | 8, b"size=1m,mode=777") != 0:
        return "mount of the shared memory"
    if libc.chroot(root.encode()) != 0:
        return "chroot"
    os.chdir("/")
    return None


def enter_namespaces(libc: ctypes.CDLL, config: dict[str, Any]) -> str | None:
    """No network, own processes, another file system; root is given up. Or why not."""

    def failed(what: str) -> str:
        return f"{what}: {os.strerror(ctypes.get_errno())}"

    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(NAMESPACES if uid else NAMESPACES & ~NEW_USERS) != 0:
        return failed("unshare")
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        if uid:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    if libc.mount(None, b"/", None, 0x4000 | 0x40000, None) != 0:  # recursive, private
        return failed("mount")
    limit, packages = config["limits"]["file_mb"], config["packages"]
    wrong = make_root(libc, config["root"], config["folder"], limit, packages)
    give_up_root(libc)
    return None if wrong is None else failed(wrong)


def drop_capabilities(libc: ctypes.CDLL) -> None:
    """Nothing inside may undo the mounts, and no program gets rights back by being started."""
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges


def filter_calls(libc: ctypes.CDLL) -> None:
    """Have the kernel refuse `CALLS`, where it knows filters: EPERM for each, and for other architectures."""
    if os.uname().machine not in ARCHITECTURES:
        return
    architecture, column = ARCHITECTURES[os.uname().machine]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    numbers = sorted({numbers[column] for numbers in CALLS.values()})
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, 0x50001), (load, 0, 0, 0)]
    steps.append((at_least, len(numbers) + 1, 0, 0x40000000))  # the x32 numbers of the same calls
    steps += [(equal, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    steps += [(end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x50001)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    given = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program)))
    libc.prctl(22, 2, given, 0, 0)


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


class Operands(ast.NodeTransformer):
    """Puts a check around what an assert compares or computes with."""

    def _checked(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Constant):
            return node
        return ast.Call(func=ast.Name(id=PLAIN, ctx=ast.Load()), args=[node], keywords=[])

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Compare):
            node.left, node.comparators = self._checked(node.left), [*map(self._checked, node.comparators)]
        elif isinstance(node, ast.BinOp):
            node.left, node.right = self._checked(node.left), self._checked(node.right)
        elif isinstance(node, ast.UnaryOp):
            node.operand = self._checked(node.operand)
        elif isinstance(node, ast.Assert):
            node.test = self._checked(node.test)
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id)
        ):
            node.args = [a if isinstance(a, ast.Starred) else self._checked(a) for a in node.args]
        return node


PLAIN = "__plain_value__"


def plain(value: Any, depth: int = 0) -> Any:
    """The value itself; an object of a class that the code wrote (its == may say anything) is refused."""
    kind = type(value)
    if kind.__flags__ & 1 << 9:  # made by a class statement
        place: Any = sys.modules.get(type.__dict__["__module__"].__get__(kind))  # type: ignore[index]
        for name in type.__dict__["__qualname__"].__get__(kind).split("."):
            place = getattr(place, name, None)
        if place is not kind or kind.__module__ == "solution":
            raise TypeError(f"a {kind.__name__} is no plain value")
    if depth < DEPTH and kind in (list, tuple, set, frozenset, dict):
        for part in value:
            plain(part, depth + 1)
            if kind is dict:
                plain(value[part], depth + 1)
    return value


def run_assert(source: str, name: str, names: dict[str, Any], own: dict[str, Any]) -> None:
    """One assert, with the interpreter's own functions, whatever the code has made of them."""
    tree = ast.fix_missing_locations(Operands().visit(ast.parse(source)))
    exec(compile(tree, name, "exec"), {**names, PLAIN: plain, "__builtins__": dict(own)})


def run_tests(source: str, tests: list[dict[str, Any]], channel: Channel) -> None:
    """Run the code as a module, then each test; one record per test."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    own = dict(vars(builtins))
    with CatchAll() as load:
        exec(compile(source, "solution.py", "exec"), module.__dict__)
    if load.error is not None:
        channel.send(load_error=load.words())
        return
    for number, test in enumerate(tests):
        with CatchAll() as attempt:
            if "assert" in test:
                run_assert(test["assert"], f"test {number + 1}", module.__dict__, own)
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
        filter_calls(libc)
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
    wanted = config["isolation"] == "namespaces"
    if not wanted and everybody_reads(os.path.realpath(os.__file__)):
        give_up_root(libc)
    if libc is not None:
        if wanted:
            with CatchAll() as attempt:
                problem = enter_namespaces(libc, config)
            problem = attempt.words() if attempt.error else problem
        libc.prctl(36, 1, 0, 0, 0)  # orphans come to this process
        die_with(config["parent"], libc)
    if wanted and problem:
        channel.send(refused=problem)
        os._exit(1)
    channel.send(isolation=config["isolation"], root=os.getuid() == 0)
    if child := os.fork():
        channel.send(ended=supervise(child, config["limits"]["wall_seconds"]))
        os._exit(0)
    if libc is not None:
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # die with the supervisor
    if wanted and (worker := os.fork()):
        os._exit(exit_code(os.waitpid(worker, 0)[1]))
    work(config, channel, libc, wanted)


if __name__ == "__main__":
    main()
