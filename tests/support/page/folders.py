"""Folders as runs leave them, with texts that a stranger has chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from everstep.jobs.history import ActionTaken, Entry, EventSeen, History, PodSeen, StatusSeen, StepSeen
from everstep.jobs.view import WorkerRow, of_status

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> {{ 7 * 7 }} </title></svg>\x1b[31m\u202e"
BEGAN = "2026-11-30T06:00:00+00:00"
STATUS: dict[str, Any] = {
    "conditions": [
        {"type": "Ready", "status": "False", "reason": "Failed", "message": EVIL},
        {"type": "Failed", "status": "True", "reason": "Failed", "message": EVIL},
    ],
    "startTime": BEGAN,
    "completionTime": "2026-11-30T06:10:00Z",
    "progress": {"step": 70, "totalSteps": 100, "metrics": {EVIL: EVIL}, "straggler": EVIL},
    "checkpoint": {"lastCommittedStep": 60, "committedAt": "2026-11-30T06:09:00Z"},
    "goodput": "50%",
    "stateSeconds": {"productive": 300, "replay": 60, "detect": 30, "form": 90, "restore": 60, "wait": 60},
    "recoveries": [
        {
            "at": "2026-11-30T06:05:00Z", "cause": EVIL, "worker": 1, "node": EVIL, "rung": "recreate",
            "detectMs": 500, "rendezvousMs": 1500, "restoreMs": 2000, "firstStepMs": 1000, "lostSteps": 9,
        }
    ],
    "rerun": 2,
    "history": [
        {
            "rerun": 1, "outcome": EVIL, "message": EVIL, "startedAt": "2026-11-29T06:00:00Z",
            "endedAt": "2026-11-29T06:02:05Z", "activeSeconds": 125, "step": 40, "committedStep": 30, "restarts": 4,
        },
        {"rerun": 0, "outcome": "Complete", "startedAt": "2026-11-28T06:00:00Z", "endedAt": "2026-11-28T06:01:00Z"},
    ],
    "failure": {"cause": "Error", "message": EVIL, "pod": EVIL, "node": EVIL, "logLines": [EVIL, "last line"]},
}  # fmt: skip


def run_folder(folder: Path, status: dict[str, Any] = STATUS, text: str = EVIL) -> Path:
    """What a run leaves, with a text of somebody else wherever there can be one."""
    folder.mkdir(parents=True)
    worker = WorkerRow(0, text, text, text, 0, 70, 0, None, 3 * 2**20)
    view = replace(of_status("digits", status, [worker], ()), began=BEGAN, rehearsed=text, notice=text)
    (folder / "status.json").write_text(json.dumps(view.to_json()))
    history: list[Entry] = [
        StatusSeen(0.0, "Pending", text, 0, 0),
        PodSeen(0.5, text, 0, 1, text, "Running"),
        StepSeen(3.0, text, 0, 0, 2, 1, 2.0, 1),
        StatusSeen(3.1, "Running", text, 1, 2, 20),
        ActionTaken(5.0, text, 1),
        EventSeen(5.2, "Warning", text, text),
        PodSeen(6.0, text, 0, 1, text, "Failed"),
        StatusSeen(6.1, text, text, 2, 2, 60),
    ]
    History(history).save(folder / "history.jsonl")
    return folder
