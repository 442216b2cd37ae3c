"""Does the engine's cost grow as the work grows? W1 of peers/make.py (labelling, 30-million-parameter model, INT8) with ever more rows.

    cargo build --release && benches/peers/.venv/bin/python benches/growth.py --data DIR [--rows 256,4096,65536] [--rounds 3]
        [--out FILE.json]

DIR is where benches/peers/run.py (or make.py beside it) put the models. Sizes take turns, the largest runs once. Printed are rows a
second, planning's share of the time, and peak memory less what the trace itself takes (4 bytes a prompt token: `bench` holds the
whole trace).
"""

import argparse
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "peers"))
import make  # noqa: E402
from common import ROOT, bench, run  # noqa: E402
from stamp import stamp  # noqa: E402

MODEL = "l30m"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--rows", default="256,4096,65536")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gristmill", type=pathlib.Path, default=ROOT / "target/release/gristmill")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    make.make(args.data, [MODEL])
    sizes = [int(size) for size in args.rows.split(",")]
    traces = {}
    for size in sizes:
        traces[size] = args.data / f"{MODEL}-W1-{size}.jsonl"
        with open(traces[size], "w") as file:
            for request in make.trace("W1", size, make.MODELS[MODEL]["vocab_size"]):
                file.write(json.dumps(request) + "\n")
    found = {size: [] for size in sizes}
    for round_ in range(args.rounds):
        for size in sizes:
            if round_ > 0 and size == max(sizes):
                continue
            figures = run(bench(args, MODEL, traces[size], "--precision", "int8"))
            found[size].append(figures)
            print(f"{size} rows: {size / figures['seconds']:.1f} rows/s", file=sys.stderr, flush=True)
    print("| rows | rows/s | planning | peak memory less the trace, MB |\n|---|---|---|---|")
    for size, runs in found.items():
        rate = statistics.median(size / figures["seconds"] for figures in runs)
        planning = statistics.median(dict(figures["seconds_by_operation"])["plan"] / figures["seconds"] for figures in runs)
        memory = statistics.median(figures["peak_memory_bytes"] - 4 * figures["prompt_tokens"] for figures in runs)
        print(f"| {size:,} | {rate:.1f} | {planning:.2%} | {memory / 1e6:,.0f} |")
    if args.out:
        args.out.write_text(json.dumps(stamp(ROOT) | {"found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
