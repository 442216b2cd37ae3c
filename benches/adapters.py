"""Measures what LoRA adapters beside a model cost: requests of the model alone, and of it and three adapters in turn.

    cargo build --release && python3 benches/adapters.py --data DIR [--models q05b] [--workloads W1,W2,W3] [--rounds 3] [--out FILE.json]

Models and traces are those of benches/peers/run.py, which is to be run first, with the same --data; the adapters are of random numbers,
of rank 16, for all projections of attention and MLPs. Both sides run the same requests, one after the other, in INT8. An
adapter that is merged while the model is loaded (`run`, `worker --adapter`) costs nothing: its model is as fast as the model alone.
"""

import json
import pathlib
import random
import statistics
import struct
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))
from common import ROOT, bench, columns_of, options, run  # noqa: E402
from stamp import stamp  # noqa: E402

COUNT, RANK = 3, 16


def matrices(config):
    """Name, rows and columns of each projection."""
    hidden, mlp, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        yield from [(at + "self_attn.q_proj", q, hidden), (at + "self_attn.k_proj", kv, hidden),
                    (at + "self_attn.v_proj", kv, hidden), (at + "self_attn.o_proj", hidden, q),
                    (at + "mlp.gate_proj", mlp, hidden), (at + "mlp.up_proj", mlp, hidden), (at + "mlp.down_proj", hidden, mlp)]


def write_adapter(model, folder, seed):
    """An adapter in PEFT's layout, in BF16. Its numbers are small, so that greedy texts stay as long."""
    if (folder / "adapter_config.json").exists():
        return
    folder.mkdir(exist_ok=True)
    draw = random.Random(seed)
    # Signs at random: 0.01 and -0.01 in BF16.
    signs = [struct.pack("<H", 0x3C24), struct.pack("<H", 0xBC24)]
    header, blobs, at = {}, [], 0
    for name, rows, columns in matrices(json.loads((model / "config.json").read_text())):
        for part, shape in (("A", [RANK, columns]), ("B", [rows, RANK])):
            blob = b"".join(draw.choices(signs, k=shape[0] * shape[1]))
            header[f"base_model.model.{name}.lora_{part}.weight"] = {
                "dtype": "BF16", "shape": shape, "data_offsets": [at, at + len(blob)]}
            blobs.append(blob)
            at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(blobs)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear", "bias": "none"}
    # Last: an adapter with a configuration is whole.
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main():
    args = options(__doc__, "q05b").parse_args()
    columns = columns_of(args)
    adapters = {model: [args.data / f"{model}-adapter{i}" for i in range(COUNT)] for model in args.models.split(",")}
    for model, folders in adapters.items():
        for seed, folder in enumerate(folders):
            write_adapter(args.data / model, folder, seed)
    machine = stamp(ROOT)
    print(json.dumps(machine), flush=True)
    found = {}
    for round_ in range(args.rounds):
        for model, workload in columns:
            trace = args.data / f"{model}-{workload}.jsonl"
            mixed = [part for folder in adapters[model] for part in ("--mix-adapter", folder)]
            for side, more in (("model alone", []), ("with three adapters", mixed)):
                figures = run(bench(args, model, trace, "--precision", "int8", *more))
                found.setdefault((model, workload, side), []).append(figures)
                print(f"round {round_ + 1}: {model} {workload} {side}: {figures['total_tokens_per_second']:,.0f} tokens/s",
                      file=sys.stderr, flush=True)

    def speed(side, column):
        return statistics.median(figures["total_tokens_per_second"] for figures in found[*column, side])

    sides = ("model alone", "with three adapters")
    ratios = [f"**{speed(sides[1], column) / speed(sides[0], column):.2f}**" for column in columns]
    table = [["total tokens/s", *(" ".join(column) for column in columns)],
             *([side, *(f"{speed(side, column):,.0f}" for column in columns)] for side in sides), ["**ratio**", *ratios]]
    print("\n".join(" | ".join(row) for row in table))
    if args.out:
        runs = [{"model": m, "workload": w, "side": s, "runs": r} for (m, w, s), r in found.items()]
        args.out.write_text(json.dumps({**machine, "found": runs, "tables": [table]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
