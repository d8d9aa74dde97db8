"""Prompt files, and which prompts a step draws."""

import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solrl.errors import UsageError
from solrl.prompts import load_prompt_lists, load_prompts, step_prompts
from solrl.settings import load_config


def written(path: Path, *prompts: str) -> str:
    path.write_text("\n".join(prompts) + "\n", "utf-8")
    return str(path)


def failure(train: str, heldout: str, **evaluate_or_prompts: int) -> str:
    overrides = {"prompts.train": train, "prompts.heldout": heldout, "evaluate.num_prompts": 1, "prompts.per_step": 1}
    with pytest.raises(UsageError) as caught:
        load_prompt_lists(load_config("tiny_flux", overrides | evaluate_or_prompts))
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_a_file_is_read_stripped_without_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes("\ufeffa cat\r\n\r\n  a dog \n\n\u00e9t\u00e9\n".encode())
    assert load_prompts(file) == ["a cat", "a dog", "\u00e9t\u00e9"]


def test_json_lines_give_their_prompts_in_order(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": " a cat ", "tag": 1}\n\n{"tag": 2, "prompt": "a\u2028dog"}\n', "utf-8")
    assert load_prompts(file) == ["a cat", "a\u2028dog"]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ("a cat", "line 2 is not JSON"),
        ('{"text": "a cat", "id": 1}', 'line 2 has no text under "prompt" (it has text, id)'),
        ('{"prompt": 3}', 'line 2 has no text under "prompt"'),
        ('["a cat"]', 'line 2 has no text under "prompt" (it has list)'),
    ],
)
def test_a_row_without_a_prompt_is_named(second: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' + second)
    line = failure(str(tmp_path / "rows.jsonl"), "shapes_heldout")
    assert f"rows.jsonl, {expected}" in line


def test_a_data_set_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert (
        failure("hf:some/body", "shapes_heldout")
        == 'hf:some/body needs the package datasets: pip install "solrl[data]"'
    )


def test_a_data_set_gives_a_column_of_a_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "table").mkdir()
    (tmp_path / "table" / "test.jsonl").write_text(
        '{"prompt": "a", "text": " b ", "n": 1}\n{"prompt": "c", "text": "d", "n": 2}\n'
    )
    folder = f"hf:{tmp_path / 'table'}"
    assert load_prompts(f"{folder}?split=test") == ["a", "c"]
    assert load_prompts(f"{folder}?split=test&column=text") == ["b", "d"]
    rows = datasets.load_dataset(str(tmp_path / "table"))
    rows.save_to_disk(tmp_path / "saved")
    assert load_prompts(f"hf:{tmp_path / 'saved'}?split=test") == ["a", "c"]
    rows["test"].save_to_disk(tmp_path / "one")
    assert load_prompts(f"hf:{tmp_path / 'one'}") == ["a", "c"]
    for source, expected in {
        folder: 'Unknown split "train"',
        f"{folder}?split=test&column=caption": "has no column 'caption'; set column= to one of prompt, text, n",
        f"{folder}?split=test&column=n": "column 'n' holds other things than texts",
        f"{folder}?splits=test": "splits is none of split, column, config, revision",
        f"{folder}?test": "write hf:NAME?split=train&column=prompt",
        f"hf:{tmp_path / 'saved'}?split=dev": "it has no split 'dev'; its splits are test",
        f"hf:{tmp_path / 'nowhere'}": "cannot be loaded: ",
    }.items():
        assert expected in failure(source, "shapes_heldout")


def test_the_embedded_lists_do_not_overlap() -> None:
    train, heldout = load_prompts("shapes_train"), load_prompts("shapes_heldout")
    assert not set(train) & set(heldout)
    assert len(set(train)) == len(train) and len(set(heldout)) == len(heldout)
    assert load_prompts("shapes_single")


def test_the_shipped_configs_have_enough_prompts() -> None:
    for name in ("tiny_flux", "tiny_flux_long"):
        config = load_config(name)
        train, heldout = load_prompt_lists(config)
        assert len(train) >= config.prompts.per_step and len(heldout) == config.evaluate.num_prompts


def test_a_missing_file_lists_the_embedded_names(tmp_path: Path) -> None:
    for missing in (str(tmp_path / "none.txt"), "shapes"):
        line = failure(missing, missing)
        assert missing in line and "shapes_heldout" in line
    assert "is a folder" in failure(str(tmp_path), str(tmp_path))


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    assert "empty.txt holds no prompt" in failure(written(tmp_path / "empty.txt", "", "  "), "shapes_heldout")


def test_a_file_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    assert "latin.txt is not UTF-8" in failure(str(tmp_path / "latin.txt"), "shapes_heldout")


def test_a_held_out_prompt_must_not_be_trained_on(tmp_path: Path) -> None:
    train = written(tmp_path / "train.txt", "a", "b", "c")
    heldout = written(tmp_path / "heldout.txt", "x", "c", "a")
    line = failure(train, heldout)
    assert "'c'" in line and train in line and heldout in line, "the first one is named"


def test_more_prompts_a_step_than_there_are_is_an_error(tmp_path: Path) -> None:
    train, heldout = written(tmp_path / "train.txt", "a", "b"), written(tmp_path / "heldout.txt", "x")
    assert "prompts.per_step = 3" in failure(train, heldout, **{"prompts.per_step": 3})
    assert "evaluate.num_prompts = 2" in failure(train, heldout, **{"evaluate.num_prompts": 2})


@given(size=st.integers(1, 30), seed=st.integers(0, 5), data=st.data())
def test_a_pass_uses_every_prompt_once(size: int, seed: int, data: st.DataObject) -> None:
    per_step = data.draw(st.integers(1, size))
    prompts = [f"prompt {number}" for number in range(size)]
    drawn = [prompt for step in range(1, size + 1) for prompt in step_prompts(prompts, seed, step, per_step)]
    for start in range(0, len(drawn) - size + 1, size):
        assert Counter(drawn[start : start + size]) == Counter(prompts)


def test_steps_are_a_pure_function_of_seed_and_step() -> None:
    prompts = [f"prompt {number}" for number in range(100)]
    first = [step_prompts(prompts, 7, step, 8) for step in range(1, 31)]
    assert first == [step_prompts(prompts, 7, step, 8) for step in reversed(range(1, 31))][::-1]
    assert first[0] != step_prompts(prompts, 8, 1, 8)
    assert [p for step in first[:12] for p in step][:96] != [p for step in first[12:25] for p in step][4:100]


def test_the_order_is_pinned() -> None:
    """A change here would silently change every run that is resumed."""
    assert step_prompts(list("abcdefgh"), 0, 1, 8) == ["g", "f", "c", "e", "b", "d", "h", "a"]
