"""Faults of single pods, as the random histories of the planner's tests cause them on a simulated cluster."""

from __future__ import annotations

from typing import Any


class PodFaults:
    """`world` is a simulated cluster. A fault that its pod cannot have any more does nothing."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.obeyed: set[str] = set()  # pods whose programs ended with 0 because they were told to

    def pod(self, index: int) -> str | None:
        name: str = self.world.current(index)
        return name if name in self.world.pods else None

    def running(self, index: int) -> str | None:
        name = self.pod(index)
        return None if name is None or self.world.pods[name].finished else name

    def succeed(self, index: int) -> None:
        if self.running(index):
            self.world.do_succeed(str(index))

    def evict(self, index: int) -> None:
        if self.running(index):
            self.world.do_evict(str(index))

    def reject(self, index: int) -> None:
        if (name := self.running(index)) is not None and not self.world.pods[name].ready:
            self.world.do_reject(str(index))

    def side_car(self, index: int) -> None:
        if self.running(index):
            self.world.do_side_car(str(index))

    def obey(self, index: int) -> None:
        if (name := self.running(index)) is not None:
            self.obeyed.add(name)
            self.world.do_obey(str(index))

    def delete(self, index: int) -> None:
        if self.pod(index):
            self.world.do_delete(str(index))

    def gone(self, index: int) -> None:
        if self.pod(index):
            self.world.do_gone(str(index))

    def node(self, name: str, back: bool) -> None:
        (self.world.do_node_back if back else self.world.do_node_lost)(name)

    def image(self, number: int) -> None:
        self.world.do_image(f"train:{number}")

    def linger(self) -> None:
        self.world.do_pods_linger()

    def end(self) -> None:
        self.world.do_end()
