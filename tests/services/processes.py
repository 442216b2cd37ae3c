"""Processes, ports and folders of one set of services."""

import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

# Seconds that a service may take to answer after its start, and to end after SIGTERM. Generous: both cores may be busy.
READY_SECONDS = 180
END_SECONDS = 20


class Unavailable(Exception):
    """A service cannot be had on this machine; the text says why."""


@contextlib.contextmanager
def locked(path):
    """Holds an exclusive lock on `path` against other processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class State:
    """What `services.json` says: one entry a service."""

    def __init__(self, folder):
        self.folder = Path(folder).absolute()
        self.path = self.folder / "services.json"
        self.services = json.loads(self.path.read_text()) if self.path.exists() else {}

    def save(self):
        staged = self.path.with_suffix(".tmp")
        staged.write_text(json.dumps(self.services, indent=2) + "\n")
        staged.chmod(0o600)
        staged.replace(self.path)

    def lock(self):
        return locked(self.folder / "lock")


def taken_ports():
    """The folder with a file a port that a set of services of this user has: the set's folder stands in it."""
    return Path(tempfile.gettempdir()) / f"gristmill-test-ports-{os.getuid()}"


def free_port(folder):
    """A port that nobody listens on and no other set of services has taken.

    Below the range of outgoing connections: a client that retries a dead port of that range can connect to itself, and
    the service could then not start again on it.
    """
    taken = taken_ports()
    taken.mkdir(exist_ok=True)
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        port = random.randrange(10_000, max(ephemeral, 11_000))
        with locked(taken / "lock"):
            mark = taken / str(port)
            if mark.exists() and Path(mark.read_text()).exists():
                continue
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
            mark.write_text(str(folder))
            return port
    raise Unavailable("no free port")


def release_ports(folder):
    """Gives back all ports of `folder`."""
    for mark in taken_ports().glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError):
            if mark.read_text() == str(folder):
                mark.unlink()


def fields(pid):
    """State, parent, process group … of a process that runs, as /proc has them; None where it runs no more."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if found[0] in "ZX" else found


def born(pid):
    """When `pid` started, in clock ticks: tells it from a later process with its number."""
    found = fields(pid)
    return found and int(found[19])


def group(pid):
    """The running processes that `pid` started and that stayed in its group, itself included."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [number for number in numbers if (fields(number) or [0, 0, ""])[2] == str(pid)]


def spawn(command, log, env=None, cwd=None):
    """Starts `command` in a session of its own; what it prints goes to `log`."""
    with open(log, "ab") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=cwd, start_new_session=True
        )
    return {"pid": child.pid, "born": born(child.pid)}


def alive(process):
    """Whether a process that `spawn` described still runs."""
    if process is None:
        return False
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process["pid"], os.WNOHANG)
    return process["born"] is not None and born(process["pid"]) == process["born"]


def send(process, number):
    """Sends a signal; whether there was somebody to get it."""
    if not alive(process):
        return False
    # The whole session: launchers (shell scripts) and helpers stop with the service.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process["pid"], number)
    return True


def end(process, number=signal.SIGTERM):
    """Ends a process and all that it started, and waits until they are gone: SIGKILL where it takes too long."""
    if not send(process, number):
        return
    send(process, signal.SIGCONT)
    deadline = time.monotonic() + END_SECONDS
    while alive(process) or group(process["pid"]):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process["pid"], signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.02)


def tail(log, lines=12):
    """The end of a log, for an error."""
    try:
        return "\n".join(Path(log).read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def wait_ready(name, process, log, ready):
    """Waits until `ready()` is true; raises with the end of the log when the process ends or takes too long."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if ready():
                return
        if not alive(process):
            raise Unavailable(f"{name} ended while starting; the end of {log}:\n{tail(log)}")
        if time.monotonic() > deadline:
            raise Unavailable(f"{name} does not answer after {READY_SECONDS} s; the end of {log}:\n{tail(log)}")
        time.sleep(0.1)


def ask(port, request, reply_bytes):
    """Connects to a port of this machine, sends `request`, and returns `reply_bytes` bytes of its answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(request)
        got = b""
        while len(got) < reply_bytes:
            more = connection.recv(reply_bytes - len(got))
            if not more:
                raise ConnectionError("closed")
            got += more
        return got
