"""Attacks on the sandbox, each a real program. All are bounded: where containment failed, the machine would live."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tracefp4.errors import TracefpError
from tracefp4.tasks.sandbox import (
    SandboxError,
    SandboxLimits,
    SandboxSupport,
    require_sandbox,
    run,
    run_program,
    run_tests,
)

QUICK = SandboxLimits(seconds=1.5, memory_mb=256, processes=8, file_kb=1024, output_kb=64)


pytestmark = pytest.mark.usefixtures("isolated")


@pytest.fixture
def unharmed():
    """Nothing of the run is left: no process, no file, no mount in this process's view."""
    mounts = set(Path("/proc/self/mounts").read_text().splitlines())
    yield
    assert survivors(sandboxed_processes()) == set()
    new = set(Path("/proc/self/mounts").read_text().splitlines()) - mounts
    assert not [line for line in new if "/tmp" in line or "/.old" in line or "/scratch" in line]
    for folder in ("/", "/tmp", "/dev/shm", "/usr/lib"):
        assert not Path(folder, "escaped").exists()


def sandboxed_processes():
    """(process id, start time) of those with a user id or command line that only sandboxed programs have."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command, stat = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
                alien = folder.stat().st_uid >= 2_000_000_000
            except OSError:
                continue
            if alien or (b"/main.py" in command and b"-B" in command):
                found.add((int(folder.name), stat.rpartition(")")[2].split()[19]))
    return found


def survivors(processes):
    """Which of them are still there after a while: runs of tests beside this one end, what escaped sleeps longer."""
    deadline = time.monotonic() + 12
    while (left := processes & sandboxed_processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def descendants(pid):
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def ended(code, stdin="", limits=QUICK):
    return run_program(code, stdin, limits)


# What works


def test_a_program_reads_writes_and_exits():
    result = ended("a, b = map(int, input().split())\nprint(a + b)\nexit(0)\n", "2 3\n")
    assert (result.status, result.stdout, result.stderr, result.exit_code) == ("ok", "5\n", "", 0)
    assert 0 < result.seconds < 1.5


def test_a_program_that_raises_is_an_error_with_its_trace():
    result = ended("def f():\n    return 1 / 0\nf()")
    assert (result.status, result.exit_code) == ("error", 1)
    assert "ZeroDivisionError" in result.stderr
    assert 'File "/main.py", line 2' in result.stderr


def test_the_standard_library_works():
    code = """
import collections, dataclasses, decimal, heapq, itertools, json, math, random, re, typing, threading, tempfile
from concurrent.futures import ThreadPoolExecutor
import multiprocessing, subprocess, sys, zoneinfo
@dataclasses.dataclass
class A: x: int
if __name__ == "__main__":
    print(A(1), sum(ThreadPoolExecutor(3).map(abs, [-1, -2])))
    with multiprocessing.Lock(): pass
    with tempfile.TemporaryFile("w+") as f:
        f.write("kept"); f.seek(0); print(f.read())
    print(subprocess.run([sys.executable, "-S", "-c", "print(7)"], capture_output=True, text=True).stdout.strip())
"""
    result = ended(code, limits=SandboxLimits(seconds=10))
    assert (result.status, result.stdout) == ("ok", "A(x=1) 3\nkept\n7\n"), result.stderr


def test_hashes_are_the_same_in_every_run():
    code = "print({str(i) for i in range(50)})"
    assert ended(code).stdout == ended(code).stdout


def test_large_input_arrives_and_unread_input_does_no_harm():
    text = "x" * 3_000_000
    assert ended("import sys; print(len(sys.stdin.read()))", text).stdout == "3000000\n"
    assert ended("import sys; sys.stdin.close(); print(1)", text).status == "ok"
    assert ended("import os; os.close(0); os.close(1); os.close(2)", text).status in ("ok", "error")


def test_lone_surrogates_and_null_bytes_in_code_are_the_programs_error():
    assert ended("x = '\ud800'").status == "error"
    assert ended("x = 1\0").status == "error"


@pytest.mark.parametrize("name", ["seconds", "memory_mb", "output_kb", "processes", "file_kb"])
def test_limits_must_be_positive(name):
    with pytest.raises(TracefpError, match=f"{name} must be above 0"):
        SandboxLimits(**{name: 0})


def test_it_works_from_many_threads():
    results = [None] * 6
    threads = [
        threading.Thread(target=lambda i=i: results.__setitem__(i, ended(f"print({i})", limits=SandboxLimits())))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.stdout for result in results] == [f"{i}\n" for i in range(6)]


# Time, memory, processes, files


def test_an_endless_loop_ends_at_the_limit(unharmed):
    start = time.monotonic()
    assert ended("while True: pass").status == "timeout"
    assert time.monotonic() - start < 5


def test_ignored_signals_and_vfork_sleep_end_at_the_limit(unharmed):
    code = """
import signal, ctypes, os, time
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
libc = ctypes.CDLL(None)
libc.vfork.restype = ctypes.c_int
if libc.vfork() == 0:        # the parent sleeps uninterruptibly until this child ends
    libc.sleep(30)
    libc._exit(0)
"""
    assert ended(code).status == "timeout"


def test_a_fork_bomb_meets_the_process_limit(unharmed):
    code = """
import os, time
made = 0
for depth in range(6):       # 64 processes where nothing stops it
    try:
        if os.fork(): made += 1
    except BlockingIOError:
        os.write(1, b'refused ')
time.sleep(60)
"""
    result = ended(code)
    assert result.status == "timeout"
    assert "refused" in result.stdout


def test_threads_meet_the_process_limit(unharmed):
    code = """
import threading, time
for i in range(40):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""
    result = ended(code)
    assert result.status == "error"
    assert "can't start new thread" in result.stderr


def test_ten_gigabytes_are_refused(unharmed):
    assert ended("x = bytearray(10 << 30)").status == "memory"
    assert ended("x = []\nwhile len(x) < 5000: x.append(bytearray(1 << 20))").status == "memory"


def test_the_sum_over_processes_is_bounded(unharmed):
    code = """
import os, time
for i in range(5):
    if os.fork() == 0:
        x = bytearray(os.urandom(1 << 20) * 100)   # 6 x 100 MB, each below the limit of 256
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""
    assert ended(code, limits=SandboxLimits(3, 256, 64, 8, 1024)).status == "memory"


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfd = os.memfd_create('x')",
        "import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nif l.shmget(0, 1 << 30, 0o1600) < 0: raise OSError()",
        "import mmap\nfor i in range(9): mmap.mmap(-1, 1 << 28)",
    ],
)
def test_memory_outside_the_heap_is_refused(code, unharmed):
    assert ended(code).status in ("error", "memory")


def test_scratch_is_writable_small_and_gone_afterwards(unharmed):
    code = """
import os
open('a', 'w').write('x' * 1000)
print(os.listdir('.'), os.path.realpath('.'))
for i in range(9):
    open(f'b{i}', 'wb').write(bytes(500_000))
"""
    result = ended(code)
    assert result.status == "error"
    assert "['a'] /scratch" in result.stdout
    assert "No space left" in result.stderr
    assert ended("import os; print(os.listdir('.'), os.listdir('/dev/shm'))").stdout == "[] []\n"


def test_inodes_are_bounded(unharmed):
    result = ended("for i in range(5000): open(f'f{i}', 'w').close()")
    assert result.status == "error"
    assert "No space left" in result.stderr


@pytest.mark.parametrize("stream", [1, 2])
def test_an_output_flood_is_cut_off(stream, unharmed):
    result = ended(f"import os\nfor i in range(20000): os.write({stream}, b'y' * 65536)")
    assert result.status == "output"
    assert len(result.stdout) + len(result.stderr) == 64 * 1024


def test_invalid_utf8_becomes_replacement_characters():
    result = ended("import os; os.write(1, b'\\xff\\xfeok'); os.write(2, b'\\x80')")
    assert (result.status, result.stdout, result.stderr) == ("ok", "\ufffd\ufffdok", "\ufffd")


def test_a_segfault_is_a_kill():
    code = "import ctypes\nctypes.string_at(0)"
    assert (ended(code).status, ended(code).exit_code) == ("killed", -signal.SIGSEGV)
    deep = "import sys\nsys.setrecursionlimit(10**8)\nclass A:\n    def __repr__(s): return repr(s)\nrepr(A())"
    assert ended(deep).status in ("killed", "error", "memory")


# Reaching out


OUTSIDE = ("/escaped", "/dev/escaped", "/usr/lib/escaped", "/etc/escaped", "/home/escaped", "/scratch/../escaped")


def test_nothing_outside_scratch_can_be_written(unharmed):
    code = f"""
import os, sys
for path in {[*OUTSIDE, sys.base_prefix + "/escaped", "/main.py", "/boot.py"]!r}:
    try: open(path, 'w'); print('wrote', path)
    except OSError: pass
    try: os.chmod(path, 0o777); print('changed', path)
    except OSError: pass
for target in ('/', '/usr', '/proc', '/dev'):
    os.symlink(target, 'link')
    try: open('link/escaped', 'w'); print('wrote through', target)
    except OSError: pass
    os.unlink('link')
open('/tmp/escaped', 'w'); open('/dev/shm/escaped2', 'w')   # both are the scratch folder
print(sorted(os.listdir('/scratch')))
"""
    result = ended(code)
    assert (result.status, result.stdout) == ("ok", "['escaped', 'escaped2']\n"), result.stderr


def test_the_machines_files_and_processes_are_not_there(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("key")
    code = f"""
import os
for path in ({str(secret)!r}, '/proc', '/sys', '/etc/passwd', '/home', '/var', {str(Path(__file__))!r}):
    if os.path.exists(path): print('sees', path)
print(os.getpid() < 5, os.getppid())
"""
    assert ended(code).stdout == "True 1\n"


def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    result = ended("import os\nfor k in os.environ: print(k)")
    allowed = {"PYTHONHASHSEED", "PYTHONUTF8", "MALLOC_ARENA_MAX", "HOME", "TMPDIR", "LC_CTYPE"}
    assert set(result.stdout.split()) <= allowed


def test_no_network_and_no_host_sockets(unharmed):
    server = socket.create_server(("127.0.0.1", 0))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind("\0tracefp4-test-abstract")
    abstract.listen()
    code = f"""
import socket
def attempt(what, f):
    try: f(); print('reached', what)
    except OSError as e: print(type(e).__name__)
attempt('loopback', lambda: socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1))
attempt('tcp', lambda: socket.create_connection(('192.0.2.1', 80), 1))
attempt('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 53)))
attempt('dns', lambda: socket.getaddrinfo('example.org', 80))
attempt('abstract', lambda: socket.socket(socket.AF_UNIX).connect('\\0tracefp4-test-abstract'))
attempt('vsock', lambda: socket.socket(40, socket.SOCK_STREAM))
attempt('netlink', lambda: socket.socket(16, socket.SOCK_RAW))
attempt('packet', lambda: socket.socket(17, socket.SOCK_RAW))
"""
    with server, abstract:
        result = ended(code, limits=SandboxLimits(seconds=8))
    assert result.status == "ok", result.stderr
    assert "reached" not in result.stdout
    assert len(result.stdout.split()) == 8


def test_kill_everything_kills_only_the_program_itself(unharmed):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        code = f"""
import os, signal
for pid in (1, os.getppid(), {os.getpid()}, {bystander.pid}):
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
os.kill(-1, signal.SIGKILL)
"""
        result = ended(code)  # kill spares its caller, which then finds nobody
        assert "ProcessLookupError" in result.stderr
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_daemons_do_not_survive(unharmed):
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(60)
    os._exit(0)
print('started')
"""
    result = ended(code)
    assert (result.status, result.stdout) == ("ok", "started\n")
    assert result.seconds < 1.5


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("ptrace", "16, 1, 0, 0"),  # PTRACE_ATTACH to init
        ("unshare", "0x10000000"),  # CLONE_NEWUSER
        ("mount", "b'none', b'/scratch', b'tmpfs', 0, 0"),
        ("umount2", "b'/usr', 2"),
        ("chroot", "b'/scratch'"),
        ("setuid", "0"),
        ("process_vm_readv", "1, 0, 0, 0, 0, 0"),
        ("sethostname", "b'x', 1"),
    ],
)
def test_privileged_calls_are_refused(call, arguments):
    code = f"import ctypes; print(ctypes.CDLL(None, use_errno=True).{call}({arguments}), ctypes.get_errno())"
    assert ended(code).stdout.startswith("-1 ")


def test_calls_by_number_are_refused():
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in (425, 438, 435):     # io_uring_setup, pidfd_getfd, clone3: one number on all architectures
    print(libc.syscall(number, 1, 0, 0), ctypes.get_errno())
"""
    assert ended(code).stdout == "-1 1\n-1 1\n-1 38\n"


def test_a_device_cannot_be_made_and_devices_are_few():
    code = (
        "import os, stat\nprint(sorted(os.listdir('/dev')))\nos.mknod('disk', stat.S_IFBLK | 0o666, os.makedev(8, 0))"
    )
    result = ended(code)
    assert result.stdout == "['full', 'null', 'random', 'shm', 'urandom', 'zero']\n"
    assert "PermissionError" in result.stderr


def test_no_descriptor_leaks_in():
    with open(__file__, "rb") as file:
        os.set_inheritable(file.fileno(), True)
        code = "import os\ndef o(fd):\n    try: os.fstat(fd); return True\n    except OSError: return False\n"
        assert ended(code + "print([fd for fd in range(128) if o(fd)])").stdout == "[0, 1, 2]\n"


def test_input_and_code_cannot_be_changed_from_inside():
    code = "import os\ntry: os.write(0, b'x')\nexcept OSError as e: print(type(e).__name__)"
    assert ended(code, "abc").stdout == "PermissionError\n"


def test_everything_dies_with_the_trainer(tmp_path):
    """SIGKILL of the process that runs a program leaves nothing behind."""
    script = "from tracefp4.tasks.sandbox import *\nprint('go', flush=True)\n"
    script += "run_program('import os, time\\nos.fork()\\ntime.sleep(50)', limits=SandboxLimits(seconds=60))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    process.stdout.readline()
    deadline = time.monotonic() + 20

    def programs():
        return {found for found in sandboxed_processes() if found[0] in descendants(process.pid)}

    while len(programs()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    started = programs()
    assert len(started) >= 2
    process.kill()
    process.wait()
    process.stdout.close()
    assert survivors(started) == set()


# Test code and programs that would rather not be judged


PASSING = "def double(x):\n    return 2 * x\n"


def verdict(code, *tests, limits=QUICK):
    return run_tests(code, list(tests), limits)[1]


@pytest.mark.parametrize("tests", ["assert f(1) == 1", [{"input": "1", "output": "1"}]], ids=["a text", "a pair"])
def test_tests_that_are_no_list_of_texts_are_refused(tests):
    """They would all fail, and the program would be blamed."""
    with pytest.raises(TypeError, match="list of source texts"):
        run_tests("def f(x):\n    return x", tests)


def test_tests_pass_and_fail_one_by_one():
    tests = ("assert double(2) == 4", "assert double(2) == 5", "import math\nassert double(math.pi) > 6")
    assert verdict(PASSING, *tests) == [True, False, True]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "def double(x):\n    import os\n    os._exit(0)",
        "def double(x): raise SystemExit(0)",
        "import builtins, sys\nbuiltins.AssertionError = ValueError\nsys.exit = print\ndouble = lambda x: 0",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a: None\ndouble = lambda x: 0",
        "print('passed [true]')\ndouble = lambda x: 0",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
        "import os, signal\nos.kill(-1, signal.SIGKILL)",
        "import os\nfor fd in range(3, 128):\n    try: os.write(fd, b'[true]')\n    except OSError: pass\nos._exit(0)",
        "import os\nfor fd in range(3, 128):\n    try: os.write(fd, b'[\"value\", true, []]\\n' * 9)\n"
        "    except OSError: pass",
        "import __main__\n__main__.run_test = lambda *a: True\ndouble = lambda x: 0",
        "import sys\nsys.modules['__main__'].Channel.encode = lambda s, v: ['mine', 0]\ndouble = lambda x: 0",
        "import atexit, os\natexit.register(os._exit, 0)\ndouble = lambda x: 0",
        "class A:\n    __eq__ = __ge__ = __le__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n"
        "def double(x): return A()",
        "class A(int):\n    __eq__ = lambda s, o: True\ndef double(x): return A(0)",
        "class A:\n    __sub__ = __rsub__ = __abs__ = lambda s, *o: s\n    __lt__ = lambda s, o: True\n"
        "def double(x): return A()",
        "def double(x): raise AssertionError",
        "import threading, time, os\nthreading.Timer(.2, lambda: os._exit(0)).start()\ntime.sleep(9)",
        "def double(x):\n    while True: pass",
        "double = 4",
        "",
        "syntax error",
    ],
)
def test_a_program_cannot_fake_a_pass(code, unharmed):
    assert verdict(code, "assert double(2) == 4 and abs(double(3) - 6) < 1e-6", limits=QUICK) == [False]


def test_shadowed_builtins_and_patched_modules_do_not_reach_the_tests():
    code = (
        "import math\nmath.isclose = lambda *a, **k: True\nabs = len = sorted = lambda *a: 0\ndef f(x): return [3, 1]"
    )
    assert verdict(code, "assert math.isclose(1, 2)", "assert sorted(f(0)) == 0", "assert sorted(f(0)) == [1, 3]") == [
        False,
        False,
        True,
    ]


def test_the_tests_can_use_what_programs_usually_define():
    code = """
import math
from collections import Counter, deque
from fractions import Fraction
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, x): self.items.append(x)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
class Vector:
    def __init__(self, x): self.x = x
    def __add__(self, other): return Vector(self.x + other.x)
    def __eq__(self, other): return self.x == other.x
    def __lt__(self, other): return self.x < other.x
class Mine(KeyError): pass
def gen(n): yield from range(n)
def fail(): raise ValueError('no')
def own(): raise Mine('k')
def apply(f, x): return f(x) + 1
def sort(items): items.sort()
def count(s): return Counter(s)
def half(): return Fraction(1, 2)
def mixed(): return {'a': (1, [2, {3}]), b'x': None, 2j: range(3), True: 1.5}
LIMIT = 5
"""
    tests = [
        "s = Stack([1])\ns.push(2)\nassert len(s) == 2 and s.items == [1, 2] and list(s) == [1, 2] and 2 in s",
        "assert (Vector(1) + Vector(2)).x == 3 and Vector(1) + Vector(2) == Vector(3) and Vector(1) < Vector(2)",
        "assert Vector(1) != Vector(2)",
        "assert list(gen(3)) == [0, 1, 2]",
        "try:\n    fail()\n    raise RuntimeError\nexcept ValueError as e:\n    assert str(e) == 'no'",
        "try:\n    own()\n    raise RuntimeError\nexcept KeyError as e:\n    assert e.args == ('k',)",
        "assert apply(lambda v: 2 * v, 4) == 9",
        "items = [3, 1, 2]\nsame = items\nsort(items)\nassert same == [1, 2, 3]",
        "assert count('aab') == Counter('aab') == {'a': 2, 'b': 1}",
        "assert half() == Fraction(1, 2)",
        "assert mixed() == {'a': (1, [2, {3}]), b'x': None, 2j: range(3), True: 1.5}",
        "assert LIMIT == 5 and math.sqrt(4) == 2",
        "def check(candidate):\n    assert candidate('x') == {'x': 1}\ncheck(count)",
        "assert float('nan') != apply(lambda v: float('inf'), 1) == float('inf')",
        "assert apply(lambda v: v, 10 ** 5000) == 10 ** 5000 + 1",
    ]
    result, passed = run_tests(code, tests, SandboxLimits())
    assert passed == [True] * len(tests), result.stderr


def test_the_tests_are_not_readable_by_the_program():
    code = """
import os, sys, gc
found = []
for fd in range(128):
    try: found.append(os.pread(fd, 10000, 0))
    except OSError: pass
for root, _, names in os.walk('/scratch'): found += names
def double(x): return 4 if any(b'magic' in str(f).encode() for f in found) else 0
"""
    assert verdict(code, "assert double(2) == 4  # magic") == [False]


# Where isolation is missing


@pytest.fixture
def without_namespaces(monkeypatch):
    monkeypatch.setattr(run, "sandbox_support", lambda: SandboxSupport(("user namespace", "net namespace")))


def test_missing_isolation_is_refused_in_one_sentence(without_namespaces):
    with pytest.raises(TracefpError) as caught:
        require_sandbox("full")
    assert "lacks: user namespace, net namespace" in str(caught.value)
    assert 'check.isolation = "weak"' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_run_that_cannot_be_set_up_says_where(monkeypatch):
    monkeypatch.setattr(run, "_FLAGS", ["\0"])
    with pytest.raises(SandboxError, match="could not be set up: embedded null byte"):
        ended("print(1)")
    monkeypatch.setattr(run, "_interpreter", lambda: "/nowhere/python")
    with pytest.raises(SandboxError, match="could not start a process: No such file"):
        ended("print(1)")


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run it where the user is not root")
def test_the_way_of_a_user_without_root(monkeypatch, unharmed):
    probe = "import ctypes, os, sys\nos.setresuid(2**20, 2**20, 2**20)\n"
    probe += "sys.exit(ctypes.CDLL(None).unshare(0x10000000) != 0)"
    if subprocess.run([run._interpreter(), "-S", "-c", probe], check=False).returncode != 0:
        pytest.skip("this machine gives no user namespace to users")
    monkeypatch.setattr(run, "_can_use_unused_uids", lambda: False)
    result = ended("import os\nprint(os.getuid(), os.path.exists('/proc'))\nopen('/usr/lib/escaped', 'w')")
    assert result.stdout == "1000 False\n"
    assert "Error" in result.stderr
    bomb = ended("import os, time\nfor i in range(20): os.fork() or time.sleep(60)\ntime.sleep(1)")
    assert bomb.status == "killed" or "Resource temporarily unavailable" in bomb.stderr
    assert verdict(PASSING, "assert double(2) == 4") == [True]
    assert "ProcessLookupError" in ended("import os\nos.kill(-1, 9)").stderr


def test_weak_isolation_still_limits(monkeypatch, unharmed):
    system = Path("/usr/bin/python3").resolve()
    if os.geteuid() == 0 and not others_can_run(run._interpreter()) and others_can_run(system):
        monkeypatch.setattr(run, "_interpreter", lambda: str(system))  # root's own is out of reach for other users
    if os.geteuid() == 0 and not others_can_run(run._interpreter()):
        with pytest.raises(SandboxError, match="Permission denied"):
            run_program("pass", "", QUICK, "weak")
        return
    made, mkdtemp = [], run.tempfile.mkdtemp
    monkeypatch.setattr(run.tempfile, "mkdtemp", lambda **given: made.append(mkdtemp(**given)) or made[-1])
    result = run_program("print(input())", "x", QUICK, "weak")
    assert (result.status, result.stdout) == ("ok", "x\n")
    assert run_program("while True: pass", "", QUICK, "weak").status == "timeout"
    assert run_program("x = bytearray(10 << 30)", "", QUICK, "weak").status == "memory"
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    time.sleep(60)"
    assert run_program(daemon, "", QUICK, "weak").status == "ok"
    bomb = "import os, time\nfor i in range(6): os.fork()\ntime.sleep(60)"
    assert run_program(bomb, "", QUICK, "weak").status in ("killed", "error", "timeout")
    assert run_tests(PASSING, ["assert double(2) == 4", "assert double(2) == 5"], QUICK, "weak")[1] == [True, False]
    assert made
    assert not [folder for folder in made if Path(folder).exists()]


def others_can_run(path):
    folders = [Path(path), *Path(path).parents]
    return all(folder.stat().st_mode & 0o001 for folder in folders)
