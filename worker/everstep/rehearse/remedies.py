"""What people write to mend what a rehearsal has found: the sentences behind the findings."""

from __future__ import annotations

from collections.abc import Mapping

from everstep.rehearse.play import Played
from everstep.train.guards.remedies import of_tensors

MOST_NAMED = 6  # values
MOST_DECLARED = 40  # values of one line to be copied: each that is left out is a warning of the next rehearsal
ALIKE = (  # the rest of the advice on running statistics
    "For the same bits write behind the step's last backward(), for each buffer in model.module.buffers(): "
    "`if buffer.is_floating_point(): dist.all_reduce(buffer); buffer /= run.world_size`"
)
TRACK = (
    "Track what steps change (`run.track(name=value)`; a number inside of a dictionary), or compute it anew in each "
    "step from run.step"
)
SAVE = (
    "Put what steps change into the state that `restore` and `save` are given (a number inside of a dictionary), or "
    "compute it anew in each step from the step's number"
)
COMMIT = (
    "Pass what steps change to hvd.elastic.TorchState(…) (a number, a text, a list, or an object with a state_dict), "
    "or compute it anew from what is in it"
)
KEEP = (
    "Keep what steps change as a number, a text, a list or a dictionary in an attribute of the callback or the module: "
    "an object of a class of your own in it is not kept"
)
ANOTHER = "If the commit of --from is of another model: name one that this script has saved, with these arguments"
UNCONVERTED = (
    "the script never calls Everstep: it has no everstep.start, no everstep.Checkpointer and no adapter, so there is "
    "no step to compare, and after a loss it would begin from nothing. docs/how-to-convert.md has the lines to write, "
    "by the form of its loop"
)
REPEATED = (
    "Steps behind a commit are taken again after a restart, and written again: give each row its step and read the "
    "last one of each, or cut the file to the restored step before the loop"
)
MISSED = (
    "What rank 0 writes behind a step is lost if it is killed just then: let each rank keep its newest row, and the "
    "next rank 0 write it"
)
OTHERWISE = "It was made from what a new process has not: track that, or compute it anew in each step"
BY_STATISTICS = (
    "It may be by the running statistics that differ, which are named too: do first what is said there, and rehearse "
    "again"
)
BYTES = "The bytes differ, which may have no cause in what is trained: the order of a set, a time, a name of a process"
BATCH = "`run.loader(dataset, global_batch=N)`"
LOADER = "`run.loader(dataset, …)` choose them, from a dataset that each process makes alike"
SAMPLER = (
    "hvd.elastic.ElasticSampler choose them: pass it to hvd.elastic.TorchState(…), and call its record_batch between a "
    "batch and the commit"
)
PADDED = (
    ". A collate_fn that pads to the longest row of a rank's batch gives other rows with other ranks: pad to one "
    "length in the script, for its runs too, because a stamp counts for this program alone; or leave the change of "
    "size out (--kill=rank,all), which leaves a stamp too: then give the job one size, --nnodes=N"
)
SCALED = (
    "it grows with the number of ranks. Where the batch of all ranks together stays the same, take the size for which "
    "it was chosen (a number, or `run.once`), and not the present one"
)
PRESENT = (
    "Compute what depends on the number of ranks anew in each step, from `run.world_size` or `dist.get_world_size()`: "
    "a job may change its size while its processes live"
)
APART = (
    'everstep.start(rng="rank") gives each rank its own. What has to be the same on all ranks, draw from run.shared_rng'
)
DROPOUT = 'Where it calls everstep.start, write everstep.start(…, rng="rank"): else all ranks then have one dropout'
SEED = (
    "Seed each rank otherwise, behind the making of the model: `torch.manual_seed(seed + dist.get_rank())`, and "
    "`random.seed` and `numpy.random.seed` likewise"
)
SPLIT = "seed a split"  # in the refusal of ranks that have split their data each for itself (`train.guards`)
BEHIND_LOOP = "is behind the loop"  # in the error of a collective that some ranks alone call there (`recovery.group`)
FIT = "A batch of N // WORLD_SIZE for each rank"


def seed(run: Played) -> str:
    """What lets two calm runs draw the same. Equal seeds give all ranks one dropout."""
    text = "Seed what the script draws (torch.manual_seed(0) before the model is made; a generator for each split)"
    if run.in_library or run.by_commits:
        return text
    return f"{text}. {SEED if run.own_loop else DROPOUT}"


def of(run: Played, held: Mapping[str, tuple[int, str]] | None = None) -> str:
    """What keeps values over a restart. `held`: those that differ, if they are known.
    Only names are known where an error has ended the run."""
    if run.in_library or run.by_commits or run.own_loop:
        return KEEP if run.in_library else COMMIT if run.by_commits else SAVE
    tensors = ["unknown"] if held is None else [name for name, (_, text) in held.items() if "tensor" in text]
    return f"{TRACK}. {of_tensors(tensors)}" if tensors else TRACK


def or_declare(run: Played, held: Mapping[str, tuple[int, str]]) -> str:
    """What to write where the values may be lost; nothing for a run that takes no names."""
    if run.in_library or run.by_commits or run.own_loop:
        return ""
    names = ", ".join(map(repr, list(held)[:MOST_DECLARED])) + (", …" if len(held) > MOST_DECLARED else "")
    return f". Or, if nothing is lost with what is named, declare it: run.untracked({names})"
