"""What run.py and benches/ablations.py have in common: options, columns, one measured run, the head of a table."""

import argparse
import json
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]


def options(description, models):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--models", default=models)
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gristmill", type=pathlib.Path, default=ROOT / "target/release/gristmill")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--svg", type=pathlib.Path)
    return parser


def columns_of(args):
    return [(model, workload) for model in args.models.split(",") for workload in args.workloads.split(",")]


def bench(args, model, trace, *options):
    """The command that measures gristmill."""
    return [args.gristmill, "bench", "--model", args.data / model, "--trace", trace, "--ignore-eos", "--warm-up", "1", "--json",
            *options]


def run(line):
    """The figures that a measured run prints last."""
    done = subprocess.run([str(part) for part in line], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, line))} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    figures = json.loads(done.stdout.splitlines()[-1])
    # A path of this machine.
    figures.pop("model", None)
    return figures


def table_head(columns):
    print("| | " + " | ".join(f"{m} {w}" for m, w in columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
