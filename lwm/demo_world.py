"""What the demo trains on: real clips and real text, and corpora of needles made from them.

Everything is a pure function of the material, the tokenizers and a seed. Needles use the numbers that training may see,
and text haystacks leave out the chapters that the evaluation searches.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data import synthetic
from data.build import Corpus, build_corpus
from data.demo_material import demo_chapters, demo_clips
from data.examples import Example, Span, TokenizedExample, from_text, to_text, tokenize
from data.synthetic import CITIES, Haystack, needle_question, needle_sentence
from data.text import TextTokenizer, train_tokenizer
from data.video import read_frames
from data.vocabulary import Vocabulary
from lwm.config import RunConfig
from lwm.corpora import corpus_directory

CLIP_FPS = 8.0
# How often the vision tokenizer sees a plate rather than a frame of a clip.
PLATE_SHARE = 0.4
# One chapter in this many is kept from training, for the haystacks of the evaluation.
HELD_OUT_EVERY = 8
# Sentences of needles and questions beside the real text that the text tokenizer learns from.
_TOKENIZER_TEXT = 800_000
_TOKENIZER_NEEDLES = 2000
# Share of text needles with one to three distractors, told apart by their city.
_CROWDED = 0.25
# Share of needles at the very start, and as many at the very end.
_AT_EACH_END = 0.1
# Counts towards the corpora's fingerprint: raise it when their making changes.
_FORMAT = 1


@dataclass(frozen=True, eq=False)
class Clip:
    """One real clip. pixels: uint8 [T, H, W, 3] at `CLIP_FPS`; captions: ways to say what it shows."""

    name: str
    pixels: np.ndarray
    captions: tuple[str, ...]


def read_clips(size: int, progress: Callable[[int], None] | None = None) -> tuple[Clip, ...]:
    """The clips that come with the demo's packages, decoded to size x size; `progress` gets the number done."""
    clips: list[Clip] = []
    for name, path in demo_clips().items():
        clips.append(Clip(name, read_frames(path, fps=CLIP_FPS, size=size).pixels, synthetic.clip_captions(path)))
        if progress:
            progress(len(clips))
    return tuple(clips)


def vision_frames(clips: tuple[Clip, ...], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames uint8 [N, size, size, 3] to train the vision tokenizer on, and how often each is drawn, float [N].

    The clips' frames and the plates of every number that training may see, `PLATE_SHARE` of the draws.
    """
    real = np.concatenate([clip.pixels for clip in clips])
    numbers = [number for number in range(synthetic.NUM_NUMBERS) if not synthetic.is_held_out(number)]
    plates = np.stack([synthetic.needle_frame(number, size) for number in numbers])
    shares = np.concatenate(
        [np.full(len(real), (1 - PLATE_SHARE) / len(real)), np.full(len(plates), PLATE_SHARE / len(plates))]
    )
    return np.concatenate([real, plates]), shares


def train_text_tokenizer(path: Path, size: int, seed: int) -> TextTokenizer:
    """SentencePiece on the training chapters and on needles, questions and captions."""
    rng = np.random.default_rng([seed, 1])

    def texts() -> Iterator[str]:
        total = 0
        for chapter in chapters(held_out=False).values():
            total += len(chapter)
            if total > _TOKENIZER_TEXT:
                break
            yield chapter
        for _ in range(_TOKENIZER_NEEDLES):
            key = None if rng.random() < 0.7 else str(rng.choice(CITIES))
            yield f"{needle_sentence(synthetic.draw_number(rng), key)} USER: {needle_question(key)} ASSISTANT:"
            yield f"USER: {synthetic.PLATE_QUESTION} ASSISTANT: {synthetic.say(synthetic.draw_number(rng))}"
        for clip in demo_clips():
            for caption in synthetic.clip_captions(clip):
                yield f"USER: Describe the video. ASSISTANT: {caption}"
                yield f"USER: Generate a video of {caption} ASSISTANT:"

    return train_tokenizer(texts(), path, size=size)


def chapters(*, held_out: bool) -> dict[str, str]:
    """Chapters to train on, or those kept for the evaluation."""
    return {
        name: text
        for index, (name, text) in enumerate(demo_chapters().items())
        if (index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out
    }


@dataclass(frozen=True, eq=False)
class World:
    """The material with its tokens. clip_codes: int32 [T, n] of each clip; plates: int32 [n] of every number."""

    clips: tuple[Clip, ...]
    clip_codes: tuple[np.ndarray, ...]
    plates: dict[int, np.ndarray]
    tokenizer: TextTokenizer
    vision_fingerprint: str
    vocabulary: Vocabulary
    seed: int

    @cached_property
    def haystack(self) -> Haystack:
        """Text to hide training needles in."""
        return Haystack(chapters(held_out=False).values(), self.tokenizer, max_tokens=600_000)

    @property
    def codes_per_frame(self) -> int:
        return int(self.clip_codes[0].shape[1])

    def tokenize(self, example: Example) -> TokenizedExample:
        return tokenize(example, self.tokenizer, self.vocabulary)


def _text_needle(world: World, rng: np.random.Generator, length: int) -> TokenizedExample:
    crowd = int(rng.integers(1, 4)) if length >= 128 and rng.random() < _CROWDED else 0
    needle = synthetic.place_text_needle(
        rng, world.haystack, world.tokenizer, length, depth=_depth(rng), num_distractors=crowd
    )
    return needle.example()


def _depth(rng: np.random.Generator) -> float:
    """Anywhere, and now and then at either end, where a needle has neighbours on one side only."""
    return float(rng.choice([0.0, 1.0, rng.random()], p=[_AT_EACH_END, _AT_EACH_END, 1 - 2 * _AT_EACH_END]))


def _video_needle(world: World, rng: np.random.Generator, length: int) -> TokenizedExample:
    number = synthetic.draw_number(rng)
    num_frames = synthetic.frames_that_fit(length, world.codes_per_frame, world.tokenizer, world.vocabulary)
    frames = synthetic.haystack_frames(rng, world.clip_codes, num_frames)
    plate = world.plates[number]
    return synthetic.video_needle(frames, plate, number, _depth(rng), world.tokenizer, world.vocabulary).example()


def _document(world: World, rng: np.random.Generator, length: int) -> TokenizedExample:
    ids, _, _ = world.haystack.cut(rng, length - 2)
    tokens = np.concatenate([[world.tokenizer.bos_id], ids, [world.tokenizer.eos_id]])
    return TokenizedExample(tokens, np.arange(len(tokens)) > 0)


def _captioned(world: World, rng: np.random.Generator, length: int, *, learn: bool) -> tuple[Span, str]:
    """A stretch of a clip of about `length` tokens, learned or not, and a caption of it."""
    which = int(rng.integers(len(world.clips)))
    codes = world.clip_codes[which]
    count = min(max(1, length // (world.codes_per_frame + 1)), len(codes))
    start = int(rng.integers(len(codes) - count + 1))
    return Span("video", learn, codes=codes[start : start + count]), str(rng.choice(world.clips[which].captions))


def _text_to_video(world: World, rng: np.random.Generator, length: int) -> TokenizedExample:
    video, caption = _captioned(world, rng, length, learn=True)
    return world.tokenize(from_text(caption, video, system=""))


def _video_to_text(world: World, rng: np.random.Generator, length: int) -> TokenizedExample:
    video, caption = _captioned(world, rng, length, learn=False)
    return world.tokenize(to_text(video, caption, system=""))


@dataclass(frozen=True)
class Recipe:
    """One corpus: what makes an example of about a length, how many tokens in all, and which lengths.

    Lengths are spread evenly over their logarithm, but for a share `at_longest` that all have the longest.
    """

    make: Callable[[World, np.random.Generator, int], TokenizedExample]
    tokens: int
    shortest: int
    longest: int
    at_longest: float = 0.0

    def examples(self, world: World, name: str, share: float = 1.0) -> Iterator[TokenizedExample]:
        """The corpus's examples, the same ones every time; `share` of the tokens for a smaller corpus."""
        rng = np.random.default_rng([world.seed, int.from_bytes(name.encode(), "big")])
        total, count = 0, 0
        while total < share * self.tokens:
            length = self.longest
            if rng.random() >= self.at_longest:
                length = round(math.exp(rng.uniform(math.log(self.shortest), math.log(self.longest))))
            made = self.make(world, rng, length)
            yield TokenizedExample(made.tokens, made.learn, f"{name}/{count}", name)
            total, count = total + len(made), count + 1


# A needle is learned where there is little hay, and then in ever more of it (measured: a number behind its sentence
# within 0.2M tokens at 40 tokens an example, not at all within 1M at 64 and up).
RECIPES = {
    "text": Recipe(_document, 300_000, 64, 256),
    "text_to_video": Recipe(_text_to_video, 400_000, 130, 330),
    "video_to_text": Recipe(_video_to_text, 100_000, 65, 260),
    "text_needles_short": Recipe(_text_needle, 500_000, 40, 64),
    "text_needles_1024": Recipe(_text_needle, 500_000, 64, 1024),
    "text_needles_4096": Recipe(_text_needle, 1_000_000, 128, 4096, at_longest=0.2),
    "video_needles_short": Recipe(_video_needle, 500_000, 95, 165),
    "video_needles_512": Recipe(_video_needle, 600_000, 165, 512),
    "video_needles_1024": Recipe(_video_needle, 500_000, 95, 1024),
    "video_needles_4096": Recipe(_video_needle, 1_000_000, 128, 4096, at_longest=0.2),
}


def build(config: RunConfig, world: World, name: str, share: float = 1.0) -> Corpus:
    """Corpus `name` of `RECIPES`, in the directory the configuration gives it; at once when it is there and whole."""
    recipe = RECIPES[name]
    parts = [
        _FORMAT, world.seed, world.tokenizer.fingerprint, world.vision_fingerprint, asdict(world.vocabulary), name,
        recipe.make.__name__, share, recipe.tokens, recipe.shortest, recipe.longest, recipe.at_longest,
    ]  # fmt: skip
    return build_corpus(
        corpus_directory(config, name),
        name,
        recipe.examples(world, name, share),
        vocabulary=world.vocabulary,
        input_fingerprint=hashlib.sha256(json.dumps(parts).encode()).hexdigest(),
        tokenizers={"text": world.tokenizer.fingerprint, "vision": world.vision_fingerprint},
        overwrite=True,
    )
