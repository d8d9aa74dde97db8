"""Opening a reward, here or in a child process of its own: with its own memory and its own GPUs.

A child takes images from shared memory (runtime/blobs.py) and answers with JSON lines over a socket; nothing is
pickled. It is this process's alone and ends with it, however that ends: the kernel kills it when its parent dies, and a
closed socket ends it. Its own death, and an answer that does not come, are failures of the reward, named as such.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from solrl.distributed import World
from solrl.errors import Interrupted, RewardFailed, SolrlError, UsageError
from solrl.runtime.blobs import BlobRef, Blobs
from solrl.types import Reward

GRACE_S = 5.0
"""How long a child that is told to end may take before it is killed."""
LOOK_S = 0.2
"""Between two looks for a signal while a child is waited for."""
PR_SET_PDEATHSIG = 1


def open_reward(setting: str, name: str, options: dict[str, Any]) -> Reward:
    """The reward that ``setting`` names; UsageError where there is none, it refuses its options, or it is no Reward."""
    from solrl_rewards import load_reward

    try:
        reward = load_reward(name, **options)
    except (ValueError, OSError) as error:
        raise UsageError(f"{setting}: {str(error).splitlines()[0]}") from error
    missing = [part for part in ("name", "range", "description", "__call__") if not hasattr(reward, part)]
    if missing:
        raise UsageError(f"{setting}: {name} has no {', '.join(missing)}; see solrl.types.Reward for what a reward has")
    return reward


def child_devices(
    gpus: int, device: torch.device, environment: Mapping[str, str] = os.environ, *, shared: bool = False
) -> str:
    """CUDA_VISIBLE_DEVICES of the child of a process on ``device``: with ``gpus`` of its own, those behind the ones of
    the run's processes on this machine, the first process's first; with 0 its parent's.

    ``shared``: those of ``gpus`` processes, its parent's among them.
    """
    if (gpus == 0 or shared) and device.type != "cuda":
        return ""
    rank, size = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
    if gpus == 0:
        return names[device.index or 0]
    if shared:
        return ",".join(names[rank // gpus * gpus :][:gpus])
    first = size + rank * gpus
    if first + gpus > len(names):
        raise UsageError(
            f"reward.process_gpus = {gpus}: {size} processes and their rewards need {size * (1 + gpus)} GPUs on this "
            f"machine and there are {len(names)}; start fewer processes"
        )
    return ",".join(names[first : first + gpus])


Together: TypeAlias = Callable[[list[tuple[Tensor, list[str]]]], list[tuple[Tensor, Tensor]]]
"""(images, prompts) of this process's parts -> (values, present) of each; a call of all processes at once."""


class ChildReward:
    """A reward in a child process, which starts when it is first needed, or by ``start``, and ends by ``stop``.

    Raises what ``open_reward`` raises. Start it in the main thread: the kernel ties a child to the thread that made it.
    Where several processes have one child between them, whoever makes it up sets ``together``: all call it at once,
    each with its own images and prompts, and each gets the answers to them.
    """

    def __init__(
        self,
        name: str,
        options: dict[str, Any],
        *,
        devices: str | None = None,
        threads: int = 1,
        timeout_s: float = 1800.0,
        stop: Callable[[], None] = lambda: None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """``devices``: the child's CUDA_VISIBLE_DEVICES; None: those of this process. ``timeout_s``: for its start, and
        for one answer. ``stop`` is called while waiting and may raise. ``facts``: those of the same reward's child in
        another process; then none is started yet."""
        self.together: Together | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._ender: weakref.finalize[..., ChildReward] | None = None
        self._unread = b""
        self._ring: Blobs | None = None
        self.name, self.devices, self.timeout_s, self._stop = name, devices, timeout_s, stop
        self._opening = {"name": name, "options": options, "threads": threads}
        try:
            json.dumps(options)
        except TypeError as error:
            raise UsageError(f"reward.options cannot be sent to another process: {error}") from error
        self.facts = facts = self.start() if facts is None else facts
        self.name, self.description = str(facts["name"]), str(facts["description"])
        self.range = (float(facts["range"][0]), float(facts["range"][1]))
        self.part_weights: tuple[float, ...] | None = facts["part_weights"] and tuple(map(float, facts["part_weights"]))

    @property
    def pid(self) -> int | None:
        """Of the child, None while there is none."""
        return self._child.pid if self._child else None

    def start(self) -> dict[str, Any]:
        """The child is up and has loaded its reward; what that says of itself."""
        if self._child is not None and self._child.poll() is None:
            return {}
        self.stop()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if self.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices
        for launcher in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(launcher, None)  # what it starts itself is no part of this run
        here, there = socket.socketpair()
        with there:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "solrl.scorer", str(there.fileno()), str(os.getpid())],
                env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,
            )  # fmt: skip
        self._socket, self._unread = here, b""
        self._ender = weakref.finalize(self, _end, self._child, here, os.getpid())  # also where nobody says stop
        try:
            return self._ask(self._opening, "loaded")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """There is no child any more, and with it none of its memory. Twice is harmless."""
        if self._ender is not None:
            self._ender()
        self._child = self._socket = self._ender = None

    def close(self) -> None:
        """The same, and its shared memory is given back."""
        self.stop()
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def __call__(self, images: Tensor, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] images and B prompts -> [B] or [B, R] scores, [B] whether each is present; on the CPU."""
        self.start()
        if self._ring is None or self._ring.capacity < 2 * images.nbytes:
            if self._ring is not None:
                self._ring.close()
            self._ring = Blobs(0, 2 * images.nbytes + 2**12, max_blobs=8)
            weakref.finalize(self, self._ring.close)
        ref = self._ring.put({"images": images.detach()})
        try:
            answer = self._ask({"images": ref.to_json(), "prompts": [*prompts]}, f"scored {len(prompts)} images")
        finally:
            self._ring.acknowledge(ref)
        values = torch.tensor([unpack(value) for value in answer["values"]], dtype=torch.float64)
        return values, torch.tensor(answer["present"], dtype=torch.bool)

    def _ask(self, question: dict[str, Any], what: str) -> dict[str, Any]:
        """The child's answer. ``what`` it has not done, in an error; then there is no child any more."""
        child, line = self._child, self._socket
        assert child is not None and line is not None
        until = time.monotonic() + self.timeout_s
        try:
            line.sendall(json.dumps(question).encode() + b"\n")
            while b"\n" not in self._unread:
                self._stop()
                if time.monotonic() > until:
                    raise RewardFailed(
                        f"reward {self.name!r}: its process {child.pid} has not {what} in {self.timeout_s:g} s; if "
                        "that is how long it takes, raise runtime.job_timeout_s"
                    )
                if select.select([line], [], [], LOOK_S)[0]:
                    received = line.recv(2**16)
                    if not received:
                        raise ConnectionResetError
                    self._unread += received
        except ConnectionError as error:
            fate = self._fate(child)
            self.stop()  # and what it had started
            raise RewardFailed(f"reward {self.name!r}: its process {fate} before it had {what}") from error
        except BaseException:
            self.stop()  # what it may still say is for nobody
            raise
        text, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(text)
        if "usage" in answer:
            raise UsageError(answer["usage"])
        if "error" in answer:
            raise RewardFailed(f"reward {self.name!r} failed in process {child.pid}: {answer['error']}")
        return answer

    @staticmethod
    def _fate(child: subprocess.Popen[bytes]) -> str:
        try:
            code = child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return f"{child.pid} closed its line"
        if code >= 0:
            return f"{child.pid} ended with code {code}"
        why = " (as the kernel does when memory runs out)" if code == -signal.SIGKILL else ""
        return f"{child.pid} was killed by {signal.Signals(-code).name}{why}"


def open_once(open_child: Callable[[dict[str, Any] | None], ChildReward], world: World) -> ChildReward:
    """A child that rank 0 has started, to hear its facts, and ended at once; the others take them over.

    All ranks at once; what goes wrong there is raised on all of them.
    """
    child, said = None, ""
    if world.is_main:
        try:
            child = open_child(None)
            child.stop()
            said = json.dumps({"facts": child.facts})
        except SolrlError as error:
            said = json.dumps({"kind": type(error).__name__, "line": str(error)})
    answer = json.loads(world.texts(said)[0])
    if "line" in answer:
        kinds: dict[str, type[SolrlError]] = {kind.__name__: kind for kind in (Interrupted, RewardFailed, UsageError)}
        raise kinds.get(answer["kind"], SolrlError)(answer["line"])
    return child or open_child(answer["facts"])


def _end(child: subprocess.Popen[bytes], line: socket.socket, owner: int) -> None:
    """The child is gone, with all that it has started."""
    line.close()
    if os.getpid() == owner:  # and no fork of it
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def serve(line: socket.socket) -> None:
    """The child: opens what the first question names, then answers each, until nobody asks any more."""
    reward: Reward | None = None
    with Blobs(0, 1) as blobs, line, line.makefile("rb") as questions, contextlib.suppress(ConnectionError):
        for text in questions:
            question = json.loads(text)
            try:
                if reward is None:
                    torch.set_num_threads(question["threads"])
                    reward = open_reward("reward.name", question["name"], question["options"])
                    answer = _facts(reward)
                else:
                    answer = _scores(reward, blobs, question)
            except UsageError as error:
                answer = {"usage": str(error)}
            except Exception as error:  # somebody else's code: the parent gets to know
                answer = {"error": f"{type(error).__name__}: {error}"}
            line.sendall(json.dumps(answer).encode() + b"\n")


def _facts(reward: Reward) -> dict[str, Any]:
    weights = getattr(reward, "part_weights", None)
    return {
        "name": reward.name,
        "range": [*reward.range],
        "description": reward.description,
        "part_weights": None if weights is None else [*weights],
    }


def _scores(reward: Reward, blobs: Blobs, question: dict[str, Any]) -> dict[str, Any]:
    images = blobs.get(BlobRef.from_json(question["images"]))["images"]
    answer = reward(images.cuda() if torch.cuda.is_available() else images, question["prompts"])
    values, present = answer if isinstance(answer, tuple) else (answer, torch.ones(len(answer), dtype=torch.bool))
    return {"values": pack(values.detach().double().cpu()), "present": present.tolist()}


def pack(values: Tensor) -> list[Any]:
    """Numbers as text that keeps every bit."""
    return [[x.hex() for x in row] if isinstance(row, list) else row.hex() for row in values.tolist()]


def unpack(value: Any) -> Any:
    """The numbers again."""
    return [float.fromhex(x) for x in value] if isinstance(value, list) else float.fromhex(value)


def main(descriptor: int, parent: int) -> None:
    """What the child runs. It dies with its parent, even while it scores."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() == parent:  # else it is dead already
        serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
