"""Runs inside the sandbox: test code against a program in another process.

The *tests* process holds the test code and the verdict's pipe; the *program* process holds the program. They talk
over two pipes: names that the tests use and do not define are the program's, calls of them are carried over, and
what comes back is rebuilt from plain values only. So a program cannot end the tests' process, patch its builtins,
pass off an object that equals everything, read the expected values or write the verdict: what it can do is answer.

An object that is no plain value stays where it is and is called from afar. Lists, dicts, sets and bytearrays that
the tests pass in are updated in place after the call. Functions of the tests can be passed and are called back.

Standard library only; nothing of the package is there.
"""

from __future__ import annotations

import builtins
import json
import os
import sys

TYPE_CHECKING = False  # typing itself costs milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

PROGRAM_READS, PROGRAM_WRITES = 100, 101  # above what a process has open at its start
EXACT_TYPES = (bool, int, float, str)


# Values between the two processes


class Gone(Exception):
    """The other process ended or sent what cannot be read."""


class RemoteError(Exception):
    """An exception of the program's own class."""


class Channel:
    """Requests and replies of one process to the other, nested where a call calls back.

    ``trusted`` is the tests' side: it does nothing for the program but call the functions it passed to it.
    """

    def __init__(self, read: int, write: int, trusted: bool) -> None:
        self.input, self.output, self.trusted = os.fdopen(read, "rb"), os.fdopen(write, "wb"), trusted
        self.objects: list[Any] = []
        self.names: dict[str, Any] = {}  # of the program
        self.remote = remote_class(self)

    def send(self, message: Any) -> None:
        self.output.write(json.dumps(message).encode() + b"\n")
        self.output.flush()

    def receive(self) -> Any:
        line = self.input.readline()
        if not line.endswith(b"\n"):
            raise Gone("the program ended its process")
        return json.loads(line)

    def request(self, operation: str, *arguments: Any) -> Any:
        """Sends a request and serves the other side's requests until the reply is there."""
        try:
            self.send([operation, *arguments])
            while True:
                kind, *rest = self.receive()
                if kind == "value":
                    return rest
                if kind == "raise":
                    raise rebuilt_exception(rest[0], [self.decode(item) for item in rest[1]])
                self.serve(kind, rest)
        except (OSError, ValueError, TypeError, KeyError, IndexError, RecursionError, MemoryError) as error:
            if getattr(error, "from_program", False):
                raise
            raise Gone(f"the program's answer cannot be read ({type(error).__name__})") from None

    def serve(self, operation: str, arguments: list[Any]) -> None:
        try:
            reply = ["value", *self.perform(operation, arguments)]
        except Gone:
            raise
        except BaseException as error:
            reply = ["raise", *self.described_exception(error)]
        self.send(reply)

    def perform(self, operation: str, arguments: list[Any]) -> list[Any]:
        if operation == "call":
            target, args, kwargs = arguments
            args = [self.decode(item) for item in args]
            kwargs = {name: self.decode(item) for name, item in kwargs}
            result = self.objects[target](*args, **kwargs)
            mutable = [*args, *kwargs.values()]
            return [self.encode(result), [self.encode(item) if is_mutable(item) else None for item in mutable]]
        if self.trusted:
            raise Gone("the program asked for more than a call")
        if operation == "names":
            return [self.encode_names()]
        target = self.objects[arguments[0]]
        if operation == "get":
            return [self.encode(getattr(target, arguments[1]))]
        if operation == "set":
            setattr(target, arguments[1], self.decode(arguments[2]))
            return [None]
        if operation == "method":  # of the type, as an operator looks it up
            args = [self.decode(item) for item in arguments[2]]
            function = getattr(type(target), arguments[1], None)
            if function is None:
                raise TypeError(f"{type(target).__name__!r} object has no {arguments[1]}")
            return [self.encode(function(target, *args))]
        raise ValueError(operation)

    def encode_names(self) -> list[Any]:
        """The program's global names; a module is only named, as the tests import their own."""
        found = []
        for name, value in self.names.items():
            if name.startswith("__"):
                continue
            if isinstance(value, type(sys)):
                found.append([name, "module", value.__name__])
            elif getattr(value, "__module__", None) in sys.stdlib_module_names and hasattr(value, "__name__"):
                found.append([name, "import", value.__module__, value.__name__])
            else:
                found.append([name, "value", self.encode(value)])
        return found

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in EXACT_TYPES:
            return value
        if isinstance(value, self.remote):
            return ["yours", object.__getattribute__(value, "_remote_id")]
        for sequence in (list, tuple, set, frozenset):
            if isinstance(value, sequence):  # of a subclass too: as equal to the plain value as the value itself
                items = sequence.__iter__(value)  # type: ignore[arg-type]
                return [sequence.__name__, [self.encode(item) for item in items]]
        if isinstance(value, dict):
            return ["dict", [[self.encode(k), self.encode(v)] for k, v in dict.items(value)]]
        if isinstance(value, bytes | bytearray):
            return [kind.__name__, value.hex()]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if kind is range:
            return ["range", value.start, value.stop, value.step]
        for base in EXACT_TYPES:  # IntEnum and the like
            if isinstance(value, base):
                return base.__str__(value) if base is str else base(value)
        if kind.__module__ in ("fractions", "decimal") and kind.__name__ in ("Fraction", "Decimal"):
            return [kind.__name__, str(value)]
        self.objects.append(value)
        return ["mine", len(self.objects) - 1]

    def decode(self, item: Any) -> Any:
        if item is None or type(item) in EXACT_TYPES:
            return item
        tag, *rest = item
        if tag in ("list", "tuple", "set", "frozenset"):
            return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[tag](map(self.decode, rest[0]))
        if tag == "dict":
            return {self.decode(key): self.decode(value) for key, value in rest[0]}
        if tag in ("bytes", "bytearray"):
            return bytes.fromhex(rest[0]) if tag == "bytes" else bytearray.fromhex(rest[0])
        if tag == "complex":
            return complex(*rest)
        if tag == "range":
            return range(*rest)
        if tag == "Fraction":
            from fractions import Fraction

            return Fraction(rest[0])
        if tag == "Decimal":
            from decimal import Decimal

            return Decimal(rest[0])
        if tag == "mine":  # the sender's
            return self.remote(int(rest[0]))
        if tag == "yours":
            return self.objects[rest[0]]
        raise ValueError(tag)

    def described_exception(self, error: BaseException) -> list[Any]:
        names = [base.__name__ for base in type(error).__mro__]
        try:
            return [names, [self.encode(item) for item in error.args]]
        except Exception:
            return [names, []]

    def call(self, target: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        encoded = [self.encode(item) for item in args], [[k, self.encode(v)] for k, v in kwargs.items()]
        result, changed = self.request("call", target, *encoded)
        for original, item in zip([*args, *kwargs.values()], changed, strict=True):
            if item is not None and is_mutable(original):
                update(original, self.decode(item))
        return self.decode(result)


def is_mutable(value: Any) -> bool:
    return type(value) in (list, dict, set, bytearray)


def update(original: Any, value: Any) -> None:
    """Takes over what a call did to an argument; a list keeps its identity."""
    if type(value) is not type(original):
        raise Gone("the program's answer cannot be read (an argument changed its type)")
    if type(original) in (list, bytearray):
        original[:] = value
    else:
        original.clear()
        original.update(value)


def rebuilt_exception(names: list[str], args: list[Any]) -> BaseException:
    """The nearest built-in exception of that name, so that ``except ValueError`` works; else RemoteError."""
    for name in names:
        known = getattr(builtins, name, None) if type(name) is str else None
        if isinstance(known, type) and issubclass(known, BaseException) and known not in (BaseException, Exception):
            try:
                error = known(*args)
            except TypeError:  # its arguments are not what its constructor takes
                error = RemoteError(name, *args)
            break
    else:
        error = RemoteError(str(names[0]), *args)
    error.from_program = True  # type: ignore[attr-defined]
    return error


# What an object of the program answers itself. Where the other operand is a plain value of the tests, neither a
# comparison nor arithmetic is among it: `abs(f(2) - 1.414) < 1e-3` would then be the program's word.
ASKED = ("iter", "next", "len", "getitem", "setitem", "delitem", "str", "repr", "int", "float", "index", "abs", "neg",
         "enter", "exit", "hash")  # fmt: skip
ASKED_WITH_ANOTHER = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lt", "le", "gt",
                      "ge")  # fmt: skip


def remote_class(channel: Channel) -> type:
    """The class of the other side's objects, as seen from this side."""

    class Remote:
        __slots__ = ("_remote_id",)

        def __init__(self, remote_id: int) -> None:
            object.__setattr__(self, "_remote_id", remote_id)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return channel.call(self._remote_id, args, kwargs)

        def __getattr__(self, name: str) -> Any:
            return channel.decode(channel.request("get", self._remote_id, name)[0])

        def __setattr__(self, name: str, value: Any) -> None:
            channel.request("set", self._remote_id, name, channel.encode(value))

        def __eq__(self, other: object) -> bool:
            if not isinstance(other, Remote):
                return False
            return other._remote_id == self._remote_id or ask("eq")(self, other) is True

        def __bool__(self) -> bool:
            return True

    def ask(name: str) -> Callable[..., Any]:
        def asked(self: Any, *args: Any) -> Any:
            encoded = [channel.encode(item) for item in args]
            return channel.decode(channel.request("method", self._remote_id, f"__{name}__", encoded)[0])

        return asked

    def ask_with_another(name: str) -> Callable[..., Any]:
        return lambda self, other: ask(name)(self, other) if isinstance(other, Remote) else NotImplemented

    for name in ASKED:
        setattr(Remote, f"__{name}__", ask(name))
    for name in ASKED_WITH_ANOTHER:
        setattr(Remote, f"__{name}__", ask_with_another(name))
    return Remote


# The two processes


def run_program(path: str) -> NoReturn:
    """The program's process: runs it as module ``solution``, then answers until the tests are over."""
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    channel = Channel(PROGRAM_READS, PROGRAM_WRITES, trusted=False)
    module = type(sys)("solution")
    sys.modules["solution"] = module
    channel.names = module.__dict__
    with open(path, "rb") as file:
        source = file.read()
    channel.receive()
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except BaseException as error:
        channel.send(["raise", *channel.described_exception(error)])
        raise
    channel.serve("names", [])
    try:
        while True:
            operation, *arguments = channel.receive()
            channel.serve(operation, arguments)
    except (Gone, BrokenPipeError):
        os._exit(0)  # the tests are over


def run_tests(path: str, verdict_fd: int) -> NoReturn:
    """The tests' process: reads the tests from standard input, writes one true or false a test to the verdict."""
    os.set_inheritable(verdict_fd, False)
    with open(0, "rb", closefd=False) as file:
        tests = json.load(file)
    (program_reads, we_write), (we_read, program_writes) = os.pipe(), os.pipe()
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-s", "-S", "-B", __file__, "program", path],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, program_reads, PROGRAM_READS),
            (os.POSIX_SPAWN_DUP2, program_writes, PROGRAM_WRITES),
        ],
    )
    os.close(program_reads)
    os.close(program_writes)
    channel = Channel(we_read, we_write, trusted=True)
    names = program_names(channel)
    passed = [names is not None and run_test(test, dict(names)) for test in tests]
    with open(verdict_fd, "w") as file:
        json.dump(passed, file)
    os._exit(0)


def program_names(channel: Channel) -> dict[str, Any] | None:
    """What the tests can use of the program; None where its top level raised, which fails every test.

    Builtins win over names of the program, and modules are the tests' own: a program that defines ``abs`` or
    patches ``math`` changes nothing here.
    """
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        for name, kind, *rest in channel.request("names")[0]:
            if hasattr(builtins, name):
                continue
            if kind == "module":
                names[name] = imported(rest[0], None)
            elif kind == "import":
                names[name] = imported(*rest)
            else:
                names[name] = channel.decode(rest[0])
    except BaseException as error:
        print(f"the program did not load: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return names


def imported(module: str, name: str | None) -> Any:
    """A module of the standard library, or a name of one; None for anything else."""
    if module.split(".")[0] not in sys.stdlib_module_names:
        return None
    try:
        found = __import__(module, fromlist=["_"])
        return found if name is None else getattr(found, name)
    except (ImportError, AttributeError):
        return None


def run_test(source: str, names: dict[str, Any]) -> bool:
    try:
        exec(compile(source, "<test>", "exec"), names)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr)
        return False
    return True


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    role, *given = sys.argv[1:]
    if role == "program":
        run_program(*given)
    else:
        run_tests(given[0], int(given[1]))
