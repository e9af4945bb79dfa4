"""Somebody else's model behind an OpenAI-compatible chat endpoint, so that it can be scored on the same cases."""

from __future__ import annotations

import base64
import io
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from data.text import TextTokenizer
from data.video import read_frames
from eval.video_qa import Ask

KEY_VARIABLE = "OPENAI_API_KEY"
_TRIES = 4
# What a server says to one question (too long, too many pictures) rather than to whoever asks.
_BAD_QUESTION = (400, 413, 422)


class Endpoint:
    """A client of `{url}/chat/completions`.

    Args:
        url: the API's base, such as http://localhost:8000/v1.
        model: the model's name there.
        key: sent as a bearer token where there is one; by default what OPENAI_API_KEY holds.
        max_new_tokens, temperature: as the API calls max_tokens and temperature.
        timeout: seconds for one answer. sleep: waits between tries, so that tests need not.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        timeout: float = 300.0,
        sleep: Callable[[float], None] = time.sleep,
    ):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the endpoint is {url!r}; give a URL such as http://localhost:8000/v1")
        self.url, self.model = f"{url.rstrip('/')}/chat/completions", model
        self._key = os.environ.get(KEY_VARIABLE) if key is None else key
        self._options = {"max_tokens": max_new_tokens, "temperature": temperature}
        self._timeout, self._sleep = timeout, sleep

    def chat(self, content: str | list[dict[str, Any]]) -> str:
        """The answer to one user message. ValueError for a question that is refused, OSError where the server fails."""
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **self._options}
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers, method="POST")
        for tried in range(1, _TRIES + 1):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as response:
                    answer = json.load(response)
                return str(answer["choices"][0]["message"]["content"])
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.reason}"
                if error.code in _BAD_QUESTION:
                    raise ValueError(f"{self.url} refused the question: {reason}: {error.read()[:200]!r}") from error
                if error.code != 429 and error.code < 500:
                    raise OSError(f"{self.url} refused: {reason}: {error.read()[:200]!r}") from error
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise OSError(f"{self.url} answered something other than a chat completion: {error}") from error
            except OSError as error:
                reason = str(error)
            if tried < _TRIES:
                self._sleep(2.0**tried)
        raise OSError(f"{self.url} failed {_TRIES} times, the last time with: {reason}")


class EndpointVideoModel:
    """An `eval.video_qa.VideoModel`: frames go as JPEG images before the text."""

    def __init__(self, endpoint: Endpoint, *, num_frames: int = 32, size: int | None = None):
        """size: frames are cut to size x size; None keeps the video's own."""
        self._endpoint, self._num_frames, self._size = endpoint, num_frames, size

    def answer(self, ask: Ask) -> str:
        if ask.video is None:
            return self._endpoint.chat(ask.text)
        frames = read_frames(ask.video, num_frames=self._num_frames, size=self._size, start=ask.start, end=ask.end)
        return self._endpoint.chat(picture_message(frames.pixels, ask.text))


class EndpointTextModel:
    """An `eval.protocol.Model` of text prompts, for needles: ids are turned into text, and the answer into ids."""

    def __init__(self, endpoint: Endpoint, tokenizer: TextTokenizer):
        self._endpoint, self._tokenizer = endpoint, tokenizer

    def generate(self, prompts: Sequence[np.ndarray], *, max_new_tokens: int, stop_id: int) -> list[list[int]]:
        """Whole answers, whatever `max_new_tokens`: another model's tokens are not this tokenizer's."""
        texts = [self._tokenizer.decode(prompt[prompt < self._tokenizer.size]) for prompt in prompts]
        return [list(self._tokenizer.encode(self._endpoint.chat(text))) for text in texts]


def picture_message(pixels: np.ndarray, text: str) -> list[dict[str, Any]]:
    """A user message of frames uint8 [T, H, W, 3] and a text after them."""
    parts: list[dict[str, Any]] = []
    for frame in pixels:
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=90)
        data = base64.b64encode(buffer.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}})
    return [*parts, {"type": "text", "text": text}]
