"""Benchmarks at tiny settings: their arithmetic, what they print and write, and that they leave no trace in solrl."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import (
    extreme_value,
    host_overhead,
    iteration_breakdown,
    quant_fidelity,
    ranking_fidelity,
    rollout_speed,
)
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.candidates import Candidates, Setting, draw
from benchmarks.common import WIDTH, facts
from benchmarks.step_overhead import MODEL, Meter, measure
from solrl.fidelity import overlap
from solrl.quant.bounds import Work
from solrl.settings import save_config
from tests.parts import tiny_config


def scores(seed: int, shape: tuple[int, ...] = (5, 24), noise: float = 0.2) -> tuple[Tensor, Tensor]:
    """(proxy, rewards) that agree up to noise."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand(shape, generator=generator, dtype=torch.float64)
    return rewards + noise * torch.rand(shape, generator=generator, dtype=torch.float64), rewards


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A JSON file of ranking_fidelity, of made-up scores."""
    tables = [scores(seed, (4, 96)) for seed in (0, 1)]
    about = {"model": "none", "full_rollout": {"num_steps": 10, "solver": "euler"}, "explore_solver": "euler",
             "seed": 0, "seconds": {}, "environment": facts()}  # fmt: skip
    candidates = Candidates(
        prompts=list("abcd"),
        rewards={name: rewards for name, (_, rewards) in zip(("shapes", "clip_score"), tables, strict=True)},
        proxies={
            name: {"2 steps, full": proxy, "6 steps, emulated_nvfp4": proxy}
            for name, (proxy, _) in zip(("shapes", "clip_score"), tables, strict=True)
        },
        about=about,
    )
    path = tmp_path / "drawn.json"
    plain = {name: {k: v.tolist() for k, v in rows.items()} for name, rows in candidates.proxies.items()}
    full = {name: rows.tolist() for name, rows in candidates.rewards.items()}
    payload = candidates.dump() | {"proxies": plain, "rewards": full}
    path.write_text(json.dumps({"benchmark": "ranking_fidelity", "candidates": payload}))
    return path


def test_without_a_name_every_benchmark_is_listed_and_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    for name in BENCHMARKS:
        assert f"  {name} " in listed
        assert importlib.util.find_spec(f"benchmarks.{name}") is not None


def test_a_wrong_name_is_bad_usage_and_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank_fidelity"]) == 2
    assert "nearest is ranking_fidelity" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["ranking_fidelity", "--candidates", "4"], "--candidates"),
        (["ranking_fidelity", "--precision", "fp3"], "fp3"),
        (["ranking_fidelity", "--settings", "six:full"], "six"),
        (["extreme_value", "--from", "nowhere.json"], "nowhere.json"),
        (["host_overhead", "--models", "sdxl"], "sdxl"),
        (["host_overhead", "--keep", "7"], "--keep"),
        (["step_overhead", "--steps", "2"], "--steps"),
        (["step_overhead", "--stepz", "2"], "--stepz"),
        (["step_overhead", "--train.num_stepz", "2"], "train.num_steps"),
        (["step_overhead", "--steps", "0"], "'0'"),
    ],
)
def test_wrong_options_are_bad_usage(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1


def test_a_perfect_proxy_gets_the_perfect_values() -> None:
    _, rewards = scores(0, (3, 96))
    found = ranking_fidelity.statistics(rewards * 2 + 1, rewards)
    for k, top, bottom in ((4, 98.4, 1.6), (8, 96.3, 3.7), (12, 94.2, 5.8)):
        assert found[f"overlap_best_{k}"].tolist() == [1.0] * 3
        assert found[f"rank_best_{k}"].tolist() == [ranking_fidelity.perfect(96, k)[0]] * 3
        assert found[f"rank_worst_{k}"].tolist() == [ranking_fidelity.perfect(96, k)[1]] * 3
        assert round(float(found[f"percentile_best_{k}"][0]), 1) == top
        assert round(float(found[f"percentile_worst_{k}"][0]), 1) == bottom
    assert torch.allclose(found["spearman"], torch.ones(3, dtype=torch.float64))
    assert ranking_fidelity.perfect(96, 12) == (6.5, 90.5)


def test_a_prompt_without_spread_is_left_out() -> None:
    proxy, rewards = scores(1, (3, 24))
    rewards[1] = 0.5
    assert len(ranking_fidelity.statistics(proxy, rewards)["kendall"]) == 2


def test_at_the_papers_spearman_overlap_rises_with_k_and_percentile_falls() -> None:
    found = ranking_fidelity.simulate(0.927, 96)
    assert found["spearman"][0] == pytest.approx(0.927, abs=0.01)
    overlaps = [found[f"overlap_best_{k}"][0] for k in (4, 8, 12)]
    percentiles = [found[f"percentile_best_{k}"][0] for k in (4, 8, 12)]
    assert overlaps == sorted(overlaps)
    assert overlaps[-1] < 0.8
    assert percentiles == sorted(percentiles, reverse=True)
    published = ranking_fidelity.PAPER["Overall"][2]
    assert all(abs(mine - theirs) < 2 for mine, theirs in zip(percentiles, published, strict=True))
    worst = [found[f"percentile_worst_{k}"][0] for k in (4, 8, 12)]
    published = ranking_fidelity.PAPER["Overall"][3]
    assert all(abs(mine - theirs) < 2 for mine, theirs in zip(worst, published, strict=True))


def test_density_is_conditional_on_the_true_rank() -> None:
    true = torch.linspace(0, 100, 32, dtype=torch.float64).repeat(2, 1)
    part = ranking_fidelity.density(true, true, 8)
    assert torch.equal(part, torch.eye(8, dtype=torch.float64))


@pytest.mark.parametrize("ties", [False, True])
def test_the_retained_range_is_the_mean_over_all_subsets(ties: bool) -> None:
    proxy, full = scores(2, (3, 6))
    if ties:
        proxy = (proxy * 3).round()
    for n in range(2, 7):
        expected = torch.zeros(3, dtype=torch.float64)
        subsets = list(itertools.combinations(range(6), n))
        for subset in subsets:
            order = torch.argsort(proxy[:, subset], dim=1, descending=True, stable=True)
            ordered = full[:, subset].gather(1, order)
            expected += (ordered[:, 0] - ordered[:, -1]) / len(subsets)
        torch.testing.assert_close(extreme_value.retained_range(full, proxy, n), expected)


def test_every_bound_holds_and_the_one_per_prompt_is_tighter() -> None:
    proxy, full = scores(3, (6, 24), noise=0.1)
    found = extreme_value.analyse(full, {"noisy": proxy, "itself": full})
    noisy, itself = found["settings"]["noisy"], found["settings"]["itself"]
    for i, (oracle, _) in enumerate(found["oracle"]):
        assert noisy["bound_max"][i] <= noisy["bound_per_prompt"][i] <= noisy["retained"][i][0] <= oracle
        assert itself["retained"][i][0] == itself["bound_max"][i] == oracle
        assert found["normal"][i] < found["asymptote"][i]
    assert itself["kept_share"] == 1
    assert itself["worth"] == 24
    assert 2 <= noisy["worth"] <= 24


def test_the_range_of_normal_draws() -> None:
    assert extreme_value.normal_range(2) == pytest.approx(2 / math.sqrt(math.pi), abs=1e-6)
    assert extreme_value.normal_range(10) == pytest.approx(3.0775, abs=1e-4)


def test_text_fits_and_json_holds_every_statistic(
    drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ranking_fidelity", "extreme_value"):
        out = tmp_path / f"{name}.json"
        assert main([name, "--from", str(drawn), "--json", str(out)]) == 0
        text = capsys.readouterr().out.replace(f"wrote {out}", "")
        assert max(len(line) for line in text.splitlines() if not line.startswith("hardware")) <= WIDTH
        assert facts()["cpu"] in text
        results = json.loads(out.read_text())["results"]
        assert set(results) == {"shapes", "clip_score"}
    again = Candidates.load(drawn)
    stats = ranking_fidelity.summaries(again, "shapes")["2 steps, full"]
    proxy, full = again.proxies["shapes"]["2 steps, full"], again.rewards["shapes"]
    assert stats["overlap_worst_8"][0] == pytest.approx(float(overlap(proxy, full, 8)[1].mean()))


def test_pictures_are_drawn_or_the_missing_extra_is_named(
    drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    for name in ("ranking_fidelity", "extreme_value"):
        picture = tmp_path / f"{name}.png"
        code = main([name, "--from", str(drawn), "--png", str(picture)])
        if has_matplotlib:
            assert code == 0
            assert picture.read_bytes().startswith(b"\x89PNG")
        else:
            assert code == 2
            assert "pip install 'solrl[bench]'" in capsys.readouterr().err


def test_an_explorer_like_the_full_rollout_scores_the_same() -> None:
    config = tiny_config(evaluate={"num_prompts": 2, "images_per_prompt": 8, "num_steps": 2})
    found = draw(config, [Setting(config.regenerate.num_steps, "full"), Setting(2, "full")], [])
    same, other = (found.proxies["shapes"][name] for name in ("3 steps, full", "2 steps, full"))
    assert torch.equal(same, found.rewards["shapes"])
    assert same.shape == (2, 8)
    assert not torch.equal(other, same)


def test_host_overhead_counts_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "host.json"
    words = ["--models", "sana", "--prompts", "1", "--candidates", "4", "--keep", "2", "--ranks", "2"]
    assert main(["host_overhead", *words, "--repeats", "1", "--max-pixels", "64", "--json", str(out)]) == 0
    seconds = json.loads(out.read_text())["seconds"]["SANA 1024 px"]
    assert set(seconds) == set(host_overhead.PARTS)
    assert all(value > 0 for value in seconds.values())
    assert "1.52" in capsys.readouterr().out  # 2 % of the paper's 76 s


def test_a_timer_does_not_count_the_timed_functions_it_calls() -> None:
    meter = Meter()
    inner = meter.timed("inner", lambda: time.sleep(0.03))

    def outer() -> None:
        inner()
        time.sleep(0.01)
        inner()

    begin = time.perf_counter()
    meter.timed("outer", outer)()
    wall = time.perf_counter() - begin
    assert meter.seconds["inner"] >= 0.06
    assert meter.seconds["outer"] >= 0.01
    assert sum(meter.seconds.values()) <= wall


def test_watching_ends_with_what_was_there() -> None:
    class Parent:
        def act(self) -> int:
            return 1

    class Child(Parent):
        pass

    meter = Meter()
    with meter.watch(Child, "act", "act"):
        assert Child().act() == 1
    assert "act" not in vars(Child)
    assert meter.seconds["act"] > 0


@pytest.mark.slow
def test_the_parts_of_a_step_add_up_to_it() -> None:
    module = importlib.import_module("solrl.rollout")
    before = module.call_parts
    steps = measure(tiny_config(), 3)
    assert module.call_parts is before
    assert len(steps) == 2
    for step in steps:
        assert all(step.parts[name] > 0 for name in MODEL)
        assert 0 < step.overhead < step.wall
        assert 0 <= step.wall - sum(step.parts.values()) < 0.5 * step.wall
    assert "checkpoint" in steps[-1].parts
    assert "checkpoint" not in steps[0].parts


@pytest.mark.slow
def test_step_overhead_prints_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, out = tmp_path / "tiny.toml", tmp_path / "out.json"
    save_config(tiny_config(tmp_path / "unused"), config)
    assert main(["step_overhead", "--config", str(config), "--steps", "3", "--json", str(out)]) in (0, 1)
    text = capsys.readouterr().out
    assert "not the model, over a run" in text
    assert 0 < json.loads(out.read_text())["overhead_share"]["amortised"] < 1
    assert not (tmp_path / "unused").exists()


def test_the_arms_of_the_iteration_breakdown_draw_what_their_names_say() -> None:
    config = tiny_config(explore={"precision": "emulated_nvfp4"})
    arms = iteration_breakdown.settings(config)
    plain, naive, direct, ours = (arms[name] for name in ("plain NFT", "naive scaling", "quantized, one stage",
                                                          "two stages"))  # fmt: skip
    assert plain.pool_size == 4 and not plain.explore.enabled and plain.regenerate.enabled
    for one_stage, precision in ((naive, "full"), (direct, "emulated_nvfp4")):
        assert one_stage.pool_size == 6 and not one_stage.regenerate.enabled
        assert one_stage.explore.precision == precision
        assert (one_stage.explore.num_steps, one_stage.explore.solver) == (3, "euler") == (
            config.regenerate.num_steps, config.regenerate.solver)  # fmt: skip
    assert ours == config


def test_the_iteration_breakdown_prints_shares_and_the_papers_speed_ups() -> None:
    def arm(name: str, explore: float, regenerate: float) -> iteration_breakdown.Arm:
        seconds = dict.fromkeys(iteration_breakdown.PHASES, 0.0) | {"explore": explore, "regenerate": regenerate}
        return iteration_breakdown.Arm(name, name, seconds | {"update": 6.0, "decode": 1.0, "total": 16.0})

    arms = [arm("naive scaling", 10.0, 0.0), arm("two stages", 3.0, 2.0)]
    text = iteration_breakdown.report(tiny_config(), arms, 1, facts())
    assert "10.00 ( 62 %)" in text and "6.00 ( 38 %)" in text
    assert "2.00x" in text.split("here")[1].split("\n")[0]
    rows = {
        model: next(line for line in text.splitlines() if f"paper, {model}" in line) for model in ("FLUX.1", "SANA")
    }
    assert "2.33x" in rows["FLUX.1"] and "1.62x" in rows["FLUX.1"] and "53 %" in rows["FLUX.1"]
    assert "1.41x" in rows["SANA"] and "1.25x" in rows["SANA"]
    assert f"{6 * 3 / (6 * 2 + 4 * 3):.2f} times as fast" in text


def test_the_rollouts_bound_counts_a_quantized_product_by_its_formats_speed() -> None:
    config = tiny_config()  # 6 candidates with 2 steps, 4 kept with 3
    two_stages = {"explore": config.explore, "rollout": config.regenerate}
    full = Work(velocity=10.0, quantized={}, linear_share=0.0, decode=5.0, score=99.0)
    assert rollout_speed.operations(dict.fromkeys(two_stages, full), two_stages) == 6 * (2 * 10 + 5) + 4 * (3 * 10 + 5)
    fp4 = Work(velocity=10.0, quantized={"nvfp4": 8.0}, linear_share=0.9, decode=5.0, score=99.0)
    assert rollout_speed.operations(dict.fromkeys(two_stages, fp4), two_stages) == 6 * (2 * (2 + 8 / 4) + 5) + 4 * (
        3 * 10 + 5
    )
    assert rollout_speed.operations({"rollout": fp4}, {"rollout": config.regenerate}) == 4 * (3 * 10 + 5)


def test_rollout_speed_prints_each_change_over_what_it_changes() -> None:
    def arm(name: str, over: str, denoise: float, operations: float) -> rollout_speed.Arm:
        seconds = {"denoise": denoise, "decode": 1.0, "score": 1.0, "requantize": 0.0}
        return rollout_speed.Arm(name, over, seconds, operations)

    eager, naive, fewer = "naive scaling, eager", "naive scaling, compiled", "two stages, compiled"
    arms = [arm(eager, "", 23.0, 60.0), arm(naive, eager, 11.0, 60.0), arm(fewer, naive, 7.0, 45.0),
            arm("two stages, fp8, compiled", fewer, 3.0, 30.0)]  # fmt: skip
    text = rollout_speed.report(tiny_config(), arms, [], 1, facts())
    rows = [line for line in text.splitlines() if line.startswith("two stages, fp8, compiled")]
    assert rows[0].split()[-3:] == ["3.00x", "2.00x", "2.60x"]  # over compiled naive scaling: 12/4, 60/30, 13/5
    assert f"2.00 times as fast as {fewer}, at most 1.50" in rows[1]
    assert f"{naive}: rollout 2.00 times as fast as {eager}" in text
    assert "paper, FLUX.1           184      79     2.33x        1.18x              1.98x" in text


@pytest.mark.slow
def test_rollout_speed_measures_an_arm_for_each_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert (
        main(["rollout_speed", "--quick", "--repeats", "1", "--precision", "full,emulated_nvfp4", "--json", str(out)])
        == 0
    )
    naive, fewer, low = json.loads(out.read_text())["arms"]
    assert (fewer["over"], low["over"]) == (naive["name"], fewer["name"])
    assert low["operations"] < fewer["operations"] < naive["operations"]
    for arm in (naive, fewer, low):
        assert all(arm["seconds"][part] > 0 for part in rollout_speed.PARTS)
    assert "--precision full is full precision here" in capsys.readouterr().out


def test_the_inception_score_counts_the_classes_that_are_told_apart() -> None:
    one_of_four = torch.eye(4, dtype=torch.float64).repeat(3, 1)
    assert quant_fidelity.inception_score(one_of_four) == pytest.approx(4)
    assert quant_fidelity.inception_score(torch.full((5, 4), 0.25, dtype=torch.float64)) == pytest.approx(1)
    assert quant_fidelity.inception_score(one_of_four[:1].repeat(5, 1)) == pytest.approx(1)
    unsure = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64)
    assert quant_fidelity.inception_score(unsure) == pytest.approx(1.8**0.9 * 0.2**0.1)


def test_peak_signal_to_noise_is_in_decibels_of_the_full_range() -> None:
    grey = torch.full((2, 3, 4, 4), 0.5)
    assert quant_fidelity.psnr(grey + torch.tensor([0.1, 0.0]).view(2, 1, 1, 1), grey).tolist() == pytest.approx(
        [20.0, math.inf], rel=1e-5
    )


def test_unusable_classifiers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lonely, broken = tmp_path / "classes.txt", tmp_path / "weights.pt"
    lonely.write_text("cat\n\n")
    torch.save({"wrong": torch.zeros(1)}, broken)
    for options, message in (
        (["--classes", str(lonely)], "must hold at least two names"),
        (["--classes", str(tmp_path / "none")], "No such file"),
        (["--inception", str(broken)], "no state dict of inception_v3"),
    ):
        assert main(["quant_fidelity", *options]) == 2
        error = capsys.readouterr().err.strip()
        assert message in error and "\n" not in error


@pytest.mark.slow
def test_quantized_rollouts_are_compared_with_full_ones_seed_by_seed(tmp_path: Path) -> None:
    config, out, png = tmp_path / "tiny.toml", tmp_path / "out.json", tmp_path / "pairs.png"
    save_config(tiny_config(tmp_path / "unused"), config)
    options = ["--config", str(config), "--prompts", "2", "--images", "2", "--precision", "emulated_nvfp4"]
    assert main(["quant_fidelity", *options, "--json", str(out), "--png", str(png)]) == 0
    full, low = json.loads(out.read_text())["formats"].values()
    assert 10 < low["psnr_db"] < 60  # the same scenes, drawn a little differently
    assert low["clip_difference"][0] == pytest.approx(low["clip_score"] - full["clip_score"])
    assert low["inception_difference"][0] == pytest.approx(low["inception_score"] - full["inception_score"])
    assert png.stat().st_size > 0


@pytest.mark.slow
def test_inception_tells_classes_with_the_weights_in_a_file(tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision.models")
    model = models.inception_v3(weights=None, init_weights=False, num_classes=1000).eval()
    torch.save(model.state_dict(), tmp_path / "inception.pt")
    classes = quant_fidelity.inception(tmp_path / "inception.pt", torch.device("cpu"))(torch.rand(2, 3, 32, 32))
    assert classes.shape == (2, 1000) and classes.sum(1).tolist() == pytest.approx([1, 1])


@pytest.mark.slow
def test_step_breakdowns_run_and_leave_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from solrl.distributed import OrderFreeSum
    from solrl.learner import Learner

    config, out = tmp_path / "tiny.toml", tmp_path / "out.json"
    save_config(tiny_config(tmp_path / "unused"), config)
    before = Learner._frozen_velocities, OrderFreeSum.add, torch.Tensor.backward
    assert main(["iteration_breakdown", "--config", str(config), "--steps", "1", "--json", str(out)]) == 0
    arms = json.loads(out.read_text())["arms"]
    assert set(arms) == {"plain NFT", "naive scaling", "two stages"}  # full precision: no quantized stage of its own
    for arm in arms.values():
        assert 0 < arm["seconds"]["decode"] < arm["seconds"]["explore"] + arm["seconds"]["regenerate"]
        assert sum(arm["seconds"][phase] for phase in iteration_breakdown.PHASES) <= arm["seconds"]["total"]
    assert main(["update_speed", "--config", str(config), "--eager", "--rounds", "1", "--json", str(out)]) == 0
    rounds = json.loads(out.read_text())["rounds"]
    assert rounds[0]["eager"]["error of merged old"] == 0 < rounds[0]["eager, merged old"]["error of merged old"]
    assert all(arm["backward"] > 0 and arm["policy forward"] > 0 for arm in rounds[0].values())
    assert before == (Learner._frozen_velocities, OrderFreeSum.add, torch.Tensor.backward)
    assert "speed-up" in capsys.readouterr().out
