"""The command line of a script whose cases are functions of the built program: all of them, or those that `--only` names."""

import argparse
import pathlib
import time


def main(description, cases):
    """Runs the cases. A case raises if something is wrong, and may return what it has to tell."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--only", action="append", choices=[case.__name__ for case in cases])
    arguments = parser.parse_args()
    program = arguments.program.resolve()
    chosen = [case for case in cases if not arguments.only or case.__name__ in arguments.only]
    for case in chosen:
        began = time.monotonic()
        told = case(program)
        print(f"{case.__name__}: right in {time.monotonic() - began:.0f} s{': ' + told if told else ''}", flush=True)
    print(f"{len(chosen)} of {len(chosen)} cases right")
