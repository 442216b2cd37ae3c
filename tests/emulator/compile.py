"""Compiles every kernel for every card by NVRTC and prints registers; fails where one needs stack or spills, or where products of a
warpgroup wait for registers.

    pip install --target DIR nvidia-cuda-nvrtc && python3 tests/emulator/compile.py DIR [KERNEL...]
"""

import ctypes
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
CARDS = ["sm_80", "sm_86", "sm_89", "sm_90a"]
FORMATS = {"int8": 0, "fp8": 1, "bf16": 2}
WIDTHS = [8, 64, 4096, 8192, 14336, 28672, 65536]
# Of a tile of linear_sm90.cu.
COLUMNS = [32, 64, 128, 256]
# HEAD_DIM and ROW_WARPS.
HEADS = [(32, 1), (64, 4), (80, 4), (96, 4), (128, 1), (128, 4), (192, 4), (256, 1), (256, 4)]
# Those of heads that two warps share; in BF16 there is no room for four.
LARGE_HEADS = [(288, 1), (512, 1), (512, 2), (512, 4)]
# HEAD_DIM, VALUE_DIM and ROW_WARPS of latents: DeepSeek-V2 and V3, and a small one.
LATENTS = [(576, 512, 1), (576, 512, 2), (288, 256, 4), (96, 64, 4)]
# HEADS, RANK, PLAIN_DIM and ROPE_DIM: DeepSeek-V3, GLM-4.7-Flash.
LATENT_SHAPES = [(128, 512, 128, 64), (20, 512, 192, 64)]
# HEAD_DIM and ROW_WARPS of attention_sm90.cu.
HOPPER_HEADS = [(dim, warps) for dim in (32, 64, 80, 96, 112, 128) for warps in (4, 8, 12)]
# The bits of 50.0f.
SOFT_CAP = 1112014848
# Qwen3-Next, a wide value, Granite 4, Nemotron-H 56B and Nemotron Nano 9B: sizes of recurrent layers.
RECURRENT = [(0, 16, 32, 128, 128, 4, 512), (0, 4, 4, 32, 512, 1, 512), (1, 1, 128, 128, 64, 8, 512), (1, 8, 256, 256, 64, 8, 512), (1, 8, 128, 128, 80, 4, 320)]
RECURRENT_MACROS = ("KIND", "KEY_HEADS", "VALUE_HEADS", "KEY_DIM", "VALUE_DIM", "LANES", "THREADS")
MODEL = {"HEADS": 32, "KV_HEADS": 8, "BLOCK": 64, "WINDOW": 0}


def threads(width):
    """What rows.cuh says of THREADS."""
    return max(128, min(1024, 1 << ((width + 31) // 32 - 1).bit_length()))


def shapes(name, card):
    """Macros to compile a kernel with, besides its format's."""
    rows = [{"WIDTH": width, "THREADS": threads(width)} for width in WIDTHS]
    tiles = [{"COLUMNS": columns, "CONSUMERS": consumers} for columns in COLUMNS for consumers in (1, 2)]
    heads = [MODEL | {"HEAD_DIM": dim, "ROW_WARPS": warps} for dim, warps in HEADS]
    large = [MODEL | {"HEAD_DIM": dim, "ROW_WARPS": warps, "STAGE_TOKENS": 32, "BLOCK_BYTES": 1 << 20, "BLOCK_SCALES": 1024} for dim, warps in LARGE_HEADS]
    latents = [MODEL | {"KV_HEADS": 4, "HEAD_DIM": dim, "VALUE_DIM": value, "ROW_WARPS": warps, "LATENT": 1, "STAGES": 1, "BLOCK_BYTES": 1 << 20, "BLOCK_SCALES": 0}
               | ({"STAGE_TOKENS": 32} if value > 256 else {}) for dim, value, warps in LATENTS]
    hopper_heads = [MODEL | {"HEAD_DIM": dim, "ROW_WARPS": warps} for dim, warps in HOPPER_HEADS]
    hopper_heads += [shape | {"HEADS": heads} for shape in hopper_heads if shape["HEAD_DIM"] in (64, 128) for heads in (8, 40, 56, 128)]
    coded = [{"ROWS": rows, "GROUP_STEPS": steps} for rows in (16, 64, 128) for steps in (0, 1, 2, 3, 4, 8, 70)]
    return {
        "add_norm": [shape | {"DELTA_NORM": norm, "CENTERED": centered, "SCALED": scaled} for shape in rows for norm in (0, 1) for centered, scaled in ((0, 0), (1, 0), (0, 1))],
        "gated": [shape | {"ACTIVATION": activation} for shape in rows for activation in (0, 1, 2, 3)],
        "gate_input": rows,
        "quantize": rows,
        "norm_heads": [shape | {"OUTPUT": 2} for shape in rows if shape["WIDTH"] <= 28672],
        "embed": [{"WIDTH": 4096}],
        "linear": [{"WIDE": wide} for wide in (0, 1)],
        "grouped_linear": [{"WIDE": 0}],
        "coded_linear": coded,
        "grouped_coded_linear": coded,
        "quantize_groups": [{"GROUP": group} for group in (8, 32, 64, 96, 128, 2048)],
        "linear_sm90": [tile | {"WIDE": wide} for tile in tiles for wide in (0, 1)],
        "attention": heads + large + latents + [shape | {"SOFT_CAP": SOFT_CAP, "WINDOW": 4096} for shape in heads if shape["HEAD_DIM"] >= 128],
        "attention_sm90": hopper_heads + [shape | {"SOFT_CAP": SOFT_CAP, "WINDOW": 4096} for shape in hopper_heads],
        "peak": [{"WARPGROUPS": groups} for groups in ((0, 1) if card == "sm_90a" else (0,))],
        "merge": heads + large,
        "rope_store": [shape | {"VALUE_NORM": norm} for shape in heads + large for norm in (0, 1)] + [shape | {"ROW_HEADS": shape["HEADS"]} for shape in heads + large],
        "recurrent": [dict(zip(RECURRENT_MACROS, sizes), CONV=conv) for sizes in RECURRENT for conv in (4, 8)],
        "latent_store": [dict(zip(("HEADS", "RANK", "PLAIN_DIM", "ROPE_DIM"), sizes), BLOCK=64, BLOCK_BYTES=1 << 20) for sizes in LATENT_SHAPES],
        "keep_inputs": [{"CONV": conv} for conv in (2, 4, 8)],
    }.get(name, [{}])


def formats(name, card):
    """The names of a kernel's formats that a card has, and their macros."""
    macro = {"add_norm": "OUTPUT", "gated": "OUTPUT", "gate_input": "OUTPUT", "quantize": "OUTPUT"}
    macro |= {"attention": "STORE", "attention_sm90": "STORE", "rope_store": "STORE"}
    macro |= {"linear": "FORMAT", "grouped_linear": "FORMAT", "linear_sm90": "FORMAT", "peak": "FORMAT"}
    if name not in macro:
        return [("", {})]
    return [(word, {macro[name]: value}) for word, value in FORMATS.items() if word != "fp8" or card not in ("sm_80", "sm_86")]


def exists(name, card, word, shape):
    """Whether a kernel has this shape in this format, and the card has no other kernel for it."""
    if name == "attention_sm90":
        return not (word == "bf16" and shape["HEAD_DIM"] == 128 and shape["ROW_WARPS"] == 12)
    if name == "attention" and word == "bf16" and shape["HEAD_DIM"] > 288 and shape["ROW_WARPS"] > 2:
        return False
    if name == "attention" and "LATENT" in shape:
        return word == "bf16"
    return not (name == "attention" and card == "sm_90a" and shape["HEAD_DIM"] <= 128)


def load(folder):
    """NVRTC; its builtins come first, since it looks for them by name alone."""
    [builtins] = folder.glob("**/libnvrtc-builtins.so*")
    [library] = folder.glob("**/libnvrtc.so.*")
    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library))


def compile(nvrtc, name, card, macros, headers):
    """Whether it compiled, what the compiler said, and the bytes of machine code."""
    program = ctypes.c_void_p()
    sources = (ctypes.c_char_p * len(headers))(*[text.encode() for text in headers.values()])
    names = (ctypes.c_char_p * len(headers))(*[header.encode() for header in headers])
    source = (ROOT / "kernels" / f"{name}.cu").read_bytes()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, f"{name}.cu".encode(), len(headers), sources, names)
    options = [f"--gpu-architecture={card}", "--std=c++17", "--ptxas-options=-v", "-default-device"]
    options += [f"-D{macro}={value}" for macro, value in macros.items()]
    passed = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    failed = nvrtc.nvrtcCompileProgram(program, len(options), passed)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    return not failed, log.value.decode(), size.value


def main():
    nvrtc = load(pathlib.Path(sys.argv[1]))
    headers = {path.name: path.read_text() for path in (ROOT / "kernels/common").glob("*.cuh")}
    names = sys.argv[2:] or sorted(path.stem for path in (ROOT / "kernels").glob("*.cu"))
    bad = False
    for name in names:
        for card in CARDS:
            if name.endswith("_sm90") and card != "sm_90a":
                continue
            for word, macro in formats(name, card):
                for shape in filter(lambda shape: exists(name, card, word, shape), shapes(name, card)):
                    fine, log, size = compile(nvrtc, name, card, macro | shape, headers)
                    spilled = any(int(count) > 0 for count in re.findall(r"(\d+) bytes (?:stack frame|spill)", log))
                    # What the assembler says of a warpgroup's products whose registers it had to wait for.
                    mended = "(C75" in log
                    registers = re.search(r"Used (\d+) registers", log)
                    said = f"{registers[1]} registers" + (", BUT: " + log if spilled or mended else "") if fine else log
                    print(name, card, word, *(f"{macro}={value}" for macro, value in shape.items()), f"{size:,} bytes;", said)
                    bad |= not fine or spilled or mended
    sys.exit(bad)


main()
