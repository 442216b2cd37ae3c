#!/usr/bin/env python3
"""Figures of the structure of src/: how long functions are, how much is public, which folders need each other.

    python3 tests/structure.py [CHECKOUT]...      (this checkout where none is named; several stand side by side)

All figures are read off the text, which rustfmt has formatted; tests within files do not count. A circle is a pair of top-level
modules of which each names the other.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINES_MAX = 70
FUNCTION = re.compile(r"^(\s*)(?:pub(?:\([^)]*\))? )?(?:default |const |async |unsafe |extern \"C\" )*fn \w+")
PUBLIC = re.compile(r"^\s*pub (?:const |async |unsafe )*(?:fn|struct|enum|trait|const|static|type|mod|use)\b")
NAMED = re.compile(r"\bcrate::(\w+)")
TUPLE = re.compile(r"\w+: &?(?:mut )?(?:\[|Option<|Vec<)?&?\([^()]*,")


def sources(root):
    """Name and text of each file, without its tests."""
    for path in sorted((root / "src").rglob("*.rs")):
        name = str(path.relative_to(root / "src"))
        if not re.search(r"(^|/)tests(/|\.rs$)", name):
            yield name, path.read_text().split("#[cfg(test)]")[0]


def functions(lines):
    """Header and number of lines of each function."""
    for start, line in enumerate(lines):
        found = FUNCTION.match(line)
        if not found:
            continue
        end = start
        # A trait's function may have no body.
        while end < len(lines) and not lines[end].rstrip().endswith((";", "{", "}")):
            end += 1
        header = " ".join(lines[start:end + 1])
        if header.rstrip().endswith("{"):
            while end < len(lines) and lines[end] != f"{found[1]}}}":
                end += 1
        yield header, end - start + 1


def module(name):
    """The top-level module of a file: `engine` for engine/run.rs, `signing` for signing.rs."""
    return name.split("/")[0].removesuffix(".rs")


def figures(root):
    code = public = documented = files = count = long = tuples = 0
    needs = set()
    for name, text in sources(root):
        lines = text.splitlines()
        files += 1
        documented += text.startswith("//!")
        code += sum(1 for line in lines if line.strip() and not line.lstrip().startswith("//"))
        public += sum(1 for line in lines if PUBLIC.match(line))
        for header, length in functions(lines):
            count += 1
            long += length > LINES_MAX
            tuples += len(TUPLE.findall(header.split(" -> ")[0]))
        plain = "\n".join(line.split("//")[0] for line in lines)
        needs |= {(module(name), other) for other in NAMED.findall(plain) if other != module(name)}
    modules = {module(name) for name, _ in sources(root)} - {"lib", "main"}
    circles = sorted(f"{a}-{b}" for a, b in needs if a < b and (b, a) in needs and {a, b} <= modules)
    return {
        "files": files,
        "files with a module comment": f"{100 * documented / files:.0f} %",
        "lines of code": code,
        "functions": count,
        f"functions over {LINES_MAX} lines": f"{long} ({100 * long / count:.1f} %)",
        "public items per 1,000 lines of code": f"{1000 * public / code:.1f}",
        "parameters that are tuples": tuples,
        "circles of top-level modules": f"{len(circles)} ({', '.join(circles)})",
    }


def main():
    roots = [pathlib.Path(root) for root in sys.argv[1:]] or [ROOT]
    columns = [figures(root) for root in roots]
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(str(column[name]) for column in columns) + " |")


if __name__ == "__main__":
    main()
