"""What a change of roles costs, by part, with the embedded models on a CPU; beside PivotRL's Figures 12 and 13.

Roles as they would be where they do not fit together: explore (rollout tree, explorer, decoder, text encoders), score
(CLIP), train (the policy, its adapters, averages and moments). Down: release, with what changes copied to host memory.
Up: load, from the parameter store in shared memory and from host memory; then the first use, beside a later one.
Several processes shift at once in the last lines, all reading one store.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks.common import facts, hardware, number_list, parser, table, whole_number, write_json
from solrl.distributed import World
from solrl.runtime.context import Context, Kind, Residency, module_tensors
from solrl.runtime.entries import EntrySet
from solrl.runtime.mailbox import Role
from solrl.runtime.store import Store
from solrl.session import Session, open_session
from solrl.settings import load_config

ORDER: tuple[Role, ...] = ("explore", "score", "explore", "train", "score", "train")
"""A cycle from train through every pair of roles."""
KINDS: Sequence[tuple[str, Kind]] = (("*.lora_*", "offloadable"), ("state.*", "offloadable"), ("*", "parameters"))
SET = "parameters"
PAPER = """\
paper (section 8.5 and Figure 12, H20 GPUs): inference up 1 s (Qwen2.5-1.5B) to 9 s (Qwen3.5-122B-A10B), down below 2 s;
training up 2 to 8.5 s, down below 6 s. Figure 13: a modest increase from 16 to 128 GPUs."""

Samples: TypeAlias = dict[tuple[str, str], list[tuple[float, float]]]
"""(role, part) -> (processor seconds, wall seconds) of every shift."""


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    options_of = parser("shift_cost", __doc__.split("\n")[0])
    options_of.add_argument("--cycles", type=whole_number, default=20, help="of six shifts (20)")
    options_of.add_argument(
        "--processes", type=number_list, default=[1, 2, 4], metavar="LIST", help="that shift at once (1,2,4)"
    )
    args = options_of.parse_args(argv)
    torch.set_num_threads(1)
    session = open_session(
        load_config("tiny_flux", {"reward.name": "clip_score"}), World(0, 1, torch.device("cpu")), print
    )
    roles = tensors_of(session)
    known, found, sizes = facts(), dict[int, Samples](), {role: mebibytes(held) for role, held in roles.items()}
    with make_store(roles) as store:
        for count in args.processes:
            found[count] = together(count, partial(measure, session, roles, store.address, args.cycles))
    print(report(found, sizes, args.cycles))
    print(hardware(known))
    write_json(args.json, {
        "benchmark": "shift_cost", "arguments": list(argv), "environment": known, "mebibytes": sizes,
        "seconds": {count: {"/".join(key): each for key, each in one.items()} for count, one in found.items()},
    })  # fmt: skip
    return 0


def tensors_of(session: Session) -> dict[Role, dict[str, Tensor]]:
    """Everything that each role holds, by name, in memory that torch owns."""
    policy, learner = session.policy, session.learner
    parts = {name: part for name, part in policy.named_children() if name != "transformer"}
    explore = module_tensors({"rollout": session.trees.rollout, "explorer": session.trees.explorer} | parts)
    train = module_tensors({"policy": policy.transformer})
    train |= {f"state.ema.{number}": tensor for number, tensor in enumerate(learner.ema_parameters)}
    for number, state in enumerate(learner.optimizer.state.values()):
        train |= {f"state.{name}.{number}": tensor for name, tensor in state.items()}
    judge: Any = session.reward
    score = module_tensors({"judge": judge.model})
    roles: dict[Role, dict[str, Tensor]] = {"explore": explore, "score": score, "train": train}
    for held in roles.values():
        for tensor in held.values():
            if not tensor.untyped_storage().resizable():
                raise SystemExit("a tensor lies in memory that torch does not own")
    return roles


def mebibytes(held: Mapping[str, Tensor]) -> float:
    """Of all storages, each once."""
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in held.values()}
    return sum(sizes.values()) / 2**20


def make_store(roles: Mapping[Role, Mapping[str, Tensor]]) -> Store:
    """A store with all that is read again."""
    named = {f"{role}:{name}": t.detach() for role, held in roles.items() for name, t in held.items()}
    store = Store.create([EntrySet.like(SET, named, frozen=True)])
    store.write(SET, 1, named)
    return store


def measure(session: Session, roles: Mapping[Role, dict[str, Tensor]], address: str, cycles: int) -> Samples:
    """Seconds of every part of every shift, the first cycle left out; ``address`` is the parameter store's."""
    store = Store.attach(address)

    def context(role: Role) -> Context:
        def read(name: str, out: Tensor) -> None:
            store.read(SET, {f"{role}:{name}": out})

        return Context(role, lambda: roles[role], KINDS, read)

    use, seconds = uses(session), defaultdict[tuple[str, str], list[tuple[float, float]]](list)
    residency = Residency([context(role) for role in roles], "train", budget_bytes=0)
    previous: Role = "train"
    for role in ("explore", "score"):
        residency.shift_down(role, previous)
    for cycle in range(cycles + 1):
        for role in ORDER:
            parts: dict[tuple[str, str], Callable[[], object]] = {
                (previous, "release"): partial(residency.shift_down, previous, role),
                (role, "load"): partial(residency.shift_up, role),
                (role, "first use"): use[role],
                (role, "later use"): use[role],
            }
            for key, act in parts.items():
                begin, cpu = time.perf_counter(), time.process_time()
                act()
                if cycle:
                    seconds[key].append((time.process_time() - cpu, time.perf_counter() - begin))
            previous = role
    return dict(seconds)


def uses(session: Session) -> dict[Role, Callable[[], object]]:
    """A forward of the explorer, a score, a forward and backward of the policy; of two images each."""
    policy, judge = session.policy, session.reward
    conditioning = policy.encode(["a red circle", "a blue square"])
    latents, sigma = torch.zeros(2, *policy.latent_shape), torch.full((2,), 0.5)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def explore() -> None:
        with torch.no_grad():
            session.explorer.velocity(latents, sigma, conditioning)

    def train() -> None:
        policy.velocity(latents, sigma, conditioning).square().mean().backward()
        session.learner.optimizer.zero_grad()

    return {"explore": explore, "score": lambda: judge(images, ["a red circle"] * 2), "train": train}


def together(count: int, act: Callable[[], Samples]) -> Samples:
    """What ``act`` finds in ``count`` forked processes at once, all of it."""
    readers = []
    for _ in range(count):
        reader, writer = os.pipe()
        if os.fork() == 0:
            code = 1
            try:
                with os.fdopen(writer, "w") as pipe:
                    json.dump([[*key, value] for key, value in act().items()], pipe)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writer)
        readers.append(reader)
    found: Samples = defaultdict(list)
    for reader in readers:
        with os.fdopen(reader) as pipe:
            for role, part, values in json.loads(pipe.read() or "[]"):
                found[role, part] += [(cpu, wall) for cpu, wall in values]
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(count)]
    if any(codes):
        sys.exit("a process that shifted has failed")
    return dict(found)


def report(found: Mapping[int, Samples], sizes: Mapping[Role, float], cycles: int) -> str:
    """Everything as text: medians."""
    rows = []
    for count, samples in found.items():
        for role, size in sizes.items():
            milliseconds = {
                part: [1e3 * statistics.median(pair[which] for pair in samples[role, part]) for which in (0, 1)]
                for part in ("release", "load", "first use", "later use")
            }
            cells = [f"{cpu:.2f} {wall:.2f}" for cpu, wall in milliseconds.values()]
            rows.append([role, str(count), f"{size:.1f}", *cells])
    header = ["role", "processes", "MiB", "down: release", "up: load", "first use", "later use"]
    return "\n".join([
        f"shift_cost: milliseconds, processor and wall, medians of {cycles} cycles of six shifts, first cycle left out",
        "", table(header, rows), "", PAPER,
    ])  # fmt: skip
