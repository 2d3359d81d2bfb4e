"""System calls that a sandboxed program is refused, as a classic BPF filter.

A list of refusals, not of permissions: Python and its libraries use several hundred calls, and the namespaces
already bound what most of them reach. Refused is what the namespaces and resource limits do not bound (memory in
memfds and System V segments, families of sockets without a namespace), what reaches into another process, and
what has no use here but a long history of kernel bugs.

Standard library only: the launcher imports this module without the package.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_X86_64 = {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440, "kcmp": 312,
    "pidfd_getfd": 438, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "open_by_handle_at": 304, "name_to_handle_at": 303, "memfd_create": 319,
    "memfd_secret": 447, "shmget": 29, "shmat": 30, "shmctl": 31, "msgget": 68, "msgsnd": 69, "msgrcv": 70,
    "msgctl": 71, "semget": 64, "semop": 65, "semctl": 66, "semtimedop": 220, "mq_open": 240, "vmsplice": 278,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "add_key": 248, "request_key": 249, "keyctl": 250, "fanotify_init": 300,
    "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "quotactl": 179, "quotactl_fd": 443, "swapon": 167, "swapoff": 168, "reboot": 169, "acct": 163, "syslog": 103,
    "personality": 135, "move_pages": 279, "mbind": 237, "set_mempolicy": 238, "migrate_pages": 256,
    "modify_ldt": 154, "iopl": 172, "ioperm": 173,
}  # fmt: skip

_AARCH64 = {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "process_madvise": 440, "kcmp": 272,
    "pidfd_getfd": 438, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "open_by_handle_at": 265, "name_to_handle_at": 264, "memfd_create": 279,
    "memfd_secret": 447, "shmget": 194, "shmctl": 195, "shmat": 196, "msgget": 186, "msgctl": 187, "msgrcv": 188,
    "msgsnd": 189, "semget": 190, "semctl": 191, "semtimedop": 192, "semop": 193, "mq_open": 180, "vmsplice": 75,
    "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "add_key": 217, "request_key": 218, "keyctl": 219, "fanotify_init": 262,
    "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273, "delete_module": 106,
    "quotactl": 60, "quotactl_fd": 443, "swapon": 224, "swapoff": 225, "reboot": 142, "acct": 89, "syslog": 116,
    "personality": 92, "move_pages": 239, "mbind": 235, "set_mempolicy": 237, "migrate_pages": 238,
}  # fmt: skip


class Machine:
    """Numbers of one architecture: the audit constant, the refused calls, and the calls that are looked into."""

    # No dataclass: importing dataclasses would double the start of every run.
    def __init__(self, audit_arch: int, refused: dict[str, int], socket: int, socketpair: int, clone: int) -> None:
        self.audit_arch, self.refused = audit_arch, refused
        self.socket, self.socketpair, self.clone = socket, socketpair, clone
        self.clone3 = 435  # on every architecture


MACHINES = {
    "x86_64": Machine(0xC000003E, _X86_64, socket=41, socketpair=53, clone=56),
    "aarch64": Machine(0xC00000B7, _AARCH64, socket=198, socketpair=199, clone=220),
}

_AF_ALLOWED = (1, 2, 10)  # unix, inet, inet6: bound by the network namespace; AF_VSOCK, for one, is not
_NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_X32_BIT = 0x40000000

_LD_W_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH, _ARG0 = 0, 4, 16  # offsets in struct seccomp_data; low half of args[0], little-endian

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def filter_bytes(machine: Machine) -> bytes:
    """The filter as an array of ``struct sock_filter``."""
    code: list[tuple[int, int, int, int]] = [
        (_LD_W_ABS, 0, 0, _ARCH),
        (_JEQ, 1, 0, machine.audit_arch),
        (_RET, 0, 0, _KILL_PROCESS),  # a 32-bit call on a 64-bit machine: its numbers mean other things
        (_LD_W_ABS, 0, 0, _NR),
        (_JGE, 0, 1, _X32_BIT),
        (_RET, 0, 0, _ERRNO | errno.ENOSYS),
        # clone3 keeps its flags in memory, where a filter cannot look; libc falls back to clone.
        (_JEQ, 0, 1, machine.clone3),
        (_RET, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for number in sorted(machine.refused.values()):
        code += [(_JEQ, 0, 1, number), (_RET, 0, 0, _ERRNO | errno.EPERM)]
    code += [
        (_JEQ, 0, 4, machine.clone),
        (_LD_W_ABS, 0, 0, _ARG0),
        (_JSET, 0, 1, _NAMESPACE_FLAGS),
        (_RET, 0, 0, _ERRNO | errno.EPERM),
        (_RET, 0, 0, _ALLOW),
        (_JEQ, 1, 0, machine.socket),
        (_JEQ, 0, 5, machine.socketpair),
        (_LD_W_ABS, 0, 0, _ARG0),
        (_JEQ, 3, 0, _AF_ALLOWED[0]),
        (_JEQ, 2, 0, _AF_ALLOWED[1]),
        (_JEQ, 1, 0, _AF_ALLOWED[2]),
        (_RET, 0, 0, _ERRNO | errno.EAFNOSUPPORT),
        (_RET, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def install(libc: ctypes.CDLL) -> None:
    """Puts the filter on this thread, for good; OSError where the kernel or the architecture does not allow it."""
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(errno.ENOSYS, f"there is no system call table for {os.uname().machine}")
    raw = filter_bytes(machine)
    buffer = ctypes.create_string_buffer(raw, len(raw))
    program = _Program(len(raw) // 8, ctypes.addressof(buffer))
    for arguments in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")
