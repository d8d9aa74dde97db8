"""An OpenAI-compatible server as judge: POST {url}/chat/completions."""

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from solrl_rewards.generative import Turn
from solrl_rewards.http_json import Endpoint
from solrl_rewards.png import encode_png

KEY_VARIABLE = "OPENAI_API_KEY"
TOP_TOKENS = 20  # what servers give at most


class ServerJudge:
    """The model that a server has under this name; up to `connections` requests at once, at temperature 0."""

    def __init__(self, model: str, url: str, connections: int, timeout_s: float, patience_s: float) -> None:
        self.model, self.connections = model, connections
        self.server = Endpoint(url, os.environ.get(KEY_VARIABLE), timeout_s, patience_s)

    def reply(self, images: Sequence[Tensor], turns: Sequence[Sequence[Turn]], max_new_tokens: int) -> list[str]:
        """Replies of at most `max_new_tokens` tokens."""
        return self._each(
            lambda image, talk: self._text(self._ask(image, talk, max_tokens=max_new_tokens)), images, turns
        )

    def probabilities(
        self, images: Sequence[Tensor], turns: Sequence[Sequence[Turn]], choices: Sequence[str]
    ) -> list[list[float] | None]:
        """What the server says of the choices among its most probable next tokens."""

        def one(image: Tensor, talk: Sequence[Turn]) -> list[float] | None:
            choice = self._ask(image, talk, max_tokens=1, logprobs=True, top_logprobs=TOP_TOKENS)
            try:
                listed = choice["logprobs"]["content"][0]["top_logprobs"]
                found = {entry["token"].strip(): math.exp(float(entry["logprob"])) for entry in reversed(listed)}
            except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise ValueError(f"{self.server.url} gives no log probabilities, which expected needs") from error
            weights = [found.get(text, 0.0) for text in choices]
            return weights if sum(weights) > 0 else None

        return self._each(one, images, turns)

    def _each(self, one: Any, images: Sequence[Tensor], turns: Sequence[Sequence[Turn]]) -> list[Any]:
        with ThreadPoolExecutor(self.connections, thread_name_prefix="judge") as pool:
            return list(pool.map(one, images, turns))

    def _ask(self, image: Tensor, turns: Sequence[Turn], **settings: Any) -> dict[str, Any]:
        """The first choice of the server's completion."""
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encode_png(image)}"}}
        (_, question), *later = turns
        messages: list[dict[str, Any]] = [{"role": "user", "content": [picture, {"type": "text", "text": question}]}]
        messages += [{"role": role, "content": text} for role, text in later]
        answer = self.server.post(
            "/chat/completions", {"model": self.model, "messages": messages, "temperature": 0, **settings}
        )
        try:
            choice = answer["choices"][0]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self.server.url} answers no completion but {answer!r:.200}") from error
        if not isinstance(choice, dict):
            raise ValueError(f"{self.server.url} answers no completion but {answer!r:.200}")
        return choice

    def _text(self, choice: dict[str, Any]) -> str:
        message = choice.get("message")
        text = message.get("content") if isinstance(message, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{self.server.url} answers a completion without text: {choice!r:.200}")
        return text
