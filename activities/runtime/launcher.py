"""What an agent's process starts as: it shuts itself in, then becomes the agent. Standard library only.

Run as a script with one argument, the JSON of `Plan`. Not a `preexec_fn`, which may deadlock in a process with threads.
On success the status pipe closes as the agent's program starts; otherwise one line in it says what was not to be had.

What each layer does (namespaces(7), landlock(7), seccomp(2), setrlimit(2), prctl(2)):
- namespaces: an empty network, no System V objects, a bounded memory file system as the working folder, and a user
  without capabilities, who can't trace or read the environment of a process outside.
- Landlock: opens nothing but the interpreter, the system's libraries, the program and the working folder.
- a system call filter: no socket of any family, also not of those that a network namespace leaves open (a Unix socket
  in the file system); no second process; no signal to another one.
- limits on address space, processor time, file size, open files; no core dump.
- the death signal: the kernel kills the agent when its worker is gone, however that went.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypedDict

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x40000000
CLONE_THREAD = 0x00010000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 28, 38
SECBIT_NOROOT, SECBIT_NOROOT_LOCKED = 0x1, 0x2
OVERFLOW_ID = 65534
"""How root appears inside, where a real 0 would hold capabilities: the kernel's own number for nobody."""

# The same on every architecture: they are newer than the common table (asm-generic/unistd.h).
NR_LANDLOCK_CREATE_RULESET, NR_LANDLOCK_ADD_RULE, NR_LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_FLAG_VERSION, LANDLOCK_RULE_PATH_BENEATH = 1, 1
# linux/landlock.h: EXECUTE, WRITE_FILE, READ_FILE, READ_DIR; the rights of ABI 1 are bits 0 to 12, then REFER (2),
# TRUNCATE (3), IOCTL_DEV (5). Scopes, from ABI 6: abstract Unix sockets, signals.
FS_EXECUTE, FS_WRITE_FILE, FS_READ_FILE, FS_READ_DIR = 0x1, 0x2, 0x4, 0x8
FS_ABI_1, FS_REFER, FS_TRUNCATE, FS_IOCTL_DEV = 0x1FFF, 1 << 13, 1 << 14, 1 << 15
LANDLOCK_SCOPES = 0x3

# seccomp.h of libseccomp.
SCMP_ACT_ALLOW, SCMP_ACT_ERRNO = 0x7FFF0000, 0x00050000
SCMP_CMP_NE, SCMP_CMP_MASKED_EQ = 1, 7
SCMP_UNKNOWN = -1

NETWORK = ("socket", "socketpair", "io_uring_setup")
PROCESSES = ("fork", "vfork", "unshare", "setns")
OTHERS = (
    *("kill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open", "pidfd_getfd", "pidfd_send_signal"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "bpf", "perf_event_open", "userfaultfd", "keyctl"),
)

_libc = ctypes.CDLL(None, use_errno=True)


class Plan(TypedDict):
    """The argument."""

    worker_pid: int
    status_fd: int
    namespaces: bool
    work: str
    command: list[str]
    environment: dict[str, str]
    readable: list[str]
    cpu_seconds: int
    memory_bytes: int
    file_bytes: int
    open_files: int


class Unavailable(Exception):
    """A layer that this machine doesn't permit."""


def main(plan: Plan) -> NoReturn:
    """Shuts the process in and becomes the agent."""
    try:
        if plan["namespaces"]:
            _enter_namespaces(plan["work"], plan["file_bytes"])
        elif os.geteuid() == 0:
            # From here on user 0 is a user as any other: exec gives it no capabilities.
            _prctl(PR_SET_SECUREBITS, SECBIT_NOROOT | SECBIT_NOROOT_LOCKED, "dropping root's capabilities")
        os.chdir(plan["work"])
        _prctl(PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
        _restrict_files(plan["readable"], plan["work"], required=plan["namespaces"])
        _set_limits(plan)
        # Set last: a change of credentials clears it. Whoever lost the parent before that must not go on.
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, "the death signal")
        if os.getppid() != plan["worker_pid"]:
            os._exit(1)
        _filter_calls()
        os.set_inheritable(plan["status_fd"], False)
        os.execve(plan["command"][0], plan["command"], plan["environment"])
    except (Unavailable, OSError) as error:
        os.write(plan["status_fd"], str(error).encode()[:1024])
        os._exit(1)


def _enter_namespaces(work: str, size: int) -> None:
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS), "new namespaces")
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid or OVERFLOW_ID} {uid} 1"),
        ("gid_map", f"{gid or OVERFLOW_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mounts of its own")
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    options = f"size={size},nr_inodes=1024,mode=0700".encode()
    _check(_libc.mount(b"tmpfs", os.fsencode(work), b"tmpfs", flags, options), "a bounded working folder")


def _restrict_files(readable: Iterable[str], work: str, *, required: bool) -> None:
    abi = _libc.syscall(NR_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_FLAG_VERSION)
    if abi < 1:
        if required:
            raise Unavailable(f"Landlock: {os.strerror(ctypes.get_errno())}")
        return
    everything = FS_ABI_1
    for since, right in ((2, FS_REFER), (3, FS_TRUNCATE), (5, FS_IOCTL_DEV)):
        everything |= right if abi >= since else 0
    attributes = (ctypes.c_uint64 * 3)(everything, 0, LANDLOCK_SCOPES if abi >= 6 else 0)
    # Older kernels know fewer of its members, and refuse a longer one.
    size = ctypes.c_size_t({1: 8, 2: 8, 3: 8, 4: 16, 5: 16}.get(abi, 24))
    ruleset = _libc.syscall(NR_LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), size, 0)
    _check(min(ruleset, 0), "a Landlock ruleset")
    for path in readable:
        _allow(ruleset, path, FS_READ_FILE | FS_EXECUTE | (FS_READ_DIR if os.path.isdir(path) else 0))
    for device, rights in (("/dev/null", FS_READ_FILE | FS_WRITE_FILE), ("/dev/urandom", FS_READ_FILE)):
        _allow(ruleset, device, rights)
    _allow(ruleset, work, everything & ~FS_EXECUTE)
    _check(_libc.syscall(NR_LANDLOCK_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = _PathBeneath(rights, descriptor)
    made = _libc.syscall(NR_LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, ctypes.byref(rule), 0)
    _check(made, f"a Landlock rule for {path}")
    os.close(descriptor)


def _set_limits(plan: Plan) -> None:
    cpu = plan["cpu_seconds"]
    # The soft limit ends it with SIGXCPU, by which the adapter knows; the hard one ends what ignores that.
    for limit, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, plan["memory_bytes"], plan["memory_bytes"]),
        (resource.RLIMIT_FSIZE, plan["file_bytes"], plan["file_bytes"]),
        (resource.RLIMIT_NOFILE, plan["open_files"], plan["open_files"]),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(limit, (soft, hard))


class _Comparison(ctypes.Structure):
    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def _filter_calls() -> None:
    """Installs the filter by libseccomp, which knows each architecture's numbers and refuses a foreign one's calls."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        raise Unavailable("the system call filter: libseccomp.so.2 is missing (Debian: libseccomp2)") from None
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(SCMP_ACT_ALLOW)))
    if context.value is None:
        raise Unavailable("the system call filter: libseccomp gave none")

    def deny(name: str, number: int, *comparisons: _Comparison) -> None:
        call = library.seccomp_syscall_resolve_name(name.encode())
        if call == SCMP_UNKNOWN:
            raise Unavailable(f"the system call filter: libseccomp doesn't know {name}")
        array = (_Comparison * len(comparisons))(*comparisons)
        action = ctypes.c_uint32(SCMP_ACT_ERRNO | number)
        made = library.seccomp_rule_add_array(context, action, call, ctypes.c_uint(len(comparisons)), array)
        if made != 0:
            raise Unavailable(f"the system call filter, {name}: {os.strerror(-made)}")

    for name in (*NETWORK, *PROCESSES, *OTHERS):
        deny(name, errno.EPERM)
    # Threads may be made, processes not. glibc falls back from clone3, whose flags no filter can see, to clone.
    deny("clone", errno.EPERM, _Comparison(0, SCMP_CMP_MASKED_EQ, CLONE_THREAD, 0))
    deny("clone3", errno.ENOSYS)
    deny("tgkill", errno.EPERM, _Comparison(0, SCMP_CMP_NE, os.getpid(), 0))
    deny("prlimit64", errno.EPERM, _Comparison(0, SCMP_CMP_NE, 0, 0))
    if (loaded := library.seccomp_load(context)) != 0:
        raise Unavailable(f"the system call filter: {os.strerror(-loaded)}")


def _prctl(option: int, value: int, what: str) -> None:
    call: Callable[..., Any] = _libc.prctl
    _check(call(option, ctypes.c_ulong(value), *(ctypes.c_ulong(0) for _ in range(3))), what)


def _check(returned: int, what: str) -> None:
    if returned != 0:
        raise Unavailable(f"{what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
