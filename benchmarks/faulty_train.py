"""``solrl train`` in a process that suffers: its roles are solrl's own, and before a round something may go wrong.

What goes wrong is a list of files in the folder that FAULTS names, made by ``write_faults``: the process that renames a
file first is the one that suffers. A fault is due from a step on; which round of which process it hits is drawn from
the seed, the restart and the rank. Nothing of the runtime is replaced.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import solrl.pipeline
from solrl.checkpoint import list_checkpoints
from solrl.decisions import DecisionLog
from solrl.errors import SolrlError
from solrl.pipeline import Crew, Drawing, Scoring
from solrl.runtime.blobs import Blobs
from solrl.runtime.context import Context, Residency
from solrl.runtime.gang import Gang
from solrl.runtime.mailbox import CONTROLLER, Role, Spent, Yielded
from solrl.session import Session

KINDS = {
    "raise_explore": "an exception while drawing",
    "raise_score": "an exception while scoring",
    "slow": "a round that takes up to 0.5 s longer",
    "frozen": "SIGSTOP for 1.5 s, heartbeat included",
    "no_room": "a role whose parameters cannot be read",
    "full_mailbox": "the controller's mailbox filled with stale messages",
    "kill_worker": "kill -9 of a worker in a round",
    "kill_leader": "kill -9 of process 0 in a round",
    "kill_anywhere": "kill -9 within a second, wherever that is",
    "corrupt": "kill -9 of process 0, and its newest checkpoint damaged",
}
DEADLY = ("kill_worker", "kill_leader", "kill_anywhere", "corrupt")
CHANCE = 0.2
"""That a round is hit while a fault is due."""
WORDS = 2**14
"""Numbers that each role holds beside the model, so that a shift has something to release and to read."""


def write_faults(folder: Path, kinds: Sequence[str], num_steps: int, seed: int) -> None:
    """``kinds`` in an order drawn from ``seed`` lie in ``folder``, due at steps spread over the run."""
    folder.mkdir(parents=True)
    order = random.Random(seed).sample(list(kinds), len(kinds))
    for number, kind in enumerate(order):
        due = 1 + number * (num_steps - 1) // max(len(order) - 1, 1)
        if kind == "corrupt":
            due = max(due, 4)  # there are checkpoints to go back to
        (folder / f"{number:03d}.{due:04d}.{kind}.due").write_text("")


def suffered(folder: Path) -> list[dict[str, Any]]:
    """The faults that have struck."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.done"))]


class Faults:
    """What this process may suffer."""

    def __init__(self, folder: Path, seed: int, rank: int, run_dir: Path) -> None:
        self.folder, self.rank, self.run_dir = folder, rank, run_dir
        self.restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.random = random.Random(f"{seed} {self.restart} {rank}")

    def take(self, step: int, kinds: Sequence[str]) -> str | None:
        """The first of ``kinds`` that is due, by chance; nobody else gets it."""
        if self.random.random() > CHANCE:
            return None
        for path in sorted(self.folder.glob("*.due")):
            number, due, kind, _ = path.name.split(".")
            if int(due) > step or kind not in kinds:
                continue
            claimed = path.with_name(f"{number}.{due}.{kind}.done")
            mine = path.with_name(f"{number}.{due}.{kind}.by{self.rank}")
            try:
                path.rename(mine)
            except FileNotFoundError:  # another was faster
                continue
            facts = {"kind": kind, "rank": self.rank, "step": step, "restart": self.restart, "time": time.time()}
            mine.write_text(json.dumps(facts))
            mine.rename(claimed)
            return kind
        return None

    def strike(self, crew: Crew, role: str) -> None:
        """Before a round of ``role``."""
        kinds = [f"raise_{role}", "slow", "frozen", "full_mailbox", "kill_anywhere"]
        kinds.append("kill_worker" if self.rank else "kill_leader")
        if not self.rank and len(list_checkpoints(self.run_dir)) > 1:
            kinds.append("corrupt")
        kind = self.take(crew.log.step, kinds)
        if kind in ("raise_explore", "raise_score"):
            raise RuntimeError(f"a fault: out of memory in role {role}")
        if kind == "slow":
            time.sleep(0.5 * self.random.random())
        elif kind == "frozen":
            subprocess.Popen(["sh", "-c", f"sleep 1.5; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "full_mailbox":
            fill_mailbox(crew)
        elif kind == "kill_anywhere":
            threading.Timer(self.random.random(), os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif kind == "corrupt":
            damage(list(list_checkpoints(self.run_dir).values())[-1], self.random)
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind in ("kill_worker", "kill_leader"):
            os.kill(os.getpid(), signal.SIGKILL)


def fill_mailbox(crew: Crew) -> None:
    """Send the controller what it has no use for until nothing more goes in."""
    post = crew.gang.post
    stale = Yielded(job=0, rank=post.rank, state=None, spent=Spent(began=0.0, seconds=0.0), rounds=0)
    try:
        while True:
            post.send(CONTROLLER, stale, patience_s=0.0)
    except SolrlError as error:
        if "is full" not in str(error):
            raise


def damage(checkpoint: Path, chance: random.Random) -> None:
    """A bit is flipped, or the end is gone."""
    path = checkpoint / "state.safetensors"
    data = bytearray(path.read_bytes())
    if chance.random() < 0.5:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    else:
        del data[len(data) // 2 :]
    path.write_bytes(data)


def holding(role: Role, number: float, faults: Faults, log: DecisionLog) -> tuple[Context, dict[str, Tensor]]:
    """A role whose parameters are ``number``, read anew whenever it comes up; and what it holds."""
    held = {"weights": torch.full((WORDS,), number), "moments": torch.full((WORDS,), -number)}

    def read(name: str, out: Tensor) -> None:
        if role != "train" and faults.take(log.step, ["no_room"]):
            raise torch.OutOfMemoryError("a fault: no room for the weights")
        out.fill_(number)

    return Context(role, lambda: held, [("weights", "parameters"), ("moments", "offloadable")], read), held


def install(folder: Path, seed: int, run_dir: Path) -> None:
    """From now on the roles of a run in this process suffer what lies in ``folder``."""
    faults = Faults(folder, seed, int(os.environ.get("RANK", "0")), run_dir)
    numbers: dict[Role, float] = {"explore": 1.0, "score": 2.0, "train": 3.0}

    class SufferingCrew(Crew):
        def __init__(self, session: Session, gang: Gang, blobs: Blobs, log: DecisionLog) -> None:
            super().__init__(session, gang, blobs, log)
            made = {role: holding(role, number, faults, log) for role, number in numbers.items()}
            self.held = {role: held for role, (_, held) in made.items()}
            gang.worker.residency = Residency([context for context, _ in made.values()], "train", budget_bytes=0)
            for role in ("explore", "score"):
                gang.worker.residency.shift_down(role, "train")

        def suffer(self, role: Role) -> None:
            faults.strike(self, role)
            assert all(
                tensor.eq(numbers[role] * (1 if name == "weights" else -1)).all()
                for name, tensor in self.held[role].items()
            ), f"role {role} does not hold what it should"

    class SufferingDrawing(Drawing):
        def advance(self) -> dict[str, Any] | None:
            self.crew.suffer("explore")  # type: ignore[attr-defined]
            return super().advance()

    class SufferingScoring(Scoring):
        def advance(self) -> dict[str, Any] | None:
            self.crew.suffer("score")  # type: ignore[attr-defined]
            return super().advance()

    solrl.pipeline.Crew = SufferingCrew  # type: ignore[misc]
    solrl.pipeline.Drawing = SufferingDrawing  # type: ignore[misc]
    solrl.pipeline.Scoring = SufferingScoring  # type: ignore[misc]


if __name__ == "__main__":
    from solrl.cli import main

    install(Path(os.environ["FAULTS"]), int(os.environ["FAULTS_SEED"]), Path(os.environ["FAULTS_RUN"]))
    raise SystemExit(main(["train", *sys.argv[1:]]))
