"""What it costs to hold answers to a shape: the same prompts with and without one, in turn, and the price of a generated token.

    cargo build --release && benches/peers/.venv/bin/python benches/constrained.py --data DIR [--models l30m,q05b] [--rounds 3]
        [--out FILE.json]

DIR is where benches/peers/run.py (or make.py beside it) put the models. Two pairs:

- W1 of make.py (labelling, greedy) free, 16 tokens a row, and with `choice`: 256 labels of 16 tokens each, which part in each of
  their first eight tokens, so that eight tokens are chosen one by one and eight follow from them;
- W2 (synthetic data, sampled) with `json_schema`: an object of strings, a number, one of eight words and a list; and free, as
  many tokens a row as the objects have on average.

A random model knows no JSON: what it writes has the schema's form and no sense, and strings are mostly as long as they may be.
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

ROWS = {"l30m": {"W1": 2048, "W2": 320}, "q05b": {"W1": 128, "W2": 64}}
SCHEMA = {
    "type": "object", "additionalProperties": False,
    "properties": {
        "language": {"const": "en"},
        "title": {"type": "string", "minLength": 10, "maxLength": 80},
        "category": {"enum": ["account_access", "billing", "refund", "shipping_delay", "shipping_damage", "defect", "technical",
                              "other"]},
        "rating": {"type": "integer", "minimum": 1, "maximum": 5},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 20}, "minItems": 2, "maxItems": 4},
        "description": {"type": "string", "minLength": 400, "maxLength": 700},
        "resolved": {"type": "boolean"},
    },
}
SCHEMA["required"] = list(SCHEMA["properties"])


def labels(vocabulary):
    """256 texts of 16 words, a token each; every two part at one of the first eight."""
    known = set(make.vocabulary(vocabulary)[0])
    parts = ["".join(word) for word in make.words(2000)]
    whole = [word for word in parts if make.SPACE + word in known]
    pairs = [whole[2 * i:2 * i + 2] for i in range(8)]
    return [" ".join([pairs[i][label >> i & 1] for i in range(8)] + whole[16 + 8 * label % 800:][:8]) for label in range(256)]


def write(path, requests):
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--models", default="l30m,q05b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gristmill", type=pathlib.Path, default=ROOT / "target/release/gristmill")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    models = args.models.split(",")
    make.make(args.data, models)
    found = []
    for name in models:
        size = make.MODELS[name]["vocab_size"]
        for workload, shape in (("W1", {"choice": labels(size)}), ("W2", {"json_schema": SCHEMA})):
            requests = list(make.trace(workload, ROWS[name][workload], size))
            traces = {key: args.data / f"{name}-{workload}-{key}.jsonl" for key in ("free", "shaped")}
            most = 16 if workload == "W1" else 1024
            write(traces["shaped"], ({**request, **shape, "max_tokens": most} for request in requests))
            # Under a shape an end of sequence is an end all the same.
            line = {key: bench(args, name, trace, "--precision", "int8") for key, trace in traces.items()}
            first = run(line["shaped"])
            length = round(first["generated_tokens"] / len(requests))
            write(traces["free"], ({**request, "max_tokens": length} for request in requests))
            runs = {"free": [], "shaped": []}
            for _ in range(args.rounds):
                for key in runs:
                    runs[key].append(run(line[key]))
            micros = {key: statistics.median(1e6 * figures["seconds"] / figures["generated_tokens"] for figures in of)
                      for key, of in runs.items()}
            tokens = {key: of[0]["generated_tokens"] / len(requests) for key, of in runs.items()}
            ratio = micros["shaped"] / micros["free"]
            print(f"| {name} {workload} {next(iter(shape))} | {tokens['free']:.1f} | {tokens['shaped']:.1f} | {micros['free']:.1f} "
                  f"| {micros['shaped']:.1f} | {ratio:.2f} |", flush=True)
            found.append({"model": name, "workload": workload, "rows": len(requests), "ratio": ratio, "runs": runs})
    if args.out:
        args.out.write_text(json.dumps(stamp(ROOT) | {"found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
