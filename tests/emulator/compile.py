"""Compiles every kernel for every card by NVRTC and prints registers, stack and spills.

    pip install --target DIR nvidia-cuda-nvrtc && python3 tests/emulator/compile.py DIR [KERNEL...]
"""

import ctypes
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
CARDS = ["sm_80", "sm_86", "sm_89", "sm_90a"]
FORMATS = {"int8": 0, "fp8": 1, "bf16": 2}
SHAPE = {"WIDTH": 4096, "HEADS": 32, "KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK": 64, "ROW_WARPS": 4, "WINDOW": 0, "CONSUMERS": 2}


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
            for word, value in FORMATS.items():
                if word == "fp8" and card in ("sm_80", "sm_86"):
                    continue
                macros = SHAPE | {"OUTPUT": value, "FORMAT": value, "STORE": value}
                fine, log, size = compile(nvrtc, name, card, macros, headers)
                lines = [line.replace("ptxas", "").replace("info", "").strip(" :.") for line in log.splitlines()]
                said = "; ".join(line for line in lines if "Used" in line or "spill" in line) if fine else log
                print(f"{name} {card} {word}: {size:,} bytes; {said}")
                bad |= not fine
    sys.exit(bad)


main()
