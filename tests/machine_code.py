#!/usr/bin/env python3
"""What three versions of NVIDIA's compiler make of the kernels for Hopper: how wide they load and store, which instructions multiply, how many
registers they take, and whether the assembler has anything to say. Held against tests/snapshots/machine_code.txt.

    .venv/bin/python tests/machine_code.py --install      NVRTC and nvdisasm from PyPI into .venv/nvrtc/
    .venv/bin/python tests/machine_code.py [--update]

The user's NVRTC is none of ours, so a count that holds for one version shows little. No card is needed. What was counted is kept in
target/machine-code/, by the sources, macros and version that it was counted of.
"""

import collections
import ctypes
import hashlib
import json
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
KEPT = ROOT / "target/machine-code"
SNAPSHOT = ROOT / "tests/snapshots/machine_code.txt"
LIBRARIES = ROOT / ".venv/nvrtc"
VERSIONS = {
    "12.9": "nvidia-cuda-nvrtc-cu12==12.9.86",
    # The one of tests/requirements.txt.
    "13.0": None,
    "13.2": "nvidia-cuda-nvrtc==13.2.51",
}
DISASSEMBLER = "nvidia-cuda-nvdisasm==13.2.51"
CARD = "sm_90a"

LLAMA = {"HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128}
KV = LLAMA | {"BLOCK": 64}
# A layer without a window of Gemma 4 31B.
GEMMA = {"HEADS": 32, "KV_HEADS": 4, "HEAD_DIM": 512, "BLOCK": 64, "BLOCK_BYTES": 262144, "BLOCK_SCALES": 1024}
# A layer of DeepSeek-V3, which keeps latents.
DEEPSEEK = {"HEADS": 128, "KV_HEADS": 8, "HEAD_DIM": 576, "BLOCK": 64, "LATENT": 1, "VALUE_DIM": 512, "BLOCK_BYTES": 73728, "BLOCK_SCALES": 0}
# A recurrent layer of Qwen3-Next 80B.
QWEN = {"KIND": 0, "KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128, "CONV": 4, "LANES": 4, "THREADS": 512}
# Kernels with the shapes of Llama-3.1-8B (of Gemma-2-9B where what is added goes through a norm). FORMAT, OUTPUT, STORE: 0 INT8, 1 E4M3, 2 BF16.
KERNELS = [
    ("add_norm", {"WIDTH": 4096, "OUTPUT": 1, "THREADS": 128, "DELTA_NORM": 0}),
    ("add_norm", {"WIDTH": 3584, "OUTPUT": 1, "THREADS": 128, "DELTA_NORM": 1}),
    ("gated", {"WIDTH": 14336, "OUTPUT": 1, "THREADS": 512, "ACTIVATION": 0}),
    ("quantize", {"WIDTH": 4096, "OUTPUT": 1, "THREADS": 128}),
    ("embed", {"WIDTH": 4096}),
    ("recurrent", QWEN),
    ("gate", {}),
    ("soft_cap", {}),
    ("scale_sums", {}),
    ("merge", LLAMA),
    ("rope_store", KV | {"STORE": 1}),
    ("rope_store", KV | {"STORE": 2}),
    ("rope_store", GEMMA | {"STORE": 1, "VALUE_NORM": 1}),
    ("attention", GEMMA | {"STORE": 1, "WINDOW": 0, "ROW_WARPS": 4, "STAGE_TOKENS": 32}),
    ("attention", GEMMA | {"STORE": 2, "WINDOW": 0, "ROW_WARPS": 2, "STAGES": 1, "STAGE_TOKENS": 32}),
    ("attention", DEEPSEEK | {"STORE": 2, "WINDOW": 0, "ROW_WARPS": 2, "STAGES": 1, "STAGE_TOKENS": 32}),
    ("head_linear", {}),
    ("latent_store", {"HEADS": 128, "RANK": 512, "PLAIN_DIM": 128, "ROPE_DIM": 64, "BLOCK": 64, "BLOCK_BYTES": 73728}),
    ("gate_input", {"WIDTH": 256, "OUTPUT": 1, "THREADS": 128}),
    ("add_inputs", {}),
    ("linear_sm90", {"FORMAT": 1, "WIDE": 0, "COLUMNS": 128, "CONSUMERS": 2}),
    ("linear_sm90", {"FORMAT": 2, "WIDE": 0, "COLUMNS": 256, "CONSUMERS": 2}),
    ("linear_sm90", {"FORMAT": 0, "WIDE": 0, "COLUMNS": 256, "CONSUMERS": 2}),
    ("attention_sm90", KV | {"STORE": 1, "WINDOW": 0, "ROW_WARPS": 4}),
    ("attention_sm90", KV | {"STORE": 1, "WINDOW": 0, "ROW_WARPS": 12}),
    ("attention_sm90", KV | {"STORE": 2, "WINDOW": 0, "ROW_WARPS": 8}),
    ("grouped_linear", {"FORMAT": 1, "WIDE": 0}),
    ("grouped_linear", {"FORMAT": 2, "WIDE": 0}),
    ("coded_linear", {"ROWS": 16, "GROUP_STEPS": 4}),
    ("coded_linear", {"ROWS": 128, "GROUP_STEPS": 4}),
    ("quantize_groups", {"GROUP": 128}),
    ("router", {}),
    ("choose_experts", {}),
    ("scale_rows", {}),
    ("combine_experts", {}),
    ("peak", {"FORMAT": 1, "WARPGROUPS": 1}),
]
MOVES = ("LDG", "STG", "LDL", "STL")
WIDTHS = ("128", "64", "U16", "S16", "U8", "S8")
PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")


def headers():
    return {path.name: path.read_text() for path in sorted((ROOT / "kernels/common").glob("*.cuh"))}


def folder_of(version):
    return LIBRARIES / version if VERSIONS[version] else pathlib.Path(sysconfig.get_path("purelib")) / "nvidia/cu13"


def open_library(version):
    folder = folder_of(version)
    [builtins] = folder.glob("**/libnvrtc-builtins.so*")
    [library] = [path for path in folder.glob("**/libnvrtc.so.*") if "alt" not in path.name]
    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


def text_of(nvrtc, program, size_of, get):
    size = ctypes.c_size_t()
    getattr(nvrtc, size_of)(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, get)(program, buffer)
    return buffer.raw


def compile_kernel(nvrtc, name, macros):
    """The assembler's log, and the machine code."""
    included = headers()
    program = ctypes.c_void_p()
    sources = (ctypes.c_char_p * len(included))(*[text.encode() for text in included.values()])
    names = (ctypes.c_char_p * len(included))(*[header.encode() for header in included])
    source = (ROOT / "kernels" / f"{name}.cu").read_bytes()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, f"{name}.cu".encode(), len(included), sources, names)
    options = [f"--gpu-architecture={CARD}", "--std=c++17", "--ptxas-options=-v", "-default-device"]
    options = [option.encode() for option in options + [f"-D{macro}={value}" for macro, value in macros.items()]]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    log = text_of(nvrtc, program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode()
    if failed:
        sys.exit(f"{name}: {log}")
    return log, text_of(nvrtc, program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")


def counts(log, image):
    """Of the machine code: registers, global and local loads and stores by their width in bits, products; and what the assembler says."""
    [disassembler] = (LIBRARIES / "nvdisasm").glob("**/bin/nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(image)
        file.flush()
        text = subprocess.run([disassembler, "-c", file.name], check=True, capture_output=True, text=True).stdout
    found = collections.Counter()
    for instruction in re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text, re.M):
        word, *more = instruction.split(".")
        if word in MOVES:
            width = next((part for part in more if part in WIDTHS), "32")
            found[f"{word}.{width}"] += 1
        elif word in PRODUCTS:
            found[word] += 1
    said = re.findall(r"\(C75\d\d\)", log) + [word for word in ("LDL", "STL") if any(name.startswith(word) for name in found)]
    registers = re.search(r"Used (\d+) registers", log)[1]
    return {"registers": int(registers), "found": dict(sorted(found.items())), "said": said}


def key_of(version, name, macros):
    hashed = hashlib.sha256(json.dumps([version, DISASSEMBLER, name, macros, headers(), pathlib.Path(__file__).read_text()]).encode())
    hashed.update((ROOT / "kernels" / f"{name}.cu").read_bytes())
    return hashed.hexdigest()[:32]


def count_version(version):
    """Counts all kernels that are not kept. Two versions of a library have no place in one process, so each has its own."""
    nvrtc = None
    for name, macros in KERNELS:
        kept = KEPT / f"{key_of(version, name, macros)}.json"
        if not kept.exists():
            nvrtc = nvrtc or open_library(version)
            result = json.dumps(counts(*compile_kernel(nvrtc, name, macros)))
            KEPT.mkdir(parents=True, exist_ok=True)
            kept.write_text(result)


def install():
    for folder, package in (VERSIONS | {"nvdisasm": DISASSEMBLER}).items():
        target = LIBRARIES / folder
        mark = target / "installed.txt"
        if package and (not mark.exists() or mark.read_text() != package):
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
            subprocess.run([*pip, "--target", target, package], check=True)
            mark.write_text(package)


def report():
    lines, wrong = [], []
    for name, macros in KERNELS:
        kernel = " ".join([name, *(f"{macro}={value}" for macro, value in macros.items())])
        by_counts = collections.defaultdict(list)
        for version in VERSIONS:
            one = json.loads((KEPT / f"{key_of(version, name, macros)}.json").read_text())
            words = [f"{word} {count}" for word, count in one["found"].items()]
            by_counts[", ".join([f"{one['registers']} registers", *words])].append(version)
            wrong += [f"{kernel}, NVRTC {version}: {said}" for said in one["said"]]
        lines += [f"{kernel}; {', '.join(versions)}: {found}" for found, versions in by_counts.items()]
    return "\n".join(lines) + "\n", wrong


def main():
    if sys.argv[1:] == ["--install"]:
        return install()
    if sys.argv[1:2] == ["--version"]:
        return count_version(sys.argv[2])
    wanted = [name for name, package in VERSIONS.items() if package] + ["nvdisasm"]
    missing = [name for name in wanted if not (LIBRARIES / name / "installed.txt").exists()]
    if missing:
        sys.exit(f"{', '.join(missing)} is missing: run `.venv/bin/python tests/machine_code.py --install`")
    children = [subprocess.Popen([sys.executable, __file__, "--version", version]) for version in VERSIONS]
    if any(child.wait() for child in children):
        sys.exit("not every version could be counted")
    found, wrong = report()
    if sys.argv[1:] == ["--update"]:
        SNAPSHOT.write_text(found)
    kept = SNAPSHOT.read_text() if SNAPSHOT.exists() else ""
    if found != kept:
        wrong += [f"not as in {SNAPSHOT.relative_to(ROOT)}: {line}" for line in found.splitlines() if line not in kept.splitlines()]
        wrong += [f"no more: {line}" for line in kept.splitlines() if line not in found.splitlines()]
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
