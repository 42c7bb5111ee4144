"""No pickle anywhere (failure mode 75): not in what a save writes, not in what a restore or the command line reads.

Python tells its audit hooks whenever an unpickler looks up a class. A process with such a hook saves, restores, lists,
verifies, copies and exports, and dies if it is called.
"""

import contextlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint import CheckpointError
from everstep.checkpoint.retention.catalog import Catalog
from everstep.storage import MemoryStore

WATCHED = r"""
import sys
from pathlib import Path
import torch, torch._dynamo, everstep, everstep.checkpoint.convert.outgoing
from everstep.checkpoint.retention.catalog import Catalog
from everstep.checkpoint.convert.copying import copy
from everstep.storage import open_store

def audit(event, arguments):
    if event in ("pickle.find_class", "marshal.loads"):
        sys.stderr.write(f"{event} {arguments}\n")
        sys.stderr.flush()
        import os; os._exit(99)

root = sys.argv[1]
def state():
    model = torch.nn.Linear(3, 2)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "rng": everstep.RngState(),
            "values": {"a": (1, b"x", {2: None})}, "tensor": torch.ones(3)}

quiet = lambda kind, **_: None
warm = everstep.Checkpointer(root + "/warm", on_event=quiet)  # imports what it imports
s = state(); warm.restore(s); warm.save(1, s).wait(30); warm.close()
warm.export(root + "/warm-export"); warm.verify()
def copied(name):
    source = open_store(f"{root}/{name}")
    copy(source, Catalog(source).find(), open_store(f"{root}/{name}-copy"), "a" * 32, "")
copied("warm")
sys.addaudithook(audit)
first = everstep.Checkpointer(root + "/run", on_event=quiet)
s = state(); first.restore(s); first.save(1, s).wait(30); first.close()
again = everstep.Checkpointer(root + "/run", on_event=quiet)
assert again.restore(state()) == 1
again.pin(); again.unpin(); again.gc(); assert again.verify() == () and again.list(); again.export(root + "/export")
copied("run")
print("done")
import pickle
pickle.loads(pickle.dumps(print))  # the watch works
"""


class Evil:
    """Unpickling it fails the test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was loaded",))


def test_nothing_is_unpickled_while_a_process_saves_restores_and_exports(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tmp_path)], capture_output=True, text=True, check=False, timeout=100
    )
    assert (result.returncode, result.stdout) == (99, "done\n"), result.stderr


def test_no_object_of_a_checkpoint_is_a_pickle(runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    Catalog(store).pin(1)
    for name, data in store.objects.items():
        with pytest.raises((pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError)):
            pickle.loads(data)
        assert name.endswith((".json", ".safetensors"))


@pytest.mark.parametrize("where", ["data/", "log/000000000001", "log/000000000002", "pins/", "loads/"])
def test_pickle_in_the_place_of_any_object_is_damage_and_is_never_loaded(where: str, runs: Any) -> None:
    store = MemoryStore()
    runs(store).save(1, 2)
    Catalog(store).pin(2)
    runs(store).begin()
    evil = pickle.dumps(Evil())
    names = [n for n in store.objects if n.startswith(where)]
    assert names
    for name in names:
        store.objects[name] = evil
    catalog = Catalog(store)
    catalog.list()
    with contextlib.suppress(CheckpointError):
        catalog.find(99)
    if where == "data/":
        with pytest.raises(CheckpointError, match="can be read whole"):
            runs(store).restored()
    else:
        assert runs(store).restored() == (1 if where == "log/000000000002" else 2)
