"""What a role holds on its device, and how a process goes from one role to another.

Every tensor of a role is one of four kinds (PivotRL section 5): *temporary* is dropped and comes back as zeros;
*parameters* are dropped and read again; *offloadable* goes to host memory and comes back; *preserved* stays. A tensor
of no kind makes the role refuse to shift. Releasing empties a tensor's storage in place: the tensor object stays, so
modules, optimizers and compiled code that hold it find it filled again.

Residency comes first: where all roles fit on the device, nothing is released and a shift is a change of name.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, UntypedStorage, nn

from solrl.errors import SolrlError
from solrl.runtime.mailbox import Role

Kind = Literal["temporary", "parameters", "offloadable", "preserved"]


class ShiftFailed(SolrlError):
    """A role could not come up; the previous one is as it was."""


@dataclass(frozen=True)
class Context:
    """A role's tensors by name, and the kind of each."""

    role: Role
    tensors: Callable[[], Mapping[str, Tensor]]
    """All that the role holds, asked anew at each shift."""
    kinds: Sequence[tuple[str, Kind]]
    """(glob over names, kind); the first that matches counts."""
    read: Callable[[str, Tensor], None] | None = None
    """Fills a parameter in place; needed where there are any."""
    start: Callable[[], object] = lambda: None
    """Brings up what is no tensor, a child process say; at every shift into the role, after its tensors."""
    stop: Callable[[], object] = lambda: None
    """Ends it, before the role's tensors go; at every shift out of the role, and where it did not come up."""

    def classified(self) -> dict[str, tuple[Tensor, Kind]]:
        """Every tensor with its kind. Raises SolrlError for one of no kind, or of two by shared storage."""
        found: dict[str, tuple[Tensor, Kind]] = {}
        of_storage: dict[int, tuple[str, Kind]] = {}
        for name, tensor in self.tensors().items():
            kind = next((kind for glob, kind in self.kinds if fnmatchcase(name, glob)), None)
            if kind is None:
                raise SolrlError(f"role {self.role} cannot shift: {name} is of no kind; classify it")
            if kind == "parameters" and self.read is None:
                raise SolrlError(f"role {self.role} cannot shift: {name} is to be read again but there is no reader")
            first, other = of_storage.setdefault(_key(tensor), (name, kind))
            if other != kind:
                raise SolrlError(f"role {self.role} cannot shift: {first}, {other}, shares memory with {name}, {kind}")
            found[name] = tensor, kind
        return found


def module_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Every parameter and buffer of ``modules``, as ``<module>.<name>``."""
    return {
        f"{name}.{inner}": tensor
        for name, module in modules.items()
        for inner, tensor in [*module.named_parameters(), *module.named_buffers()]
    }


@dataclass
class _Released:
    """A storage that was emptied."""

    nbytes: int
    kind: Kind
    host: Tensor | None = None


class Residency:
    """The role that this process has now, among the roles that it can have.

    ``budget_bytes``: what the device can hold of all roles together; None: all of it, so that nothing is ever released.
    """

    def __init__(self, contexts: Iterable[Context], current: Role, budget_bytes: int | None = None) -> None:
        self.contexts = {context.role: context for context in contexts}
        self.current: Role = current
        self.budget_bytes = budget_bytes
        self._released: dict[int, _Released] = {}  # by the identity of a storage that a tensor still holds

    @property
    def is_resident(self) -> bool:
        """Whether all roles fit together."""
        return self.budget_bytes is None or self.held_bytes(self.contexts) <= self.budget_bytes

    def held_bytes(self, roles: Iterable[Role]) -> int:
        """Bytes of the roles' tensors, each storage once, released ones as if they were there."""
        sizes: dict[int, int] = {}
        for role in roles:
            for tensor in self.contexts[role].tensors().values():
                released = self._released.get(_key(tensor))
                sizes[_key(tensor)] = released.nbytes if released else tensor.untyped_storage().nbytes()
        return sum(sizes.values())

    def shift_to(self, role: Role) -> None:
        """This process has ``role``. Raises ShiftFailed, with the previous role as it was, where it does not come up.

        Any other SolrlError is a mistake in the roles, or a previous role that did not come back: no way to go on.
        """
        if role not in self.contexts:
            raise SolrlError(f"this process has no role {role}")
        if role == self.current:
            return
        before, is_resident = self.current, self.is_resident
        if not is_resident:
            for each in (before, role):
                self.contexts[each].classified()
        try:
            self._hand_over(before, role, is_resident)
        except (SolrlError, RuntimeError) as error:  # out of memory is a RuntimeError
            self._roll_back(role, before, error, is_resident)
            raise ShiftFailed(f"role {role} did not come up, {before} is back: {_line(error)}") from error
        self.current = role

    def _hand_over(self, before: Role, role: Role, is_resident: bool) -> None:
        self.contexts[before].stop()
        if not is_resident:
            self.shift_down(before, role)
            self.shift_up(role)
        self.contexts[role].start()

    def _roll_back(self, role: Role, before: Role, error: Exception, is_resident: bool) -> None:
        try:
            self._hand_over(role, before, is_resident)
        except (SolrlError, RuntimeError) as second:
            raise SolrlError(
                f"role {role} did not come up ({_line(error)}) and {before} did not come back ({_line(second)}): "
                "continue with --resume"
            ) from error

    def shift_down(self, role: Role, successor: Role) -> int:
        """Release what ``role`` holds and ``successor`` does not; bytes released, proved."""
        kept = {_key(tensor) for tensor in self.contexts[successor].tensors().values()}
        going: dict[int, tuple[str, Tensor, Kind]] = {}
        for name, (tensor, kind) in self.contexts[role].classified().items():
            if kind != "preserved" and _key(tensor) not in kept and _storage(tensor).nbytes():
                if not _storage(tensor).resizable():
                    raise SolrlError(f"{name} is {kind}, and memory that torch does not own cannot be released")
                going.setdefault(_key(tensor), (name, tensor, kind))
        device = next((tensor.device for _, tensor, _ in going.values() if tensor.device.type == "cuda"), None)
        before = torch.cuda.memory_allocated(device) if device else 0
        total = on_device = 0
        for key, (_, tensor, kind) in going.items():
            storage = _storage(tensor)
            if key not in self._released:  # else a failed shift_up is taken back, and what it began to fill is no state
                host = _bytes_of(storage).to("cpu", copy=True) if kind == "offloadable" else None
                self._released[key] = _Released(storage.nbytes(), kind, host)
            total += storage.nbytes()
            on_device += storage.nbytes() if tensor.device.type == "cuda" else 0
            storage.resize_(0)
        for name, tensor, _ in going.values():
            if _storage(tensor).nbytes():
                raise SolrlError(f"role {role} did not release {name}")
        if device:
            gc.collect()
            torch.cuda.empty_cache()
            freed = before - torch.cuda.memory_allocated(device)
            if freed < on_device:
                raise SolrlError(f"role {role} released {on_device} bytes but the device got {freed} back")
        return total

    def shift_up(self, role: Role) -> None:
        """Fill what ``role`` needs and does not have. A failure leaves it half up; ``shift_down`` takes that back."""
        context = self.contexts[role]
        filled: list[tuple[str, Tensor]] = []
        for name, (tensor, kind) in context.classified().items():
            released = self._released.get(_key(tensor))
            if released is None:
                continue
            if released.kind != kind:
                raise SolrlError(f"{name} is {kind} in role {role} and was released as {released.kind}")
            storage = _storage(tensor)
            if not storage.nbytes():
                storage.resize_(released.nbytes)
                if released.host is not None:
                    _bytes_of(storage).copy_(released.host)
                elif kind == "temporary":
                    _bytes_of(storage).zero_()
            filled.append((name, tensor))
            if kind == "parameters":
                assert context.read is not None
                with torch.no_grad():
                    context.read(name, tensor)
        for _, tensor in filled:
            self._released.pop(_key(tensor), None)


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _storage(tensor: Tensor) -> UntypedStorage:
    return tensor.untyped_storage()


def _key(tensor: Tensor) -> int:
    """Of the storage, whatever it holds now: its data pointer is 0 when released."""
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
