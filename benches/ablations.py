"""What each part of the engine is worth, on gristmill alone: a table and a picture.

    cargo build --release && python3 benches/ablations.py --data DIR [--models l30m] [--rounds 3] [--out FILE.json] [--svg FILE.svg]

DIR is where benches/peers/run.py has made its models and traces. Each round runs every variant in turn on every workload; the
table shows medians of total tokens/s as shares of what the whole engine does in INT8.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benches/peers"))
from picture import bars  # noqa: E402

INT8 = ["--precision", "int8"]
VARIANTS = {
    "static batches": [*INT8, "--without", "refilling"],
    "unsorted": [*INT8, "--without", "sorting"],
    "prefixes not shared": [*INT8, "--without", "sharing"],
    "prefill apart": [*INT8, "--without", "mixing"],
    "none of the four": [*INT8, "--without", "refilling,sorting,sharing,mixing"],
    "keys, values BF16": [*INT8, "--kv-cache", "bf16"],
    "INT8 without VNNI": [*INT8, "--instructions", "avx512"],
    "INT8 on AVX2": [*INT8, "--instructions", "avx2"],
    "BF16": ["--precision", "bf16"],
    "F32": ["--precision", "f32"],
    "all, INT8": INT8,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--models", default="l30m")
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gristmill", type=pathlib.Path, default=ROOT / "target/release/gristmill")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--svg", type=pathlib.Path)
    args = parser.parse_args()
    columns = [(m, w) for m in args.models.split(",") for w in args.workloads.split(",")]
    found = {}
    for round_ in range(args.rounds):
        for model, workload in columns:
            for name, options in VARIANTS.items():
                line = [args.gristmill, "bench", "--model", args.data / model, "--trace",
                        args.data / f"{model}-{workload}.jsonl", "--ignore-eos", "--warm-up", "1", "--json", *options]
                done = subprocess.run(line, capture_output=True, text=True, check=True)
                figures = json.loads(done.stdout.splitlines()[-1])
                # A path of this machine.
                figures.pop("model")
                found.setdefault((model, workload, name), []).append(figures)
                print(f"round {round_ + 1}: {model} {workload} {name}: {figures['total_tokens_per_second']:,.0f} tokens/s",
                      file=sys.stderr, flush=True)

    def rate(column, name):
        return statistics.median(figures["total_tokens_per_second"] for figures in found[*column, name])

    print("| | " + " | ".join(f"{m} {w}" for m, w in columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    whole = list(VARIANTS)[-1]
    for name in VARIANTS:
        cells = [f"{rate(c, name):,.0f}" if name == whole else f"{rate(c, name) / rate(c, whole):.2f}" for c in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if args.svg:
        groups = [(f"{m} {w}", [rate((m, w), name) / rate((m, w), whole) for name in VARIANTS]) for m, w in columns]
        args.svg.write_text(bars("Total tokens a second, of the whole engine's in INT8", list(VARIANTS), groups))
    if args.out:
        runs = [{"model": m, "workload": w, "variant": v, "runs": r} for (m, w, v), r in found.items()]
        args.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
