"""Messages between the processes of a run, over torch's TCPStore; in a run of one process over its HashStore.

A message is JSON of at most 64 KB whose fields are checked against its kind; nothing is ever unpickled, and bulk data
goes another way. Keys carry the launcher's restart count and every message the run's token, so what an earlier or a
foreign gang has left behind is refused instead of obeyed. The store listens on the loopback interface only; with
several machines on every interface.

Queues are polled: a blocking pop cannot be told from a dead peer, holds up signals, and prints a warning when its time
is up.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from solrl.distributed import World
from solrl.errors import SolrlError
from solrl.runtime.network import is_one_machine

MAX_BYTES = 64 * 1024
"""Of one message."""
MAX_WAITING = 1024
"""Messages in one box; a sender waits for room."""
PATIENCE_S = 20.0
"""So long; then the box's owner is stuck."""
STORE_TIMEOUT = timedelta(seconds=30)
"""Of one operation of the store."""
POLL_S = (0.0005, 0.01)
"""Between two looks into an empty box: first, and at most."""
BEAT_S = 1.0
"""Between two signs of life."""
CONTROLLER = "controller"
Role = Literal["explore", "score", "train"]
Ending = Literal["failed", "reward", "interrupted"]
"""Why a run ends early: an error, a reward that failed, or a signal."""


class ProcessLost(SolrlError):
    """A process of the run is dead or deaf: the message names it."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Run(_Message):
    """To a worker: carry out a job of the role it has; ``state`` is where an earlier worker left off."""

    kind: Literal["run"] = "run"
    job: int
    role: Role
    payload: dict[str, Any]
    state: dict[str, Any] | None = None


class Shift(_Message):
    """To a worker: give back the job at hand and take ``role``."""

    kind: Literal["shift"] = "shift"
    role: Role
    number: int


class Finish(_Message):
    """To a worker: all jobs are done; ``value`` is for the caller."""

    kind: Literal["finish"] = "finish"
    value: dict[str, Any]


class Stop(_Message):
    """To a worker: the run ends."""

    kind: Literal["stop"] = "stop"
    ending: Ending
    reason: str


class Spent(_Message):
    """When a worker began (time.time) and for how long it was at it."""

    began: float
    seconds: float


class Result(_Message):
    """From a worker: the job is done."""

    kind: Literal["result"] = "result"
    job: int
    rank: int
    value: dict[str, Any]
    spent: Spent
    rounds: int


class Yielded(_Message):
    """From a worker: the job is given back unfinished; it goes on from ``state``, from its start if None."""

    kind: Literal["yielded"] = "yielded"
    job: int
    rank: int
    state: dict[str, Any] | None
    spent: Spent
    rounds: int


class Raised(_Message):
    """From a worker: the role failed at the job; it may be tried again."""

    kind: Literal["raised"] = "raised"
    job: int
    rank: int
    spent: Spent
    error: str
    ending: Ending


class Shifted(_Message):
    """From a worker: the role that it has now; with ``error`` set it is the previous one."""

    kind: Literal["shifted"] = "shifted"
    rank: int
    role: Role
    number: int
    seconds: float
    error: str | None = None


class Failed(_Message):
    """From a worker: the run cannot go on."""

    kind: Literal["failed"] = "failed"
    rank: int
    ending: Ending
    error: str


Message = Run | Shift | Finish | Stop | Result | Yielded | Raised | Shifted | Failed


class _Envelope(_Message):
    token: str
    message: Annotated[Message, Field(discriminator="kind")]


_SCHEMA = TypeAdapter(_Envelope)


class Post:
    """The boxes of a run as one thread of one process sees them; every thread needs a ``clone`` of its own."""

    def __init__(self, store: Any, token: str, size: int, rank: int, timeout_s: float) -> None:
        self._store, self._token = store, token
        self.size, self.rank, self.timeout_s = size, rank, timeout_s
        self._prefix = f"solrl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._seen = [("", time.monotonic())] * size

    @property
    def token(self) -> str:
        """What only processes of this run know."""
        return self._token

    def clone(self) -> Post:
        """The same boxes over a connection of its own."""
        with self._talking():
            return Post(self._store.clone(), self._token, self.size, self.rank, self.timeout_s)

    def send(self, box: str, message: Message, *, patience_s: float = PATIENCE_S) -> None:
        """Put ``message`` into ``box``: a rank, or "controller". Raises SolrlError where it is too large, or the box
        stays full for ``patience_s``."""
        data = _Envelope(token=self._token, message=message).model_dump_json().encode()
        if len(data) > MAX_BYTES:
            raise SolrlError(
                f"a {message.kind} message to {_named(box)} has {len(data)} bytes, more than {MAX_BYTES}: bulk data "
                "goes by blobs; in training, lower prompts.per_step or raise batch.rollout"
            )
        until, pause = time.monotonic() + patience_s, POLL_S[0]
        while True:
            with self._talking():
                if self._store.queue_len(self._box(box)) < MAX_WAITING:
                    return self._store.queue_push(self._box(box), data)
            if time.monotonic() >= until:
                raise SolrlError(
                    f"the mailbox of {_named(box)} is full ({MAX_WAITING} messages) for {patience_s:g} s: it is stuck; "
                    "every step that was saved is intact: continue with --resume"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_S[1])

    def receive(self, box: str) -> Message | None:
        """The oldest message in ``box``, None where there is none. Raises SolrlError for one that is no message of this
        run."""
        with self._talking():
            try:
                data = self._store.queue_pop(self._box(box), False)
            except dist.QueueEmptyError:
                return None
        if len(data) > MAX_BYTES:
            raise SolrlError(f"a message of {len(data)} bytes lay in the mailbox of {_named(box)}: refused")
        try:
            envelope = _SCHEMA.validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise SolrlError(
                f"what lay in the mailbox of {_named(box)} is no message: {where}: {first['msg']}"
            ) from None
        if not secrets.compare_digest(envelope.token, self._token):
            raise SolrlError(f"a message of another run lay in the mailbox of {_named(box)}: refused")
        return envelope.message

    def wait(self, box: str, until: float, look: Callable[[], None] = lambda: None) -> Message | None:
        """The next message in ``box``; None at ``until`` (time.monotonic). ``look`` is called while waiting and may
        raise."""
        pause, longest = POLL_S
        while (message := self.receive(box)) is None:
            look()
            left = until - time.monotonic()
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, longest)
        return message

    def beat(self, number: int) -> None:
        """Say that this process lives."""
        with self._talking():
            self._store.set(self._pulse(self.rank), str(number))

    def check_alive(self, ranks: Sequence[int]) -> None:
        """Raise ProcessLost for the first of ``ranks`` without a sign of life for ``timeout_s``."""
        with self._talking():
            beats = self._store.multi_get([self._pulse(rank) for rank in ranks])
        now = time.monotonic()
        for rank, beat in zip(ranks, beats, strict=True):
            text, since = self._seen[rank]
            if beat.decode("ascii", "replace") != text:
                self._seen[rank] = (beat.decode("ascii", "replace"), now)
            elif now - since > self.timeout_s:
                raise ProcessLost(
                    f"process {rank} is gone: no sign of life for {now - since:.0f} s; every step that was saved is "
                    "intact: continue with --resume"
                )

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except dist.DistError as error:  # the store lives in process 0
            raise ProcessLost(
                f"process 0, which leads the run, is gone as process {self.rank} sees it; every step that was saved is "
                "intact: continue with --resume"
            ) from error

    def _box(self, name: str) -> str:
        return f"{self._prefix}/box/{name}"

    def _pulse(self, rank: int) -> str:
        return f"{self._prefix}/alive/{rank}"


class Heart(threading.Thread):
    """Beats until the context ends, whatever the main thread computes."""

    def __init__(self, post: Post) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._post, self._stopped = post, threading.Event()

    def run(self) -> None:
        """Beat; when process 0 is gone, stop: the main thread finds out by itself."""
        number = 1
        while not self._stopped.wait(BEAT_S):
            try:
                self._post.beat(number)
            except ProcessLost:
                return
            number += 1

    def __enter__(self) -> Heart:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self.join(STORE_TIMEOUT.total_seconds())


@contextmanager
def connect(world: World, timeout_s: float) -> Iterator[Post]:
    """The post of this run, with this process's heart beating. All ranks at once; the only collectives of this file."""
    if world.size == 1:
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        token = secrets.token_hex(16)
    else:
        store, token = _open_store(world)
    post = Post(store, token, world.size, world.rank, timeout_s)
    post.beat(0)
    heart = Heart(post.clone())
    world.barrier()  # every pulse is there, where a get of a missing key would block, and every connection stands
    with heart:
        yield post


def _open_store(world: World) -> tuple[Any, str]:
    """(a store in process 0, on a port that the system chose; the run's token)."""
    words = torch.zeros(5, dtype=torch.int64)
    here = is_one_machine()
    listener = None
    if world.is_main:
        listener = socket.create_server(("127.0.0.1" if here else "", 0))
        words[0] = listener.getsockname()[1]
        words[1:] = torch.tensor([secrets.randbits(32) for _ in range(4)])
    port, *parts = world.broadcast_(words).tolist()
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": STORE_TIMEOUT}
    if listener is not None:
        options |= {"is_master": True, "master_listen_fd": listener.detach()}
    host = "127.0.0.1" if here or world.is_main else os.environ["MASTER_ADDR"]
    store = dist.TCPStore(host, port, **options)  # type: ignore[attr-defined]
    return store, "".join(f"{part:08x}" for part in parts)


def _named(box: str) -> str:
    return "the controller" if box == CONTROLLER else f"process {box}"
