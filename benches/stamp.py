"""Where a result was measured: what every file of results says of itself."""

import datetime
import os
import platform
import re
import subprocess


def stamp(root):
    """Commit, date, processor, cores and memory of this machine."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
    # What is measured is made of these; results and notes about them are not.
    measured = ["src", "kernels", "benches", "tests", "Cargo.toml", "Cargo.lock"]
    notes = [":!tests/results", ":!benches/results", ":!tests/README.md", ":!benches/README.md"]
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *measured, *notes], cwd=root).returncode:
        commit += " with changes"
    return {
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": memory_gib(),
    }


def processor():
    """Its name, and the instruction sets that matter here."""
    text = open("/proc/cpuinfo").read() if os.path.exists("/proc/cpuinfo") else ""
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.M)
    flags = re.search(r"^flags\s*:\s*(.*)$", text, re.M)
    known = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8")
    sets = [flag for flag in known if flags and flag in flags.group(1).split()]
    return " ".join([name.group(1) if name else platform.processor(), f"({', '.join(sets)})"])


def memory_gib():
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
