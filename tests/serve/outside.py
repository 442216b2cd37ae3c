#!/usr/bin/env python3
"""Holds `gristmill serve` against tools of others: schemathesis over /openapi.json, promtool over /metrics of the service and of a worker.

    .venv/bin/python tests/serve/outside.py PROGRAM [--seconds N]

Installs schemathesis and Debian's promtool into `.outside/` of the checkout (`apt-get download prometheus`). No part of the check, since it takes
minutes. The last line counts the cases.
"""

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile

import httpx2 as httpx

from run import BROKERS, ROOT, Worker, broker_queue, free_port, request, scraped, service, submit, tickets, until, wait

OUTSIDE = ROOT / ".outside"
SCHEMATHESIS = "schemathesis==4.32.5"
KEY = "sk-outside"
# What a schema allows and the service refuses for reasons that no schema can say: a file that is not there, parts that are missing.
EXCLUDED = "positive_data_acceptance"


def install():
    if not (OUTSIDE / "bin/schemathesis").exists():
        subprocess.run([sys.executable, "-m", "venv", OUTSIDE], check=True)
        subprocess.run([OUTSIDE / "bin/pip", "install", "--quiet", "--disable-pip-version-check", SCHEMATHESIS], check=True)
    if not promtool().exists():
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["apt-get", "download", "-qq", "prometheus"], check=True, cwd=folder)
            [package] = pathlib.Path(folder).glob("*.deb")
            subprocess.run(["dpkg", "-x", package, OUTSIDE / "prometheus"], check=True)


def promtool():
    return OUTSIDE / "prometheus/usr/bin/promtool"


def api(program, args):
    """Thousands of valid and invalid requests: no 5xx, answers as the schema says, and what the schema forbids is refused."""
    with service(program, keys={KEY: "a"}) as one:
        # A batch, so that there is one to ask for.
        wait(one.client(KEY), submit(one.client(KEY), [request(id, text) for id, text, _ in tickets(5)]))
        done = subprocess.run(
            [
                OUTSIDE / "bin/schemathesis", "run", f"{one.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}",
                "--max-time", str(args.seconds), "--continue-on-failure", "--exclude-checks", EXCLUDED, "--request-timeout", "40",
            ],
            capture_output=True, text=True, cwd=one.folder, env=os.environ | {"PYTHONWARNINGS": "ignore"},
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert one.process.poll() is None, "the service lives"
        log = (one.folder / "serve.log").read_text()
        assert "panicked" not in log and " ERROR " not in log, log[-2000:]
        counted = [line.strip() for line in done.stdout.splitlines() if "generated" in line]
        return counted[-1] if counted else None


def check_metrics(text):
    done = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def metrics(program, args):
    """promtool has nothing to say about the metrics of a service that works itself, of one with a queue, and of a worker."""
    checked = 0
    with service(program) as one, contextlib.ExitStack() as ends:
        port = free_port()
        one.kill()
        one.arguments += ["--metrics-port", str(port)]
        one.start()
        wait(one.client(), submit(one.client(), [request(id, text) for id, text, _ in tickets(20)]))
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert "gristmill_serve_requests_total" in text and "gristmill_rows_total" in text, text
        check_metrics(text)
        checked += 1
        if queue := broker_queue():
            port = free_port()
            worker = Worker(program, queue, one.folder, extra=["--liveness-port", str(port)])
            ends.callback(worker.kill)
            until("the worker is ready", lambda: "gristmill_ready 1" in scraped(port))
            check_metrics(scraped(port))
            checked += 1
    return f"{checked} of 2 programs" + ("" if checked == 2 else f"; set {' or '.join(BROKERS)} for the worker's")


CASES = [api, metrics]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=lambda path: str(pathlib.Path(path).resolve()))
    parser.add_argument("--only", action="append", choices=[case.__name__ for case in CASES])
    parser.add_argument("--seconds", type=int, default=180)
    args = parser.parse_args()
    install()
    chosen = [case for case in CASES if not args.only or case.__name__ in args.only]
    for case in chosen:
        print(f"{case.__name__}: right: {case(args.program, args)}", flush=True)
    print(f"{len(chosen)} of {len(chosen)} cases right")


if __name__ == "__main__":
    main()
