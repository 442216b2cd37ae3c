"""What each part of the engine is worth, on gristmill alone: a table and a picture.

    cargo build --release && python3 benches/ablations.py --data DIR [--models l30m] [--rounds 3] [--out FILE.json] [--svg FILE.svg]

DIR is where benches/peers/run.py has made its models and traces. Each round runs every variant in turn on every workload; the
table shows medians of total tokens/s as shares of what the whole engine does in INT8.
"""

import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "peers"))
from common import ROOT, bench, columns_of, options, run, table_head  # noqa: E402
from picture import bars  # noqa: E402
from stamp import stamp  # noqa: E402

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
    args = options(__doc__, "l30m").parse_args()
    columns = columns_of(args)
    found = {}
    for round_ in range(args.rounds):
        for model, workload in columns:
            for name, extra in VARIANTS.items():
                figures = run(bench(args, model, args.data / f"{model}-{workload}.jsonl", *extra))
                found.setdefault((model, workload, name), []).append(figures)
                print(f"round {round_ + 1}: {model} {workload} {name}: {figures['total_tokens_per_second']:,.0f} tokens/s",
                      file=sys.stderr, flush=True)

    def rate(column, name):
        return statistics.median(figures["total_tokens_per_second"] for figures in found[*column, name])

    table_head(columns)
    whole = list(VARIANTS)[-1]
    for name in VARIANTS:
        cells = [f"{rate(c, name):,.0f}" if name == whole else f"{rate(c, name) / rate(c, whole):.2f}" for c in columns]
        print(f"| {name} | " + " | ".join(cells) + " |")
    if args.svg:
        groups = [(f"{m} {w}", [rate((m, w), name) / rate((m, w), whole) for name in VARIANTS]) for m, w in columns]
        args.svg.write_text(bars("Total tokens a second, of the whole engine's in INT8", list(VARIANTS), groups))
    if args.out:
        runs = [{"model": m, "workload": w, "variant": v, "runs": r} for (m, w, v), r in found.items()]
        args.out.write_text(json.dumps(stamp(ROOT) | {"found": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
