"""OCR: Flow-GRPO's formula on what was read, and rendered words that are read."""

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from solrl_rewards import load_reward
from solrl_rewards.ocr import Ocr, edit_distance, text_score, wanted_text
from torch import Tensor

from tests.rewards.conftest import GOLDEN


@pytest.mark.parametrize(("prompt", "read", "score"), GOLDEN["ocr"])
def test_a_text_scores_as_by_flow_grpos_formula(prompt: str, read: str, score: float) -> None:
    assert text_score(wanted_text(prompt), read) == pytest.approx(score, abs=1e-12)


def test_the_edit_distance_is_levenshteins() -> None:
    cases = [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2), ("same", "same", 0)]
    for one, other, distance in cases:
        assert edit_distance(one, other) == edit_distance(other, one) == distance


@pytest.mark.parametrize(
    ("prompt", "text"),
    [('a "Sol RL" sign', "Sol RL"), ("\u201ccurly\u201d quotes", "curly"), ('"one" and "two"', "one")],
)
def test_the_text_is_what_the_first_quotes_enclose(prompt: str, text: str) -> None:
    assert wanted_text(prompt) == text


@pytest.mark.parametrize("prompt", ["no quotes", 'one " only', '"  "'])
def test_a_prompt_without_a_text_is_refused(prompt: str) -> None:
    with pytest.raises(ValueError, match="names no text in double quotes"):
        wanted_text(prompt)


@pytest.fixture(scope="module")
def reward() -> Ocr:
    pytest.importorskip("rapidocr", reason='needs the extra "rewards"')
    made = load_reward("ocr")
    assert isinstance(made, Ocr)
    return made


def rendered(words: list[str]) -> Tensor:
    pictures = []
    for text in words:
        picture = Image.new("RGB", (192, 192), "white")
        font = ImageFont.load_default(size=40)
        ImageDraw.Draw(picture).text((96, 96), text, fill="black", font=font, anchor="mm")
        pictures.append(torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(192, 192, 3))
    return torch.stack(pictures).permute(0, 3, 1, 2).float() / 255


def test_rendered_words_are_read(reward: Ocr) -> None:
    words = ["HELLO", "12345", ""]
    images = rendered(words)
    assert reward(images, [f'a card that says "{word or "nothing"}"' for word in words]).tolist() == [1, 1, 0]


@pytest.mark.slow
def test_other_words_than_the_wanted_ones_score_low(reward: Ocr) -> None:
    scores = reward(rendered(["WORLD", "12345"]), ['"MUSIC"', '"98706"'])
    assert (scores < 0.5).all() and scores.dtype == torch.float32


@pytest.mark.slow
def test_a_score_does_not_depend_on_the_rest_of_the_batch(reward: Ocr) -> None:
    images, prompts = rendered(["HELLO", "WORLD"]), ['"HELLO"', '"WORDS"']
    scores = reward(images, prompts)
    assert reward(images.flip(0), prompts[::-1]).tolist() == scores.flip(0).tolist()
    assert reward(images[:1], prompts[:1]).tolist() == scores[:1].tolist()
    assert reward(images[:0], []).shape == (0,)
    assert reward.name == "ocr" and len(reward.description) > 20
