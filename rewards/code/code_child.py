# SPDX-License-Identifier: Apache-2.0
"""The inside of the code sandbox: run as a script by `sandbox`, standard library only.

Three processes. The supervisor gives up root, enters fresh user, mount, network, process and IPC namespaces,
keeps the time, and ends when nothing is left or its caller is dead; the init process holds the process
namespace, so that its death is everybody's; the worker drops all capabilities, has the kernel refuse what
code of this kind has no use for, sets the resource limits, installs the audit hook, and runs the code.
Where there are tests, the init process locks itself in likewise and judges them, see `code_judge`; it alone
reads them, after the worker has begun, and holds the channel of the verdicts.
"""

from __future__ import annotations

import ctypes
import importlib
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from .code_judge import judge, judge_link, serve
    from .code_values import CatchAll, Channel
else:  # a script without its package: its neighbours, and nothing else beside it
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    _judge, _values = map(importlib.import_module, ("code_judge", "code_values"))
    judge, judge_link, serve = _judge.judge, _judge.judge_link, _judge.serve
    CatchAll, Channel = _values.CatchAll, _values.Channel
    del sys.path[0]

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


def lock_in(config: dict[str, Any], keep: set[int], libc: ctypes.CDLL | None, isolated: bool) -> None:
    """What the code's process and the judge's may do from here on, and the descriptors that they keep."""
    os.chdir(config["folder"])
    for descriptor in set(range(3, 64)) - keep:
        with CatchAll():
            os.close(descriptor)
    if libc is not None:
        drop_capabilities(libc)
        filter_calls(libc)
    set_limits(config["limits"], isolated)
    refuse(config["folder"], config["limits"]["processes"], isolated, config["packages"])


def run_program(source: str) -> None:
    """The code as the main module."""
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
    """Read the task, build the processes; only the worker returns from here."""
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        config = json.load(file)
    channel, tests = Channel(int(sys.argv[2])), int(sys.argv[3])
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
    os.setsid()
    start_worker(config, channel, tests, libc, wanted)


def start_worker(
    config: dict[str, Any], channel: Channel, tests: int, libc: ctypes.CDLL | None, isolated: bool
) -> None:
    """Run the program, or serve the code to the judge, which this process becomes where there are tests."""
    (from_judge, to_code), (from_code, to_judge) = os.pipe(), os.pipe()
    worker = os.fork() if isolated or config["tested"] else 0
    if libc is not None:
        libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # die with the supervisor, or the init process
    if worker == 0:
        lock_in(config, {channel.descriptor, from_judge, to_judge}, libc, isolated)
        channel.send(ready=True)
        os.close(channel.descriptor)
        if config["tested"]:
            serve(config["source"], from_judge, to_judge)
        os.close(from_judge)
        os.close(to_judge)
        run_program(config["source"])
        return

    def end() -> None:
        os._exit(exit_code(os.waitpid(worker, 0)[1]))

    if not config["tested"]:
        end()
    with os.fdopen(tests, "rb") as file:
        setup, listed = json.load(file)
    lock_in(config, {channel.descriptor, from_code, to_code}, libc, isolated)
    if libc is not None:
        libc.prctl(4, 0, 0, 0, 0)  # its memory and descriptors are not for the worker, where that sees /proc
    judge(setup, listed, judge_link(from_code, to_code, end), channel)
    os._exit(0)


if __name__ == "__main__":
    main()
