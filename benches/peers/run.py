"""Measures gristmill and its peers on this machine, one after the other, and prints a table.

    cargo build --release && python3 benches/peers/run.py --data DIR [--models l30m,q05b] [--workloads W1,W2,W3]
        [--peers openvino,openvino-group0,transformers] [--rounds 3] [--scale N] [--precision int8] [--out FILE.json]

The first run installs the peers into .venv/ beside this file (several GB), makes the two random models and exports them for
OpenVINO. Then each round runs every peer and gristmill in turn on every workload; the table shows medians, and how many times
as fast gristmill is. `--scale` repeats the workloads' rows: choose it so that the fastest side runs 10 s or more.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

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


def export(data, model):
    """The checkpoint in OpenVINO's format, weights in INT8, symmetric."""
    target = data / f"{model}-openvino"
    if (target / "openvino_model.bin").exists():
        return
    subprocess.run([PYTHON.parent / "optimum-cli", "export", "openvino", "--model", data / model, "--task",
                    "text-generation-with-past", "--weight-format", "int8", "--sym", target], check=True)


def command(side, data, model, workload, args):
    trace = data / f"{model}-{workload}.jsonl"
    if side == "gristmill":
        return [args.gristmill, "bench", "--model", data / model, "--trace", trace, "--ignore-eos", "--precision",
                args.precision, "--json"]
    if side == "transformers":
        return [PYTHON, HERE / "peer_transformers.py", data / model, trace]
    group0 = ["--property", "DYNAMIC_QUANTIZATION_GROUP_SIZE=0"] if side == "openvino-group0" else []
    return [PYTHON, HERE / "peer_openvino.py", data / f"{model}-openvino", trace, *group0]


def run(line):
    done = subprocess.run([str(part) for part in line], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, line))} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def processor():
    info = pathlib.Path("/proc/cpuinfo").read_text()
    flags = next(line for line in info.splitlines() if line.startswith("flags")).split()
    name = next(line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name"))
    sets = [f for f in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16") if f in flags]
    return f"{name}, {os.cpu_count()} threads, {' '.join(sets)}, load {os.getloadavg()[0]:.2f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--models", default="l30m,q05b")
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--gristmill", type=pathlib.Path, default=ROOT / "target/release/gristmill")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    models, workloads = args.models.split(","), args.workloads.split(",")
    sides = [*args.peers.split(","), "gristmill"]
    print(processor(), flush=True)
    install()
    args.data.mkdir(parents=True, exist_ok=True)
    subprocess.run([PYTHON, HERE / "make.py", "--data", args.data, "--models", args.models, "--scale", str(args.scale)],
                   check=True)
    if any(side.startswith("openvino") for side in sides):
        for model in models:
            export(args.data, model)
    found = {}
    for round_ in range(args.rounds):
        for model in models:
            for workload in workloads:
                for side in sides:
                    figures = run(command(side, args.data, model, workload, args))
                    found.setdefault((model, workload, side), []).append(figures)
                    print(f"round {round_ + 1}: {model} {workload} {side}: {figures['total_tokens_per_second']:,.0f} tokens/s, "
                          f"{figures['seconds']:.1f} s", file=sys.stderr, flush=True)

    def median(model, workload, side, name="total_tokens_per_second"):
        return statistics.median(figures[name] for figures in found[model, workload, side])

    print("| side | " + " | ".join(f"{m} {w}" for m in models for w in workloads) + " |")
    print("|---" * (1 + len(models) * len(workloads)) + "|")
    for side in sides:
        cells = [f"{median(m, w, side):,.0f} ({median(m, w, side, 'peak_memory_bytes') / 1e6:,.0f})"
                 for m in models for w in workloads]
        print(f"| {side} | " + " | ".join(cells) + " |")
    ratios = []
    for model in models:
        for workload in workloads:
            best = max(median(model, workload, side) for side in sides if side != "gristmill")
            ratios.append(f"{median(model, workload, 'gristmill') / best:.2f}")
    print("| gristmill / best peer | " + " | ".join(ratios) + " |")
    if args.out:
        rows = [{"model": m, "workload": w, "side": s, "runs": runs} for (m, w, s), runs in found.items()]
        args.out.write_text(json.dumps({"machine": processor(), "scale": args.scale, "found": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
