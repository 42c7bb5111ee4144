"""What of a script's imports the fork server imports before it: read from its text, and nothing that it would not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep.agent.arguments import MODULES, read
from everstep.agent.preload import LATE, MOST_BYTES, MOST_NAMES, preloaded
from everstep.agent.processes import client


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch\n", ()),
        ("import transformers\nimport datasets as d\n", ("transformers", "datasets")),
        ("from transformers import Trainer, AutoConfig as C\n", ("transformers:Trainer", "transformers:AutoConfig")),
        ("from transformers.utils import *\n", ("transformers.utils",)),
        ("try:\n    import lightning.pytorch as L\nexcept ImportError:\n    pass\n", ("lightning.pytorch",)),
        ("def main():\n    import transformers\n", ()),
        (
            "from everstep.train.adapters.huggingface import EverstepCallback\n",
            ("everstep.train.adapters.huggingface:EverstepCallback",),
        ),
        ("from everstep.train.adapters import lightning\n", ("everstep.train.adapters:lightning",)),
        # `datasets` comes with it: `prepare` imports that, for seconds in which the others wait for a new process.
        ("from accelerate import Accelerator\n", ("accelerate:Accelerator", "datasets")),
        (
            "from everstep.train.adapters.accelerate import start\n",
            ("everstep.train.adapters.accelerate:start", "datasets"),
        ),
        ("import os\nos.environ['HF_HOME'] = '/data'\nimport transformers\n", ()),
        ("import os\ndef f():\n    os.environ.setdefault('A', 'b')\nimport transformers\n", ()),
        ("from os import environ\nenviron.update(A='b')\nimport transformers\n", ()),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport transformers\n", ()),
        ("import os\nprint(os.environ['HOME'])\nimport transformers\n", ("transformers",)),
        ("import transformers\ndef\n", ()),
        ("#" * (MOST_BYTES + 1) + "\nimport transformers\n", ()),
        ("from . import other\nimport transformers\n", ()),
    ],
)
def test_slow_libraries_are_found_in_the_text(text: str, found: tuple[str, ...], tmp_path: Path) -> None:
    assert preloaded(script(tmp_path, text)) == found


def test_what_a_library_imports_late_is_left_out_where_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LATE, "accelerate", "not_installed_here")
    assert preloaded(script(tmp_path, "from accelerate import Accelerator\n")) == ("accelerate:Accelerator",)


def test_modules_beside_the_script_are_followed(tmp_path: Path) -> None:
    script(tmp_path, "from transformers import Trainer\nimport train\n", "model.py")
    assert preloaded(script(tmp_path, "import model\n")) == ("transformers:Trainer",)
    script(tmp_path, "import os\nos.environ['A'] = 'b'\n", "settings.py")
    assert preloaded(script(tmp_path, "import settings\nimport model\n")) == ()


def test_users_own_module_of_such_a_name_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = script(tmp_path, "import datasets\n")
    assert preloaded(path) == ("datasets",)
    script(tmp_path, "", "datasets.py")
    assert preloaded(path) == ()
    brings = script(tmp_path, "from accelerate import Accelerator\n", "other.py")
    assert preloaded(brings) == ("accelerate:Accelerator",), "the file beside it is what `prepare` would import"
    (tmp_path / "datasets.py").unlink()
    other = tmp_path / "other"
    other.mkdir()
    script(other, "", "datasets.py")
    monkeypatch.chdir(other)
    assert preloaded(path) == ()


def test_what_is_read_is_bounded(tmp_path: Path) -> None:
    many = "".join(f"from transformers import A{i}\n" for i in range(2 * MOST_NAMES))
    assert len(preloaded(script(tmp_path, many))) == MOST_NAMES
    assert preloaded(str(tmp_path / "missing.py")) == ()


def test_environment_says_all_that_is_preloaded(tmp_path: Path) -> None:
    path = script(tmp_path, "import transformers\n")
    assert read([path], {}).preload == (*MODULES.split(","), "transformers")
    assert read([path], {"EVERSTEP_PRELOAD": "torch"}).preload == ("torch",)
    assert read([path], {"EVERSTEP_PRELOAD": ""}).preload == ()
    assert read(["--module", "transformers"], {}).preload == tuple(MODULES.split(","))


def test_processes_find_the_library_imported(tmp_path: Path) -> None:
    """By a library of the same name that is quick, and that counts its imports."""
    library = tmp_path / "library" / "transformers"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text(
        "def __getattr__(name):\n"
        "    import importlib\n"
        "    if name != 'Trainer':\n"
        "        raise AttributeError(name)\n"
        "    return importlib.import_module('transformers.trainer').Trainer\n"
    )
    imports = tmp_path / "imports"
    (library / "trainer.py").write_text(
        f"import os\nopen({str(imports)!r}, 'a').write(f'{{os.getpid()}}\\n')\nclass Trainer: pass\n"
    )
    path = script(tmp_path, "from transformers import Trainer\nimport os\nprint('here', os.getpid(), Trainer)\n")
    environ = {k: v for k, v in os.environ.items() if k != "EVERSTEP_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-m", "everstep.agent.main", "--standalone", "--nproc-per-node=2", path],
        env={**environ, "PYTHONPATH": str(tmp_path / "library"), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert done.stdout.count("here") == 2
    assert len(imports.read_text().splitlines()) == 1, "in the parent alone"


LIBRARIES = {
    "from transformers import Trainer, TrainingArguments": "transformers.trainer",
    "import lightning.pytorch": "lightning.pytorch.trainer.trainer",
    "from accelerate import Accelerator": "accelerate.accelerator",
    "from everstep.train.adapters.huggingface import EverstepCallback": "everstep.train.adapters.huggingface",
    "from everstep.train.adapters import lightning": "everstep.train.adapters.lightning",
    "from everstep.train.adapters.accelerate import start": "everstep.train.adapters.accelerate",
}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_real_libraries_are_imported_before_the_scripts_first_line(tmp_path: Path) -> None:
    """Of the three that have an adapter, without a word to the agent."""
    first = f"import sys\nprint('there:', *sorted({set(LIBRARIES.values())!r} & sys.modules.keys()))\n"
    path = script(tmp_path, first + "\n".join(LIBRARIES) + "\n")
    environ = {k: v for k, v in os.environ.items() if k != "EVERSTEP_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-m", "everstep.agent.main", "--standalone", "--nproc-per-node=1", path],
        env={**environ, "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert f"there: {' '.join(sorted(LIBRARIES.values()))}\n" in done.stdout, done.stdout + done.stderr
    assert "it is imported in each process instead" not in done.stderr


def test_fork_server_whose_imports_take_too_long_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "import time\ntime.sleep(60)\n", "slow_library.py")
    monkeypatch.setattr(client, "START_SECONDS", 0.5)

    async def fork() -> None:
        server = client.ForkServer(["slow_library"], os.environ | {"PYTHONPATH": str(tmp_path)}, lambda pid, code: None)
        try:
            await server.fork({"kind": "program"})
        finally:
            monkeypatch.setattr(client, "CLOSE_SECONDS", 0.1)
            await server.close()

    with pytest.raises(client.ForkServerError, match=r"in 0\.5 s: .*\(slow_library\).*EVERSTEP_PRELOAD=torch"):
        asyncio.run(fork())
