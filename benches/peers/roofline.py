"""Each column of the peers' benchmark against what the machine could do at most.

    .venv/bin/python benches/peers/roofline.py [--found FILE.json]

FILE.json is what run.py wrote (benches/results/peers.json); its traces are made again, by make.py. Arithmetic is that of all linear
layers, of the head for each generated token, and of attention (4 operations a query head's dimension and position looked at), at the
ceiling of INT8 products in registers. Memory is all weights once a step, and keys and values once a step and sequence, at the ceiling
of reading DRAM, though a part of it comes from caches. The limit is the larger of the two. `prefix` tokens that a prompt shares are
computed once. Of the last layer, a prompt's tokens but the last need their keys and values alone.
"""

import argparse
import json
import pathlib
import statistics
import tempfile

import make

FOUND = pathlib.Path(__file__).resolve().parents[1] / "results/peers.json"


def shape(config):
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    layer = hidden * (heads + 2 * kv) * dim + heads * dim * hidden + 3 * hidden * inner
    layers = config["num_hidden_layers"]
    return {
        "linear": layer * layers, "last": layer - 2 * hidden * kv * dim, "head": hidden * config["vocab_size"], "pair": 4 * heads * dim * layers, "layers": layers,
        # Bytes, and scales.
        "kv": layers * kv * (2 * dim + 12),
    }


def work(trace, s):
    """Operations and bytes of keys and values that a trace needs."""
    requests = [json.loads(line) for line in trace.read_text().splitlines()]
    first = requests[0]["prompt_token_ids"]
    linear = dropped = head = pairs = dropped_pairs = read = 0
    for i, request in enumerate(requests):
        prompt, out = request["prompt_token_ids"], request["max_tokens"]
        shared = 0
        if i > 0:
            while shared < min(len(prompt), len(first)) and prompt[shared] == first[shared]:
                shared += 1
            shared = shared // 16 * 16
        length, end = len(prompt), len(prompt) + out - 1
        linear += end - shared
        dropped += length - 1 - shared
        head += out
        # A token at position p looks at p + 1 positions.
        pairs += (end * (end + 1) - shared * (shared + 1)) // 2
        dropped_pairs += ((length - 1) * length - shared * (shared + 1)) // 2
        read += sum(range(length + 1, end + 1)) + length
    return {"linear": 2 * (linear * s["linear"] - dropped * s["last"]), "head": 2 * head * s["head"],
            "attention": (pairs - dropped_pairs / s["layers"]) * s["pair"], "kv": read * s["kv"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--found", type=pathlib.Path, default=FOUND)
    args = parser.parse_args()
    found = json.loads(args.found.read_text())
    peak, read = found["ceilings"]["int8_gops"] * 1e9, found["ceilings"]["read_gb_per_second"] * 1e9
    columns, scales = {}, {}
    for entry in found["found"]:
        columns.setdefault((entry["model"], entry["workload"]), {})[entry["side"]] = entry["runs"]
        if entry["side"] == "gristmill":
            scales[entry["model"], entry["workload"]] = entry["scale"]
    print("| | linear s | head s | attention s | weights s | keys, values s | limit s | gristmill s | share | best peer's share |")
    print("|---" * 10 + "|")
    for (model, workload), sides in columns.items():
        s = shape(make.MODELS[model])
        with tempfile.TemporaryDirectory() as data:
            make.write_trace(pathlib.Path(data), model, workload, scales[model, workload])
            needs = work(pathlib.Path(data) / f"{model}-{workload}.jsonl", s)
        own = sides["gristmill"]
        seconds = statistics.median(run["seconds"] for run in own)
        arithmetic = [needs[part] / peak for part in ("linear", "head", "attention")]
        steps = own[0]["batches"]["steps"]
        memory = [steps * (s["linear"] + s["head"]) / read, needs["kv"] / read]
        limit = max(sum(arithmetic), sum(memory))
        # A slow peer may have run fewer rows.
        peers = [statistics.median(run["seconds"] / run["requests"] for run in runs) * own[0]["requests"]
                 for side, runs in sides.items() if side != "gristmill"]
        cells = [*(f"{x:.2f}" for x in [*arithmetic, *memory, limit, seconds]), f"{limit / seconds:.0%}",
                 f"{limit / min(peers):.0%}"]
        print(f"| {model} {workload} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
