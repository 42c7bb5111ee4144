"""The error file of a training process, which the agent reads: what the error said, and whether it is a refusal.

The format is that of torch's `record`, and torch may have written the file already. Standard library only.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

from everstep.contract import refusal

PATH = "TORCHELASTIC_ERROR_FILE"


def write(error: BaseException) -> None:
    """Write the error file as torch's `record` does, unless it is there. That of a refusal says so in any case."""
    path = os.environ.get(PATH)
    if not path:
        return
    refused = refusal.find(error)
    steps = refusal.refused_after(error)
    if Path(path).exists():
        if refused is not None:
            written = json.loads(Path(path).read_text())
            message, sentence = written["message"], refusal.sentence(refused)
            message["message"] = sentence
            message["extraInfo"]["refusedAfter"] = steps
            # torchrun's last lines are the call stack, which may end with an error that the refusal led to.
            if not message["extraInfo"]["py_callstack"].rstrip().endswith(sentence):
                message["extraInfo"]["py_callstack"] += f"\n{sentence}"
            Path(path).write_text(json.dumps(written))
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    callstack = "".join(traceback.format_exception(error))
    extra: dict[str, Any] = {"py_callstack": callstack, "timestamp": str(int(time.time()))}
    if steps is not None:
        extra["refusedAfter"] = steps
    message = {"message": {"message": refusal.sentence(refused or error), "extraInfo": extra}}
    Path(path).write_text(json.dumps(message))
