"""The metrics file is strict and complete, only rank 0 writes, and the display fits terminal and log alike."""

import io
import json
import math
import re
import resource
import signal
from pathlib import Path

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers

from solrl.config import Config
from solrl.display import duration, plain_line, plan_lines
from solrl.tracking import Metrics, Tracking, check_trackers, read_metrics
from solrl.types import SolrlError, UsageError

ROW = {
    "step": 120, "reward/mean": 0.5123, "proxy_reward/mean": 0.48, "fidelity/kept_spearman": 0.834,
    "time/explore_s": 3.14, "time/score_s": 0.2, "time/regenerate_s": 1.25, "time/update_s": 2.0, "time/total_s": 6.6,
}  # fmt: skip


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def config(folder, **sections) -> Config:
    return Config.model_validate({"output": {"dir": folder, **sections.pop("output", {})}, **sections})


def steps(first: int, last: int) -> list[dict[str, float]]:
    return [{**ROW, "step": step} for step in range(first, last + 1)]


def test_every_row_comes_back_as_written(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    for row in ({"step": 0, "eval/shapes/mean": 0.4375}, ROW):
        metrics.write(row)
        assert read_metrics(tmp_path / "metrics.jsonl")[-1] == row  # on the disk before the next step begins
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_a_number_is_an_error_with_its_name_and_writes_nothing(tmp_path, value):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    with pytest.raises(SolrlError, match=r"step 3: metric loss/kl is (nan|inf|-inf)"):
        metrics.write({"step": 3, "loss/kl": value})
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    with pytest.raises(TypeError, match="metric note must be an int or a float"):
        metrics.write({"step": 3, "note": "fine"})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"step": 2, "reward/mean": 0.', "line 2: not a metrics line"),
        ('{"step": 2, "reward/mean": NaN}', "NaN is not JSON"),
        ('{"reward/mean": 0.5}', "KeyError: 'step'"),
        ('["step"]', "not a metrics line"),
        ('{"step": 1}', "step 1 comes after step 1"),
        ("", "line 2: not a metrics line"),
    ],
)
def test_a_damaged_line_is_an_error_naming_file_and_line(tmp_path, line, words):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n')
    with pytest.raises(SolrlError, match=re.escape(str(path))) as caught:
        read_metrics(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_an_unreadable_file_is_an_error_naming_it(tmp_path):
    with pytest.raises(SolrlError, match=r"cannot read .*metrics.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n\xff\xfe')
    with pytest.raises(SolrlError, match="is not text"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_full_disk_is_an_error_with_the_remedy_and_leaves_no_half_line(tmp_path):
    metrics = Metrics(Path("/dev/full"))
    with pytest.raises(SolrlError, match=r"cannot write /dev/full.*free disk space"):
        metrics.write(ROW)
    metrics.close()
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write({"step": 1})
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, room[1]))
        with pytest.raises(SolrlError, match=r"cannot write .*metrics.jsonl"):
            metrics.write(ROW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
        signal.signal(signal.SIGXFSZ, previous)
    metrics.write({"step": 2})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]


def test_only_the_main_rank_writes_and_all_ranks_see_the_same_history(tmp_path):
    streams = [io.StringIO(), io.StringIO()]
    main, other = (
        Tracking(config(tmp_path), is_main=is_main, stream=stream)
        for is_main, stream in zip((True, False), streams, strict=True)
    )
    for tracking in (main, other):
        tracking.plan(["explorer  full precision"])
        for row in steps(1, 3):
            tracking.log(row)
        tracking.close()
    assert main.history == other.history == read_metrics(tmp_path / "metrics.jsonl") == steps(1, 3)
    assert streams[0].getvalue().startswith("explorer  full precision\n") and streams[1].getvalue() == ""


def test_a_resumed_run_appends_and_refuses_to_record_a_step_twice(tmp_path):
    with Tracking(config(tmp_path), is_main=True, stream=io.StringIO()) as tracking:
        tracking.log({"step": 0, "eval/shapes/mean": 0.25, "eval/shapes/stderr": 0.01})
        tracking.log(steps(1, 1)[0])
    stream = io.StringIO()
    with Tracking(config(tmp_path), is_main=True, stream=stream) as tracking:
        with pytest.raises(ValueError, match="step 1 was already recorded"):
            tracking.log(steps(1, 1)[0])
        tracking.log(steps(2, 2)[0])
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert "held-out 0.250" in stream.getvalue()


def test_a_log_gets_one_line_a_step_of_at_most_80_columns(tmp_path):
    stream = io.StringIO()
    with Tracking(config(tmp_path), is_main=True, stream=stream) as tracking:
        tracking.phase("evaluate")
        tracking.log({"step": 0, "eval/shapes/mean": 0.441, "eval/shapes/stderr": 0.01})
        for row in steps(1, 4):
            tracking.log(row | {"reward/mean": -123456.789})
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= 80
    assert lines[0] == "[  0/300] held-out 0.441"
    assert "\x1b" not in stream.getvalue()


def test_a_plain_line_names_step_rewards_fidelity_time_and_the_longest_phase():
    line = plain_line(ROW, 300, "0.488", 1210)
    assert line == "[120/300] reward 0.512 held-out 0.488 rho 0.83 eta 20m10s 6.6s explore 3.1"
    last = plain_line({"step": 300, "time/a_s": 1.0, "time/b_s": 2.0, "time/total_s": 3.0}, 300, "", None)
    assert last == "[300/300] 3.0s b 2.0 a 1.0"


def test_a_terminal_shows_progress_rewards_fidelity_and_phases_and_keeps_them_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with Tracking(config(tmp_path, train={"num_steps": 4}), is_main=True, stream=stream) as tracking:
        tracking.plan(["explorer  full precision"])
        tracking.phase("evaluate")
        tracking.log({"step": 0, "eval/shapes/mean": 0.441, "eval/shapes/stderr": 0.012})
        tracking.phase("explore")
        tracking.log({**ROW, "step": 1, "eval/shapes/mean": 0.5, "eval/shapes/stderr": 0.013})
        tracking.log({**ROW, "step": 2})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    last = text[text.rindex("2/4") :]
    assert "eta" in last and "held-out 0.441 -> 0.500 +- 0.013" in last and "kept rank corr. 0.834" in last
    assert "explore 3.1" in last and "update 2.0" in last and "total" not in last
    assert stream.getvalue().endswith("\x1b[?25h")  # the cursor is back


def test_a_resumed_run_paints_from_its_first_step_on(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Tracking(config(tmp_path, train={"num_steps": 4}), is_main=True, stream=stream) as tracking:
        tracking.log({**ROW, "step": 3})
    assert "3/4" in stream.getvalue()


def test_the_remaining_time_comes_from_the_pace_of_the_steps(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("solrl.display.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    with Tracking(config(tmp_path, train={"num_steps": 10}), is_main=True, stream=stream) as tracking:
        now[0] = 200.0
        tracking.log({"step": 0, "eval/shapes/mean": 0.4})
        for step in range(1, 4):
            now[0] += 30
            tracking.log({"step": step})
    assert stream.getvalue().splitlines()[-1] == "[ 3/10] held-out 0.400 eta 3m30s"
    assert [duration(s) for s in (0.4, 59, 185, 7445)] == ["0s", "59s", "3m05s", "2h04m"]


def plan(settings: Config, world_size: int) -> str:
    lines = plan_lines(settings, device="cpu", world_size=world_size, policy="tiny, float32", explorer="emulated NVFP4")
    assert max(map(len, lines)) <= 80
    return " ".join(" ".join(lines).split())


def test_the_plan_derives_batches_padding_and_step_arithmetic(tmp_path):
    settings = config(tmp_path, prompts={"per_step": 5}, explore={"group_size": 30}, regenerate={"group_size": 8})
    text = plan(settings, world_size=2)
    assert "device cpu, 2 processes policy tiny, float32 explorer emulated NVFP4" in text
    # 150 samples in 7 micro-batches of 24: 4 rounds of 2 processes hold 192
    assert "5 prompts x 30 = 150 samples, 6 dpm2 steps, 7 micro-batches of 24, 4 a process (+28% padding)" in text
    assert "5 prompts x 8 = 40 samples, 10 dpm2 steps, 2 micro-batches of 24, 1 a process (+20% padding)" in text
    assert "4 best and 4 worst of 30 per prompt" in text
    assert "40 samples x 6 timesteps = 240 pairs, 3 forward and 1 backward pass each" in text
    assert "4 micro-batches of 12 (+20% padding), 1 optimizer step" in text


@pytest.mark.parametrize(
    ("rule", "text"),
    [("extremes", "the 8 furthest from the mean"), ("middle", "the 8 of middle rank"), ("random", "any 8")],
)
def test_the_plan_names_the_rule_by_which_candidates_are_kept(tmp_path, rule, text):
    settings = config(tmp_path, explore={"group_size": 30}, regenerate={"group_size": 8, "selection": rule})
    assert f"select {text} of 30 per prompt" in plan(settings, world_size=1)


def test_the_plan_of_plain_training_names_no_explorer_and_no_reference_pass(tmp_path):
    text = plan(config(tmp_path, explore={"enabled": False}, train={"kl_weight": 0}), world_size=1)
    assert "explore" not in text and "select" not in text and "2 forward and 1 backward" in text
    assert "48 prompts x 24 = 1152 samples, 10 dpm2 steps, 48 micro-batches of 24 update" in text  # no padding


def test_an_unknown_tracker_names_the_nearest_and_a_missing_one_its_pip_command():
    with pytest.raises(UsageError, match="no tracker 'tensorbord'; did you mean tensorboard"):
        check_trackers(["tensorbord"])
    installed = {kind.value for kind in get_available_trackers()}
    missing = next(name for name in ("dvclive", "aim", "clearml", "swanlab") if name not in installed)
    with pytest.raises(UsageError, match=f"{missing} is not installed; run: pip install {missing}"):
        check_trackers([missing])
    check_trackers([])


class Notebook(GeneralTracker):
    """A tracker that keeps what it is told."""

    name = "notebook"
    requires_logging_directory = True
    seen: list[tuple] = []  # noqa: RUF012

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.seen.append(("made", run_name, logging_dir))

    @property
    def tracker(self) -> list[tuple]:
        return self.seen

    def store_init_configuration(self, values: dict) -> None:
        self.seen.append(("settings", values))

    def log(self, values: dict, step: int | None = None, **_: object) -> None:
        self.seen.append((step, values))

    def finish(self) -> None:
        self.seen.append(("finished",))


def test_trackers_get_settings_and_every_step_on_rank_0_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    monkeypatch.setattr(Notebook, "seen", [])
    settings = config(tmp_path, output={"trackers": ["notebook"]}, lora={"rank": 4, "targets": ["to_q"]})
    for is_main in (False, True):
        with Tracking(settings, is_main=is_main, stream=io.StringIO()) as tracking:
            tracking.log({"step": 1, "reward/mean": 0.5})
    made, (kind, values), logged, finished = Notebook.seen
    assert made == ("made", "notebook", str(tmp_path)) and finished == ("finished",)
    assert (
        kind == "settings"
        and values["lora.rank"] == 4
        and values["lora.targets"] == json.dumps(list(settings.lora.targets))
    )
    assert all(isinstance(value, bool | int | float | str) for value in values.values())
    assert logged == (1, {"reward/mean": 0.5})


def test_a_tracker_that_does_not_start_stops_the_run_with_its_name(tmp_path, monkeypatch):
    def refuse(self: Notebook) -> None:
        raise RuntimeError("no account")

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    monkeypatch.setattr(Notebook, "start", refuse)
    with pytest.raises(SolrlError, match="tracker notebook did not start: RuntimeError: no account"):
        Tracking(config(tmp_path, output={"trackers": ["notebook"]}), is_main=True, stream=io.StringIO())
