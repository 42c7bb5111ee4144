"""What the how-to pages show: the chart renders with its settings, and the API server takes the jobs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.apiserver

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("how-to-*.md"))
FLAG = re.compile(r"--set(?:-json|-string)? (?:'[^']+'|[\w.]+=[\w./-]+)")
JOB = re.compile(r"^```yaml\n(apiVersion: everstep\.dev.*?)^```$", re.DOTALL | re.MULTILINE)
FLAGS = sorted({flag for page in PAGES for flag in FLAG.findall(page.read_text())})
JOBS = [pytest.param(job, id=page.stem) for page in PAGES for job in JOB.findall(page.read_text())]


@pytest.mark.parametrize("flag", FLAGS)
def test_setting_that_a_page_shows_changes_what_the_chart_renders(
    flag: str, helm: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    plain = helm("template", "everstep").stdout
    changed = helm("template", "everstep", *shlex.split(flag)).stdout
    assert changed != plain


@pytest.mark.parametrize("text", JOBS)
def test_job_that_a_page_shows_is_taken_by_the_api_server(text: str, jobs: Any) -> None:
    body = yaml.safe_load(text)
    body["metadata"]["namespace"] = jobs.namespace
    done = jobs.kubectl("create", "--dry-run=server", "-f", "-", input=json.dumps(body))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
