"""What the benchmark times is a whole shift: everything that a role holds goes, and comes back bit for bit."""

from __future__ import annotations

import pytest
import torch

from benchmarks import shift_cost
from benchmarks.common import WIDTH
from benchmarks.shift_cost import make_store, measure, mebibytes, report, tensors_of, together
from solrl.session import open_session
from solrl.settings import load_config
from tests.children import in_child
from tests.parts import ALONE, never


@pytest.mark.slow
def test_every_role_of_the_embedded_model_comes_back_bit_for_bit() -> None:
    def shift() -> None:
        config = load_config("tiny_flux", {"reward.name": "clip_score", "evaluate.rewards": []})
        session = open_session(config, ALONE, never)
        roles = tensors_of(session)
        sizes = {role: mebibytes(held) for role, held in roles.items()}
        before = {name: tensor.detach().clone() for name, tensor in roles["train"].items()}
        with make_store(roles) as store:
            samples = measure(session, roles, store.address, cycles=1)  # it ends in role train
        assert all(torch.equal(tensor, before[name]) for name, tensor in roles["train"].items())
        assert mebibytes(roles["train"]) == sizes["train"] and mebibytes(roles["score"]) == 0 < sizes["score"]
        assert {role for role, _ in samples} == set(roles) and min(map(len, samples.values())) == 2
        text = report({1: samples}, sizes, 1)
        assert "H20" in text and max(map(len, text.splitlines())) <= WIDTH + 30

    assert in_child(shift) == (0, "")


def test_what_several_processes_measure_is_put_together() -> None:
    found = together(3, lambda: {("score", "load"): [(1.0, 2.0)]})
    assert found == {("score", "load"): [(1.0, 2.0)] * 3}
    assert set(shift_cost.ORDER) == {"explore", "score", "train"} and shift_cost.ORDER[-1] == "train"
