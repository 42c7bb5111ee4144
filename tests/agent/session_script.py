"""The recovery tests' training script, as a user starts it: `everstep-run session_script.py '{"out": …}'`."""

import faulthandler
import json
import logging
import os
import signal
import sys
import time

from support.recovery.recovery_script import Wanted, train

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    preamble = asked.pop("preamble", 0.0)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s.%(msecs)03d {os.getpid()} %(name)s %(message)s")
    time.sleep(preamble)
    train(Wanted(**asked))
