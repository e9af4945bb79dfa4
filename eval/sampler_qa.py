"""This project's own models as an `eval.video_qa.VideoModel`."""

from __future__ import annotations

from data.examples import SYSTEM, Span
from data.video import read_frames
from eval.video_qa import Ask
from lwm import prompts
from lwm.serving import OpenRun

_DEFAULT_FRAMES = 32


class SamplerVideoModel:
    """Looks at a video once for all questions in a row about it.

    Args:
        run: an open checkpoint.
        num_frames: frames spread evenly over the video, or its part; None: 32, or as many as fit into the context.
        order, system: as in `lwm.prompts.ask_about_media`. With "media-first" what the questions about one video have
            in common is read once.
        max_new_tokens: longest answer.
    """

    def __init__(
        self,
        run: OpenRun,
        *,
        num_frames: int | None = None,
        order: str = "question-first",
        system: str = SYSTEM,
        max_new_tokens: int = 32,
    ):
        if order not in prompts.ORDERS:
            raise ValueError(f"order is {order!r}; choose one of {', '.join(prompts.ORDERS)}")
        self._run, self._num_frames, self._order, self._system = run, num_frames, order, system
        self._max_new_tokens = max_new_tokens
        self._seen: tuple[tuple, Span] | None = None

    def answer(self, ask: Ask) -> str:
        run = self._run
        if ask.video is None:
            prompt = prompts.ask_about_text(ask.text, run.text, system=self._system)
        else:
            media = self._look(ask)
            prompt = prompts.ask_about_media(
                media, ask.text, run.text, run.vocabulary, system=self._system, order=self._order
            )
        (ids,) = run.sampler.generate(
            [prompt],
            max_new_tokens=self._max_new_tokens,
            stop_id=run.text.eos_id,
            reuse=self._order == "media-first",
        )
        return prompts.answer_text(ids, run.text)

    def _look(self, ask: Ask) -> Span:
        assert ask.video is not None
        vision = self._run.need_vision()
        num_frames = self._num_frames
        if num_frames is None:
            text = prompts.ask_about_text(ask.text, self._run.text, system=self._system)
            # Room for the text, the markers around the video and the answer.
            room = self._run.sampler.max_length - len(text) - self._max_new_tokens - 16
            num_frames = max(1, min(_DEFAULT_FRAMES, room // (vision.codes_per_frame + 1)))
        name = (ask.video, num_frames, ask.start, ask.end)
        if self._seen is None or self._seen[0] != name:
            size = vision.config.resolution
            frames = read_frames(ask.video, num_frames=num_frames, size=size, start=ask.start, end=ask.end)
            self._seen = (name, Span("video", codes=vision.encode(frames.pixels)))
        return self._seen[1]
