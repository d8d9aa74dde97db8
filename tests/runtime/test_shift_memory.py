"""Shifting for a long time takes no more memory than shifting once: real processes, roles that do not fit together."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from solrl.distributed import start
from solrl.runtime import controller as controller_module
from solrl.runtime.blobs import BlobRef, Blobs
from solrl.runtime.context import Context, Residency
from solrl.runtime.controller import Job
from solrl.runtime.gang import Gang
from solrl.runtime.mailbox import Role, connect
from tests.children import in_children
from tests.runtime.test_controller import Hashing, HashJobs, Judging, restless

MEGABYTES = 8
"""Of each role: a quarter is read again, a quarter comes back as zeros, half goes to host memory and back."""
WARM_SHIFTS, MORE_SHIFTS = 20, 50
TOLERANCE = 2**20
"""Bytes: a quarter of what a role copies to host memory. A copy kept at one shift in fifty would be seen."""


def context(role: Role, value: float) -> Context:
    quarter = MEGABYTES * 2**20 // 16
    held = {
        "weight": torch.full((quarter,), value),
        "cache": torch.zeros(quarter),
        "moments": torch.full((2 * quarter,), -value),
    }

    def read(name: str, out: Tensor) -> None:
        out.fill_(value)

    return Context(role, lambda: held, [("weight", "parameters"), ("cache", "temporary"), ("*", "offloadable")], read)


class Images(HashJobs):
    """What is explored goes on to be scored together with a blob, as a micro-batch's images do."""

    def finished(self, job: Job, value: dict[str, Any], rank: int) -> list[Job]:
        following = super().finished(job, value, rank)
        return [Job(one.number, one.role, one.payload | {"blob": value["blob"]}, 1) for one in following]


class Drawing(Hashing):
    """A job whose state and result travel as blobs."""

    def __init__(self, blobs: Blobs, payload: dict[str, Any], state: dict[str, Any] | None) -> None:
        super().__init__(payload, state, lambda n: None)
        self.blobs = blobs
        if state is not None:
            take(blobs, state)

    def advance(self) -> dict[str, Any] | None:
        value = super().advance()
        return value and value | self.put()

    def give_back(self) -> dict[str, Any] | None:
        state = super().give_back()
        return state and state | self.put()

    def put(self) -> dict[str, Any]:
        return {"blob": self.blobs.put({"latents": torch.ones(2**16)}).to_json()}


class Scoring(Judging):
    def __init__(self, blobs: Blobs, payload: dict[str, Any]) -> None:
        super().__init__(payload, lambda n: None)
        self.blobs = blobs

    def advance(self) -> dict[str, Any] | None:
        take(self.blobs, self.payload)
        return super().advance()


def take(blobs: Blobs, message: dict[str, Any]) -> None:
    reference = BlobRef.from_json(message["blob"])
    assert blobs.get(reference)["latents"].sum() == 2**16
    blobs.acknowledge(reference)


def held_now() -> dict[str, int]:
    """What this process has, without what its allocator could give back."""
    ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    mapped = sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return {
        "rss": process.memory_info().rss, "files": process.num_fds(), "memfds": mapped,
        "shm": len(os.listdir("/dev/shm")), "threads": process.num_threads(),
    }  # fmt: skip


@pytest.mark.slow
def test_fifty_shifts_of_a_process_leave_memory_files_and_shared_memory_flat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "TICK_S", 0.002)

    def shift_and_measure(rank: int) -> None:
        values: dict[Role, float] = {"explore": 1.0, "score": 2.0, "train": 3.0}
        shifts = [0]
        with start(1, True) as world, connect(world, 30.0) as post, Blobs(rank, 2**22) as blobs:
            residency = Residency([context(role, value) for role, value in values.items()], "train", budget_bytes=0)
            for role in ("explore", "score"):
                residency.shift_down(role, "train")
            gang = Gang(post, residency, lambda line: None, stop=lambda: None, job_timeout_s=30.0)
            shift_to = residency.shift_to

            def counted(role: Role) -> None:
                shifts[0] += role != residency.current
                shift_to(role)

            residency.shift_to = counted  # type: ignore[method-assign]
            roles = {
                "explore": lambda payload, state: Drawing(blobs, payload, state),
                "score": lambda payload, state: Scoring(blobs, payload),
            }

            def shift_until(number: int) -> None:
                everyone, round = 0, 0
                while everyone < number:
                    jobs, round = Images(8), round + 1
                    gang.work(roles, jobs if rank == 0 else None, restless(number + round))
                    jobs.check() if rank == 0 else None
                    everyone = -int(world.max_(torch.tensor([-shifts[0]])))  # of the process that shifted least

            shift_until(WARM_SHIFTS)
            before, first = held_now(), shifts[0]
            shift_until(int(world.max_(torch.tensor([first]))) + MORE_SHIFTS)
            found = {"before": before, "after": held_now(), "shifts": shifts[0] - first, "blobs": blobs.num_waiting}
            (tmp_path / f"{rank}.json").write_text(json.dumps(found))

    assert in_children(2, shift_and_measure) == [(0, "")] * 2
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        before, after = found["before"], found["after"]
        assert found["shifts"] >= MORE_SHIFTS and found["blobs"] == 0
        assert after["rss"] - before["rss"] < TOLERANCE, found
        assert all(after[name] <= before[name] for name in before if name != "rss"), found
