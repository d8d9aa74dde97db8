"""What a role holds is released and comes back bit for bit, or the role refuses to shift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from solrl.errors import SolrlError
from solrl.runtime.context import Context, Kind, Residency, ShiftFailed, module_tensors
from solrl.runtime.mailbox import Role


def tensors(*names: str, size: int = 1000) -> dict[str, Tensor]:
    return {name: torch.randn(size, generator=torch.Generator().manual_seed(7)) for name in names}


def context(role: Role, held: Mapping[str, Tensor], *kinds: tuple[str, Kind], **options: Any) -> Context:
    return Context(role, lambda: held, kinds, **options)


def nbytes(held: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.untyped_storage().nbytes() for name, tensor in held.items()}


def reader(held: Mapping[str, Tensor]) -> Any:
    copies = {name: tensor.clone() for name, tensor in held.items()}
    return lambda name, out: out.copy_(copies[name])


def test_each_kind_is_released_and_comes_back() -> None:
    held = tensors("kv", "weight", "moments", "graph")
    before = {name: tensor.clone() for name, tensor in held.items()}
    kinds: list[tuple[str, Kind]] = [
        ("kv", "temporary"), ("w*", "parameters"), ("moments", "offloadable"), ("*", "preserved"),
    ]  # fmt: skip
    residency = Residency(
        [context("score", held, *kinds, read=reader(held)), context("explore", {})], "score", budget_bytes=0
    )
    residency.shift_to("explore")
    assert nbytes(held) == {"kv": 0, "weight": 0, "moments": 0, "graph": 4000}
    residency.shift_to("score")
    assert torch.equal(held["kv"], torch.zeros(1000))
    assert all(torch.equal(held[name], before[name]) for name in ("weight", "moments", "graph"))


def test_a_tensor_of_no_kind_makes_the_role_refuse_and_nothing_is_released() -> None:
    module = nn.BatchNorm1d(4)
    held = module_tensors({"judge": module})
    assert set(held) == {f"judge.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    score = context("score", held, ("judge.weight", "offloadable"), ("judge.bias", "offloadable"))
    residency = Residency([score, context("explore", {})], "score", budget_bytes=0)
    with pytest.raises(SolrlError, match=r"role score cannot shift: judge.running_mean is of no kind"):
        residency.shift_to("explore")
    assert residency.current == "score" and all(nbytes(held).values())


def test_one_memory_under_two_kinds_is_refused() -> None:
    held = tensors("a")
    held["b"] = held["a"][:10]
    score = context("score", held, ("a", "preserved"), ("b", "offloadable"))
    with pytest.raises(SolrlError, match="a, preserved, shares memory with b, offloadable"):
        Residency([score, context("explore", {})], "score", budget_bytes=0).shift_to("explore")


def test_parameters_need_a_reader() -> None:
    score = context("score", tensors("a"), ("*", "parameters"))
    with pytest.raises(SolrlError, match="no reader"):
        Residency([score, context("explore", {})], "score", budget_bytes=0).shift_to("explore")


def test_where_both_roles_fit_nothing_is_released() -> None:
    held = tensors("a", "b")
    contexts = [
        context("score", held, ("*", "offloadable")),
        context("explore", {"x": held["a"]}, ("*", "offloadable")),
    ]
    residency = Residency(contexts, "score", budget_bytes=8000)  # a is in both roles and counts once
    residency.shift_to("explore")
    assert residency.current == "explore" and nbytes(held) == {"a": 4000, "b": 4000}
    tight = Residency(contexts, "score", budget_bytes=7999)
    tight.shift_to("explore")
    assert nbytes(held) == {"a": 4000, "b": 0}  # what the next role holds as well stays


def test_a_role_that_does_not_come_up_leaves_the_previous_one_as_it_was() -> None:
    mine, theirs = tensors("moments"), tensors("first", "weight")
    before = {name: tensor.clone() for name, tensor in (mine | theirs).items()}
    copies, full = reader(theirs), [False]

    def read(name: str, out: Tensor) -> None:
        if full[0]:
            out.fill_(3)  # half written
            raise torch.OutOfMemoryError("no room for weight")
        copies(name, out)

    residency = Residency(
        [
            context("train", mine, ("*", "offloadable")),
            context("score", theirs, ("first", "offloadable"), ("weight", "parameters"), read=read),
        ],
        "score",
        budget_bytes=0,
    )
    residency.shift_to("train")
    full[0] = True
    for _ in range(2):  # and nothing is left over from the first time
        with pytest.raises(ShiftFailed, match="role score did not come up, train is back: no room for weight"):
            residency.shift_to("score")
        assert residency.current == "train" and torch.equal(mine["moments"], before["moments"])
        assert nbytes(theirs) == {"first": 0, "weight": 0}
    full[0] = False
    residency.shift_to("score")
    assert all(torch.equal(theirs[name], before[name]) for name in theirs) and nbytes(mine) == {"moments": 0}


def train_twice(shift: Any) -> Tensor:
    """Weights after two steps with momentum, with ``shift`` of everything between them."""
    weight, momentum = torch.linspace(-1, 1, 64), torch.zeros(64)

    def step() -> None:
        momentum.mul_(0.9).add_(weight.sin())
        weight.sub_(0.1 * momentum)

    step()
    shift({"weight": weight, "momentum": momentum})
    step()
    return weight


def test_a_shift_in_between_leaves_training_bit_equal() -> None:
    def away_and_back(held: dict[str, Tensor]) -> None:
        train = context("train", held, ("*", "offloadable"))
        residency = Residency([train, context("explore", {})], "train", budget_bytes=0)
        residency.shift_to("explore")
        assert not any(nbytes(held).values())
        residency.shift_to("train")

    assert torch.equal(train_twice(lambda held: None), train_twice(away_and_back))
