"""What runs between the trainer's process and a sandboxed program.

Three processes: the *launcher* (started afresh by exec, so that the trainer's threads and memory are not forked)
unshares the namespaces, watches memory and waits; its child, *init*, is process 1 of the new process namespace,
builds the root file system and waits; init's child drops every privilege and becomes the *program*. When init
ends, by itself or killed, the kernel kills all that is left in the namespace before the launcher's wait returns.

Standard library only, and few modules of it: this is imported for every run, with ``-S`` and without the package.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import signal

import seccomp

TYPE_CHECKING = False  # typing itself costs milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x08000000, 0x10000000, 0x20000000, 0x40000000
NAMESPACES = {
    "user": CLONE_NEWUSER,
    "mount": CLONE_NEWNS,
    "pid": CLONE_NEWPID,
    "net": CLONE_NEWNET,
    "ipc": CLONE_NEWIPC,
    "uts": CLONE_NEWUTS,
    "cgroup": CLONE_NEWCGROUP,
}

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000  # one number on all architectures; Linux 5.12
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 24, 36

UNUSED_UID = 2_000_000_000
"""Above what systems hand out; the launcher's process id is added, so that no two runs share a process count."""
INNER_UID = 1000
OPEN_FILES = 128
STACK_BYTES = 16 << 20
WATCH_SECONDS = 0.02
SYSTEM_FOLDERS = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
OLD_ROOT = "/.old"
SCRATCH = "/scratch"

libc = ctypes.CDLL(None, use_errno=True)


def main(spec_fd: int, status_fd: int) -> NoReturn:
    """Reads the marshalled spec of ``tracefp4.tasks.sandbox``, runs it, writes lines to ``status_fd``, exits."""
    for fd in (spec_fd, status_fd):
        os.set_inheritable(fd, False)
    with open(spec_fd, "rb") as file:
        spec = marshal.load(file)
    if spec["verdict_fd"] is not None:
        os.set_inheritable(spec["verdict_fd"], False)
    try:
        _die_with_parent()
        if os.getppid() != spec["parent"]:
            os._exit(1)
        if spec["isolation"] == "weak":
            _launch_weak(spec, status_fd)
        else:
            _launch(spec, status_fd)
    except OSError as error:
        _say(status_fd, f"fail {error.filename or ''} {error.strerror}")
        os._exit(1)
    os._exit(0)


def probe(status_fd: int) -> NoReturn:
    """Writes the name of every namespace that this user cannot have, one a line."""
    for name, flag in NAMESPACES.items():
        if name == "user" and os.geteuid() == 0:
            continue  # root does without
        extra = CLONE_NEWUSER if os.geteuid() != 0 else 0
        pid = os.fork()
        if pid == 0:
            os._exit(0 if libc.unshare(flag | extra) == 0 else 1)
        if os.waitpid(pid, 0)[1] != 0:
            _say(status_fd, f"{name} namespace")
    if os.uname().machine not in seccomp.MACHINES:
        _say(status_fd, f"system call filter for {os.uname().machine}")
    os._exit(0)


# The launcher


def _launch(spec: dict[str, Any], status_fd: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    spec["uid"] = UNUSED_UID + os.getpid() if spec["root"] else INNER_UID
    # The mount namespace is init's own: its new root would become the launcher's too, which needs /proc.
    later = {"mount"} | ({"user"} if spec["root"] else set())
    _call("unshare", sum(flag for name, flag in NAMESPACES.items() if name not in later))
    if not spec["root"]:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/gid_map", f"{INNER_UID} {gid} 1")
        _write("/proc/self/uid_map", f"{INNER_UID} {uid} 1")
    pid = os.fork()
    if pid == 0:
        _run_init(spec, status_fd)
    _watch(pid, spec, status_fd, lambda: os.kill(pid, signal.SIGKILL))
    os.waitpid(pid, 0)  # returns when the whole process namespace is gone


def _launch_weak(spec: dict[str, Any], status_fd: int) -> None:
    """Limits and a filter, but no namespace: the program sees the machine's files, processes and network."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans come back here, where they can be found
    scratch = spec["scratch"]
    spec["uid"] = UNUSED_UID + os.getpid() if spec["root"] else None
    for path, text in spec["files"].items():
        with open(scratch + path, "wb") as file:
            file.write(text)
    if spec["root"]:
        os.chown(scratch, spec["uid"], spec["uid"])
    spec["command"] = [scratch + part if part in spec["files"] else part for part in spec["command"]]
    pid = os.fork()
    if pid == 0:
        _become_program(spec, status_fd, scratch)
    _say(status_fd, "started")
    _watch(pid, spec, status_fd, _kill_descendants)
    _, code = os.waitpid(pid, 0)
    _say(status_fd, _ending(code))
    try:
        while True:
            _kill_descendants()
            os.waitpid(-1, 0)
    except ChildProcessError:
        return


def _watch(pid: int, spec: dict[str, Any], status_fd: int, kill: Callable[[], None]) -> None:
    """Returns when ``pid`` ended; kills it on SIGTERM, and when its descendants are too many or too big."""
    stop_read, stop_write = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(stop_write, b"x"))
    handle = os.pidfd_open(pid)
    limit = spec["memory_mb"] << 20
    while True:
        ready, _, _ = select.select([handle, stop_read], [], [], WATCH_SECONDS)
        if handle in ready:
            break
        processes = _descendants(pid)
        # RLIMIT_NPROC does this, but not to the machine's own root, nor where other processes share the user.
        too_many = len(processes) > spec["processes"] + 1
        too_big = sum(map(_resident_bytes, processes)) > limit and sum(map(_share_bytes, processes)) > limit
        if too_big:
            _say(status_fd, "memory")
        if ready or too_big or too_many:
            kill()
            select.select([handle], [], [])
            break
    os.close(handle)


def _descendants(pid: int) -> list[int]:
    found, queue = [], [pid]
    while queue:
        parent = queue.pop()
        found.append(parent)
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                    queue += map(int, file.read().split())
        except OSError:
            continue  # it ended meanwhile
    return found


def _resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _share_bytes(pid: int) -> int:
    """Resident memory with every page divided by the number of processes that map it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(b"Pss:"))
    except (OSError, StopIteration):
        return _resident_bytes(pid)


def _kill_descendants() -> None:
    for process in _descendants(os.getpid())[1:]:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it ended meanwhile


# Init, process 1 of the namespace


def _run_init(spec: dict[str, Any], status_fd: int) -> NoReturn:
    try:
        _die_with_parent()
        # Should the launcher have died before the line above, this ends the namespace.
        signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.alarm(int(spec["seconds"]) + 60)
        libc.sethostname(b"sandbox", 7)
        _build_root(spec)
        pid = os.fork()
        if pid == 0:
            _become_program(spec, status_fd, SCRATCH)
        _say(status_fd, "started")
        while True:
            found, code = os.wait()
            if found == pid:
                break
        _say(status_fd, _ending(code))
        os._exit(0)
    except OSError as error:
        _say(status_fd, f"fail {error.filename or ''} {error.strerror}")
        os._exit(1)


def _build_root(spec: dict[str, Any]) -> None:
    """A root of its own: the interpreter and system libraries, read-only, a few devices, and the scratch folder.

    Nothing else of the machine's file system is there, /proc and /sys included.
    """
    bound = [*SYSTEM_FOLDERS, *spec["folders"]]
    libraries = [p for p in _mapped_files() if not any(p.startswith(folder + "/") for folder in bound)]
    _call("unshare", CLONE_NEWNS)
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    size = (1 << 20) + 2 * sum(map(len, spec["files"].values()))
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},nr_inodes=4096,mode=755")
    os.mkdir("/tmp" + OLD_ROOT)
    _call("pivot_root", b"/tmp", b"/tmp" + OLD_ROOT.encode())
    os.chdir("/")
    for path in (*bound, *DEVICES, spec["command"][0], *libraries):
        _bind(path)
    os.symlink(SCRATCH, "/dev/shm")
    if not os.path.lexists("/tmp"):  # else the interpreter lies there
        os.symlink(SCRATCH, "/tmp")
    for path, text in spec["files"].items():
        with open(path, "wb") as file:
            file.write(text)
        os.chmod(path, 0o444)
    _call("umount2", OLD_ROOT.encode(), MNT_DETACH)
    os.rmdir(OLD_ROOT)
    os.mkdir(SCRATCH)
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    arguments = (ctypes.c_long(AT_FDCWD), b"/", ctypes.c_long(AT_RECURSIVE), attributes, ctypes.c_long(32))
    _call("syscall", ctypes.c_long(SYS_MOUNT_SETATTR), *arguments, name="mount_setattr (Linux 5.12)")
    options = f"size={spec['file_kb']}k,nr_inodes={spec['inodes']},mode=700,uid={spec['uid']},gid={spec['uid']}"
    _mount("tmpfs", SCRATCH, "tmpfs", MS_NOSUID | MS_NODEV, options)


def _bind(path: str) -> None:
    source = OLD_ROOT + path
    if os.path.lexists(path) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o444))
    _mount(source, path, None, MS_BIND | MS_REC)


def _mapped_files() -> list[str]:
    """Shared libraries of this interpreter, wherever the linker found them."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        paths = {fields[5].strip() for line in file if len(fields := line.split(None, 5)) == 6}
    return sorted(path for path in paths if path.startswith("/") and ".so" in path and os.path.isfile(path))


# The program


def _become_program(spec: dict[str, Any], status_fd: int, scratch: str) -> NoReturn:
    try:
        os.setsid()
        os.chdir(scratch)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if spec["verdict_fd"] is not None:
            os.set_inheritable(spec["verdict_fd"], True)
        _limit(spec)
        if spec["root"]:
            for capability in range(64):
                if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                    break
            os.setgroups([])
            os.setresgid(spec["uid"], spec["uid"], spec["uid"])
            os.setresuid(spec["uid"], spec["uid"], spec["uid"])
        _die_with_parent()  # again: changing the user forgets it
        seccomp.install(libc)
        os.execve(spec["command"][0], spec["command"], spec["environment"] | {"HOME": scratch, "TMPDIR": scratch})
    except BaseException as error:
        _say(status_fd, f"fail {getattr(error, 'filename', None) or ''} {getattr(error, 'strerror', None) or error}")
    finally:
        os._exit(127)


def _limit(spec: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_AS: spec["memory_mb"] << 20,
        resource.RLIMIT_CPU: int(spec["seconds"]) + 2,
        resource.RLIMIT_FSIZE: spec["file_kb"] << 10,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    # Without a namespace the kernel would count the user's other processes too; there the watch counts.
    if spec["isolation"] != "weak" or spec["root"]:
        limits[resource.RLIMIT_NPROC] = spec["processes"]
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # A second between the two: at the soft limit comes SIGXCPU, which tells it from other kills.
        soft = bound - 1 if limit == resource.RLIMIT_CPU else bound
        resource.setrlimit(limit, (soft, bound))


# Small things


def _die_with_parent() -> None:
    _call("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit {code}"


def _say(fd: int, line: str) -> None:
    os.write(fd, (" ".join(line.split()) + "\n").encode(errors="replace"))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _call("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3], name=f"mount on {target}")


def _call(function: str, *arguments: Any, name: str = "") -> None:
    if getattr(libc, function)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name or function)
