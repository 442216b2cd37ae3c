"""Prints what `cargo bench --bench kernels` has measured, as the tables of benches/README.md, beside the machine's ceilings.

Ceilings are measured now, by peers/ceilings.rs: leave the machine alone until this has ended.
"""

import json
import pathlib
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def ceilings():
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "ceilings"
        source = ROOT / "benches/peers/ceilings.rs"
        subprocess.run(["rustc", "--edition", "2024", "-C", "opt-level=3", source, "-o", program], check=True)
        return json.loads(subprocess.run([program], check=True, capture_output=True).stdout)


def measured():
    """Of each kernel: group, shape, rows or length, 10^9 bytes or operations a second, and which of the two."""
    for path in sorted((ROOT / "target/criterion").glob("*/*/*/new/benchmark.json")):
        about = json.loads(path.read_text())
        nanoseconds = json.loads((path.parent / "estimates.json").read_text())["median"]["point_estimate"]
        (unit, amount), = about["throughput"].items()
        yield about["group_id"], about["function_id"], int(about["value_str"]), amount / nanoseconds, unit == "Bytes"


def main():
    limits = ceilings()
    print(", ".join(f"{name} {value}" for name, value in limits.items()))
    of_arithmetic = {"int8": "int8_gops", "bf16": "bf16_gflops", "f32": "f32_gflops", "attention int8": "int8_gops"}
    groups = {}
    for group, shape, size, rate, is_bytes in measured():
        precision = group.split(",")[0]
        limit = limits.get("read_gb_per_second" if is_bytes else of_arithmetic[precision])
        share = f" ({rate / limit:.0%})" if limit else ""
        unit = " GB/s" if is_bytes else ""
        groups.setdefault(group, {}).setdefault(shape, {})[size] = f"{rate:.{1 if is_bytes else 0}f}{unit}{share}"
    for group, shapes in groups.items():
        sizes = sorted({size for cells in shapes.values() for size in cells})
        print(f"\n| {group} |" + "".join(f" {size} |" for size in sizes))
        print("|---|" + "---|" * len(sizes))
        for shape, cells in shapes.items():
            print(f"| {shape} |" + "".join(f" {cells.get(size, '')} |" for size in sizes))


if __name__ == "__main__":
    main()
