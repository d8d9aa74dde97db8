"""The parameter store with real processes: whole versions only, whatever is killed when."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from solrl.errors import SolrlError
from solrl.runtime import arena
from solrl.runtime.arena import Arena, check_memory
from solrl.runtime.entries import EntrySet, Spec, split_rows
from solrl.runtime.store import Store

fork = multiprocessing.get_context("fork")


def patterns(value: int, size: int = 1 << 15) -> dict[str, Tensor]:
    """Every element says which version it is of."""
    return {name: torch.full((4, size // 4), float(value)) for name in ("first", "second", "third")}


def like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.create([EntrySet.like("policy", patterns(0))]) as made:
        yield made


def interrupt(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """The next copy stops after its first tensor, as when a process is put to sleep there, while ``act`` is done."""
    copy_all = torch._foreach_copy_

    def interrupted(to: list[Tensor], source: list[Tensor]) -> None:
        monkeypatch.setattr(torch, "_foreach_copy_", copy_all)
        copy_all(to[:1], source[:1])
        act()
        copy_all(to[1:], source[1:])

    monkeypatch.setattr(torch, "_foreach_copy_", interrupted)


def start(target: Callable[..., object], *arguments: object) -> multiprocessing.process.BaseProcess:
    process = fork.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def assert_whole(out: dict[str, Tensor], version: int) -> None:
    for name, tensor in out.items():
        assert bool((tensor == version).all()), (name, version, tensor.unique())


def test_any_dtype_and_shape_comes_back_bit_for_bit_in_a_process_that_joins_by_address() -> None:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 255, (64,), dtype=torch.uint8, generator=generator)
    dtypes = (torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.float32)
    tensors = {str(dtype): (raw % 2 if dtype == torch.bool else raw).view(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "odd": raw[:15].reshape(3, 5)}
    tensors["strided"] = torch.arange(12.0).reshape(3, 4).T
    with Store.create([EntrySet.like("all", tensors)]) as store:
        store.write("all", 7, tensors)
        assert oct(os.stat(store.address.split("#")[0]).st_mode & 0o777) == "0o600"

        def join(address: str) -> None:
            out = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            assert Store.attach(address).read("all", out) == 7
            for name, tensor in tensors.items():
                assert torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, out[name]))), name

        child = start(join, store.address)
        child.join()
        assert child.exitcode == 0


def test_a_read_that_is_overtaken_starts_over_and_returns_the_newer_version_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("policy", 1, patterns(1))

    def overtake() -> None:
        store.write("policy", 2, patterns(2))
        store.write("policy", 3, patterns(3))

    interrupt(monkeypatch, overtake)
    out = like(patterns(0))
    assert store.read("policy", out) == 3
    assert_whole(out, 3)


def test_a_read_during_which_one_version_is_committed_keeps_its_own(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("policy", 1, patterns(1))
    interrupt(monkeypatch, lambda: store.write("policy", 2, patterns(2)))
    out = like(patterns(0))
    assert store.read("policy", out) == 1
    assert_whole(out, 1)


def hammer(address: str) -> None:
    store, version = Store.attach(address), 0
    while True:
        for _ in range(3):
            version += 1
            store.write("policy", version, patterns(version))
        time.sleep(0.002)


def test_no_reader_sees_a_mix_while_another_process_hammers(store: Store) -> None:
    writer = start(hammer, store.address)
    store.wait("policy", 1, 20.0)
    out, seen = (
        {name: tensor.T for name, tensor in like({k: v.T.contiguous() for k, v in patterns(0).items()}).items()},
        [],
    )
    deadline = time.monotonic() + 30
    while len(set(seen)) < 50 and time.monotonic() < deadline:
        seen.append(store.read("policy", out))  # strided: slower than the writer
        assert_whole(out, seen[-1])
    writer.kill()
    writer.join()
    assert len(set(seen)) == 50
    assert seen == sorted(seen)


def test_a_writer_killed_in_the_middle_leaves_the_last_version_and_the_next_writer_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(os.listdir("/dev/shm"))
    store.write("policy", 1, patterns(1))
    reached = fork.Event()

    def stop_half_way(address: str) -> None:
        interrupt(monkeypatch, lambda: (reached.set(), time.sleep(60)))
        Store.attach(address).write("policy", 2, patterns(2))

    writer = start(stop_half_way, store.address)
    assert reached.wait(20)
    with pytest.raises(SolrlError, match="version 2 of policy is being written by writer 0"):
        store.write("policy", 2, patterns(2))
    writer.kill()
    writer.join()
    out = like(patterns(0))
    assert store.read("policy", out) == 1
    assert_whole(out, 1)
    store.write("policy", 2, patterns(20))
    assert store.read("policy", out) == 2
    assert_whole(out, 20)
    assert sorted(os.listdir("/dev/shm")) == before


def test_killed_at_any_moment_the_store_stays_readable_and_writable(store: Store) -> None:
    out = like(patterns(0))

    def go_on(address: str, version: int) -> None:
        mine = Store.attach(address)
        while True:
            version += 1
            mine.write("policy", version, patterns(version))

    store.write("policy", 0, patterns(0))
    for delay in range(8):
        last = store.version("policy")
        writer = start(go_on, store.address, last)
        store.wait("policy", last + 1, 30.0)
        time.sleep(0.0007 * delay)
        writer.kill()
        writer.join()
        assert_whole(out, store.read("policy", out))
    store.write("policy", store.version("policy") + 1, patterns(5))


def test_nothing_is_left_when_everybody_is_killed(tmp_path: Path) -> None:
    before = sorted(os.listdir("/dev/shm"))
    reached = fork.Event()

    def everybody() -> None:
        os.setsid()
        store = Store.create([EntrySet.like("policy", patterns(0))])
        start(hammer, store.address)
        store.wait("policy", 3, 20.0)
        (tmp_path / "address").write_text(store.address)
        reached.set()
        time.sleep(60)

    process = fork.Process(target=everybody)  # not a daemon: it starts a process
    process.start()
    assert reached.wait(20)
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert sorted(os.listdir("/dev/shm")) == before
    with pytest.raises(SolrlError, match="its creator must be alive"):
        Store.attach((tmp_path / "address").read_text())


def test_shards_of_a_version_are_read_only_when_all_are_there() -> None:
    tensors = {"w": torch.arange(20.0).reshape(5, 4), "b": torch.arange(2.0), "s": torch.tensor(9.0)}
    with Store.create([EntrySet.like("policy", tensors, num_writers=3)]) as store:
        parts = [
            {key: tensors[key][tuple(slice(*edge) for edge in box)] for key, box in shard.items()}
            for shard in store.sets["policy"].shards
        ]
        assert [part["w"].shape[0] for part in parts] == [2, 2, 1]
        assert not store.write("policy", 4, parts[2], writer=2)
        assert not store.write("policy", 4, parts[0], writer=0)
        assert store.version("policy") is None
        with pytest.raises(SolrlError, match=r"version 4 of policy did not come in 0 s; not yet written by writer 1$"):
            store.wait("policy", 4, 0.0)
        with pytest.raises(SolrlError, match="no version of policy has been written"):
            store.read("policy", like(tensors))
        assert store.write("policy", 4, parts[1], writer=1)
        out = like(tensors)
        assert store.wait("policy", 3, 0.0) == store.read("policy", out) == 4
        assert all(torch.equal(out[key], tensors[key]) for key in tensors)


def test_a_writer_that_is_behind_cannot_undo_a_newer_version() -> None:
    with Store.create([EntrySet.like("policy", patterns(0), num_writers=2)]) as store:
        part = {key: tensor[:2] for key, tensor in patterns(1).items()}
        store.write("policy", 5, part, writer=0)
        with pytest.raises(SolrlError, match="version 4 of policy is not new: 5 is being written"):
            store.write("policy", 4, part, writer=1)
        assert store.write("policy", 5, part, writer=1)


def test_an_adapter_is_written_beside_a_base_that_is_written_once() -> None:
    base, adapter = {"w": torch.randn(256, 256)}, {"lora_A": torch.randn(4, 256), "lora_B": torch.randn(256, 4)}
    quantized = {"w": torch.zeros(256, 128, dtype=torch.uint8)}
    sets = [EntrySet.like("base", base, frozen=True), EntrySet.like("lora", adapter), EntrySet.like("fp4", quantized)]
    with Store.create(sets) as store:
        assert store.nbytes < 256 * 256 * 4 + 2 * (2 * 4 * 256 * 4) + 2 * 256 * 128 + 4096  # one slot, two, two
        store.write("base", 0, base)
        for version in (1, 2):
            store.write("lora", version, adapter)
        out = like(base)
        assert store.read("base", out) == 0
        assert torch.equal(out["w"], base["w"])
        assert store.read("lora", {"lora_B": (some := torch.empty(256, 4))}) == 2
        assert torch.equal(some, adapter["lora_B"])
        with pytest.raises(SolrlError, match="base is frozen: it was written once, as version 0"):
            store.write("base", 1, base)
        assert store.version("fp4") is None


def test_mistakes_are_one_line_that_names_them(store: Store) -> None:
    good = patterns(1)
    store.write("policy", 3, good)
    for act, words in (
        (lambda: store.write("polcy", 4, good), "has no 'polcy'; it has policy"),
        (lambda: store.write("policy", 3, good), "version 3 of policy is not new: 3 is committed"),
        (lambda: store.write("policy", 4, good, writer=1), "policy has writers 0 to 0, got 1"),
        (lambda: store.write("policy", 4, {"first": good["first"]}), "writer 0 of policy must write second too"),
        (lambda: store.read("policy", {"frist": good["first"]}), "policy has no entry frist; the nearest is first"),
        (lambda: store.read("policy", {"first": good["first"].half()}), r"first of policy is float32 \[4, 8192\], got "
         r"float16 \[4, 8192\]"),
        (lambda: store.write("policy", 4, good | {"third": good["first"][:2]}), r"got float32 \[2, 8192\]"),
        (lambda: Store.attach("/etc/passwd#" + "0" * 32), "is no address of a parameter store"),
        (lambda: Store.attach(store.address[:-32] + "0" * 32), "leads to something else"),
        (lambda: Store.create([EntrySet.like("a", good), EntrySet.like("a", good)]), "sets of different names"),
    ):  # fmt: skip
        with pytest.raises(SolrlError, match=words) as caught:
            act()
        assert "\n" not in str(caught.value)
    assert store.version("policy") == 3


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([((0, 2), (0, 4)), ((1, 4), (0, 4))], "a part of w of policy is written twice"),
        ([((0, 2), (0, 4)), ((3, 4), (0, 4))], "a part of w of policy is written not at all"),
        ([((0, 2), (0, 4)), ((2, 5), (0, 4))], r"writer 1 of policy writes .* of w, which is uint8 \[4, 4\]"),
        ([((0, 4),)], "writer 0 of policy writes"),
    ],
)
def test_shards_that_do_not_cover_once_are_refused(boxes: list, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(SolrlError, match=words):
        Store.create([EntrySet("policy", {"w": Spec(torch.uint8, (4, 4))}, [{"w": box} for box in boxes])])


def test_too_little_memory_is_refused_before_any_is_taken(tmp_path: Path) -> None:
    spec = {"w": Spec(torch.uint8, (1 << 42,))}
    with pytest.raises(SolrlError, match=r"the parameter store needs 8192.0 GiB and .* has .* GiB free of"):
        Store.create([EntrySet("policy", spec, split_rows(spec, 1))])
    kibi = 1024
    group, inner = tmp_path / "sys/fs/cgroup", tmp_path / "sys/fs/cgroup/pod/job"
    for folder in (tmp_path / "proc/self", inner):
        folder.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/elsewhere\n0::/pod/job\n")
    check_memory(600 * kibi, "store", tmp_path)
    for folder, limit, used in ((inner, "max", 0), (inner.parent, str(500 * kibi), 400 * kibi)):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text(str(used))
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {100 * kibi}\n")
    check_memory(200 * kibi, "store", tmp_path)
    with pytest.raises(
        SolrlError, match=r"the store needs 201.0 KiB and the control group .*/pod has 200.0 KiB free of"
    ):
        check_memory(201 * kibi, "store", tmp_path)
    old = group / "memory"  # version 1, from inside a container: the path of the group is the host's
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text(str(300 * kibi))
    (old / "memory.usage_in_bytes").write_text(str(250 * kibi))
    (old / "memory.stat").write_text("total_inactive_file 0\n")
    with pytest.raises(SolrlError, match=r"cgroup/memory has 50.0 KiB free of 300.0 KiB"):
        check_memory(51 * kibi, "store", tmp_path)


def test_a_stopped_process_that_holds_the_lock_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(address: str) -> None:
        with Arena.attach("parameter store", address).lock():
            os.kill(os.getpid(), signal.SIGSTOP)

    holder = start(hold, store.address)
    assert os.WIFSTOPPED(os.waitpid(holder.pid, os.WUNTRACED)[1])
    monkeypatch.setattr(arena, "LOCK_TIMEOUT_S", 0.05)
    with pytest.raises(SolrlError, match=f"process {holder.pid} has held the parameter store for"):
        store.version("policy")
    holder.kill()
    holder.join()
    assert store.version("policy") is None  # the dead let go


def test_a_forked_process_must_attach_by_itself(store: Store) -> None:
    def use() -> None:
        with pytest.raises(SolrlError, match="a forked process must attach the parameter store"):
            store.version("policy")

    child = start(use)
    child.join()
    assert child.exitcode == 0


def test_stores_that_are_closed_give_their_memory_back() -> None:
    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem"))

    kept = []  # so that closing gives back, and not forgetting
    for repeat in range(8):
        with Store.create([EntrySet.like("policy", {"w": torch.zeros(1 << 22, dtype=torch.uint8)})]) as store:
            kept.append(store)
            store.write("policy", 1, {"w": torch.ones(1 << 22, dtype=torch.uint8)})
        if repeat == 1:
            before = resident()
    assert resident() - before < 4 << 20
    for act in (
        lambda: store.version("policy"),
        lambda: store.write("policy", 2, {}),
        lambda: store.read("policy", {}),
    ):
        with pytest.raises(SolrlError, match="the parameter store is closed"):
            act()
