"""Run a Python program that may open no socket: `python no_sockets.py FILE`.

Two blocks: Python's own sockets by an audit hook, and, on Linux, the system call itself by a seccomp filter that kills
the process, since the tokenizer library opens its sockets from Rust.
"""

import ctypes
import platform
import runpy
import struct
import sys

SOCKET_CALL = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}  # (audit architecture, number of the call)
KILL_PROCESS, ALLOW = 0x80000000, 0x7FFF0000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2


def block_python_sockets():
    def refuse(event, _):
        if event.startswith("socket."):
            raise PermissionError(f"{event}: this process may open no socket")

    sys.addaudithook(refuse)


def block_socket_call() -> bool:
    """Kill this process at its first socket(2). Returns whether the system could be told so."""
    if sys.platform != "linux" or platform.machine() not in SOCKET_CALL:
        return False
    architecture, number = SOCKET_CALL[platform.machine()]
    load, equal, answer = 0x20, 0x15, 0x06
    program = [
        (load, 0, 0, 4),
        (equal, 0, 3, architecture),
        (load, 0, 0, 0),
        (equal, 0, 1, number),
        (answer, 0, 0, KILL_PROCESS),
        (answer, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    return (
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        and libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(header), 0, 0) == 0
    )


if __name__ == "__main__":
    block_python_sockets()
    print("system call blocked" if block_socket_call() else "system call not blocked", flush=True)
    runpy.run_path(sys.argv[1])
