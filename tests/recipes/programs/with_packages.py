"""Runs a recipe's script with packages from a folder, and prints the first step that each of its processes reports:
with_packages.py FOLDER SCRIPT [ARGUMENT…]"""

import runpy
import sys

import everstep

report = everstep.report


def first(**named):
    print(f"begins with step {named['step']}", flush=True)
    everstep.report = report
    report(**named)


everstep.report = first
folder, *sys.argv = sys.argv[1:]
sys.path.insert(1, folder)
runpy.run_path(sys.argv[0], run_name="__main__")
