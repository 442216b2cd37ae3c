#!/usr/bin/env python3
"""Makes the wheel of deploy/python/ around a program, installs it into a new environment, and uses it there.

    .venv/bin/python tests/python_package.py PROGRAM

The last line counts the cases. The environment has no index: it sees the pyarrow of the Python that runs this.
"""

import concurrent.futures
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "deploy/python"))
import build  # noqa: E402

WHEEL_BYTES_MAX = 40_000_000
FIVE_LINES = """
import gristmill

result = gristmill.run("jobs/label-tickets.yaml", limit=60)
table = result.dataset().to_table(columns=["row", "status", "completion"])
print(table.num_rows, result.failed_rows, result.report["rows"]["succeeded"])
"""
DEFINITIONS = """
import json, pathlib, time
import gristmill

long = "word " * 3000
texts = ["ticket 1", long, "ticket 3"]
pathlib.Path("rows.jsonl").write_text("".join(json.dumps({"id": n, "text": text}) + "\\n" for n, text in enumerate(texts)))

def job(name, **changes):
    return {"name": name, "model": pathlib.Path("jobs/demo/model"), "input": {"uri": "rows.jsonl", "format": "jsonl"},
            "prompt": {"text": "{{ text }} ${NAME}"}, "generate": {"max_tokens": 4, "temperature": 0},
            "context": 256, "output": {"uri": "out/" + name, "carry": ["id"]}, **changes}

def caught(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind}")
"""


class Environment:
    """A new virtual environment with the wheel, and a folder with the demo job."""

    def __init__(self, folder, wheel):
        self.work = folder / "work"
        shutil.copytree(ROOT / "jobs", self.work / "jobs")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.bin = folder / "venv/bin"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.bin / "python"]
        subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", "--no-compile", wheel], check=True)
        own = subprocess.check_output([self.bin / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
        # Last on the path, so that the wheel's package is the one that is imported.
        pathlib.Path(own.strip(), "pyarrow.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def start(self, script, **options):
        # A shell lets what it starts in the background ignore Ctrl-C, and Python would pass that on.
        script = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{script}"
        command = [self.bin / "python", "-I", "-W", "error", "-c", script]
        return subprocess.Popen(command, cwd=self.work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)

    def python(self, script):
        """Runs a script, which must not fail. Returns stdout and stderr."""
        child = self.start(script)
        stdout, stderr = child.communicate(timeout=60)
        assert child.returncode == 0, stderr
        return stdout, stderr

    def program(self, *arguments):
        return subprocess.run([self.bin / "gristmill", *arguments], cwd=self.work, capture_output=True, text=True)


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until(what, condition, seconds=60):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return found


def the_wheel_is_stripped_and_tagged(environment, wheel):
    packed = zipfile.ZipFile(wheel)
    program = environment.work / "unpacked"
    program.write_bytes(packed.read("gristmill/bin/gristmill"))
    assert ".symtab" not in build.output_of("readelf", "-W", "-S", program)
    foreign = build.foreign_libraries(program)
    assert wheel.stat().st_size < WHEEL_BYTES_MAX, wheel.stat().st_size
    assert ("manylinux_2_" in wheel.name) == (not foreign), (wheel.name, foreign)
    assert "gristmill/py.typed" in packed.namelist()


def the_program_is_on_the_path(environment, wheel):
    said = environment.program("--version")
    assert said.stdout.startswith(f"gristmill {build.version()}"), said
    assert environment.program("plan", "none.yaml").returncode == 2
    as_module = subprocess.check_output([environment.bin / "python", "-m", "gristmill", "--version"], text=True)
    assert as_module == said.stdout, as_module
    stdout, _ = environment.python("import gristmill; print(gristmill.__version__)")
    assert stdout.strip() == build.version(), stdout


def five_lines_run_the_demo(environment, wheel):
    stdout, stderr = environment.python(FIVE_LINES)
    assert stdout.split() == ["60", "0", "60"], stdout
    assert "{" not in stderr, f"progress is text: {stderr}"


def a_dict_is_a_job_and_failed_rows_are_a_result(environment, wheel):
    stdout, stderr = environment.python(DEFINITIONS + """
lines = []
result = gristmill.run(job("three"), parameters={"NAME": "x y"}, progress=lines.append, threads=1)
print(json.dumps([result.report, result.output, result.failed_rows, result.dataset().to_table(columns=["id"]).num_rows]))
assert all(isinstance(line, gristmill.Line) and line.level for line in lines), lines
for name, kind in ("Report", result.report), ("Status", gristmill.status("out/three")), ("RowCounts", result.report["rows"]):
    known = getattr(gristmill, name)
    assert known.__required_keys__ <= set(kind) <= set(known.__annotations__), (name, set(kind) ^ set(known.__annotations__))
""")
    report, output, failed, rows = json.loads(stdout)
    assert (failed, rows, report["rows"]["errored"]) == (1, 3, 1), report
    assert output == (environment.work / "out/three").resolve().as_uri(), output
    assert report["failures"]["most"][0]["rows"] == 1, report
    assert stderr == "", stderr


def exceptions_have_the_message_of_their_exit_code(environment, wheel):
    stdout, _ = environment.python(DEFINITIONS + """
bad = caught(gristmill.BadJob, lambda: gristmill.run(
    job("bad", generate={"max_tokens": "many"}), parameters={"NAME": "x"}, progress=False))
option = caught(gristmill.BadJob, lambda: gristmill.run(job("bad"), limit=0, progress=False))
none = caught(gristmill.BadJob, lambda: gristmill.status("out/none", progress=False))
late = job("late", budget={"deadline": "1s"})
gristmill.submit(late, parameters={"NAME": "x"}, no_enqueue=True)
time.sleep(1)
stop = caught(gristmill.Stopped, lambda: gristmill.run(late, parameters={"NAME": "x"}, progress=False))
missing = caught(gristmill.ProgramMissing, lambda: gristmill.run(job("bad"), program="/none/gristmill"))
print(json.dumps([str(error) for error in (bad, option, none, stop, missing)]))
assert [error.exit_code for error in (bad, option, none, stop, missing)] == [2, 2, 2, 4, None]
assert stop.report["rows"]["total"] == 3, stop.report
caught(TypeError, lambda: gristmill.run(job("bad"), json=True))
""")
    bad, option, none, stop, missing = json.loads(stdout)
    assert "max_tokens" in bad and "\n" not in bad, bad
    assert option.startswith("invalid value '0' for '--limit <N>'"), option
    assert "holds no job" in none, none
    assert "deadline" in stop, stop
    assert "/none/gristmill" in missing, missing


def jobs_are_submitted_and_looked_at(environment, wheel):
    stdout, _ = environment.python(DEFINITIONS + """
sent = gristmill.submit(job("sent"), parameters={"NAME": "x"}, no_enqueue=True)
assert set(sent) == set(gristmill.Submitted.__annotations__), sent
print(json.dumps([sent, gristmill.status(sent["output"])]))
""")
    sent, status = json.loads(stdout)
    assert (sent["rows"], sent["queue"], status["state"], status["id"]) == (3, None, "running", sent["id"])


def options_are_those_of_the_program(environment, wheel):
    stdout, _ = environment.python("from gristmill import _types as t; print(*t.RunOptions.__annotations__, ';', *t.SubmitOptions.__annotations__)")
    for command, names in zip(("run", "submit"), stdout.split(";")):
        told = environment.program(command, "--help").stdout
        known = {word for line in told.splitlines() for word in line.split() if line.lstrip().startswith("-") and word.startswith("--")}
        listed = {f"--{name.replace('_', '-')}" for name in names.split()}
        own = {"--set", "--limit", "--json", "--help", "--log-format", "--version"}
        assert listed == known - own, (command, listed ^ (known - own))


def begin_demo(environment, name):
    """A Python process whose job has begun, and its program's process id."""
    yaml = (environment.work / "jobs/label-tickets.yaml").read_text().replace("out/label-tickets", f"out/{name}")
    (environment.work / f"jobs/{name}.yaml").write_text(yaml)
    child = environment.start(f"import gristmill; gristmill.run('jobs/{name}.yaml')")
    ledger = environment.work / f"out/{name}/_gristmill"
    wait_until("a shard begins", lambda: list(ledger.glob("*/shards/*/attempts/*")) or child.poll() is not None)
    (program,) = children(child.pid)
    return child, program


def ctrl_c_ends_the_program_first(environment, wheel):
    child, program = begin_demo(environment, "interrupted")
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=40)
    assert not pathlib.Path(f"/proc/{program}").exists(), "the program still runs"
    assert stderr.rstrip().endswith("KeyboardInterrupt"), stderr
    status = json.loads(environment.program("status", "out/interrupted", "--json").stdout)
    assert status["state"] == "running" and status["open_shards"], status


def a_killed_python_leaves_no_program(environment, wheel):
    child, program = begin_demo(environment, "killed")
    child.kill()
    child.communicate()
    wait_until("the program ends", lambda: not pathlib.Path(f"/proc/{program}").exists(), 40)


CASES = [
    the_wheel_is_stripped_and_tagged,
    the_program_is_on_the_path,
    five_lines_run_the_demo,
    a_dict_is_a_job_and_failed_rows_are_a_result,
    exceptions_have_the_message_of_their_exit_code,
    jobs_are_submitted_and_looked_at,
    options_are_those_of_the_program,
    ctrl_c_ends_the_program_first,
    a_killed_python_leaves_no_program,
]


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    program = pathlib.Path(sys.argv[1]).resolve(strict=True)
    right = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        # Libraries stay outside: patchelf is no part of the tests' environment.
        wheel = build.make(program, folder / "wheel", bundle=False, level=1)
        environment = Environment(folder, wheel)

        def said_of(case):
            begun = time.monotonic()
            try:
                case(environment, wheel)
                return f"{case.__name__}: right, {time.monotonic() - begun:.1f} s"
            except (AssertionError, KeyError, ValueError, subprocess.SubprocessError) as why:
                return f"{case.__name__}: WRONG: {type(why).__name__}: {why}"

        # Cases mostly wait for models to load.
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            for said in threads.map(said_of, CASES):
                print(said)
                right += ": right, " in said
    print(f"{right} of {len(CASES)} cases right")
    sys.exit(right < len(CASES))


if __name__ == "__main__":
    main()
