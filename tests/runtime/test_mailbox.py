"""Messages arrive as they were sent or are refused; silence is noticed and named."""

from __future__ import annotations

import json
import os
import pickle
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from solrl.distributed import start
from solrl.errors import SolrlError
from solrl.runtime import mailbox
from solrl.runtime.mailbox import (
    CONTROLLER,
    Failed,
    Finish,
    Message,
    Post,
    ProcessLost,
    Raised,
    Result,
    Run,
    Shift,
    Shifted,
    Spent,
    Stop,
    Yielded,
    connect,
)
from tests.children import in_children

SPENT = Spent(began=1.5e9, seconds=0.1)
MESSAGES: list[Message] = [
    Run(job=3, role="explore", payload={"members": [[0, 1]], "x": (0.1).hex()}, state={"step": 2}),
    Shift(role="score", number=1),
    Finish(value={"explore": [0, 1, 0]}),
    Stop(ending="reward", reason="the judge is down"),
    Result(job=3, rank=1, value={"values": ["0x1p-3"]}, spent=SPENT, rounds=4),
    Yielded(job=3, rank=1, state=None, spent=SPENT, rounds=0),
    Raised(job=3, rank=1, spent=SPENT, error="OutOfMemoryError: ...", ending="failed"),
    Shifted(rank=1, role="train", number=7, seconds=0.0),
    Failed(rank=1, ending="interrupted", error="stopped by SIGTERM"),
]


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def post(store: Any, rank: int = 0, token: str = "a", timeout_s: float = 60.0) -> Post:
    return Post(store, token, 2, rank, timeout_s)


def raw_box(name: str) -> str:
    return f"solrl/0/box/{name}"


def test_messages_arrive_as_they_were_sent_and_in_order(store: Any) -> None:
    sender, receiver = post(store, 0), post(store.clone(), 1)
    for message in MESSAGES:
        sender.send("1", message)
    assert [receiver.receive("1") for _ in MESSAGES] == MESSAGES
    assert receiver.receive("1") is None and receiver.receive(CONTROLLER) is None


def test_a_message_of_more_than_64_kb_is_refused_on_both_sides(store: Any) -> None:
    here = post(store)
    with pytest.raises(SolrlError, match=r"run message to process 1 has \d+ bytes, more than 65536"):
        here.send("1", Run(job=1, role="score", payload={"x": "y" * 65536}))
    store.queue_push(raw_box("1"), b" " * 65537)
    with pytest.raises(SolrlError, match=r"65537 bytes .* process 1: refused"):
        here.receive("1")


def test_a_box_that_stays_full_is_an_error_that_names_its_owner(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MAX_WAITING", 3)
    here = post(store)
    for number in range(3):
        here.send(CONTROLLER, Shift(role="score", number=number))
    with pytest.raises(SolrlError, match="mailbox of the controller is full"):
        here.send(CONTROLLER, Shift(role="score", number=3), patience_s=0.05)


def test_a_sender_waits_for_room_and_nothing_is_lost_or_out_of_order(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "MAX_WAITING", 3)
    sender, receiver = post(store, 0), post(store.clone(), 1)
    messages = [Shift(role="score", number=number) for number in range(40)]
    thread = threading.Thread(target=lambda: [sender.send("1", message) for message in messages])
    thread.start()
    time.sleep(0.05)
    assert store.queue_len(raw_box("1")) == 3  # it waits
    assert [receiver.wait("1", time.monotonic() + 10) for _ in messages] == messages
    thread.join()


def test_a_message_of_another_run_is_refused(store: Any) -> None:
    post(store, token="b").send("0", MESSAGES[0])
    with pytest.raises(SolrlError, match=r"message of another run .* process 0"):
        post(store, token="a").receive("0")


def test_messages_from_before_a_restart_are_not_seen(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    post(store).send("0", MESSAGES[0])
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert post(store).receive("0") is None


def envelope(**message: Any) -> bytes:
    return json.dumps({"token": "a", "message": message}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"not json",
        pickle.dumps(MESSAGES[0]),
        b"{}",
        envelope(kind="exec", code="print(1)"),
        envelope(kind="shift", role="score"),
        envelope(kind="shift", role="judge", number=1),
        envelope(kind="shift", role="score", number="1"),
        envelope(kind="shift", role="score", number=1, more=2),
    ],
)
def test_what_is_no_message_is_refused(store: Any, data: bytes) -> None:
    store.queue_push(raw_box("0"), data)
    with pytest.raises(SolrlError, match="mailbox of process 0 is no message"):
        post(store).receive("0")


def test_waiting_ends_at_its_time_and_looks_around_meanwhile(store: Any) -> None:
    looks: list[int] = []
    began = time.monotonic()
    assert post(store).wait("0", began + 0.05, lambda: looks.append(1)) is None
    assert time.monotonic() - began >= 0.05 and len(looks) > 1


def test_a_silent_process_is_named_and_one_that_beats_is_not(store: Any) -> None:
    here, there = post(store, 0, timeout_s=0.1), post(store.clone(), 1)
    there.beat(0)
    here.check_alive([1])
    time.sleep(0.06)
    there.beat(1)
    time.sleep(0.06)
    here.check_alive([1])  # 0.12 s after the first
    time.sleep(0.11)
    with pytest.raises(ProcessLost, match=r"process 1 is gone: no sign of life .* --resume"):
        here.check_alive([1])


def killed(victim: int, rank: int) -> None:
    """Two processes connect; ``victim`` is killed; the other waits for it to be named."""
    with start(1, True) as world, connect(world, timeout_s=1.0) as box:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        box.send(CONTROLLER, MESSAGES[0])
        box.wait("nobody", time.monotonic() + 20, lambda: (time.sleep(0.1), box.check_alive([victim]))[1])


def test_a_connection_that_a_dead_leader_cannot_give_names_it() -> None:
    leader = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    follower = dist.TCPStore("127.0.0.1", leader.port, is_master=False, timeout=timedelta(seconds=0.2))
    del leader
    with pytest.raises(ProcessLost, match=r"process 0, which leads the run, is gone as process 1 sees it"):
        post(follower, 1).clone()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_is_named_by_the_other(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "BEAT_S", 0.1)
    outcomes = in_children(2, lambda rank: killed(victim, rank))
    assert outcomes[victim][0] == -signal.SIGKILL
    code, line = outcomes[1 - victim]
    assert code == 1 and line.startswith(f"process {victim}") and "is gone" in line and "\n" not in line
