"""What texts for a person advise in several places."""

from __future__ import annotations

from collections.abc import Iterable

# Tracked as it is, such a tensor is refused, because it is another one on each rank; and summed over the ranks, as that
# refusal advises for a mean, it would mix the states of different texts.
OF_A_RANK = (
    "A tensor of a rank's own samples (a hidden state, a batch that was fetched a step early) is neither tracked as it "
    'is nor summed over the ranks: write it as docs/how-to-restructure.md does under "Hidden state of each rank" and '
    '"A batch that is fetched a step early"'
)
OF_A_MODULE = (
    "A tensor of a tracked module is saved with it if it is a buffer: self.register_buffer(name, tensor), without "
    "persistent=False"
)


def of_tensors(names: Iterable[str]) -> str:
    """What to do about tensors with these names that nothing saves."""
    return f"{OF_A_MODULE}. {OF_A_RANK}" if any("." in name for name in names) else OF_A_RANK
