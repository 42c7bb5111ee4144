"""Leaves the stamp of a rehearsal of a script that has no modules of its own: `stamped.py SCRIPT ARGUMENTS`.

No rehearsal is run: what is measured is a run that has a stamp.
"""

import sys

from everstep.contract.main_script import main_module
from everstep.contract.stamp import Stamp
from everstep.rehearse import stamp
from everstep.train.guards.comparison.rehearsed import program_of_process

if __name__ == "__main__":
    script = sys.argv[1]
    del sys.argv[0]
    main_module().__file__ = script
    stamp.write(None, stamp.Path(script), Stamp(program_of_process(), 3, 10**6, "2026-11-29T00:00:00Z"))
