"""The page holds what was measured, needs nothing from outside, and works at any moment of a run."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch

from solrl.charts import Series, line_chart, number, smoothed, stacked_chart, thinned, ticks
from solrl.config import Config
from solrl.gate import too_low
from solrl.image_statistics import STATISTICS
from solrl.images import save_grid
from solrl.panels import fidelity_section
from solrl.report import write_report
from solrl.settings import save_config
from solrl.tracking import Metrics
from solrl.types import SolrlError

ENVIRONMENT = {"device": "cpu", "cpu": "Some <CPU>", "num_cpus": 2, "precision": "emulated NVFP4, 1.4x the time"}


class Page(HTMLParser):
    """What a browser would see: words, links, loads, attributes; and whether tags close in order."""

    VOID = frozenset({"meta", "img", "path", "polygon", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def charts(self) -> dict[str, dict]:
        """Chart title -> the values its hover script shows."""
        found = [json.loads(attrs["data-points"]) for tag, attrs in self.tags if "data-points" in attrs]
        titles = [word for i, word in enumerate(self.words) if word in TITLES]
        return dict(zip(titles, found, strict=True))


TITLES = (
    "Held-out shapes", "Held-out clip_score", "Training rewards", "Rank correlation of proxy reward and reward",
    "Mean true rank, whole group", "Seconds of each step",
)  # fmt: skip


def step_row(step: int) -> dict[str, float]:
    row = {
        "step": step, "reward/mean": 0.4 + step / 100, "reward/std": 0.2, "proxy_reward/mean": 0.75 - step / 100,
        "fidelity/kept_spearman": 0.8 + step / 1000, "fidelity/kept_kendall": 0.6, "fidelity/kept_top_rank": 7.0,
        "fidelity/kept_bottom_rank": 18.0, "loss/policy": 4.0 + step, "loss/kl": 0.001, "grad_norm": 0.02 * step,
        "time/explore_s": 3.0, "time/score_s": 0.25, "time/update_s": 2.0 + step / 10, "time/total_s": 6.0 + step / 10,
        "health/groups": 4, "health/skipped_groups": 1, "health/clean_norm": 0.9, "health/odd_one": 5.0,
    }  # fmt: skip
    if step % 10 == 0:
        row |= {"fidelity/full_spearman": 0.91, "fidelity/full_kendall": 0.75, "fidelity/full_top_rank": 8.4,
                "fidelity/full_bottom_rank": 87.4, "fidelity/full_overlap_k": 0.7}  # fmt: skip
        row |= evaluation(0.4375 + step / 200)
    return row


def evaluation(mean: float) -> dict[str, float]:
    return {"eval/shapes/mean": mean, "eval/shapes/stderr": 0.0125, "eval/clip_score/mean": 0.27,
            "eval/clip_score/stderr": 0.002, "time/evaluate_s": 20.0}  # fmt: skip


def make_run(folder, steps: int, *, images: bool = True, **sections) -> None:
    """A run folder after ``steps`` steps; -1: not even evaluated."""
    settings = Config.model_validate({"output": {"dir": folder}, "train": {"num_steps": 40}, **sections})
    folder.mkdir(parents=True, exist_ok=True)
    save_config(settings, folder / "config.toml")
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    metrics = Metrics(folder / "metrics.jsonl")
    for step in range(steps + 1):
        metrics.write({"step": 0} | evaluation(0.4375) if step == 0 else step_row(step))
    metrics.close()
    for step in {0, steps} if images and steps >= 0 else ():
        save_grid(folder / "samples" / f"step_{step:06d}.png", pictures(step), PROMPTS, rewards=REWARDS + step / 100)


PROMPTS = ["a red circle left of a blue square", 'two <b>"bold"</b> & green rings']
REWARDS = torch.tensor([[0.25, 0.5], [0.125, float("nan")]])


def pictures(seed: int) -> torch.Tensor:
    return torch.rand(2, 2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def read(folder) -> Page:
    return Page(write_report(folder).read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Page:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    make_run(folder, 40)
    (folder / "lora").mkdir()
    return read(folder)


def test_nothing_is_loaded_from_anywhere(finished):
    for tag, attrs in finished.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        assert tag != "script" or not attrs
        for name in ("src", "srcset", "poster", "data", "href", "xlink:href"):
            target = attrs.get(name, "")
            assert "//" not in target.removeprefix("data:image/png;base64,") or target.startswith("data:image/png")
        if "src" in attrs:
            assert attrs["src"].startswith("data:image/")
    policy = next(a["content"] for t, a in finished.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'") and "http" not in policy


def test_no_address_and_no_import_is_left_in_styles_and_scripts(tmp_path):
    make_run(tmp_path / "run", 1, images=False)
    text = write_report(tmp_path / "run").read_text()
    assert "http://" not in text and "https://" not in text
    assert "url(" not in text and "@import" not in text and "fetch(" not in text and "import(" not in text


def test_the_headline_says_what_happened_to_the_heldout_reward_with_its_error(finished):
    assert "Held-out shapes reward rose from 0.438 to 0.637 (+46%)" in finished.text
    assert "0.438 \u00b1 0.013 before, 0.637 \u00b1 0.013 at step 40 (standard error over prompts)" in finished.text
    assert "emulated NVFP4, 1.4x the time" in finished.text and "Some <CPU>, 2 CPUs" in finished.text
    assert "40 of 40" in finished.text and "96 explored, 24 kept for each of 48 prompts a step" in finished.text


@pytest.mark.parametrize(
    ("after", "words"),
    [(0.3, "reward fell from 0.438 to 0.300 (-31%)"), (0.45, "moved from 0.438 to 0.450 (+3%): within its error")],
)
def test_a_fall_and_a_change_within_the_error_are_said_as_such(tmp_path, after, words):
    make_run(tmp_path / "run", 0, images=False)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**step_row(1), **evaluation(after)}) + "\n")
    assert words in read(tmp_path / "run").text


def test_the_last_values_of_every_curve_equal_the_last_metrics(finished):
    row, charts = step_row(40), finished.charts()

    def last(title: str) -> dict[str, str]:
        assert charts[title]["x"][-1] == 40
        return {name: texts[-1] for name, _, texts in charts[title]["s"]}

    assert last("Held-out shapes") == {"averaged weights, trained on": "0.637 \u00b1 0.013"}
    assert last("Held-out clip_score") == {"averaged weights, watched only": "0.270 \u00b1 0.002"}
    rewards = last("Training rewards")
    assert rewards["reward"] == number(row["reward/mean"]) and rewards["proxy reward"] == "0.350"
    fidelity = last("Rank correlation of proxy reward and reward")
    assert fidelity["Spearman, kept only (range-restricted)"] == "0.840"
    assert fidelity["Spearman, whole group of 96 (audited steps)"] == "0.910"
    assert last("Mean true rank, whole group") == {"proxy's best 12": "8.40", "proxy's worst 12": "87.4"}
    assert last("Seconds of each step") == {"explore": "3", "score": "0.250", "update": "6", "other": "0.750"}


def test_the_verdict_stands_on_the_page_with_its_reasons_and_what_else_was_found(finished):
    assert "Is this training normal? healthy" in finished.text
    assert "held-out shapes 0.438 -> 0.637 (+11.3 standard errors) clip_score 0.270 -> 0.270 (+0.0" in finished.text
    assert "the gradient's norm grew from 0.11 to 0.71" in finished.text  # a hint: said, but not a reason


def test_image_statistics_are_shown_with_their_drift_in_spreads(tmp_path):
    make_run(tmp_path / "run", 0, images=False)
    with (tmp_path / "run" / "metrics.jsonl").open("w") as file:
        for step, mean in ((0, 0.5), (8, 0.75)):
            row = (
                {"step": step} | evaluation(0.4 + step / 20) | {f"images/{name}/std": 0.1 + step for name in STATISTICS}
            )
            row |= {f"images/{name}/mean": mean for name in STATISTICS}
            file.write(json.dumps(row) + "\n")
    text = read(tmp_path / "run").text
    assert "sharpness variance of the brightness's Laplacian" in text and "0.500 \u00b1 0.100 0.750 +2.50" in text
    assert "Is this training normal? suspicious" in text


def test_kept_and_whole_group_fidelity_have_their_own_perfect_and_chance_values(finished):
    text = finished.text
    assert "kept 24 (range-restricted)" in text and "whole group of 96, 4 audits" in text
    assert "kept as best 7 6.50 / 12.5 8.40 6.50 / 48.5" in text
    assert "kept as worst 18 18.5 / 12.5 87.4 90.5 / 48.5" in text
    assert "\u2013 0.700 1 / 0.125" in text  # overlap: of the whole group only


def test_every_curve_ends_where_the_run_does(tmp_path):
    make_run(tmp_path / "run", 15, images=False)
    charts = read(tmp_path / "run").charts()
    assert charts["Training rewards"]["at"][-1] == 100
    assert charts["Mean true rank, whole group"]["at"] == [66.67]  # the audit of step 10
    assert charts["Held-out shapes"]["at"] == [0, 66.67]


def test_time_shares_cover_the_run_and_evaluation_stands_apart(finished):
    # 40 steps of 8.05 s on average, 5 evaluations of 20 s
    assert "explore 3 28.4%" in finished.text
    assert "evaluate (outside of steps) 2.50 23.7%" in finished.text


def test_health_shows_last_value_and_range_of_metrics_it_does_not_know_too(finished):
    assert "grad_norm length of the gradient before clipping 0.800 0.020 to 0.800" in finished.text
    assert "health/odd_one 5 constant" in finished.text


def test_images_are_embedded_before_and_after_with_prompts_rewards_and_alternatives(finished):
    images = [attrs for tag, attrs in finished.tags if tag == "img"]
    assert len(images) == 8 and all(image["src"].startswith("data:image/png;base64,") for image in images)
    assert images[0]["alt"] == f"step 0, seed 1: {PROMPTS[0]}, reward 0.25"
    assert images[2]["alt"] == f"step 40, seed 1: {PROMPTS[0]}, reward 0.65"
    assert images[5]["alt"] == f"step 0, seed 2: {PROMPTS[1]}"  # a missing reward has no number
    assert PROMPTS[1] in finished.text  # escaped, or its tags would be missing here


def test_links_lead_to_what_the_folder_holds(finished):
    links = {attrs["href"] for tag, attrs in finished.tags if tag == "a"}
    assert links == {"config.toml", "environment.json", "metrics.jsonl", "samples/", "lora/"}


@pytest.mark.parametrize("steps", [-1, 0, 1, 3])
def test_a_run_that_has_hardly_begun_has_a_page(tmp_path, steps):
    make_run(tmp_path / "run", steps)
    page = read(tmp_path / "run")
    expected = "No held-out shapes reward yet" if steps < 0 else "Held-out shapes reward is 0.438 so far"
    assert expected in page.text and f"{max(steps, 0)} of 40" in page.text
    assert ("Not measured yet" in page.text) == (steps < 1)


def test_a_folder_with_settings_alone_has_a_page(tmp_path):
    make_run(tmp_path / "run", -1)
    for name in ("metrics.jsonl", "environment.json"):
        (tmp_path / "run" / name).unlink()
    assert "not recorded" in read(tmp_path / "run").text


def test_a_run_without_exploration_says_that_fidelity_was_not_measured(tmp_path):
    make_run(tmp_path / "run", 2, explore={"enabled": False})
    page = read(tmp_path / "run")
    assert "only one of the two stages draws samples" in page.text and "off: plain DiffusionNFT" in page.text
    assert "24 for each of 48 prompts a step" in page.text


@pytest.mark.parametrize(
    ("lora", "words"), [({"rank": 8}, "512 x 512, LoRA rank 8"), ({"enabled": False}, "512 x 512, full fine-tuning")]
)
def test_the_page_says_what_is_trained(tmp_path, lora, words):
    make_run(tmp_path / "run", -1, lora=lora)
    page = read(tmp_path / "run")
    assert words in page.text and ("LoRA rank" in page.text) == ("rank" in lora)


BELOW = r"After step 9 the correlation was 0\.20 \[[^]]*\], below explore\.min_fidelity = 0\.8, and nothing "


@pytest.mark.parametrize(
    ("correlations", "rungs", "pattern"),
    [
        ([], [0] * 9, r"\. No group was audited, so explore\.min_fidelity = 0\.8 had nothing to go by\."),
        (
            [0.9] * 9,
            [0] * 9,
            r"\. The explorer did not climb: 9 audits did not show the correlation below explore\.min_",
        ),
        ([0.2] * 9, [0] * 9, rf"compare\. {BELOW}higher runs here\."),
        ([0.2] * 9, [0, *[1] * 8], rf"says: from step 2 on rung 1 of the ladder, 4 steps\. {BELOW}higher runs here\."),
        ([0.9] * 9, [0, *[1] * 8], r"says: from step 2 on rung 1 of the ladder, 4 steps\. Precisions"),
    ],
    ids=["no audit", "above", "below at the top", "climbed, and below at the top", "climbed"],
)
def test_the_gate_is_reported_as_it_went(correlations, rungs, pattern):
    rows = [
        {"step": step, "fidelity/kept_spearman": 0.5, "explore/rung": rung, "explore/num_steps": 2 + 2 * rung}
        for step, rung in enumerate(rungs, 1)
    ]
    for row, correlation in zip(rows, correlations, strict=False):
        row["fidelity/full_spearman"] = correlation
    config = Config.model_validate({"explore": {"min_fidelity": 0.8}})
    assert re.search(pattern, Page(fidelity_section(config, rows)).text)
    if correlations[:1] == [0.2] and not rungs[-1]:  # as far as the first step that the gate spoke after
        spoke = next(n for n in range(1, 10) if too_low(config, rows[:n]))
        text = Page(fidelity_section(config, rows[:spoke])).text
        assert f"After step {spoke} the correlation" in text and "nothing was explored since." in text


def test_damaged_files_are_errors_that_name_them(tmp_path):
    make_run(tmp_path / "run", 2)
    run = tmp_path / "run"
    lines = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(lines.replace('"step": 1', '"step": oops'))
    with pytest.raises(SolrlError, match=r"metrics.jsonl, line 2: not a metrics line"):
        write_report(run)
    (run / "metrics.jsonl").write_text(lines)
    (run / "environment.json").write_text("{")
    with pytest.raises(SolrlError, match=r"cannot read .*environment.json"):
        write_report(run)
    (run / "environment.json").unlink()
    (run / "samples" / "step_000002.png").write_bytes(b"no picture")
    with pytest.raises(SolrlError, match=r"step_000002.png is not an image grid"):
        write_report(run)
    with pytest.raises(SolrlError, match="is not a run folder"):
        write_report(tmp_path)


def test_a_report_is_replaced_whole(tmp_path):
    make_run(tmp_path / "run", 1)
    first = write_report(tmp_path / "run").read_text()
    assert write_report(tmp_path / "run").read_text() == first
    assert [p.name for p in (tmp_path / "run").glob("*report*")] == ["report.html"]


def test_long_series_are_thinned_and_keep_their_last_point():
    long = thinned(Series("r", range(1, 10_001), [float(i) for i in range(10_000)], errors=[0.5] * 10_000))
    assert len(long.xs) == len(long.ys) == len(long.errors) == 1000 and (long.xs[-1], long.ys[-1]) == (10_000, 9999.0)


def test_smoothing_is_a_trailing_mean():
    assert smoothed(Series("r", [1, 2, 3, 4], [1.0, 3.0, 5.0, 7.0]), 2, 1).ys == [1.0, 2.0, 4.0, 6.0]


def test_constant_and_single_values_have_a_chart():
    for ys in ([0.0], [3.0, 3.0], [-1e-12, 1e-12]):
        assert "NaN" not in line_chart("t", [Series("r", range(len(ys)), ys)], summary="")
    single = stacked_chart("t", [1], [Series("a", [1], [0.0], 1, "area")], summary="")
    assert "nan" not in single.lower() and 'points="0.0,300.0 1000.0,300.0 ' in single  # as wide as the chart


def test_ticks_are_round_and_inside():
    assert ticks(0.425, 0.563) == pytest.approx([0.45, 0.5, 0.55])
    assert ticks(0, 8.4) == [0, 2, 4, 6, 8]
    assert ticks(-3, 96.2) == [0, 20, 40, 60, 80]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (1.0, "1"), (8.437, "8.44"), (87.42, "87.4"), (0.04567, "0.046"), (3.1e-4, "3.1e-04"),
     (-0.5, "-0.500"), (1234567, "1,234,567"), (123.6, "124")],
)  # fmt: skip
def test_numbers_are_written_as_people_read_them(value, text):
    assert number(value) == text
