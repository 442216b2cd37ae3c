#!/usr/bin/env python3
"""Starts and stops what gristmill's tests run against: Apache Kafka, RabbitMQ and MinIO, without Docker.

    services.py up [--dir DIR] [kafka] [rabbitmq] [minio]     start a set (all three), and say where it lies
    services.py env --dir DIR                                 its addresses and passwords as shell exports
    services.py kill|end|start NAME --dir DIR                 SIGKILL, SIGTERM; start again, same ports and data
    services.py stop|cont NAME --dir DIR                      SIGSTOP, SIGCONT
    services.py rabbitmqctl --dir DIR -- ARGUMENT...          RabbitMQ's own tool on this set's node
    services.py session --dir DIR                             temporary credentials of MinIO's STS, as JSON
    services.py sts --dir DIR                                 serves such credentials for web identity tokens, until killed
    services.py down --dir DIR                                end everything and remove the data
    services.py prepare [NAME...]                             only fetch and build what is needed

Several sets run side by side, each with a DIR of its own. A service that cannot be had is reported on one line,
`unavailable: NAME: why`, and the rest goes on. Downloads and builds are kept in `.services/` of the checkout
(or in GRISTMILL_SERVICES_CACHE).
"""

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import certificates
import kafka
import minio
import rabbitmq
import sts
from processes import State, Unavailable, alive, end, release_ports, send

MODULES = {"kafka": kafka, "rabbitmq": rabbitmq, "minio": minio}


def unavailable(name, why):
    # One line, whatever the reason looks like: callers read it line by line. The rest is on stderr.
    first, *rest = str(why).splitlines() or ["no reason known"]
    print(f"unavailable: {name}: {first}", flush=True)
    if rest:
        print("\n".join(rest), file=sys.stderr)
    return first


def each(names, step, failed):
    """Does `step(name)` for each service that is still well; notes who failed and why."""
    for name in names:
        if name not in failed:
            try:
                step(name)
            except Unavailable as why:
                failed[name] = unavailable(name, why)


def prepare(names):
    failed = {}
    each(names, lambda name: MODULES[name].prepare(), failed)


def up(folder, names):
    folder = Path(folder or tempfile.mkdtemp(prefix="gristmill-services-")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    state, failed = State(folder), {}
    with state.lock():
        state = State(folder)
        names = [name for name in names if not alive(state.services.get(name, {}).get("process"))]
        try:
            certificates.make(folder / "certificates")
        except Unavailable as why:
            failed = {name: unavailable(name, why) for name in names}

        def create(name):
            MODULES[name].prepare()
            place = folder / name
            if state.services.get(name, {}).get("port") is None:
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                state.services[name] = MODULES[name].create(place, folder / "certificates")

        def start(name):
            MODULES[name].start(folder / name, state.services[name])
            state.save()

        def wait(name):
            MODULES[name].wait(folder / name, state.services[name])
            MODULES[name].finish(folder / name, state.services[name])

        # All start before the first is waited for.
        for step in (create, start, wait):
            each(names, step, failed)
        for name, why in failed.items():
            stop(name, state.services.get(name, {}), signal.SIGKILL)
            state.services[name] = {"unavailable": why}
        state.save()
    print(f"services: {folder}")
    for name, entry in state.services.items():
        if "port" in entry:
            print(f"{name}: {entry['address'].rpartition('@')[2]}")


def stop(name, entry, number):
    """Ends a service and what it needs besides."""
    end(entry.get("process"), number)
    if name == "rabbitmq":
        rabbitmq.stop_helpers(entry)


def one(folder, name):
    """The entry of a service that was started once."""
    state = State(folder)
    entry = state.services.get(name, {})
    if "port" not in entry:
        sys.exit(f"no {name} in `{folder}`: start it with `up`")
    return state, entry


def signal_one(folder, name, number):
    _, entry = one(folder, name)
    if not alive(entry["process"]):
        sys.exit(f"{name} does not run")
    if number in (signal.SIGKILL, signal.SIGTERM):
        end(entry["process"], number)
    else:
        send(entry["process"], number)


def start_again(folder, name):
    with State(folder).lock():
        state, entry = one(folder, name)
        if alive(entry["process"]):
            sys.exit(f"{name} runs already")
        place = state.folder / name
        MODULES[name].start(place, entry)
        state.save()
        MODULES[name].wait(place, entry)


def down(folder):
    state = State(folder)
    for name, entry in state.services.items():
        # Nothing is kept, so nothing need be written out: SIGKILL is as good an end as any, and the quickest.
        stop(name, entry, signal.SIGKILL)
    for name in [*MODULES, "certificates"]:
        shutil.rmtree(state.folder / name, ignore_errors=True)
    state.path.unlink(missing_ok=True)
    (state.folder / "lock").unlink(missing_ok=True)
    release_ports(state.folder)
    if state.folder.exists() and not any(state.folder.iterdir()):
        state.folder.rmdir()


def exports(folder):
    state = State(folder)
    found = {"GRISTMILL_TEST_SERVICES_DIR": str(state.folder)}
    place = state.folder / "certificates"
    found["GRISTMILL_TEST_CA"] = str(place / "ca.pem")
    found["GRISTMILL_TEST_WRONG_CA"] = str(place / "wrong-ca.pem")
    for name, entry in state.services.items():
        if "port" in entry:
            found.update(MODULES[name].exports(entry))
    for name, value in found.items():
        print(f"export {name}={shlex.quote(value)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("up", "prepare"):
        command = commands.add_parser(name)
        command.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODULES))
        if name == "up":
            command.add_argument("--dir")
    for name in ("kill", "end", "start", "stop", "cont", "env", "session", "sts", "down", "rabbitmqctl"):
        command = commands.add_parser(name)
        command.add_argument("--dir", required=True)
        if name in ("kill", "end", "start", "stop", "cont"):
            command.add_argument("name", choices=MODULES)
        elif name == "rabbitmqctl":
            command.add_argument("arguments", nargs="+")
    given = parser.parse_args()
    names = getattr(given, "names", None) or list(MODULES)
    if unknown := set(names) - set(MODULES):
        parser.error(f"no such service: {', '.join(sorted(unknown))}")
    signals = {"kill": signal.SIGKILL, "end": signal.SIGTERM, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}
    match given.command:
        case "up":
            up(given.dir, names)
        case "prepare":
            prepare(names)
        case "start":
            start_again(given.dir, given.name)
        case "env":
            exports(given.dir)
        case "session":
            print(minio.session(one(given.dir, "minio")[1]))
        case "sts":
            state, entry = one(given.dir, "minio")
            sts.serve(state.folder, entry)
        case "down":
            down(given.dir)
        case "rabbitmqctl":
            state, entry = one(given.dir, "rabbitmq")
            sys.exit(rabbitmq.control(state.folder / "rabbitmq", entry, given.arguments))
        case command:
            signal_one(given.dir, given.name, signals[command])


if __name__ == "__main__":
    try:
        main()
    except Unavailable as why:
        sys.exit(str(why))
