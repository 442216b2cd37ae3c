"""Measures gristmill and its peers on this machine, one after the other, and prints tables.

    cargo build --release && python3 benches/peers/run.py --data DIR [--models l30m,q05b] [--workloads W1,W2,W3]
        [--peers openvino,openvino-group0,llamacpp,transformers] [--rounds 3] [--least-seconds 10] [--out FILE.json]
        [--svg FILE.svg]

The first run installs the peers into .venv/ beside this file (several GB; llama.cpp is compiled for this machine, which needs a
C++ compiler and takes minutes), makes the two random models (make.py says what they and the workloads are) and writes them in the
peers' formats. Rows are repeated from the same distribution until gristmill runs for `--least-seconds`; transformers, which is
slow, runs the rows of scale 1 only. Then each round runs every peer and gristmill in turn on every workload; tables show medians,
and how many times as fast as the fastest peer gristmill is. Every side runs a first request before its clock starts.

`openvino-int4` has weights in 4 bits, symmetric, in groups of 128; `gristmill-w4a8` runs a checkpoint that is quantized so.
`openvino-group0` is OpenVINO with `DYNAMIC_QUANTIZATION_GROUP_SIZE=0`; `llamacpp` has weights in Q8_0, `llamacpp-q4_0`,
`llamacpp-q4_k` and `llamacpp-bf16` in other formats; `gristmill-f32` and `gristmill-bf16` are gristmill in other precisions.
"""

import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

from common import ROOT, bench, columns_of, options, run, table_head
from picture import bars

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from stamp import stamp  # noqa: E402

PYTHON = HERE / ".venv/bin/python"
PEERS = ("openvino", "openvino-group0", "llamacpp", "transformers")
# These run the rows of scale 1, whatever the others run.
SLOW = ("transformers",)


def install():
    wanted = (HERE / "requirements.txt").read_text()
    installed = HERE / ".venv/requirements.txt"
    if installed.exists() and installed.read_text() == wanted:
        return
    if not any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++")):
        raise SystemExit("llama.cpp is compiled while it is installed: a C++ compiler is needed (Debian: apt-get install g++)")
    subprocess.run([sys.executable, "-m", "venv", HERE / ".venv"], check=True)
    # For this machine's instructions; pip brings CMake and Ninja where they are missing. GCC 12 takes all but the first 8 bytes of
    # what `_tile_loadconfig` reads for unused and drops the stores to them: without these flags, AMX ends in an illegal instruction.
    flags = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CXXFLAGS": "-fno-tree-dse -fno-dse"}
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "-r", HERE / "requirements.txt"], check=True, env=os.environ | flags)
    installed.write_text(wanted)


def prepare(data, models, sides):
    """Models, traces of scale 1, and the checkpoints in the peers' formats; OpenVINO's with weights in INT8, symmetric."""
    # With numpy, which only the peers' environment has.
    four_bits = ["--four-bits"] if "gristmill-w4a8" in sides else []
    subprocess.run([PYTHON, HERE / "make.py", "--data", data, "--models", ",".join(models), *four_bits], check=True)
    for model in models:
        for side in sides:
            target = data / f"{model}-{openvino(side)}"
            if side.startswith("openvino") and not (target / "openvino_model.bin").exists():
                subprocess.run([PYTHON.parent / "optimum-cli", "export", "openvino", "--model", data / model, "--task",
                                "text-generation-with-past", *OPENVINO[openvino(side)], "--sym", target], check=True)
            if side.startswith("llamacpp"):
                subprocess.run([PYTHON, HERE / "gguf_model.py", data / model, data / f"{model}-{weights(side)}.gguf", "--type",
                                weights(side)], check=True)


# Folders of OpenVINO's checkpoints, and how their weights are quantized.
OPENVINO = {"openvino": ["--weight-format", "int8"],
            "openvino-int4": ["--weight-format", "int4", "--group-size", "128", "--ratio", "1.0"]}


def openvino(side):
    """The folder of OpenVINO's weights."""
    return side if side in OPENVINO else "openvino"


def weights(side):
    """The format of llama.cpp's weights."""
    return side.partition("-")[2] or "q8_0"


def ceilings(data):
    """What ceilings.rs finds."""
    subprocess.run(["rustc", "--edition", "2024", "-C", "opt-level=3", HERE / "ceilings.rs", "-o", data / "ceilings"], check=True)
    return json.loads(subprocess.run([data / "ceilings"], capture_output=True, text=True, check=True).stdout)


def command(side, args, model, workload):
    name, _, option = side.partition("-")
    trace = args.data / f"{model}-{workload}{'-scale1' if name in SLOW else ''}.jsonl"
    if name == "gristmill":
        folder = f"{model}-w4" if option == "w4a8" else model
        return bench(args, folder, trace, "--precision", option or "int8")
    if name == "transformers":
        return [PYTHON, HERE / "peer_transformers.py", args.data / model, trace]
    if name == "llamacpp":
        return [PYTHON, HERE / "peer_llamacpp.py", args.data / f"{model}-{weights(side)}.gguf", trace]
    group0 = ["--property", "DYNAMIC_QUANTIZATION_GROUP_SIZE=0"] if option == "group0" else []
    return [PYTHON, HERE / "peer_openvino.py", args.data / f"{model}-{openvino(side)}", trace, *group0]


def scale_up(args, model, workload):
    """Writes a trace that takes gristmill long enough, beside that of scale 1; returns its scale."""
    trace = args.data / f"{model}-{workload}.jsonl"
    shutil.copyfile(trace, args.data / f"{model}-{workload}-scale1.jsonl")
    figures = run(command("gristmill", args, model, workload))
    scale = max(1, math.ceil(1.1 * args.least_seconds / figures["seconds"])) if figures["seconds"] < args.least_seconds else 1
    subprocess.run([PYTHON, "-c", "import make, pathlib, sys; make.write_trace(pathlib.Path(sys.argv[1]), *sys.argv[2:4], "
                    "int(sys.argv[4]))", args.data, model, workload, str(scale)], check=True, cwd=HERE)
    return scale


def table(title, columns, sides, cell):
    print(f"\n{title}\n")
    table_head(columns)
    for side in sides:
        print(f"| {side} | " + " | ".join(cell(side, *column) for column in columns) + " |")


def main():
    parser = options(__doc__, "l30m,q05b")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--least-seconds", type=float, default=10)
    args = parser.parse_args()
    columns = columns_of(args)
    sides = [*args.peers.split(","), "gristmill"]
    install()
    args.data.mkdir(parents=True, exist_ok=True)
    prepare(args.data, args.models.split(","), sides)
    machine = stamp(ROOT) | {"load": os.getloadavg()[0], "ceilings": ceilings(args.data)}
    print(json.dumps(machine), flush=True)
    scales = {column: scale_up(args, *column) for column in columns}
    found = {}
    for round_ in range(args.rounds):
        for model, workload in columns:
            for side in sides:
                figures = run(command(side, args, model, workload))
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
    rows = {side: ", ".join(f"{m} {w} {found[m, w, side][0]['requests']:,}" for m, w in columns) for side in sides}
    print(f"\nRows: {rows['gristmill']}")
    for side in sides:
        if rows[side] != rows["gristmill"]:
            print(f"Fewer, from the same distribution, of {side}: {rows[side]}")
    print("Of gristmill's computed tokens/s: " + ", ".join(
        f"{m} {w} {median('gristmill', (m, w), 'computed_tokens') / median('gristmill', (m, w), 'seconds'):,.0f}"
        for m, w in columns))
    if args.svg:
        groups = [(f"{m} {w}", [median(side, (m, w), "total_tokens_per_second") /
                                median("gristmill", (m, w), "total_tokens_per_second") for side in sides])
                  for m, w in columns]
        args.svg.write_text(bars("Total tokens a second, of gristmill's", sides, groups))
    if args.out:
        runs = [{"model": m, "workload": w, "side": s, "scale": 1 if s in SLOW else scales[m, w], "runs": r}
                for (m, w, s), r in found.items()]
        args.out.write_text(json.dumps({**machine, "found": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
