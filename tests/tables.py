#!/usr/bin/env python3
"""Holds the tables of benches/README.md and tests/README.md against the files of results that they are made of, and what the pages promise
against the tests that carry it.

    python3 tests/tables.py            says which table is not what its file gives
    python3 tests/tables.py --write    writes them

A table stands under `<!-- table: NAME -->`. NAME is one of MADE below, or `FILE N`: the N-th table that benches/keep.py kept in
benches/results/FILE.json. Every table of benches/README.md has such a line.
"""

import json
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
READMES = (ROOT / "benches/README.md", ROOT / "tests/README.md")
# What each file of results must say of itself.
STAMP = ("commit", "date", "processor", "cores", "memory_gib")


def results(name):
    return json.loads((ROOT / f"benches/results/{name}.json").read_text())


def rows_of(cells):
    """Markdown of a table: the head, then the rows."""
    head, *rows = cells
    return ["| " + " | ".join(head) + " |" if head[0] else "| | " + " | ".join(head[1:]) + " |", "|---" * len(head) + "|",
            *("| " + " | ".join(row) + " |" for row in rows)]


def median(runs, name):
    return statistics.median(run[name] for run in runs)


class Peers:
    """What benches/peers/run.py found."""

    def __init__(self, name):
        self.found = {(one["model"], one["workload"], one["side"]): one["runs"] for one in results(name)["found"]}
        self.columns = list(dict.fromkeys((model, workload) for model, workload, _ in self.found))
        self.sides = list(dict.fromkeys(side for _, _, side in self.found))

    def of(self, side, column, name):
        return median(self.found[*column, side], name)

    def head(self):
        return ["", *(" ".join(column) for column in self.columns)]

    def best(self, name):
        def ratio(column):
            peers = [self.of(side, column, name) for side in self.sides if side != "gristmill"]
            return self.of("gristmill", column, name) / max(peers)

        return ["**gristmill / best peer**", *(f"**{ratio(column):.2f}**" for column in self.columns)]

    def cell(self, side, column):
        speed, memory = (self.of(side, column, name) for name in ("total_tokens_per_second", "peak_memory_bytes"))
        return f"{speed:,.0f} ({memory / 1e6:,.0f})"

    def rows(self, column, side="gristmill"):
        return self.found[*column, side][0]["requests"]

    def speed(self):
        each = [[side, *(self.cell(side, column) for column in self.columns)] for side in self.sides]
        return rows_of([self.head(), *each, self.best("total_tokens_per_second")])

    def four_bits(self):
        def ratio(column, others):
            of = [self.of(side, column, "total_tokens_per_second") for side in others]
            return f"**{self.of('gristmill-w4a8', column, 'total_tokens_per_second') / max(of):.2f}**"

        peers = [side for side in self.sides if not side.startswith("gristmill")]
        each = [[side, *(self.cell(side, column) for column in self.columns)] for side in self.sides]
        return rows_of([self.head(), *each,
                        ["**gristmill-w4a8 / best peer**", *(ratio(column, peers) for column in self.columns)],
                        ["**gristmill-w4a8 / gristmill**", *(ratio(column, ["gristmill"]) for column in self.columns)]])

    def details(self):
        sides = ("openvino", "gristmill")
        computed = [self.of("gristmill", c, "computed_tokens") / self.of("gristmill", c, "seconds") for c in self.columns]
        return rows_of([
            self.head(),
            ["rows", *(f"{self.rows(column):,}" for column in self.columns)],
            *([f"{side}, rows/s", *(f"{self.of(side, c, 'requests_per_second'):.1f}" for c in self.columns)] for side in sides),
            ["gristmill, computed tokens/s", *(f"{rate:,.0f}" for rate in computed)],
        ])

    def others(self):
        rows = [f"{self.rows(c):,} ({self.rows(c, 'transformers'):,})" for c in self.columns]
        head, line, *rest = self.speed()
        return [head, line, f"| rows (transformers) | {' | '.join(rows)} |", *rest]

    def shares(self):
        names = [name for name, _ in self.found[*self.columns[0], "gristmill"][0]["seconds_by_operation"]]

        def share(column, name):
            runs = self.found[*column, "gristmill"]
            return f"{statistics.median(dict(run['seconds_by_operation'])[name] / run['seconds'] for run in runs):.1%}"

        return rows_of([["", *names], *([" ".join(c), *(share(c, name) for name in names)] for c in self.columns)])


def growth():
    out = [["rows", "rows/s", "planning", "peak memory less the trace, MB"]]
    for size, runs in results("growth")["found"].items():
        rate = statistics.median(int(size) / run["seconds"] for run in runs)
        planning = statistics.median(dict(run["seconds_by_operation"])["plan"] / run["seconds"] for run in runs)
        memory = statistics.median(run["peak_memory_bytes"] - 4 * run["prompt_tokens"] for run in runs)
        out.append([f"{int(size):,}", f"{rate:.1f}", f"{planning:.2%}".replace("%", " %"), f"{memory / 1e6:,.0f}"])
    return rows_of(out)


def ablations():
    found = {(one["model"], one["workload"], one["variant"]): one["runs"] for one in results("ablations")["found"]}
    columns = list(dict.fromkeys((model, workload) for model, workload, _ in found))
    variants = list(dict.fromkeys(variant for _, _, variant in found))
    whole = variants[-1]
    for column in columns:
        counts = {run["requests"] for variant in variants for run in found[*column, variant]}
        if len(counts) > 1:
            raise SystemExit(f"ablations of {' '.join(column)} mix row counts: {sorted(counts)}")

    def cell(column, variant):
        rate = median(found[*column, variant], "total_tokens_per_second")
        return f"{rate:,.0f}" if variant == whole else f"{rate / median(found[*column, whole], 'total_tokens_per_second'):.2f}"

    return rows_of([["", *(" ".join(column) for column in columns)], *([v, *(cell(c, v) for c in columns)] for v in variants)])


def constrained():
    out = [["", "tokens a row, free", "shaped", "microseconds a generated token, free", "shaped", "shaped / free"]]
    shapes = {"W1": "`choice`", "W2": "`json_schema`"}
    for one in results("constrained")["found"]:
        runs = [one["runs"][key] for key in ("free", "shaped")]
        micros = [statistics.median(1e6 * run["seconds"] / run["generated_tokens"] for run in of) for of in runs]
        tokens = [f"{of[0]['generated_tokens'] / one['rows']:.1f}" for of in runs]
        ratio = f"{micros[1] / micros[0]:.2f}"
        out.append([f"{one['model']} {one['workload']} {shapes[one['workload']]}", *tokens, *(f"{m:,.1f}" for m in micros), ratio])
    return rows_of(out)


def precision():
    """Smallest and largest over the models of each pair of formats."""
    found = {}
    for _, weights, kv, divergence, same in results("precision")["tables"][0][1:]:
        found.setdefault((weights, kv), []).append((float(divergence), float(same.split()[0])))

    def between(values, form):
        return " to ".join(form.format(value) for value in (min(values), max(values)))

    out = [["precision", "keys and values", "mean KL, nats", "same top token"]]
    for formats, pairs in found.items():
        nats, shares = zip(*pairs)
        out.append([*formats, between(nats, "{:.4f}"), between(shares, "{:.1f}") + " %"])
    return rows_of(out)


def faults(old):
    """The full run of tests/faults.sh: what a row says of a fault stands in the README, its figures in tests/results/."""
    out = old[:2]
    for line in old[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found = [json.loads((ROOT / f"tests/results/{name}.json").read_text()) for name in sections(cells[1])]
        each = [one["figures"] for one in found]

        def total(*names):
            values = [figures[name] for figures in each for name in names if name in figures]
            return sum(values) if values else None

        done = total("faults", "seeds", "keys", "bad_rows", "abort_rows")
        rows, lines, computed = (total(name) for name in ("rows", "rows_as_lines", "rows_computed"))
        minutes = [one["seconds"] / 60 for one in found]
        longest = f" (longest {max(minutes):.1f})" if len(minutes) > 1 else ""
        cells[5:] = [
            "–" if done is None else f"{done:,}",
            "–" if rows is None else f"{rows:,}",
            "–" if rows is None else f"{lines or 0:,}",
            "–" if computed is None else f"{computed / rows:.2f}",
            f"{sum(minutes):.1f}{longest}",
        ]
        out.append("| " + " | ".join(cells) + " |" if cells[0] else "| | " + " | ".join(cells[1:]) + " |")
    return out


def fuzz():
    """Every target, also one that has not run."""
    file = ROOT / "tests/results/fuzz.json"
    found = json.loads(file.read_text())["targets"] if file.exists() else {}
    out = [["target", "processor hours", "inputs", "edges reached"]]
    for target in sorted(path.stem for path in (ROOT / "tests/fuzz/fuzz_targets").glob("*.rs")):
        one = found.get(target)
        figures = [f"{one['seconds'] / 3600:.2f}", f"{one['inputs']:,}", f"{one['edges']:,}"] if one else ["–"] * 3
        out.append([f"`{target}`", *figures])
    return rows_of(out)


def sections(cell):
    """Names in a cell like `a-1`, `-2` or `a-1` … `-4`."""
    names = re.findall(r"`([^`]*)`", cell)
    whole, *more = names
    if not more:
        return [whole]
    if "…" in cell:
        stem, first = whole.rsplit("-", 1)
        return [f"{stem}-{n}" for n in range(int(first), int(more[0].strip("-")) + 1)]
    stem = whole.rsplit("-", 1)[0]
    return [whole, *(stem + name if name.startswith("-") else name for name in more)]


MADE = {
    "peers": lambda _: Peers("peers").speed(),
    "peers, details": lambda _: Peers("peers").details(),
    "peers, shares": lambda _: Peers("peers").shares(),
    "peers, others": lambda _: Peers("peers-others").others(),
    "peers, experts": lambda _: Peers("peers-experts").speed(),
    "peers, four bits": lambda _: Peers("peers-w4").four_bits(),
    "growth": lambda _: growth(),
    "ablations": lambda _: ablations(),
    "constrained": lambda _: constrained(),
    "precision": lambda _: precision(),
    "faults": faults,
    "fuzz": lambda _: fuzz(),
}


def made(name, old):
    if name in MADE:
        return MADE[name](old)
    file, number = name.rsplit(" ", 1)
    return rows_of(results(file)["tables"][int(number)])


def check_readme(path, write):
    """What is wrong with a README's tables."""
    wrong, out, name = [], [], None
    lines = path.read_text().split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if found := re.fullmatch(r"<!-- table: (.*) -->", line):
            name = found.group(1)
        if not line.startswith("|"):
            out.append(line)
            at += 1
            continue
        end = at
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        old, at = lines[at:end], end
        new = old
        if name is not None:
            new = made(name, old)
            wrong += [f"{path.name}, table `{name}`: it says\n  {a}\nand its file gives\n  {b}" for a, b in zip(old, new) if a != b]
            if len(old) != len(new):
                wrong.append(f"{path.name}, table `{name}`: {len(old)} lines, and its file gives {len(new)}")
        elif path.parent.name == "benches":
            wrong.append(f"{path.name}: no file is named for the table\n  {old[0]}")
        out += new
        name = None
    if write:
        path.write_text("\n".join(out))
    return wrong


def check_claims():
    """Each claim stands in its page, and what carries it in this repository."""
    text = READMES[1].read_text()
    sources = "\n".join(path.read_text() for folder in ("src", "tests") for path in sorted(ROOT.glob(f"{folder}/**/*.*"))
                        if path.suffix in (".rs", ".py") and "emulator" not in path.parts)
    # Tests that every run of them has: no helpers, none that is ignored.
    attributes = r"#\[(?:tokio::)?test\b[^\n]*\n((?:\s*(?:#\[|///?)[^\n]*\n)*)\s*(?:async )?fn (\w+)"
    known = {name for more, name in re.findall(attributes, sources) if "#[ignore" not in more}
    known |= {path.stem for path in ROOT.glob("tests/*.py")}
    wrong = []
    claims = re.findall(r"^\| (\S+\.md) \| “(.*)” \| (.*) \|$", text, re.M)
    lines = [line for line in text.split("\n") if re.match(r"\| \S*\.md \|", line)]
    if len(claims) != len(lines):
        wrong.append(f"tests/README.md: {len(lines) - len(claims)} rows of the claims have another form")
    for page, claim, carried in claims:
        words = " ".join((ROOT / page).read_text().replace("**", "").split())
        if claim.replace("\\|", "|") not in words:
            wrong.append(f"tests/README.md: {page} does not say “{claim}”")
        names = re.findall(r"`([^`]*)`", carried)
        wrong += [f"tests/README.md: “{claim}”: there is no `{name}`" for name in names
                  if name not in known and not (ROOT / name).is_file()]
        if not names:
            wrong.append(f"tests/README.md: nothing carries “{claim}”")
    return wrong


def check_stamps():
    files = sorted([*ROOT.glob("benches/results/*.json"), *ROOT.glob("tests/results/*.json")])
    return [f"{file.relative_to(ROOT)}: it does not say its {name}" for file in files for name in STAMP
            if name not in json.loads(file.read_text())]


def main():
    write = sys.argv[1:] == ["--write"]
    wrong = [one for path in READMES for one in check_readme(path, write)]
    wrong = ([] if write else wrong) + check_stamps() + check_claims()
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
