"""MDS and litdata shards, written by the libraries in an environment of their own: see outside_script.py."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("source", "package"), [("mds", "mosaicml-streaming>=0.13"), ("litdata", "litdata>=0.2.76")])
def test_samples_order_and_refusals_are_right_over_the_library_itself(
    source: str, package: str, tmp_path: Path
) -> None:
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([UV, "venv", "-q", "--python", sys.executable, tmp_path / "env"], check=True)
    install: list[str | Path] = [
        UV,
        "pip",
        "install",
        "-q",
        "--python",
        python,
        "--find-links",
        ROOT.parent / "shared" / "wheels",
    ]
    subprocess.run(
        [*install, "torch>=2.13,<2.14", package, "zstd", "-e", f"{ROOT}/worker[worker]", "-e", ROOT / "sources"],
        check=True,
    )
    script: list[str | Path] = [python, Path(__file__).with_name("outside_script.py"), source, tmp_path]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("all is right\n")
