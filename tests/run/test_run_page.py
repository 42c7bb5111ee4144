"""The page beside a run that is alive, and of what it left: the same addresses, the same facts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest

from support.local.local_job import LocalJob
from support.page.html import active_parts, parsed, table, words
from support.scenarios.player import wait_for
from support.scenarios.reference import EXAMPLE

pytestmark = pytest.mark.timeout(240)


class Reader:
    """Opens the address that a command has printed, and goes on with its cookie."""

    def __init__(self, address: str) -> None:
        self.base, _, self.path = address.partition("/jobs/")
        self.path = "/jobs/" + self.path.partition("?")[0]
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self._opener.open(address, timeout=30).read()

    def get(self, path: str) -> Element:
        with self._opener.open(self.base + path, timeout=60) as answer:
            document = parsed(answer.read().decode())
        assert not [*active_parts(document)]
        return document

    def job(self) -> Element:
        return self.get(self.path)


def printed(file: Path, pattern: str) -> str:
    """What a command has printed, as soon as it has."""
    wait_for(pattern, lambda: re.search(pattern, file.read_text()), 60)
    match = re.search(pattern, file.read_text())
    assert match is not None
    return match[1]


@pytest.mark.long
def test_run_has_a_page_while_it_is_alive_and_afterwards(tmp_path: Path) -> None:
    job = LocalJob(tmp_path / "run", name="elastic")
    out = tmp_path / ".everstep" / "kept"
    job.start(
        str(EXAMPLE / "elastic.py"), "--workers", "2", "--elastic", "1:2", "--plain", "--out", str(out), "--ui",
        "--", "--steps", "100000", "--step-seconds", "0.02", "--every-steps", "20",
    )  # fmt: skip
    page: subprocess.Popen[bytes] | None = None
    try:
        address = printed(tmp_path / "run" / "printed.txt", r"page: (http://127\.0\.0\.1:\d+/jobs/\S+\?token=\S+)")
        reader = Reader(address)
        wait_for("a commit", lambda: job.view().get("committed"), 90)
        (row,) = [[words(cell) for cell in row] for row in list(reader.get("/").iter("tr"))[1:]]
        assert (row[0], row[2], row[8]) == ("elastic", "2 of 2", "local run elastic")
        assert "Running" in row[1]
        assert re.fullmatch(r"\d+s old, step \d+", row[5])
        job.ask("kill", pod="elastic-w1-0")
        wait_for("the worker that replaces it", lambda: job.worker(1)["incarnation"] == 1, 60)
        document = reader.job()
        drawn = words(next(e for e in document.iter("section") if e.get("aria-labelledby") == "timeline"))
        assert "kill elastic-w1-0" in drawn
        assert ["Warning", "WorkerLost"] in [row[1:3] for row in table(document, "events")]
        assert table(document, "checkpoints"), "the store is read"
        facts = {words(e.find("dt")): words(e.find("dd")) for e in document.iter("div") if e.find("dt") is not None}
        assert re.match(r"\d+ steps, |nothing", facts["Lost if killed now"])
        stacks = reader.get(reader.path.replace("/jobs/", "/stacks/"))
        assert "elastic.py" in words(stacks), "where the script is"
        job.ask("delete-job")
        assert job.process is not None
        assert job.process.wait(60) == 130
        with pytest.raises(urllib.error.URLError):
            reader.job()
        with (tmp_path / "ui.txt").open("wb") as file:
            page = subprocess.Popen(
                [sys.executable, "-m", "everstep.cli.main", "ui", "elastic"], stdout=file, stderr=subprocess.STDOUT,
                cwd=tmp_path, env={**os.environ, "XDG_RUNTIME_DIR": str(job.temporary)},
            )  # fmt: skip
        after = Reader(printed(tmp_path / "ui.txt", r"(http://\S+)"))
        assert after.path == reader.path, "a run has one address, alive and ended"
        left = after.job()
        assert table(left, "events")[-3:] == table(document, "events")[-3:]
        assert table(left, "checkpoints")
        assert not [e for e in left.iter("a") if e.get("id") == "to-stacks"]
        with pytest.raises(urllib.error.HTTPError, match="503"):
            after.get(after.path.replace("/jobs/", "/stacks/"))
        page.send_signal(signal.SIGINT)
        assert page.wait(30) == 130
    finally:
        if page is not None and page.poll() is None:
            page.kill()
            page.wait()
        job.remove()
        job.expect_nothing_left()
