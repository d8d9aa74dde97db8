"""Blobs between machines: the same bits, the same errors, and nothing for those who do not know the run's token."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from solrl.errors import SolrlError
from solrl.runtime import network
from solrl.runtime.blobs import BlobRef, Blobs
from solrl.runtime.network import is_one_machine, machine, own_address


@pytest.fixture
def first() -> Iterator[Blobs]:
    with Blobs(0, 1 << 20, machine=0, host="127.0.0.1", token="of this run") as made:
        yield made


@pytest.fixture
def second() -> Iterator[Blobs]:
    with Blobs(5, 1 << 12, machine=1, host="127.0.0.1", token="of this run") as made:
        yield made


def travelled(ref: BlobRef) -> BlobRef:
    return BlobRef.from_json(json.loads(json.dumps(ref.to_json())))


def test_another_machine_gets_the_bits_and_gives_the_room_back(first: Blobs, second: Blobs) -> None:
    sent = {"latents": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), "images": torch.ones(2, 300, 300)}
    for _ in range(4):  # together more than the ring holds
        ref = travelled(first.put(sent, timeout_s=5.0))
        found = second.get(ref)
        assert all(torch.equal(found[name], sent[name]) for name in sent) and found.keys() == sent.keys()
        second.acknowledge(ref)
        assert first.num_waiting == 0
    with pytest.raises(SolrlError, match=r"process 0 on another machine .* blob 3 of rank 0 is gone"):
        second.get(ref)


def test_threads_of_one_process_may_ask_at_once(first: Blobs, second: Blobs) -> None:
    refs = [travelled(first.put({"x": torch.full((1000,), value)})) for value in range(8)]
    found: dict[int, torch.Tensor] = {}

    def get(number: int) -> None:
        found[number] = second.get(refs[number])["x"]

    threads = [threading.Thread(target=get, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [int(found[number][0]) for number in range(8)] == list(range(8))


def test_a_ring_that_waits_in_vain_names_the_process_of_the_other_machine(first: Blobs, second: Blobs) -> None:
    second.get(travelled(first.put({"x": torch.zeros(200_000)})))
    with pytest.raises(SolrlError, match="1 fetched by rank 5"):
        first.put({"x": torch.zeros(200_000)}, timeout_s=0.05)


def test_bytes_that_changed_on_the_way_are_refused(first: Blobs, second: Blobs) -> None:
    ref = travelled(first.put({"x": torch.zeros(16)}))
    with pytest.raises(SolrlError, match="corrupt"):
        second.get(replace(ref, checksum=ref.checksum ^ 1))


def test_who_does_not_know_the_token_gets_and_frees_nothing(first: Blobs) -> None:
    ref = travelled(first.put({"x": torch.zeros(16)}))
    with Blobs(9, 64, machine=1, token="of another run") as stranger:
        with pytest.raises(SolrlError, match="a request of another run"):
            stranger.get(ref)
        with pytest.raises(SolrlError, match="a request of another run"):
            stranger.acknowledge(ref)
    assert first.num_waiting == 1


@pytest.mark.parametrize("text", [b"\n", b"[]\n", b'{"token": "of this run"}\n', b"x" * 40_000])
def test_a_request_that_is_none_is_answered_and_the_server_goes_on(first: Blobs, second: Blobs, text: bytes) -> None:
    ref = travelled(first.put({"x": torch.ones(16)}))
    host, port = ref.server.split(":")
    with socket.create_connection((host, int(port)), 5.0) as line:
        line.sendall(text)
        assert b"error" in line.recv(1000)
    assert torch.equal(second.get(ref)["x"], torch.ones(16))


def test_a_machine_that_is_gone_is_named(second: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "TIMEOUT_S", 1.0)
    with Blobs(3, 4096, machine=0, host="127.0.0.1", token="of this run") as gone:
        ref = travelled(gone.put({"x": torch.zeros(16)}))
        second.get(ref)
    with pytest.raises(SolrlError, match="process 3 on another machine does not hand over a blob"):
        second.get(ref)


def test_machines_are_told_apart_as_the_launcher_counts_them() -> None:
    node = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert not is_one_machine(node) and is_one_machine({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    assert is_one_machine({}) and machine({}) == 0 and machine({"GROUP_RANK": "3"}) == 3
    assert own_address(node | {"MASTER_ADDR": "first"}) == "first"
    assert own_address(node | {"GROUP_RANK": "1"}) == "127.0.0.1"
