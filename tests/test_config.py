"""Settings: files, overrides, their mistakes, and the way back to a file."""

from pathlib import Path
from types import NoneType
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solrl.config import Config
from solrl.errors import UsageError
from solrl.settings import load_config, read_flags, save_config, setting_types, shipped_configs


def failure(name: str | Path, overrides: dict[str, object] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(name, overrides)
    return str(caught.value)


def toml(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


SHIPPED = [
    "flux1_dev",
    "sana_1600m",
    "sd35_large",
    "sd35_medium",
    "tiny_flux",
    "tiny_flux_long",
    "tiny_sana",
    "tiny_sd3",
]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_config_loads_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    assert name in shipped_configs()
    config = load_config(name)
    save_config(config, tmp_path / "config.toml")
    assert load_config(tmp_path / "config.toml") == config
    assert load_config(tmp_path) == config, "a run folder names its own config"


def test_the_tests_know_every_shipped_config() -> None:
    assert shipped_configs() == SHIPPED


# Sol-RL Table 7: what all models share, then each model's own; SD3.5 Medium, not in it, takes SD3.5 Large's column.
SHARED = {
    "lora.rank": 32, "lora.alpha": 64, "lora.targets": None, "train.learning_rate": 3e-4,
    "train.adam_betas": (0.9, 0.999), "train.weight_decay": 1e-4, "train.adam_eps": 1e-8, "model.dtype": "auto",
    "explore.group_size": 96, "explore.num_steps": 6, "regenerate.group_size": 24, "regenerate.num_steps": 10,
    "train.beta": 1.0, "train.kl_weight": 1e-4, "train.advantage_clip": 5.0, "train.ema_decay": 0.9,
    "train.old_decay_rate": 0.001, "train.old_decay_cap": 0.5, "prompts.per_step": 48, "explore.precision": "auto",
    "model.cfg_scale": 1.0, "model.guidance": 1.0,
}  # fmt: skip
COLUMNS = {
    "sana_1600m": ("sana", 1024, False, "euler", 40, 16, 6, 1.0),
    "flux1_dev": ("flux", 512, True, "dpm2", 28, 12, 4, 1.0),
    "sd35_large": ("sd3", 1024, False, "dpm2", 40, 4, 6, 0.002),
    "sd35_medium": ("sd3", 512, False, "dpm2", 40, 8, 6, 0.002),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_configs_of_real_models_hold_the_papers_table_7(name: str) -> None:
    config = load_config(name)

    def value(key: str) -> object:
        section, field = key.split(".")
        return getattr(getattr(config, section), field)

    assert (Path("configs") / f"{name}.toml").read_text().count("\n") < 40
    assert {key: value(key) for key in SHARED} == SHARED
    assert COLUMNS[name] == (
        config.model.family,
        config.model.height,
        config.model.gradient_checkpointing,
        config.regenerate.solver,
        config.evaluate.num_steps,
        config.batch.train,
        config.num_train_timesteps,
        config.train.max_grad_norm,
    )
    assert config.model.width == config.model.height and config.explore.solver == config.regenerate.solver
    assert config.model.max_text_tokens == (300 if name == "sana_1600m" else 128)


def test_a_saved_file_names_every_setting_that_has_a_value(tmp_path: Path) -> None:
    save_config(Config(), tmp_path / "all.toml")
    text = (tmp_path / "all.toml").read_text()
    for key, annotation in setting_types():
        if NoneType not in get_args(annotation) and not key.endswith("options"):
            assert f"{key.rpartition('.')[2]} = " in text


def test_leaving_unset_keys_out_of_a_file_loses_nothing() -> None:
    for key, annotation in setting_types():
        if NoneType in get_args(annotation):
            section, _, name = key.rpartition(".")
            assert getattr(getattr(Config(), section) if section else Config(), name) is None, key


def test_settings_stay_few() -> None:
    assert len(list(setting_types())) <= 85


def test_every_setting_has_a_meaning() -> None:
    def sections(model: type) -> list[type]:
        return [model, *(part for f in model.model_fields.values() for part in inner(f.annotation))]  # type: ignore[attr-defined]

    def inner(annotation: object) -> list[type]:
        return sections(annotation) if hasattr(annotation, "model_fields") else []  # type: ignore[arg-type]

    for section in sections(Config):
        for name, field in section.model_fields.items():  # type: ignore[attr-defined]
            assert hasattr(field.annotation, "model_fields") or field.description, f"{section.__name__}.{name}"


def test_overrides_win_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = toml(tmp_path, "seed = 3\n[train]\nnum_steps = 7\nlearning_rate = 1e-5\n")
    config = load_config(file, {"train.num_steps": 9, "model.path": "elsewhere"})
    assert (config.seed, config.train.num_steps, config.train.learning_rate) == (3, 9, 1e-5)
    assert config.model.path == "elsewhere"
    assert config.train.beta == Config().train.beta


def test_overrides_are_checked_together() -> None:
    config = load_config("tiny_flux", {"explore.group_size": 6, "regenerate.group_size": 4})
    assert (config.explore.group_size, config.regenerate.group_size) == (6, 4)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.num_step", "train.num_steps"),
        ("train.lr", "train.learning_rate"),
        ("trian.num_steps", "train.num_steps"),
        ("num_steps", "train.num_steps"),
        ("explore.groupsize", "explore.group_size"),
        ("sed", "seed"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(key: str, nearest: str) -> None:
    line = failure("tiny_flux", {key: 5})
    assert f"unknown setting {key.split('.')[0]}" in line
    assert line.endswith(f"nearest valid one is {nearest}"), line


def test_a_mistake_says_whether_the_file_or_an_override_made_it(tmp_path: Path) -> None:
    file = toml(tmp_path, "[train]\nnum_step = 7\n")
    lines = failure(file, {"train.bet": 2}).splitlines()
    assert len(lines) == 2, "one line a problem"
    assert "train.num_step" in lines[0] and str(file) in lines[0]
    assert "train.bet " in lines[1] and "(override)" in lines[1]
    assert "unknown setting trainer (" in failure(toml(tmp_path, "[trainer]\n"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"train.num_steps": "many"}, ["train.num_steps", "'many'", "integer"]),
        ({"train.num_steps": 0}, ["train.num_steps", "0", "greater than 0"]),
        ({"train.learning_rate": float("inf")}, ["train.learning_rate", "inf", "finite"]),
        ({"train.learning_rate": float("nan")}, ["train.learning_rate", "nan"]),
        ({"model.dtype": "fp16"}, ["model.dtype", "'fp16'", "bfloat16"]),
        ({"model.height": 33}, ["model.height", "33", "multiple of 8"]),
        ({"deterministic": "maybe"}, ["deterministic", "'maybe'", "boolean"]),
        ({"lora.targets": "to_q"}, ["lora.targets", "'to_q'"]),
        ({"lora.targets": []}, ["lora.targets"]),
        ({"train.adam_betas": [2, 0.9]}, ["train.adam_betas", "2"]),
        ({"train": 5}, ["train", "5"]),
        ({"train.num_steps.x": 5}, ["train.num_steps.x", "not a section"]),
        ({"regenerate.group_size": 25}, ["regenerate.group_size", "25", "even"]),
        ({"explore.group_size": 4}, ["regenerate.group_size (8)", "explore.group_size (4)"]),
        ({"batch.train": 7}, ["batch.train (7)", "batch.rollout"]),
        ({"explore.enabled": False, "regenerate.enabled": False}, ["explore.enabled", "regenerate.enabled"]),
        ({"train.timestep_fraction": 0.01}, ["train.timestep_fraction", "0.01"]),
        (
            {"train.early_stop": "broken", "evaluate.every_steps": 0},
            ["train.early_stop = broken", "evaluate.every_steps"],
        ),
        (
            {"regenerate.selection": "random", "explore.enabled": False},
            ["selection = random", "explore.enabled is false"],
        ),
    ],
)
def test_an_impossible_value_is_named_in_one_line(overrides: dict[str, object], words: list[str]) -> None:
    line = failure("tiny_flux", overrides)
    assert len(line.splitlines()) == 1
    for word in words:
        assert word in line


def test_a_config_that_is_not_there_lists_the_shipped_names(tmp_path: Path) -> None:
    for missing in ("tiny_flx", tmp_path / "none.toml", "", "../configs/tiny_flux"):
        line = failure(missing)
        assert ", ".join(SHIPPED) in line and str(missing) in line


def test_a_folder_without_a_run_says_so(tmp_path: Path) -> None:
    assert "not a run folder" in failure(tmp_path)


def test_a_shipped_name_wins_over_a_folder_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_flux").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_config("tiny_flux").model.height == 32
    assert "not a run folder" in failure("./tiny_flux")


def test_a_file_that_is_not_toml_names_the_line(tmp_path: Path) -> None:
    line = failure(toml(tmp_path, "seed = 1\n[train\n"))
    assert "mine.toml" in line and "line 2" in line


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b"seed = 1 # caf\xe9\n")
    assert "latin.toml is not UTF-8" in failure(path)


@pytest.mark.parametrize(("words", "rewards"), [([], ()), (["[]"], ()), (["ocr", "aesthetic"], ("ocr", "aesthetic")),
                                                (['["ocr", "aesthetic"]'], ("ocr", "aesthetic"))])  # fmt: skip
def test_a_list_is_given_as_words_or_as_toml(words: list[str], rewards: tuple[str, ...]) -> None:
    assert load_config("tiny_flux", read_flags(["--evaluate.rewards", *words])).evaluate.rewards == rewards


def test_flags_are_read_as_their_setting_wants_them() -> None:
    flags = (
        "--train.num-steps 5 --lora.targets to_q to_v --explore.quantize *attn* nvfp4 * full --model.revision None "
        "--evaluate.rewards --seed=4 --explore.enabled false --train.learning_rate 1e-3 --output.dir runs/x"
    )
    config = load_config("tiny_flux", read_flags(flags.split()))
    assert config.train.num_steps == 5
    assert config.lora.targets == ("to_q", "to_v")
    assert config.explore.quantize == (("*attn*", "nvfp4"), ("*", "full"))
    assert config.model.revision is None
    assert config.evaluate.rewards == ()
    assert config.seed == 4
    assert config.explore.enabled is False
    assert config.train.learning_rate == 1e-3
    assert config.output.dir == Path("runs/x")


@pytest.mark.parametrize(("key", "choice"), [(key, choice) for key, annotation in setting_types()
                                            if get_origin(annotation) is Literal for choice in get_args(annotation)
                                            if not isinstance(choice, str)])  # fmt: skip
def test_a_choice_among_numbers_is_taken_from_a_flag(key: str, choice: object) -> None:
    assert read_flags([f"--{key}", str(choice)]) == {key: choice}


def test_a_number_that_is_no_choice_is_refused_with_the_choices() -> None:
    with pytest.raises(UsageError, match=r"explore\.downscale = '3' \(override\): input should be 1, 2 or 4"):
        load_config("tiny_flux", read_flags(["--explore.downscale", "3"]))


def test_reward_options_take_any_name_and_toml_values() -> None:
    flags = ["--reward.options.model", "a/b", "--reward.options.scale", "2.5", "--reward.options.flag", "true"]
    config = load_config("tiny_flux", read_flags(flags))
    assert config.reward.options == {"model": "a/b", "scale": 2.5, "flag": True}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train.num_steps"], "--train.num_steps takes one value, got none"),
        (["--train.num_steps", "1", "2"], "takes one value, got 1 2"),
        (["--seed", "1", "--seed", "2"], "--seed is given twice"),
        (["stray"], "unexpected argument 'stray'"),
    ],
)
def test_flags_that_make_no_sense_say_so(flags: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_flags(flags)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.shard": True, "runtime.mode": "shiftable"}, "model.shard needs runtime.mode = colocated"),
        ({"model.shard": True, "runtime.staleness": 1}, "model.shard works without runtime.staleness"),
        ({"lora.enabled": False, "model.init_lora": "some/lora"}, "init_lora is an adapter's start and lora.enabled"),
    ],
)
def test_what_sharding_and_full_fine_tuning_cannot_go_with_is_said(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load_config("tiny_flux", changes)
    assert len(str(caught.value).splitlines()) == 1


@given(
    seed=st.integers(0, 2**63 - 1),
    rate=st.floats(1e-12, 1e3),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    path=st.text(st.characters(blacklist_categories=("Cs",)), max_size=20),
    options=st.dictionaries(st.text(min_size=1, max_size=5), st.integers() | st.text(max_size=5) | st.booleans()),
)
def test_any_settings_survive_a_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    rate: float,
    betas: tuple[float, float],
    path: str,
    options: dict[str, int | str | bool],
) -> None:
    file = tmp_path_factory.mktemp("round") / "config.toml"
    values = {"seed": seed, "train.learning_rate": rate, "train.adam_betas": betas, "model.path": path}
    config = load_config("tiny_flux", {**values, "reward.options": options})
    save_config(config, file)
    assert load_config(file) == config
