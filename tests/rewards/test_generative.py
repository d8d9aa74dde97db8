"""The generative judge: its ratings read, followed up where unreadable, and never made up; in process and by HTTP."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from solrl_rewards import load_reward
from solrl_rewards.generative import REMINDER, Generative
from solrl_rewards.judge_local import LocalJudge
from torch import Tensor

from tests.rewards import seeded

torch.set_num_threads(1)
FAST: dict[str, Any] = {"timeout_s": 5.0, "patience_s": 0.0}
CHOICES = ["1", "2", "3", "4", "5"]

# --- a judge behind HTTP

Answer = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def server(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible server; what it was asked is kept."""
    asked: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(request | {"path": self.path, "key": self.headers.get("Authorization")})
            body = json.dumps(answer(request)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_address[1]}/v1", asked
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


def says(text: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def seen_brightness(request: dict[str, Any]) -> int:
    """Rating 1 to 5 of the picture that arrived."""
    url = request["messages"][0]["content"][0]["image_url"]["url"]
    picture = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
    return 1 + round(picture.getpixel((0, 0))[0] / 255 * 4)  # type: ignore[index]


def grey(*levels: float) -> Tensor:
    return torch.tensor(levels)[:, None, None, None].expand(-1, 3, 8, 8)


def test_a_servers_ratings_are_read_for_the_right_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    with server(lambda request: says(f"It is grey.\nFinal Score: {seen_brightness(request)}")) as (url, asked):
        reward = load_reward("generative", model="judge", url=url, batch_size=2, max_new_tokens=77, **FAST)
        values, present = reward(grey(0.0, 1.0, 0.5, 0.25, 0.75), ["a", "b", "c", "{prompt} d", "e"])
    assert torch.allclose(values, torch.tensor([1, 5, 3, 2, 4]) / 5) and present.all()
    assert all(request["path"] == "/v1/chat/completions" and request["key"] == "Bearer key" for request in asked)
    assert all(request["model"] == "judge" and request["max_tokens"] == 77 for request in asked)
    assert all(request["temperature"] == 0 for request in asked)
    questions = {request["messages"][0]["content"][1]["text"] for request in asked}
    assert len(questions) == 5 and any("{prompt} d" in question for question in questions)


def test_an_unreadable_reply_is_followed_up_with_what_was_said() -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return says("Lovely." if len(request["messages"]) == 1 else "Final Score: 4")

    with server(answer) as (url, asked):
        values, _ = load_reward("generative", model="judge", url=url, **FAST)(grey(0.5), ["a"])
    assert values.tolist() == pytest.approx([0.8])
    assert [turn["role"] for turn in asked[1]["messages"]] == ["user", "assistant", "user"]
    assert asked[1]["messages"][1]["content"] == "Lovely." and asked[1]["messages"][2]["content"] == REMINDER


def test_what_stays_unreadable_is_an_error_or_missing_but_never_zero() -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return says("Final Score: 9" if seen_brightness(request) == 5 else "Final Score: 2")

    images = grey(0.0, 1.0)
    with server(answer) as (url, asked):
        reward = load_reward("generative", model="judge", url=url, retries=2, **FAST)
        with pytest.raises(ValueError, match=r"no rating from 1 to 5 in 3 replies for 1 images.*Final Score: 9"):
            reward(images, ["a", "b"])
        assert len(asked) == 4  # only the unreadable one was asked again
        values, present = load_reward("generative", model="judge", url=url, unreadable="missing", **FAST)(
            images, ["a", "b"]
        )
    assert present.tolist() == [True, False] and values[0] == pytest.approx(0.4)


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": ["x"]}, says(None), says(3), {"choices": [{}]}])
def test_a_server_that_answers_no_completion_is_an_error(answer: dict[str, Any]) -> None:
    with server(lambda request: answer) as (url, _):
        reward = load_reward("generative", model="judge", url=url, unreadable="missing", **FAST)
        with pytest.raises(ValueError, match=r"answers (no completion|a completion without text)"):
            reward(grey(0.5), ["a"])


def test_a_servers_expected_rating_is_the_mean_under_its_probabilities() -> None:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        assert request["logprobs"] and request["max_tokens"] == 1
        listed = [{"token": "4", "logprob": -0.5}, {"token": "2", "logprob": -1.5}, {"token": "the", "logprob": -3.0}]
        if seen_brightness(request) == 5:
            listed = listed[2:]
        return {"choices": [{"logprobs": {"content": [{"top_logprobs": listed}]}}]}

    with server(answer) as (url, _):
        options: dict[str, Any] = {"model": "judge", "url": url, "expected": True, **FAST}
        values, present = load_reward("generative", unreadable="missing", **options)(grey(0.5, 1.0), ["a", "b"])
        four, two = torch.tensor([-0.5, -1.5]).softmax(0).tolist()
        assert values[0] == pytest.approx((4 * four + 2 * two) / 5) and present.tolist() == [True, False]
        with pytest.raises(ValueError, match="next token is none of 1, 2, 3, 4, 5"):
            load_reward("generative", **options)(grey(1.0), ["a"])
    with server(lambda request: says("4")) as (url, _), pytest.raises(ValueError, match="no log probabilities"):
        load_reward("generative", **options | {"url": url})(grey(0.5), ["a"])


READINGS = [
    ("Final Score: 4", 4.0), ("final score: 3.5.", 3.5), ("**Final Score:** 2", 2.0), ("Final Score: 0.5", None),
    ("Final Score: 1\nFinal Score: 5", 5.0), ("a final score of 3 is too high. Final Score: 2", 2.0),
    ("Final Score: 7", None), ("Final Score: -3", None), ("Score: 4", None), ("", None), ("Final Score: five", None),
]  # fmt: skip


def bare(**options: Any) -> Generative:
    made = load_reward("generative", model="judge", url="http://127.0.0.1:9", **options)
    assert isinstance(made, Generative)
    return made


@pytest.mark.parametrize(("reply", "rating"), READINGS)
def test_the_last_rating_within_bounds_is_read(reply: str, rating: float | None) -> None:
    assert bare().read(reply) == rating


def test_question_pattern_and_bounds_are_settings() -> None:
    reward = bare(question="Rate {prompt}", pattern=r"<(\d+)>", lowest=0, highest=10)
    assert reward.read("<7> of <10>") == 10 and reward.read("<11>") is None
    assert reward.range == (0.0, 1.0) and len(reward.description) > 20 and reward.name == "generative"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"question": "Rate it"}, "must contain {prompt}"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": "score"}, "needs one group"),
        ({"unreadable": "zero"}, "error or missing, got 'zero'"),
        ({"lowest": 5}, "lowest must be below highest"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"batch_size": 0}, "at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bare(**options)


# --- a judge in process: LLaVA, two layers of each kind

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %} {{ part['text'] }}{% endif %}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
VOCABULARY = ["<pad>", "<s>", "</s>", "<unk>", "<image>", *CHOICES, "Final", "Score", ":", "image", "user", "assistant"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torchvision", reason='needs torchvision, which the extra "rewards" brings')
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CLIPImageProcessor,
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )  # fmt: skip

    words = [*VOCABULARY, *(f"word{number}" for number in range(64 - len(VOCABULARY)))]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    processor = LlavaProcessor(
        CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}), tokenizer,
        patch_size=14, vision_feature_select_strategy="default", chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    text = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=4, image_seq_length=4)
    )
    shapes = {name: value.shape for name, value in model.state_dict().items() if value.is_floating_point()}
    model.load_state_dict(seeded.state(shapes), strict=False)
    folder = tmp_path_factory.mktemp("llava")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def local(folder: Path, **options: Any) -> Generative:
    made = load_reward("generative", model=str(folder), dtype="float32", **options)
    assert isinstance(made, Generative)
    return made


def expected_score(judge: LocalJudge, image: Tensor, question: str) -> float:
    """The mean rating over five, by the model's plain forward pass on one conversation."""
    text = f"user <image> {question} assistant "
    inputs = judge.processor(text=[text], images=[(image * 255).round().to(torch.uint8)], return_tensors="pt")
    with torch.no_grad():
        logits = judge.model(**inputs).logits[0, -1]
    ids = [VOCABULARY.index(choice) for choice in CHOICES]
    return float((logits[ids].softmax(0) * torch.arange(1, 6)).sum() / 5)


def test_the_expected_rating_is_that_of_the_models_own_logits(folder: Path) -> None:
    reward = local(folder, expected=True, question="image {prompt}")
    images, prompts = seeded.images((40, 40), 3), ["Final", "Score Score Score word30", "word20 word21"]
    values, present = reward(images, prompts)
    assert isinstance(reward.judge, LocalJudge) and present.all() and len(set(values.tolist())) == 3
    alone = [
        expected_score(reward.judge, image, f"image {prompt}") for image, prompt in zip(images, prompts, strict=True)
    ]
    assert values.tolist() == pytest.approx(alone, abs=1e-5)


def test_a_rating_does_not_depend_on_batch_size_or_order(folder: Path) -> None:
    images, prompts = seeded.images((40, 40)), seeded.PROMPTS
    values, _ = local(folder, expected=True)(images, prompts)
    for batch_size in (1, 2):
        other, _ = local(folder, expected=True, batch_size=batch_size)(images.flip(0), prompts[::-1])
        torch.testing.assert_close(other.flip(0), values, atol=1e-5, rtol=0)


def test_replies_are_the_models_greedy_ones_and_ratings_are_read_in_them(folder: Path) -> None:
    """Random weights babble; whatever word they say is the pattern here, so that a reply can be read."""
    judge = local(folder).judge
    images = list(seeded.images((40, 40), 2))
    turns = [[("user", "image word30")], [("user", "Score : word20 word21 word22")]]
    replies = judge.reply(images, turns, 6)
    assert replies == [judge.reply([image], [talk], 6)[0] for image, talk in zip(images, turns, strict=True)]
    assert all(0 < len(reply.split()) <= 6 for reply in replies)
    before = torch.get_rng_state()
    counted = local(folder, pattern=r"(\d+)", lowest=0, highest=63, max_new_tokens=6, unreadable="missing")
    values, present = counted(torch.stack(images), ["a", "b"])
    assert present.shape == values.shape == (2,) and torch.equal(torch.get_rng_state(), before)


def test_babble_is_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match="no rating from 1 to 5 in 2 replies for 2 images"):
        local(folder, max_new_tokens=3)(seeded.images((40, 40), 2), ["a", "b"])


def test_ratings_of_several_tokens_have_no_expected_score(folder: Path) -> None:
    judge = LocalJudge(str(folder), None, "float32")
    with pytest.raises(ValueError, match="one token each"):
        judge.probabilities(list(seeded.images((40, 40), 1)), [[("user", "image")]], ["1", "2 3"])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"model": "nowhere/at-all"}, "cannot load 'nowhere/at-all'"), ({"dtype": "int8"}, "dtype")],
)
def test_a_judge_that_cannot_be_loaded_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        load_reward("generative", **{"model": "x"} | options)
