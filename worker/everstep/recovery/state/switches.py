"""Saves switches of tracked modules that a script changes while it trains and that are not in `state_dict`: which
parameters require gradients, which modules are in training mode, the sizes of buffers, and which parameters have a
gradient at all. (An optimizer moves a parameter whose gradient is zero, by decay or momentum, but not one without a
gradient.)

A process that comes later has the switches that its script sets before the loop, so it would train what the others have
frozen. Therefore switches that changed since the loop began are part of the training state. Switches set before the
loop are not: if another script resumes the run and freezes other layers, its settings hold.

Invariant: a process gets switches only if its script begins with the same settings as the script that saved them. They
come before the modules in the state, because `load_state_dict` needs buffers of the right size.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash
from torch.nn.parameter import is_lazy

from everstep.checkpoint.state.modules import bare, make_buffer
from everstep.recovery.state.gradients import zero_gradient
from everstep.torch_private.modules import buffers_of, compiled, parameters_of, unsaved_of

log = logging.getLogger("everstep.train")

SWITCHES: Final = "switches"  # the name in a commit
GRADIENTS = "gradients"  # among what was switched


@dataclass(frozen=True, slots=True)
class _Began:
    """The switches of one module when the loop began."""

    name: str
    module: torch.nn.Module
    root: torch.nn.Module  # the tracked one, of which it is a part
    training: bool
    required: dict[str, bool]  # by parameter
    buffers: dict[str, list[Any] | None]  # the persistent ones


class Switches:
    """The switches of the modules in `state`. Call `start` once, when the script has built them and nothing is restored
    yet."""

    everstep_optional = True  # commits of runs without a session lack it
    everstep_of_session = True  # so buffers, and what the script keeps, may have other sizes than when it began

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._modules: list[_Began] = []
        self._digest = ""
        self._kept: dict[str, str] | None = None

    def start(self) -> None:
        """Note the settings of the script before its loop."""
        tracked = [(key, bare(t)) for key, t in self._state.items() if isinstance(t, torch.nn.Module)]
        self._modules = [
            _Began(f"{key}.{path}" if path else key, m, module, m.training, _required(m), _buffers(m))
            for key, module in tracked
            for path, m in module.named_modules()
        ]
        settings = [(b.name, b.training, b.required, b.buffers) for b in self._modules]
        self._digest = xxhash.xxh3_64_hexdigest(json.dumps(settings).encode())

    def keep(self) -> None:
        """From now on give what is switched now: the script has left its loop."""
        self._kept = self.state_dict()

    def state_dict(self) -> dict[str, str]:
        if self._kept is not None:
            return self._kept
        switched: dict[str, Any] = {}
        for began in self._modules:
            if began.module.training is not began.training:
                switched[f"training of {began.name}"] = began.module.training
            for known, now in ((began.required, _required(began.module)), (began.buffers, _buffers(began.module))):
                if known != now:
                    switched |= {f"{began.name}.{k}": v for k, v in now.items() if k in known and v != known[k]}
        if gradients := self._gradients():
            switched[GRADIENTS] = gradients
        return {"began": self._digest, "switched": json.dumps(switched, sort_keys=True)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        self._kept = None
        wanted = json.loads(state["switched"])
        gradients = wanted.pop(GRADIENTS, {})
        if state["began"] != self._digest:
            if wanted:
                log.warning(
                    "the run that made this state had switched %s since its loop began; this script's modules begin "
                    "otherwise (requires_grad, training mode, buffers), and are left as it has set them",
                    ", ".join(sorted(wanted)[:8]),
                )
            return
        for began in self._modules:
            began.module.training = wanted.get(f"training of {began.name}", began.training)
            for k, required in began.required.items():
                p, to = parameters_of(began.module).get(k), wanted.get(f"{began.name}.{k}", required)
                if p is not None and p.requires_grad is not to:
                    p.requires_grad_(to)
            for k, kind in began.buffers.items():
                _make_room(began.module, k, wanted.get(f"{began.name}.{k}", kind), began.root)
        for name, p in self._parameters():
            has = name not in gradients["without"] if "without" in gradients else name in gradients.get("with", ())
            if has is not (p.grad is not None):
                p.grad = zero_gradient(p, sparse=name in gradients.get("sparse", ())) if has else None
        for target in self._state.values():
            _align(target)

    def hold(self) -> dict[str, str]:
        """Require gradients as when the loop began, until the returned state is loaded: a framework that makes its
        optimizer and wraps the module now finds what it would have found then."""
        own = self.state_dict()
        for began in self._modules:
            for k, required in began.required.items():
                if (p := parameters_of(began.module).get(k)) is not None:
                    p.requires_grad_(required)
        return own

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for began in self._modules:
            for key in began.required:
                if (p := parameters_of(began.module).get(key)) is not None and not is_lazy(p):
                    yield f"{began.name}.{key}", p

    def _gradients(self) -> dict[str, list[str]]:
        """Which parameters have a gradient, in a short form, because mostly all or none do."""
        parameters = list(self._parameters())
        names = {"with": [name for name, p in parameters if p.grad is not None]}
        if not names["with"]:
            return {}
        if len(names["with"]) > len(parameters) // 2:
            names = {"without": [name for name, p in parameters if p.grad is None]}
        sparse = [name for name, p in parameters if p.grad is not None and p.grad.is_sparse]
        return names | {"sparse": sparse} if sparse else names


def _required(module: torch.nn.Module) -> dict[str, bool]:
    return {k: p.requires_grad for k, p in parameters_of(module).items() if p is not None}


def _buffers(module: torch.nn.Module) -> dict[str, list[Any] | None]:
    """The buffers' types and shapes; None for buffers that do not exist yet."""
    own, left_out = buffers_of(module), unsaved_of(module)
    return {k: _kind(b) for k, b in own.items() if k not in left_out and not (b is not None and is_lazy(b))}


def _kind(buffer: torch.Tensor | None) -> list[Any] | None:
    return None if buffer is None else [str(buffer.dtype).removeprefix("torch."), *buffer.shape]


def _make_room(module: torch.nn.Module, name: str, kind: list[Any] | None, root: torch.nn.Module) -> None:
    """Make room for a value that is about to be loaded into a buffer; or None, for one that was None then. `root`: its
    parameters are where the buffer is to be, if the module has none itself."""
    own = buffers_of(module)
    live = own.get(name)
    if _kind(live) == kind or (live is not None and is_lazy(live)):
        return
    if kind is None:
        own[name] = None
        return
    like = live if live is not None else next((p for m in (module, root) for p in m.parameters()), None)
    make_buffer(module, name, like, kind[1:], getattr(torch, kind[0]))


def _align(target: Any) -> None:
    """Put the wrappers of a module into its mode."""
    inner = bare(target)
    while isinstance(target, torch.nn.Module) and target is not inner:
        target.training = inner.training
        target = target.module if (wrapped := compiled(target)) is None else wrapped
