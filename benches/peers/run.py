"""Measures gristmill and its peers on this machine, one after the other, and prints tables.

    cargo build --release && python3 benches/peers/run.py --data DIR [--models l30m,q05b] [--workloads W1,W2,W3]
        [--peers openvino,openvino-group0,transformers] [--rounds 3] [--least-seconds 10] [--out FILE.json] [--svg FILE.svg]

The first run installs the peers into .venv/ beside this file (several GB), makes the two random models (make.py says what they and
the workloads are) and exports them for OpenVINO. Rows are repeated from the same distribution until gristmill runs for
`--least-seconds`. Then each round runs every peer and gristmill in turn on every workload; tables show medians, and how many
times as fast as the fastest peer gristmill is. Every side runs a first request before its clock starts. `openvino-group0`
is OpenVINO with `DYNAMIC_QUANTIZATION_GROUP_SIZE=0`, `gristmill-f32` and `gristmill-bf16` are gristmill in other precisions.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

from picture import bars

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = HERE / ".venv/bin/python"
PEERS = ("openvino", "openvino-group0", "transformers")


def install():
    wanted = (HERE / "requirements.txt").read_text()
    stamp = HERE / ".venv/requirements.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    subprocess.run([sys.executable, "-m", "venv", HERE / ".venv"], check=True)
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "-r", HERE / "requirements.txt"], check=True)
    stamp.write_text(wanted)


def prepare(data, models, sides):
    """Models, traces of scale 1, and the checkpoints in OpenVINO's format, weights in INT8, symmetric."""
    # With numpy, which only the peers' environment has.
    subprocess.run([PYTHON, HERE / "make.py", "--data", data, "--models", ",".join(models)], check=True)
    for model in models:
        target = data / f"{model}-openvino"
        if any(side.startswith("openvino") for side in sides) and not (target / "openvino_model.bin").exists():
            subprocess.run([PYTHON.parent / "optimum-cli", "export", "openvino", "--model", data / model, "--task",
                            "text-generation-with-past", "--weight-format", "int8", "--sym", target], check=True)


def ceilings(data):
    """What ceilings.rs finds."""
    subprocess.run(["rustc", "--edition", "2024", "-C", "opt-level=3", HERE / "ceilings.rs", "-o", data / "ceilings"], check=True)
    return json.loads(subprocess.run([data / "ceilings"], capture_output=True, text=True, check=True).stdout)


def command(side, data, model, workload, args):
    trace = data / f"{model}-{workload}.jsonl"
    name, _, option = side.partition("-")
    if name == "gristmill":
        return [args.gristmill, "bench", "--model", data / model, "--trace", trace, "--ignore-eos", "--warm-up", "1",
                "--precision", option or "int8", "--json"]
    if name == "transformers":
        return [PYTHON, HERE / "peer_transformers.py", data / model, trace]
    group0 = ["--property", "DYNAMIC_QUANTIZATION_GROUP_SIZE=0"] if option == "group0" else []
    return [PYTHON, HERE / "peer_openvino.py", data / f"{model}-openvino", trace, *group0]


def run(line):
    done = subprocess.run([str(part) for part in line], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, line))} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    # A path of this machine.
    figures.pop("model", None)
    return figures


def scale_up(data, model, workload, args):
    """Writes a trace that takes gristmill long enough; returns its scale."""
    figures = run(command("gristmill", data, model, workload, args))
    scale = max(1, math.ceil(1.1 * args.least_seconds / figures["seconds"])) if figures["seconds"] < args.least_seconds else 1
    subprocess.run([PYTHON, "-c", "import make, pathlib, sys; make.write_trace(pathlib.Path(sys.argv[1]), *sys.argv[2:4], "
                    "int(sys.argv[4]))", data, model, workload, str(scale)], check=True, cwd=HERE)
    return scale


def processor():
    info = pathlib.Path("/proc/cpuinfo").read_text()
    flags = next(line for line in info.splitlines() if line.startswith("flags")).split()
    name = next(line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name"))
    sets = [f for f in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16") if f in flags]
    return f"{name}, {os.cpu_count()} threads, {' '.join(sets)}, load {os.getloadavg()[0]:.2f}"


def table(title, columns, sides, cell):
    print(f"\n{title}\n\n| | " + " | ".join(f"{m} {w}" for m, w in columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for side in sides:
        print(f"| {side} | " + " | ".join(cell(side, *column) for column in columns) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--models", default="l30m,q05b")
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least-seconds", type=float, default=10)
    parser.add_argument("--gristmill", type=pathlib.Path, default=ROOT / "target/release/gristmill")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--svg", type=pathlib.Path)
    args = parser.parse_args()
    columns = [(model, workload) for model in args.models.split(",") for workload in args.workloads.split(",")]
    sides = [*args.peers.split(","), "gristmill"]
    install()
    args.data.mkdir(parents=True, exist_ok=True)
    prepare(args.data, args.models.split(","), sides)
    machine = {"processor": processor(), "ceilings": ceilings(args.data)}
    print(json.dumps(machine), flush=True)
    scales = {column: scale_up(args.data, *column, args) for column in columns}
    found = {}
    for round_ in range(args.rounds):
        for model, workload in columns:
            for side in sides:
                figures = run(command(side, args.data, model, workload, args))
                found.setdefault((model, workload, side), []).append(figures)
                print(f"round {round_ + 1}: {model} {workload} {side}: {figures['total_tokens_per_second']:,.0f} tokens/s, "
                      f"{figures['seconds']:.1f} s, load {os.getloadavg()[0]:.2f}", file=sys.stderr, flush=True)

    def median(side, column, name):
        return statistics.median(figures[name] for figures in found[*column, side])

    def total(side, *column):
        return (f"{median(side, column, 'total_tokens_per_second'):,.0f} "
                f"({median(side, column, 'peak_memory_bytes') / 1e6:,.0f})")

    def ratio(column):
        peers = [median(side, column, "total_tokens_per_second") for side in sides if not side.startswith("gristmill")]
        return median("gristmill", column, "total_tokens_per_second") / max(peers)

    table("Total tokens/s (peak memory, MB)", columns, sides, total)
    print("| **gristmill / best peer** | " + " | ".join(f"**{ratio(column):.2f}**" for column in columns) + " |")
    table("Rows/s", columns, sides, lambda side, *column: f"{median(side, column, 'requests_per_second'):.1f}")
    rows = {column: found[*column, "gristmill"][0] for column in columns}
    print("\nRows: " + ", ".join(f"{m} {w} {rows[m, w]['requests']:,}" for m, w in columns))
    print("Of gristmill's computed tokens/s: " + ", ".join(
        f"{m} {w} {median('gristmill', (m, w), 'computed_tokens') / median('gristmill', (m, w), 'seconds'):,.0f}"
        for m, w in columns))
    if args.svg:
        groups = [(f"{m} {w}", [median(side, (m, w), "total_tokens_per_second") /
                                median("gristmill", (m, w), "total_tokens_per_second") for side in sides])
                  for m, w in columns]
        args.svg.write_text(bars("Total tokens a second, of gristmill's", sides, groups))
    if args.out:
        runs = [{"model": m, "workload": w, "side": s, "scale": scales[m, w], "runs": r} for (m, w, s), r in found.items()]
        args.out.write_text(json.dumps({**machine, "found": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
