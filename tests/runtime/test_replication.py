"""A parameter store and its mirrors in real processes: whole versions, bit for bit; a source that is gone is named."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from solrl.errors import SolrlError, UsageError
from solrl.runtime import replication
from solrl.runtime.entries import EntrySet
from solrl.runtime.replication import Mirror, Network, Source
from solrl.runtime.store import Store
from tests.children import in_child, signal_at

fork = multiprocessing.get_context("fork")
NIXL = pytest.param("nixl", marks=pytest.mark.slow)
every_network = pytest.mark.parametrize("network", ["gloo", NIXL])


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if "nixl" in request.node.name and not (find_spec("nixl_cu13") or find_spec("nixl_cu12")):
        pytest.skip("needs the extra nixl")


def policy(version: int) -> dict[str, Tensor]:
    """Sizes odd and nothing, and every element is another in every version."""
    generator = torch.Generator().manual_seed(version)
    raw = torch.randint(0, 255, (3 * 1031,), dtype=torch.uint8, generator=generator)
    return {
        "odd": raw.reshape(3, 1031),
        "half": raw[:22].view(torch.bfloat16),
        "scalar": torch.tensor(version + 0.5),
        "empty": torch.zeros(0, 3),
        "large": torch.full((1 << 18,), float(version)),
    }


def sets() -> list[EntrySet]:
    return [
        EntrySet.like("policy", policy(0), num_writers=2),
        EntrySet.like("base", {"w": torch.zeros(5, 7)}, frozen=True),
        EntrySet.like("nothing", {"empty": torch.zeros(0)}),
    ]


def write(store: Store, version: int) -> None:
    tensors = policy(version)
    for writer, shard in enumerate(store.sets["policy"].shards):
        parts = {key: tensors[key][tuple(slice(*edge) for edge in box)] for key, box in shard.items()}
        store.write("policy", version, parts, writer=writer)


def serve(pipe: Connection, prepare: Callable[[], object]) -> None:
    """A source, which writes the versions that it is told, None: one after the other for ever."""
    prepare()
    with Store.create(sets()) as store, Source(store, "of this run", host="127.0.0.1", timeout_s=20.0) as source:
        store.write("base", 3, {"w": torch.arange(35.0).reshape(5, 7)})
        store.write("nothing", 0, {"empty": torch.zeros(0)})
        pipe.send(source.address)
        version = pipe.recv()
        while version is not None:
            write(store, version)
            pipe.send(version)
            version = pipe.recv()
        version = 1000
        while True:
            for _ in range(3):
                version += 1
                write(store, version)
            time.sleep(0.002)


@contextmanager
def sourcing(prepare: Callable[[], object] = lambda: None) -> Iterator[tuple[str, Callable[[int | None], object], Any]]:
    """(address, have it write a version, process) of a source in a process of its own."""
    ours, theirs = fork.Pipe()
    process = fork.Process(target=serve, args=(theirs, prepare), daemon=True)
    process.start()
    assert ours.poll(20)

    def tell(version: int | None) -> None:
        ours.send(version)
        assert version is None or ours.recv() == version

    try:
        yield ours.recv(), tell, process
    finally:
        process.kill()
        process.join()


def mirror(address: str, network: Network, timeout_s: float = 20.0) -> Mirror:
    return Mirror(6, address, "of this run", network=network, timeout_s=timeout_s)


def assert_equal(out: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(out[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def read(store: Store, name: str, like: dict[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
    out = {key: torch.full_like(tensor, 1) for key, tensor in like.items()}
    return store.read(name, out), out


def done(action: Callable[[], object]) -> None:
    """In a process of its own, so that this one has no thread of gloo or NIXL when it forks the next time."""
    assert in_child(action) == (0, "")


def losing_an_answer(listener: socket.socket, address: str, lost: bytes) -> None:
    """What comes goes to ``address`` and back, but the first answer to ``lost``: the line breaks instead."""
    host, _, port = address.rpartition(":")
    is_lost = False
    while True:
        here, there = listener.accept()[0], socket.create_connection((host, int(port)))
        with here, here.makefile("rb") as questions, there, there.makefile("rb") as answers:
            for question in questions:
                there.sendall(question)
                head = answers.readline()
                body = answers.read(json.loads(head)["nbytes"])
                if lost in question and not is_lost:
                    is_lost = True
                    break
                here.sendall(head + body)


@every_network
def test_another_machine_has_the_newest_version_bit_for_bit(network: Network) -> None:
    def follow() -> None:
        with mirror(address, network) as made:
            assert made.store.version("policy") is None
            for version in (4, 5, 9):
                tell(version)
                assert made.pull("policy") == version
                assert made.pull("policy", version, timeout_s=0.0) == version  # has it: nothing is fetched
                with Store.attach(made.store.address) as other:  # as other processes of that machine do
                    found, out = read(other, "policy", policy(0))
                assert found == version
                assert_equal(out, policy(version))
            assert made.pull("base") == 3 and made.pull("base") == 3 and made.pull("nothing") == 0
            assert_equal(read(made.store, "base", {"w": torch.zeros(5, 7)})[1], {"w": torch.arange(35.0).reshape(5, 7)})

    with sourcing() as (address, tell, _):
        done(follow)


@pytest.mark.slow
def test_what_came_by_nixl_is_what_came_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "CHUNK", 300_000)  # several to a slot, the last one smaller

    def follow() -> None:
        with mirror(address, "gloo") as one, mirror(address, "nixl") as two:
            for made in (one, two):
                made.pull("policy", 7)
            slots = [made.store.committed("policy") for made in (one, two)]
            first, second = (m.store.slot_bytes("policy", s.index) for m, s in zip((one, two), slots, strict=True) if s)
            assert first.nbytes > 1 << 20 and torch.equal(first, second)

    with sourcing() as (address, tell, _):
        tell(7)
        done(follow)


@every_network
def test_no_version_is_mixed_while_the_source_is_written_over(network: Network) -> None:
    def follow() -> None:
        with mirror(address, network) as made:
            seen: list[int] = []
            while len(set(seen)) < 30:
                seen.append(made.pull("policy", 1001))
                found, out = read(made.store, "policy", policy(0))
                assert found == seen[-1]
                assert_equal(out, policy(found))
            assert seen == sorted(seen)

    with sourcing() as (address, tell, _):
        tell(None)
        done(follow)


@every_network
def test_what_was_written_over_on_the_way_is_not_committed(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    def follow() -> None:
        with mirror(address, network) as made:
            fetch, rest = made._way.fetch, [12, 13]

            def overtaken(*arguments: Any) -> None:
                fetch(*arguments)
                while rest:
                    tell(rest.pop(0))

            monkeypatch.setattr(made._way, "fetch", overtaken)
            assert made.pull("policy") == 13
            assert_equal(read(made.store, "policy", policy(0))[1], policy(13))

    with sourcing() as (address, tell, _):
        tell(11)
        done(follow)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
@every_network
def test_a_source_that_dies_or_hangs_in_a_transfer_is_named_and_its_last_version_stays(
    network: Network, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # what NIXL takes within a machine would read the memory of the stopped

    def prepare() -> None:
        signal_at(monkeypatch, dist.ProcessGroupGloo, "send", 2, number)

    def follow() -> None:
        with mirror(address, network, timeout_s=5.0 if network == "nixl" else 2.0) as made:
            tell(1)
            made.pull("policy")
            tell(2)
            if network == "nixl":
                ask = made._way._ask

                def ask_and_signal(do: str) -> None:
                    ask(do)
                    os.kill(process.pid, number)

                monkeypatch.setattr(made._way, "_ask", ask_and_signal)
            begin = time.monotonic()
            for _ in range(2):
                with pytest.raises(SolrlError, match="process 6 on another machine does not hand over parameters: "):
                    made.pull("policy")
            assert time.monotonic() - begin < 20
            found, out = read(made.store, "policy", policy(0))
            assert found == 1
            assert_equal(out, policy(1))

    with sourcing(prepare) as (address, tell, process):
        done(follow)


def test_a_mirror_whose_line_breaks_in_a_transfer_takes_nothing_from_before_for_newer() -> None:
    def follow() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=losing_an_answer, args=(listener, address, b'"send"'), daemon=True).start()
            with mirror(f"127.0.0.1:{listener.getsockname()[1]}", "gloo") as made:
                with pytest.raises(
                    SolrlError, match=r"process 6 .* not hand over parameters: it closed the connection"
                ):
                    made.pull("policy")
                tell(2)
                with pytest.raises(SolrlError, match="that was before, and this mirror gets nothing any more"):
                    made.pull("policy")
                assert made.store.version("policy") is None

    with sourcing() as (address, tell, _):
        tell(1)
        done(follow)


@every_network
def test_a_mirror_that_dies_leaves_the_source_to_others(network: Network) -> None:
    def die() -> None:
        with mirror(address, network) as made:
            made.pull("policy")
            os.kill(os.getpid(), signal.SIGKILL)

    def follow() -> None:
        with mirror(address, network) as made:
            assert made.pull("policy") == 1

    with sourcing() as (address, tell, _):
        tell(1)
        assert in_child(die) == (-signal.SIGKILL, "")
        done(follow)


def test_a_mirror_may_have_mirrors() -> None:
    def follow() -> None:
        with (
            mirror(address, "gloo") as first,
            Source(first.store, "of this run", host="127.0.0.1") as again,
            mirror(again.address, "gloo") as second,
        ):
            first.pull("policy")
            assert second.pull("policy") == 2
            assert_equal(read(second.store, "policy", policy(0))[1], policy(2))

    with sourcing() as (address, tell, _):
        tell(2)
        done(follow)


def test_mistakes_are_one_line_that_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def follow() -> None:
        with mirror(address, "gloo") as made:
            with pytest.raises(SolrlError, match=r"policy of process 6 .* has no version 0 or newer after 0.05 s"):
                made.pull("policy", timeout_s=0.05)
            with pytest.raises(SolrlError, match="the parameter store has no 'polcy'"):
                made.pull("polcy")
        with pytest.raises(SolrlError, match=r"process 6 .* not hand over parameters: a request of another run"):
            Mirror(6, address, "of another run")
        with pytest.raises(UsageError, match="gloo or nixl, got 'ucx'"):
            mirror(address, "ucx")  # type: ignore[arg-type]
        for name in ("nixl_cu12", "nixl_cu13"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UsageError, match=r"^the network nixl needs NIXL: pip install 'solrl\[nixl\]', or"):
            replication.NixlMemory(torch.zeros(8))

    with sourcing() as (address, _, _):
        done(follow)


def test_a_mirror_that_finds_no_room_leaves_no_line_open() -> None:
    def follow() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = os.listdir("/proc/self/fd")
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        with pytest.raises((OSError, SolrlError)) as caught:
            mirror(address, "gloo")
        assert os.listdir("/proc/self/fd") == before, caught  # which keeps the mirror's frame alive

    with sourcing() as (address, _, _):
        done(follow)
