"""``python -m solrl.ray_launch --num_processes 16 CONFIG [--section.key value ...]``: ``solrl train`` on a Ray cluster.

One Ray actor for each process reserves its GPU (or CPU) and starts `solrl train` there, in the environment that
torchrun makes: RANK, LOCAL_RANK, WORLD_SIZE and so on. From then on Ray carries neither weights nor tasks: processes
find each other as under any launcher, and the run is the same, bit for bit. The first one that fails ends all.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from solrl.errors import Interrupted, SolrlError, UsageError
from solrl.signals import SignalStop

TERM_S = 60.0
"""What a process that is asked to stop has to save its work."""
_LOOK_S = 1
"""Longest call of Ray's: a signal is looked for in between."""
PR_SET_PDEATHSIG = 1
Place = tuple[str, str, list[str], int]
"""(node, its address, GPUs, a free port) of a process."""


class Process:
    """The actor of one process."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._is_stopped = False
        self._lock = threading.Lock()

    def place(self) -> Place:
        """Where it is and what it has."""
        import ray

        context = ray.get_runtime_context()
        gpus = [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])]
        with socket.socket() as free:
            free.bind(("", 0))
            return context.get_node_id(), ray.util.get_node_ip_address(), gpus, free.getsockname()[1]

    def run(self, words: list[str], folder: str, environment: dict[str, str]) -> tuple[int, str]:
        """(exit code, last line of stderr) of `solrl train`; Ray shows what it prints."""
        with self._lock:
            if self._is_stopped:
                return Interrupted.exit_code, "stopped before it began"
            end_with_actor = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, int(signal.SIGTERM))
            self._child = subprocess.Popen(
                [sys.executable, "-m", "solrl", "train", *words], cwd=folder, env={**os.environ, **environment},
                stderr=subprocess.PIPE, text=True, preexec_fn=end_with_actor,
            )  # fmt: skip
        last = ""
        assert self._child.stderr is not None
        for line in self._child.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
        return self._child.wait(), last

    def stop(self) -> None:
        """It has ended, with everything saved where there was time for that."""
        with self._lock:
            self._is_stopped = True
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(TERM_S)
            except subprocess.TimeoutExpired:
                self._child.kill()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs on the cluster and returns the exit code of `solrl train`."""
    parser = argparse.ArgumentParser(
        prog="python -m solrl.ray_launch", allow_abbrev=False,
        description="solrl train on a Ray cluster: that of --address or RAY_ADDRESS, a running one, or a new one here.",
    )  # fmt: skip
    parser.add_argument("--num_processes", type=int, required=True, help="one for each GPU, or CPU with --cpu")
    parser.add_argument("--cpu", action="store_true", help="no GPUs: each process on a CPU")
    parser.add_argument("--address", help="of the cluster")
    parser.add_argument("--wait_s", type=float, default=300.0, help="seconds to wait for room on the cluster (300)")
    parser.add_argument("train", nargs=argparse.REMAINDER, metavar="CONFIG ...", help="what `solrl train` takes")
    options = parser.parse_args(arguments)
    try:
        if options.num_processes < 1:
            raise UsageError(f"--num_processes must be at least 1, got {options.num_processes}")
        try:
            import ray
        except ModuleNotFoundError as error:
            raise UsageError("launching on Ray needs Ray: pip install 'solrl[ray]'") from error
        try:
            ray.init(address=options.address)
            with SignalStop() as stop, _actors(ray, options, stop) as actors:
                _run(ray, actors, options, stop)
        except ConnectionError as error:
            raise UsageError(f"no Ray cluster answers: {error}") from error
        finally:
            ray.shutdown()
    except SolrlError as error:
        print(f"solrl: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


@contextmanager
def _actors(ray: Any, options: argparse.Namespace, stop: SignalStop) -> Iterator[list[Any]]:
    """One for each process, packed on as few nodes as possible; all have ended afterwards."""
    bundle = {"CPU": 1} if options.cpu else {"CPU": 1, "GPU": 1}
    group = ray.util.placement_group([bundle] * options.num_processes, strategy="PACK")
    actors: list[Any] = []
    try:
        end = time.monotonic() + options.wait_s
        while not group.wait(_LOOK_S):
            stop()
            if time.monotonic() > end:
                has = ray.available_resources()
                free = ", ".join(f"{has.get(kind, 0):g} {kind}" for kind in bundle)
                raise SolrlError(f"no room for {options.num_processes} processes in {options.wait_s:g} s; free: {free}")
        for index in range(options.num_processes):
            slot = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, index)
            kind = ray.remote(num_cpus=1, num_gpus=bundle.get("GPU", 0), max_concurrency=2, scheduling_strategy=slot)
            actors.append(kind(Process).remote())
        yield actors
    finally:
        ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=TERM_S + 5)
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def _run(ray: Any, actors: list[Any], options: argparse.Namespace, stop: SignalStop) -> None:
    """All processes have ended well; what the first one said that did not is an error."""
    found = ray.get([actor.place.remote() for actor in actors])
    nodes = [place[0] for place in found]
    order = sorted(range(len(actors)), key=lambda index: nodes.index(nodes[index]))  # a node's ranks in a row
    running = {}
    for rank, index in enumerate(order):
        environment = rank_environment(rank, [found[other] for other in order], cpu=options.cpu)
        running[actors[index].run.remote(options.train, os.getcwd(), environment)] = rank
    while running:
        stop()
        ended, _ = ray.wait([*running], timeout=_LOOK_S)
        if not ended:
            continue
        rank = running.pop(ended[0])
        try:
            code, last = ray.get(ended[0])
        except ray.exceptions.RayError as error:
            why = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            raise SolrlError(f"process {rank} is lost: {str(why).splitlines()[0]}") from error
        if code:
            kind = {1: SolrlError, 2: UsageError, 3: Interrupted}.get(code, SolrlError)
            raise kind(f"process {rank} ended with exit code {code}: {last or 'it said nothing'}")


def rank_environment(rank: int, places: Sequence[Place], *, cpu: bool) -> dict[str, str]:
    """What torchrun sets for process ``rank`` of those at ``places``, where a node's are in a row."""
    nodes = [node for node, *_ in places]
    here = [place for place in places if place[0] == nodes[rank]]
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank - nodes.index(nodes[rank]),
        "GROUP_RANK": list(dict.fromkeys(nodes)).index(nodes[rank]),
        "WORLD_SIZE": len(places),
        "LOCAL_WORLD_SIZE": len(here),
        "MASTER_ADDR": places[0][1],
        "MASTER_PORT": places[0][3],
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # Ray would set the number of CPUs
    }
    if cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    else:  # all of the node's processes see all of their GPUs, and LOCAL_RANK chooses
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for place in here for gpu in place[2])
    return {name: str(value) for name, value in environment.items()}


if __name__ == "__main__":
    raise SystemExit(main())
