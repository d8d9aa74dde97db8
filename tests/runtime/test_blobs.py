"""Blobs between real processes: nothing changes, nothing is lost before it is acknowledged, nothing grows."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from solrl.errors import SolrlError
from solrl.runtime.blobs import BlobRef, Blobs

fork = multiprocessing.get_context("fork")
KIB = 1024


def block(value: int, size: int = KIB) -> dict[str, torch.Tensor]:
    return {"x": torch.full((size,), value, dtype=torch.uint8)}


@pytest.fixture
def plane() -> Iterator[Blobs]:
    with Blobs(3, 4 * KIB) as made:
        yield made


def test_latents_and_images_arrive_bit_for_bit_in_another_process_and_come_back() -> None:
    generator = torch.Generator().manual_seed(2)
    sent = {
        "latents": torch.randn(2, 16, 8, generator=generator),
        "previous": torch.randn(2, 16, 8, generator=generator).bfloat16(),
        "images": torch.randint(0, 256, (2, 3, 9, 7), dtype=torch.uint8, generator=generator),
        "sigma": torch.tensor(0.25),
        "none": torch.zeros(0, 4),
    }

    def echo(pipe: Any) -> None:
        with Blobs(1, 64 * KIB) as mine:
            ref = BlobRef.from_json(json.loads(pipe.recv()))
            pipe.send(json.dumps(mine.put(mine.get(ref)).to_json()))
            mine.acknowledge(ref)
            pipe.recv()

    here, there = fork.Pipe()
    child = fork.Process(target=echo, args=(there,), daemon=True)
    child.start()
    with Blobs(0, 64 * KIB) as plane:
        here.send(json.dumps(plane.put(sent).to_json()))
        back = plane.get(BlobRef.from_json(json.loads(here.recv())))
        here.send("done")
        child.join()
        assert plane.num_waiting == 0
    assert {name: (t.dtype, t.shape) for name, t in back.items()} == {n: (t.dtype, t.shape) for n, t in sent.items()}
    assert all(torch.equal(back[name], sent[name]) for name in sent)


def test_a_full_ring_waits_then_names_itself_and_who_keeps_the_room(plane: Blobs) -> None:
    with Blobs(5, KIB) as other:
        refs = [plane.put(block(value)) for value in range(4)]
        for ref in refs[:2]:
            other.get(ref)
        words = (
            "rank 3 waited 0.05 s for room for 1.0 KiB in its blob ring of 4.0 KiB; not acknowledged: "
            "2 fetched by rank 5, 2 never fetched"
        )
        begin = time.monotonic()
        with pytest.raises(SolrlError, match=f"^{re.escape(words)}$"):
            plane.put(block(9), timeout_s=0.05)
        assert time.monotonic() - begin >= 0.05
        assert [int(plane.get(ref)["x"][0]) for ref in refs] == [0, 1, 2, 3]


def test_acknowledging_lets_a_waiting_owner_go_on(plane: Blobs) -> None:
    refs = [plane.put(block(value)) for value in range(4)]
    with Blobs(5, KIB) as other:
        threading.Timer(0.05, lambda: other.acknowledge(refs[0])).start()
        late = plane.put(block(4), timeout_s=20)
        assert int(other.get(late)["x"][0]) == 4
        with pytest.raises(SolrlError, match="blob 0 of rank 3 is gone: it was acknowledged before"):
            other.get(refs[0])


def test_what_is_acknowledged_out_of_order_leaves_the_others_whole(plane: Blobs) -> None:
    refs = [plane.put(block(value)) for value in range(4)]
    for place in (2, 1, 3):
        plane.acknowledge(refs[place])
        plane.acknowledge(refs[place])  # twice is harmless
    with pytest.raises(SolrlError, match="not acknowledged: 1 never fetched"):
        plane.put(block(9), timeout_s=0.0)  # behind the oldest
    assert bool((plane.get(refs[0])["x"] == 0).all())
    plane.acknowledge(refs[0])
    again = plane.put(block(7, 4 * KIB))
    plane.acknowledge(refs[0])  # of a blob whose room is another's now
    assert plane.num_waiting == 1
    assert bool((plane.get(again)["x"] == 7).all())


def test_any_order_of_sizes_and_acknowledgements_keeps_every_blob(plane: Blobs) -> None:
    dice = random.Random(4)
    alive: list[tuple[BlobRef, int, int]] = []
    sent = 0
    for _ in range(600):
        size = dice.randint(1, 900)
        try:
            alive.append((plane.put(block(sent % 251, size), timeout_s=0.0), sent % 251, size))
            sent += 1
        except SolrlError:
            ref, value, size = alive.pop(dice.randrange(len(alive)))
            found = plane.get(ref)["x"]
            assert found.shape == (size,)
            assert bool((found == value).all())
            plane.acknowledge(ref)
    assert sent > 200
    for ref, value, _ in alive:
        assert bool((plane.get(ref)["x"] == value).all())


def test_a_changed_bit_is_found(plane: Blobs) -> None:
    ref = plane.put({"a": torch.zeros(100), "b": torch.ones(50)})
    plane.get(ref)
    plane._arena.body[-4 * KIB + ref.offset + 70] ^= 16
    with pytest.raises(SolrlError, match=r"blob 0 of rank 3 is corrupt: its 704 bytes changed"):
        plane.get(ref)


def test_a_blob_outlives_the_process_that_fetched_it_and_the_one_that_sent_it() -> None:
    def send(pipe: Any) -> None:
        mine = Blobs(1, KIB)
        pipe.send(mine.put(block(6)).to_json())
        time.sleep(60)

    def fetch(found: dict[str, Any]) -> None:
        Blobs(2, KIB).get(BlobRef.from_json(found))
        os._exit(9)  # before it could acknowledge

    before = sorted(os.listdir("/dev/shm"))
    here, there = fork.Pipe()
    sender = fork.Process(target=send, args=(there,), daemon=True)
    sender.start()
    found = here.recv()
    worker = fork.Process(target=fetch, args=(found,))
    worker.start()
    worker.join()
    assert worker.exitcode == 9
    ref = BlobRef.from_json(found)
    with Blobs(0, KIB) as plane, Blobs(4, KIB) as late:
        plane.get(ref)
        sender.kill()
        sender.join()
        assert bool((plane.get(ref)["x"] == 6).all())
        with pytest.raises(SolrlError, match=r"cannot join the blob ring of rank 1 .*its creator must be alive"):
            late.get(ref)
    assert sorted(os.listdir("/dev/shm")) == before


def test_a_failed_copy_and_a_full_table_keep_no_room() -> None:
    with Blobs(0, 64 * KIB, max_blobs=2) as plane:
        with pytest.raises(NotImplementedError):
            plane.put({"x": torch.empty(4, device="meta")})
        assert plane.num_waiting == 0
        refs = [plane.put(block(1)), plane.put(block(2))]
        with pytest.raises(SolrlError, match="not acknowledged: 2 never fetched"):
            plane.put(block(3), timeout_s=0.0)
        plane.acknowledge(refs[0])
        assert int(plane.get(plane.put(block(3)))["x"][0]) == 3
        assert int(plane.get(refs[1])["x"][0]) == 2


def test_mistakes_are_one_line(plane: Blobs) -> None:
    with pytest.raises(SolrlError, match=r"rank 3 cannot send 5.0 KiB: its blob ring holds 4.0 KiB; raise it"):
        plane.put(block(1, 5 * KIB))
    good = plane.put(block(1)).to_json()
    for change, words in (
        ({"entries": [["x", "float32", [KIB]]]}, "the reference of blob 0 of rank 3 contradicts itself"),
        ({"entries": [["x", "load", [KIB]]]}, "no reference of a blob: 'load' is no dtype"),
        ({"offset": -64}, "contradicts itself"),
        ({"number": "one"}, "no reference of a blob"),
        ({"address": "/etc/passwd"}, "is no address of a blob ring of rank 3"),
        ({"offset": 1 << 40}, "is gone"),
    ):  # fmt: skip
        with pytest.raises(SolrlError, match=words):
            plane.get(BlobRef.from_json(good | change))
    with pytest.raises(SolrlError, match="no reference of a blob: 'address'"):
        BlobRef.from_json({key: value for key, value in good.items() if key != "address"})
