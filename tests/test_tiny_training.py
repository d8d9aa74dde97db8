"""How the embedded models are taught: what captions are made careless, and what text encoders learn to tell."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from solrl_rewards import scenes

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import train_tiny

    yield train_tiny


def captions(single: float) -> list[str]:
    rng = random.Random(0)
    return [str(scenes.sample_scene(rng, single).caption) for _ in range(200)]


def test_captions_of_one_object_are_always_right(training: ModuleType) -> None:
    worst = training.Round(1, 1.0, guessed=1.0, reversed=1.0)
    assert [training.careless(random.Random(1), text, worst) for text in captions(1.0)] == captions(1.0)


def test_careless_captions_keep_colours_and_are_wrong_as_often_as_asked(training: ModuleType) -> None:
    texts = captions(0.0)
    exact, opposite, guessing = (training.Round(1, 0.0, *shares) for shares in ((0, 0), (0, 1), (1, 0)))
    assert [training.careless(random.Random(1), text, exact) for text in texts] == texts
    rng, kept = random.Random(2), 0
    for text in texts:
        true = scenes.parse(text)
        turned = scenes.parse(training.careless(rng, text, opposite))
        first, second = (scenes.DIRECTIONS[caption.relation or ""] for caption in (true, turned))
        assert turned.objects == true.objects and (first[0] + second[0], first[1] + second[1]) == (0, 0)
        guessed = scenes.parse(training.careless(rng, text, guessing))
        pairs = list(zip(guessed.objects, true.objects, strict=True))
        assert guessed.relation == true.relation and all(ours[0] == theirs[0] for ours, theirs in pairs)
        kept += sum(ours[1] == theirs[1] for ours, theirs in pairs)
    assert 0.15 < kept / (2 * len(texts)) < 0.35  # a guess among four shapes


def test_each_word_of_an_object_tells_its_own_colour_shape_and_side(training: ModuleType) -> None:
    import tiny_reading

    red, blue = scenes.COLOUR_NAMES.index("red"), scenes.COLOUR_NAMES.index("blue")
    circle, square = scenes.SHAPE_NAMES.index("circle"), scenes.SHAPE_NAMES.index("square")
    left, right = (tiny_reading.SIDES.index(scenes.DIRECTIONS[name]) for name in ("left", "right"))
    texts = ["a red circle left of a blue square", "a red circle"]
    two, one = tiny_reading.contents([scenes.parse(text) for text in texts], causal=False).tolist()
    nothing = [tiny_reading.UNTOLD] * 3
    assert two[:3] == [[red, circle, left]] * 3 and two[5:8] == [[blue, square, right]] * 3
    assert two[3:5] == [nothing] * 2 and two[8:] == [nothing] * 4
    assert one[:3] == [[red, circle, len(tiny_reading.SIDES)]] * 3 and one[3:] == [nothing] * 9


def test_a_causal_word_tells_what_was_said_of_its_object_so_far(training: ModuleType) -> None:
    """Relations and the second article speak of the first object, the last two words of the second."""
    import tiny_reading

    red, blue = scenes.COLOUR_NAMES.index("red"), scenes.COLOUR_NAMES.index("blue")
    circle, square = scenes.SHAPE_NAMES.index("circle"), scenes.SHAPE_NAMES.index("square")
    left, right = (tiny_reading.SIDES.index(scenes.DIRECTIONS[name]) for name in ("left", "right"))
    texts = ["a red circle left of a blue square", "a red circle on the left", "a red circle"]
    two, placed, one = tiny_reading.contents([scenes.parse(text) for text in texts], causal=True).tolist()
    untold = tiny_reading.UNTOLD
    opening = [[untold] * 3] * 2 + [[red, untold, untold], [red, circle, untold]]  # <bos> a red circle
    assert (
        two == opening + [[red, circle, left]] * 3 + [[blue, untold, right], [blue, square, right]] + [[untold] * 3] * 3
    )
    assert placed == opening + [[red, circle, untold]] * 2 + [[red, circle, left]] + [[untold] * 3] * 5
    assert one == opening + [[untold] * 3] * 8


@pytest.mark.parametrize("build", ["build_t5", "build_gemma"])
def test_words_and_tokens_are_one_to_one_where_an_encoder_learns_to_read(training: ModuleType, build: str) -> None:
    """`contents` counts words; Gemma's tokenizer puts one token before them."""
    import tiny_models
    import tiny_steps

    corpus = tiny_models.caption_corpus()
    make = tiny_models.gemma_tokenizer if build == "build_gemma" else tiny_models.t5_tokenizer
    tokenizer = make(corpus, tiny_models.TEXT_LENGTH)
    before = ["<bos>"] if build == "build_gemma" else []
    for text in corpus[:50]:
        tokens = tokenizer.convert_ids_to_tokens(tiny_steps.caption_ids(tokenizer, [text])[0].tolist())
        words = text.split()
        assert [token.strip("\u2581") for token in tokens[: len(before + words)]] == before + words


def test_a_round_is_read_from_numbers(training: ModuleType) -> None:
    assert training.Round.read("2000,0.5,0.67,0.33") == training.ROUNDS[0]
