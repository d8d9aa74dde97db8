"""The comparison of methods: which runs it wants, what it takes from where, and what its tables say."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import alignment
from benchmarks.alignment.report import Report, modelled, paired
from benchmarks.alignment.study import Cell, Results, Study, interpolate, settings_digest
from benchmarks.alignment.tables import METHODS, PAIRED, TABLES
from benchmarks.arms import Run, carry_out, run_evaluations, seconds_an_evaluation, step_evaluations
from benchmarks.common import facts
from solrl.errors import UsageError
from solrl.hardware import find_gpu
from solrl.settings import load_config, save_config
from solrl.tracking import read_metrics
from solrl.train import train
from tests.parts import tiny_config

B200 = find_gpu("b200")


def study(folder: Path, *tables: str, seeds: int = PAIRED, rewards: tuple[str, ...] = ("shapes",)) -> Study:
    return Study(folder, "tiny_flux", tables or tuple(TABLES), rewards, seeds, {})


def cell(plan: Study, arm: str, seed: int, *means: float, reward: str = "shapes") -> Cell:
    """Evaluations at equal distances up to the arm's last step."""
    config = plan.arms[reward, arm]
    steps = [round(config.train.num_steps * at / (len(means) - 1)) for at in range(len(means))]
    curves = {reward: [(step, mean, 0.02) for step, mean in zip(steps, means, strict=True)]}
    return Cell(reward, arm, seed, settings_digest(config), curves, {"update": 2.0, "total": 3.0},
                [3.0 * step for step in steps], "a machine")  # fmt: skip


def results_of(plan: Study, *cells: Cell) -> Results:
    results = Results(plan, plan.folder / "alignment.json")
    results.cells = {(c.reward, c.arm, c.seed): c for c in cells}
    return results


def report_of(plan: Study, *cells: Cell) -> Report:
    return Report(results_of(plan, *cells), B200, "python -m benchmarks alignment runs/x")


def finish(folder: Path) -> None:
    """What a run of eight steps leaves."""
    rows = [{"step": step, "eval/shapes/mean": 0.3 + step / 100, "eval/shapes/stderr": 0.0, "time/total_s": 1.0,
             "eval/clip_score/mean": 0.5, "eval/clip_score/stderr": 0.0} for step in (0, 8)]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lora").mkdir()
    (folder / "environment.json").write_text(json.dumps(facts()))


def line_of(text: str, label: str) -> str:
    return next(
        line
        for line in text.splitlines()
        if line.strip().startswith(label) and line.strip()[len(label) :][:2] in ("", "  ")
    )


# What is run


def test_two_stages_against_plain_comes_first_and_seed_by_seed(tmp_path: Path) -> None:
    first = study(tmp_path).runs()[:4]
    assert [(run.arm, run.seed) for run in first] == [("nft", 0), ("sol_rl", 0), ("nft", 1), ("sol_rl", 1)]


def test_arms_with_the_same_settings_are_trained_once(tmp_path: Path) -> None:
    plan = study(tmp_path)
    assert {plan.twin("shapes", arm) for arm in ("sol_rl", "steps_6", "pool_24", "explore_full")} == {"sol_rl"}
    arms = [run.arm for run in plan.runs()]
    assert "pool_24" not in arms and arms.count("sol_rl") == PAIRED and arms.count("pool_48") == 3
    assert len({run.folder for run in plan.runs()}) == len(arms)


def test_only_table_1_is_run_for_further_rewards(tmp_path: Path) -> None:
    plan = study(tmp_path, rewards=("shapes", "clip_score"))
    further = {run.arm for run in plan.runs() if run.config.reward.name == "clip_score"}
    assert further == {row.arm for row in TABLES["1"].rows}
    assert plan.arms["clip_score", "nft"].evaluate.rewards == ("shapes",)


def test_every_arm_of_every_table_is_a_valid_run_on_the_shipped_configs(tmp_path: Path) -> None:
    assert {row.arm for made in TABLES.values() for row in made.rows} <= set(METHODS)
    for name in ("tiny_flux", "flux1_dev", "sana_1600m"):
        plan = Study(tmp_path, name, tuple(TABLES), (load_config(name).reward.name,), 1, {})
        for config in plan.arms.values():
            assert step_evaluations(config) > 0  # opens the objective, which checks its settings


def test_settings_of_the_command_change_every_arm_but_not_what_an_arm_is(tmp_path: Path) -> None:
    given = {"explore.group_size": 12, "explore.precision": "full", "prompts.per_step": 2}
    arms = Study(tmp_path, "tiny_flux", tuple(TABLES), ("shapes",), 1, given).arms
    assert {config.prompts.per_step for config in arms.values()} == {2}
    assert arms["shapes", "sol_rl"].explore.group_size == 12 and arms["shapes", "pool_48"].explore.group_size == 48
    emulated = {arm for (_, arm), config in arms.items() if config.explore.precision == "emulated_nvfp4"}
    assert emulated == {"naive_quantized", "explore_nvfp4"}
    assert arms["shapes", "naive"].explore.num_steps == arms["shapes", "naive"].regenerate.num_steps


def test_arms_at_equal_compute_get_as_many_evaluations_as_two_stages(tmp_path: Path) -> None:
    arms = study(tmp_path, "1").arms
    whole = {arm: config.train.num_steps * step_evaluations(config) for (_, arm), config in arms.items()}
    for arm, evaluations in whole.items():
        assert 0 <= evaluations - whole["sol_rl"] < step_evaluations(arms["shapes", arm]), arm
    assert arms["shapes", "nft"].train.num_steps > arms["shapes", "sol_rl"].train.num_steps


def test_evaluations_are_counted_by_hand() -> None:
    config = tiny_config(evaluate={"every_steps": 2, "num_prompts": 2, "images_per_prompt": 2, "num_steps": 2})
    step = 3 * (6 * 2 + 4 * 3 + 4 * 2 * (3 + 1 + 1))  # explored, kept, trained: forward, backward, old, reference
    assert step_evaluations(config) == step
    assert run_evaluations(config) == 3 * step + 3 * (2 * 2 * 2)  # before, after steps 2 and 3


# What is known


def test_a_curve_is_straight_between_its_evaluations() -> None:
    assert interpolate([(0, 1.0), (4, 3.0), (5, 2.0)], 1) == 1.5
    assert interpolate([(0, 1.0), (4, 3.0), (5, 2.0)], 9) == 2.0


def test_results_of_the_file_stand_for_runs_and_those_of_other_settings_are_kept_apart(tmp_path: Path) -> None:
    plan = study(tmp_path, "4", seeds=2)
    made = results_of(plan, cell(plan, "nft", 0, 0.3, 0.4), cell(plan, "sol_rl", 0, 0.3, 0.5))
    stranger = dataclasses.replace(cell(plan, "nft", 1, 0.3, 0.9), settings="of another time")
    made.others = [dataclasses.asdict(stranger)]
    made.file.write_text(json.dumps(made.payload()))
    again = Results(plan, made.file)
    assert again.cells == made.cells
    assert [run.seed for run in plan.runs() if not again.has(run)] == [1, 1]
    assert again.price == pytest.approx(3.0 * (1 / step_evaluations(plan.arms["shapes", "nft"]) +
                                               1 / step_evaluations(plan.arms["shapes", "sol_rl"])) / 2)  # fmt: skip
    assert len(again.payload()["cells"]) == 3


def test_a_twin_takes_the_results_of_its_settings_under_any_name(tmp_path: Path) -> None:
    whole = study(tmp_path)
    made = results_of(whole, cell(whole, "sol_rl", 0, 0.3, 0.5))
    made.file.write_text(json.dumps(made.payload()))
    alone = study(tmp_path, "3")
    assert alone.twin("shapes", "pool_24") == "pool_24"
    assert list(Results(alone, made.file).seeds("shapes", "pool_24")) == [0]


def test_a_damaged_file_of_results_is_named(tmp_path: Path) -> None:
    (tmp_path / "alignment.json").write_text('{"benchmark": "alignment", "cells": [{"curves": {}}]}')
    with pytest.raises(UsageError, match=r"alignment\.json holds a cell that is none"):
        Results(study(tmp_path, "4"), tmp_path / "alignment.json")


def test_the_digest_is_of_what_decides_the_result(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    assert settings_digest(config) == settings_digest(tiny_config(tmp_path / "elsewhere", seed=7))
    assert settings_digest(config) == settings_digest(tiny_config(tmp_path, evaluate={"rewards": ("clip_score",)}))
    assert settings_digest(config) != settings_digest(tiny_config(tmp_path, train={"learning_rate": 2e-3}))


def test_a_run_made_elsewhere_counts_if_it_is_finished_and_an_arm_has_its_settings(tmp_path: Path) -> None:
    plan = study(tmp_path / "runs", "4", seeds=1)
    results, run = results_of(plan), plan.runs()[1]
    place = tmp_path / "elsewhere"
    place.mkdir()
    save_config(run.config, place / "config.toml")
    with pytest.raises(UsageError, match="elsewhere is not finished"):
        results.add_folder(place)
    finish(place)
    results.add_folder(place)
    assert results.seeds("shapes", "sol_rl")[0].value(8) == pytest.approx(0.38)
    save_config(run.config.model_copy(update={"cpu_threads": 2}), place / "config.toml")
    with pytest.raises(UsageError, match="no arm of these tables has its settings"):
        results.add_folder(place)


def test_a_run_of_other_settings_in_an_arms_place_is_not_taken_for_the_arms(tmp_path: Path) -> None:
    plan = study(tmp_path, "4", seeds=1)
    run = plan.runs()[1]
    run.folder.mkdir(parents=True)
    finish(run.folder)
    save_config(run.config, run.folder / "config.toml")
    assert Results(plan, tmp_path / "x.json").has(run)
    changed = run.config.model_copy(update={"train": run.config.train.model_copy(update={"learning_rate": 1e-4})})
    save_config(changed, run.folder / "config.toml")
    with pytest.raises(UsageError, match="sol_rl/seed_0 was made with other settings"):
        Results(plan, tmp_path / "x.json")


def test_a_run_that_measured_its_decode_slice_is_the_arms_own(tmp_path: Path) -> None:
    """`batch.decode` = 0 asks for as much as fits, and config.toml says what that was."""
    plan = Study(tmp_path / "runs", "tiny_flux", ("4",), ("shapes",), 1, {"batch.decode": 0})
    run, elsewhere = plan.runs()[1], tmp_path / "elsewhere"
    measured = run.config.model_copy(update={"batch": run.config.batch.model_copy(update={"decode": 16})})
    for place in (run.folder, elsewhere):
        place.mkdir(parents=True)
        finish(place)
        save_config(measured, place / "config.toml")
    results = Results(plan, tmp_path / "x.json")
    assert results.has(run)
    carry_out([run], 1, say=lambda line: None)  # finished, and of the same settings
    results.cells.clear()
    results.add_folder(elsewhere)
    assert results.has(run)


def test_the_price_of_an_evaluation_is_the_median_over_runs(tmp_path: Path) -> None:
    made = []
    for seed, seconds in enumerate((1.0, 2.0, 30.0)):
        run = Run("a", seed, tiny_config(tmp_path / str(seed), seed=seed))
        run.folder.mkdir()
        rows = [{"step": 0, "time/evaluate_s": 0.0}, {"step": 1, "time/total_s": seconds, "time/evaluate_s": 0.0}]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        made.append(run)
    assert seconds_an_evaluation([]) is None
    held = 2 * 2 * 2 * 2  # two evaluations of 2 prompts x 2 images x 2 steps
    assert seconds_an_evaluation(made) == pytest.approx(2.0 / (step_evaluations(made[0].config) + held))
    said: list[str] = []
    carry_out(made, 1, said.append, hours=1e-6)
    assert said[-1] == "3 runs were not begun: they would not have ended within 1e-06 hours"


# What the tables say


def test_differences_are_paired_and_starred_where_zero_is_outside() -> None:
    base = {seed: 0.5 + 0.1 * seed for seed in range(4)}
    assert paired({seed: value + 0.01 for seed, value in base.items()}, base) == "+0.0100 [+0.0100, +0.0100] *"
    assert paired({0: 0.6, 1: 0.5}, base).endswith("]")
    assert paired({7: 1.0}, base) == ""
    assert paired({0: 0.6}, base) == "+0.1000"


def test_cells_that_were_not_run_are_empty_beside_their_command(tmp_path: Path) -> None:
    text = report_of(study(tmp_path)).text()
    assert line_of(text, "DiffusionNFT").split() == ["DiffusionNFT"]
    assert line_of(text, "DanceGRPO").split() == [
        "DanceGRPO", "1.4937", "+1.0387", "0.2898", "+0.0268", "0.8807", "+0.0711", "0.3552", "+0.0986",
    ]  # fmt: skip
    for key in TABLES:
        assert f"    python -m benchmarks alignment runs/x --tables {key}\n" in text


def test_plain_training_is_read_where_it_has_spent_what_two_stages_spent(tmp_path: Path) -> None:
    """It rises by 0.01 a step; two stages end after fewer evaluations than it does."""
    plan = study(tmp_path, "4", seeds=2)
    last = plan.arms["shapes", "nft"].train.num_steps
    ends = plan.base.train.num_steps * step_evaluations(plan.base) / step_evaluations(plan.arms["shapes", "nft"])
    assert ends < last
    cells = [cell(plan, "nft", seed, 0.3, 0.3 + 0.01 * last) for seed in (0, 1)]
    line = line_of(report_of(plan, *cells, cell(plan, "sol_rl", 0, 0.3, 0.5)).text(), "DiffusionNFT")
    assert f"{0.3 + 0.01 * ends:.3f}" in line and f"{ends:.4g}" in line


def test_an_arm_that_ended_before_it_had_spent_as_much_is_marked(tmp_path: Path) -> None:
    plan = study(tmp_path, "4", seeds=1)
    plan.arms["shapes", "nft"] = plan.arms["shapes", "sol_rl"].model_copy(
        update={"explore": plan.arms["shapes", "nft"].explore}
    )
    text = report_of(plan, cell(plan, "nft", 0, 0.3, 0.4), cell(plan, "sol_rl", 0, 0.3, 0.4)).text()
    assert line_of(text, "DiffusionNFT").split()[2:5] == ["8", "(of", "10.62)"]


def test_at_equal_steps_a_longer_arm_is_read_at_the_same_step(tmp_path: Path) -> None:
    plan = study(tmp_path, "selection", seeds=1)
    last = plan.arms["shapes", "nft"].train.num_steps
    text = report_of(plan, cell(plan, "nft", 0, 0.3, 0.3 + 0.01 * last), cell(plan, "sol_rl", 0, 0.3, 0.5)).text()
    assert "0.380" in line_of(text, "random")  # after the 8 steps of the others
    assert "-0.1200" in line_of(text, "random")


def test_the_speed_up_is_the_ratio_of_compute_to_the_same_reward(tmp_path: Path) -> None:
    """Two stages rise twice as fast by step, and a step of theirs costs more."""
    plan = study(tmp_path, "4", seeds=1)
    slow, fast = (plan.arms["shapes", arm] for arm in ("nft", "sol_rl"))
    gain = 0.01 * slow.train.num_steps
    text = report_of(
        plan, cell(plan, "nft", 0, 0.3, 0.3 + gain), cell(plan, "sol_rl", 0, 0.3, 0.3 + 0.02 * fast.train.num_steps)
    ).text()
    expected = 2 * step_evaluations(slow) / step_evaluations(fast)
    for share in ("25%", "50%", "75%", "100%"):
        assert line_of(text, share).split() == [share, f"{expected:.2f}", "1", "of", "1", f"{expected:.2f}"]


def test_a_reward_that_is_never_reached_gives_no_speed_up(tmp_path: Path) -> None:
    plan = study(tmp_path, "4", seeds=1)
    text = report_of(plan, cell(plan, "nft", 0, 0.3, 0.5), cell(plan, "sol_rl", 0, 0.3, 0.42)).text()
    assert line_of(text, "50%").split()[2:5] == ["1", "of", "1"]
    assert line_of(text, "75%").split() == ["75%"]


def test_the_mean_curves_count_the_seeds_that_never_get_there(tmp_path: Path) -> None:
    plan = study(tmp_path, "4", seeds=2)
    slow, fast = (plan.arms["shapes", arm] for arm in ("nft", "sol_rl"))
    ends = {("nft", 0): 0.4, ("nft", 1): 0.4, ("sol_rl", 0): 0.5, ("sol_rl", 1): 0.3}
    text = report_of(plan, *(cell(plan, arm, seed, 0.3, end) for (arm, seed), end in ends.items())).text()
    cost = slow.train.num_steps * step_evaluations(slow) / (fast.train.num_steps * step_evaluations(fast))
    assert line_of(text, "100%").split() == ["100%", f"{cost:.2f}", "1", "of", "2", f"{2 * cost:.2f}"]  # no interval


def test_nothing_is_faster_than_an_arm_that_gained_nothing(tmp_path: Path) -> None:
    plan = study(tmp_path, "4", seeds=1)
    text = report_of(plan, cell(plan, "nft", 0, 0.5, 0.4, 0.45), cell(plan, "sol_rl", 0, 0.3, 0.6)).text()
    assert line_of(text, "100%").split() == ["100%"]


def test_gains_are_counted_in_errors_of_both_evaluations(tmp_path: Path) -> None:
    plan = study(tmp_path, "objectives")
    line = line_of(report_of(plan, cell(plan, "explored_dpo", 0, 0.3, 0.4)).text(), "dpo")
    assert line.split()[-1] == f"{0.1 / (0.02 * 2**0.5):.1f}"


@pytest.mark.slow
def test_modelled_time_counts_an_emulated_explorer_as_the_real_one(tmp_path: Path) -> None:
    arms = study(tmp_path, "4gpu", "4", "6").arms
    plain, full, quick = (modelled(arms["shapes", arm], B200) for arm in ("nft", "sol_rl", "explore_nvfp4"))
    assert plain < quick < full
    assert modelled(arms["shapes", "naive"], B200) > full


def test_an_unknown_table_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--tables 9: there are 4, "):
        alignment.main([str(tmp_path), "--tables", "9"])


@pytest.mark.slow
@pytest.mark.long
def test_two_arms_are_trained_reported_and_not_trained_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_config(tiny_config(tmp_path / "unused", evaluate={"every_steps": 2}), tmp_path / "base.toml")
    words = [str(tmp_path / "runs"), "--config", str(tmp_path / "base.toml"), "--tables", "4", "--seeds", "1",
             "--rewards", "shapes", "--train.num_steps", "2", "--prompts.per_step", "1"]  # fmt: skip
    assert alignment.main([*words, "--launch", sys.executable]) == 0  # scripts/train.py, as a launcher starts it
    out = capsys.readouterr().out
    assert "0 of 2 runs have results, 2 are to be trained" in out and "that takes about" in out
    found = json.loads((tmp_path / "runs" / "alignment.json").read_text())
    assert {(c["arm"], len(c["curves"]["shapes"])) for c in found["cells"]} >= {("sol_rl", 2)}
    assert (tmp_path / "runs" / "alignment.png").is_file()
    text = (tmp_path / "runs" / "alignment.md").read_text()
    assert line_of(text, "Sol-RL").split()[1] == "1" and "2 of them finished" in text
    assert alignment.main([*words, "--no-train"]) == 0
    assert alignment.main(words) == 0
    assert "2 of 2 runs have results, 0 are to be trained" in capsys.readouterr().out


@pytest.mark.slow
def test_keeping_any_trains_on_the_samples_of_no_exploration(tmp_path: Path) -> None:
    """So plain DiffusionNFT is the random selection of the tables."""
    loras = []
    for name, sections in (
        ("any", {"regenerate": {"selection": "random"}}),
        ("plain", {"explore": {"enabled": False}}),
    ):
        train(tiny_config(tmp_path / name, train={"num_steps": 2}, evaluate={"num_prompts": 1}, **sections))
        loras.append(load_file(tmp_path / name / "lora" / "pytorch_lora_weights.safetensors"))
        assert read_metrics(tmp_path / name / "metrics.jsonl")[-1]["step"] == 2
    assert all(torch.equal(loras[0][key], loras[1][key]) for key in loras[0])
