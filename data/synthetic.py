"""Small worlds with known answers: needles in text and video, number plates, moving shapes, plain sentences.

A needle is a three-digit number hidden in real text (a sentence) or real video (a frame with a number plate), and asked
for at the end. A fixed fifth of the numbers is never trained on (`is_held_out`), so an answer cannot be remembered.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw, ImageFont

from data.examples import Example, Span, TokenizedExample, tokenize
from data.text import TextTokenizer
from data.vocabulary import Vocabulary

NUM_NUMBERS = 1000
# Ground and digit of each slot. Both differ from slot to slot, so that any patch of a digit tells its slot, too: with
# digits all of one colour, a small vision tokenizer gives the same code to the same stroke in different slots.
_PLATE_COLOURS = {
    "red": ((208, 24, 28), (96, 255, 255)),
    "green": ((16, 136, 44), (255, 255, 255)),
    "blue": ((28, 48, 208), (255, 224, 40)),
}
_PLATE_EDGE = (24, 24, 24)
_SAID = re.compile(r"\b" + r"[\s,]+".join(rf"{colour}\s?(\d)" for colour in _PLATE_COLOURS) + r"\b")
PLATE_QUESTION = "What number is on the plate?"
CITIES = (
    "Amsterdam", "Athens", "Bangkok", "Berlin", "Bogota", "Boston", "Brussels", "Cairo", "Chicago", "Dakar", "Delhi",
    "Denver", "Dublin", "Geneva", "Hanoi", "Havana", "Istanbul", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon",
    "London", "Madrid", "Manila", "Miami", "Milan", "Montreal", "Moscow", "Nairobi", "Oslo", "Paris", "Prague",
    "Rome", "Seoul", "Sydney", "Tokyo", "Toronto", "Vienna", "Warsaw",
)  # fmt: skip


# Numbers.


@functools.cache
def held_out_numbers() -> frozenset[int]:
    """The fifth of 0 .. 999 with the lowest sha256: never trained on."""
    order = sorted(range(NUM_NUMBERS), key=lambda number: hashlib.sha256(f"needle {number}".encode()).digest())
    return frozenset(order[: NUM_NUMBERS // 5])


def is_held_out(number: int) -> bool:
    return number in held_out_numbers()


@functools.cache
def _numbers(held_out: bool) -> NDArray[np.int64]:
    return np.array([number for number in range(NUM_NUMBERS) if is_held_out(number) == held_out])


def draw_number(rng: np.random.Generator, *, held_out: bool = False) -> int:
    """A number from 0 to 999: one to train on, or one that is never trained on."""
    choices = _numbers(held_out)
    return int(choices[rng.integers(choices.size)])


def spell(number: int) -> str:
    """Always three digits: 7 is "007"."""
    if not 0 <= number < NUM_NUMBERS:
        raise ValueError(f"number is {number}; a needle has three digits, 0 to {NUM_NUMBERS - 1}")
    return f"{number:03d}"


def say(number: int) -> str:
    """A number in words, as needles and answers give it: 482 is "red4 green8 blue2", in the colours of the plates.

    A digit with its colour can be found by content alone. For a bare 482 a model must also learn to count digits, which
    takes a small one several times as long and is not what a haystack measures.
    """
    return " ".join(f"{colour}{digit}" for colour, digit in zip(_PLATE_COLOURS, spell(number), strict=True))


def hear(text: str) -> str:
    """`text` with every number that is given in words (`say`) as digits: "It is red4 green8 blue2" -> "It is 482"."""
    return _SAID.sub(r"\1\2\3", text)


# Needles in text.


def needle_sentence(number: int, key: str | None = None) -> str:
    return f"The special magic {f'{key} ' if key else ''}number is: {say(number)}."


def needle_question(key: str | None = None) -> str:
    return f"What is the special magic {f'{key} ' if key else ''}number?"


def _prompt(asked: str) -> str:
    return f"\nUSER: {asked} ASSISTANT:"


class Haystack:
    """Real text as one run of tokens, int32 [N], that knows where its sentences start (int32 [number of them])."""

    def __init__(self, texts: Iterable[str], tokenizer: TextTokenizer, *, max_tokens: int | None = None) -> None:
        sentences: list[list[int]] = []
        total = 0
        for sentence in (piece for text in texts for piece in re.split(r"(?<=[.!?])\s+", text.strip())):
            if max_tokens is not None and total >= max_tokens:
                break
            if ids := tokenizer.encode(sentence):
                sentences.append(ids)
                total += len(ids)
        if not sentences:
            raise ValueError("the haystack has no text; give it at least one sentence")
        self.tokens = np.concatenate([np.asarray(ids, np.int32) for ids in sentences])
        self.starts = np.cumsum([0, *map(len, sentences[:-1])]).astype(np.int32)
        self._starts_word = tokenizer.starts_word(self.tokens)
        self._starts_sentence = np.zeros(self.tokens.size, np.bool_)
        self._starts_sentence[self.starts] = True

    def cut(
        self, rng: np.random.Generator, budget: int
    ) -> tuple[NDArray[np.int32], NDArray[np.intp], NDArray[np.intp]]:
        """At most `budget` tokens from the start of a random sentence, cut before a word; the text repeats if short.

        Returns tokens [m], and where sentences and where words start in them (m itself counts for both).
        """
        first = int(self.starts[rng.integers(self.starts.size)])
        places = np.arange(first, first + budget + 1) % self.tokens.size
        (words,) = self._starts_word[places].nonzero()
        end = int(words[-1]) if words.size else 0
        (sentences,) = self._starts_sentence[places[:end]].nonzero()
        return self.tokens[places[:end]], np.append(sentences, end), words if words.size else np.zeros(1, np.intp)


@dataclass(frozen=True, eq=False)
class PlacedNeedle:
    """A context with a needle, and its question. tokens: int32, BOS to `ASSISTANT:`; answer_tokens: int32, to EOS.

    answer: the number's digits (`spell`); the tokens give it in words (`say`).
    position: where the needle's tokens start in `tokens`, or None when it was left out (then the answer is nowhere).
    depth: how far down it was asked for, 0 to 1. frame: which frame holds it, in a video.
    """

    tokens: NDArray[np.int32]
    answer_tokens: NDArray[np.int32]
    answer: str
    number: int
    depth: float
    position: int | None
    key: str | None = None
    num_distractors: int = 0
    frame: int | None = None

    @property
    def length(self) -> int:
        """Tokens of context, question and answer together."""
        return self.tokens.size + self.answer_tokens.size

    def example(self, *, id: str = "", source: str = "") -> TokenizedExample:
        """To train on: only the answer is learned."""
        learn = np.arange(self.length) >= self.tokens.size
        return TokenizedExample(np.concatenate([self.tokens, self.answer_tokens]), learn, id, source)


def place_text_needle(
    rng: np.random.Generator,
    haystack: Haystack,
    tokenizer: TextTokenizer,
    length: int,
    *,
    number: int | None = None,
    depth: float | None = None,
    keyed: bool | None = None,
    num_distractors: int = 0,
    present: bool = True,
) -> PlacedNeedle:
    """Real text with a needle in it: at most `length` tokens, question and answer included (the last word may not fit).

    number: a random one to train on when None. depth: 0 (start) to 1 (end), uniform when None.
    keyed: name a city in sentence and question; by default only where there are distractors, needles with other cities
    and numbers at random depths, which need it. present=False leaves the needle out and asks all the same: the control.

    Needles stand between sentences where one ends nearby (a tenth of the text away), else between words.
    """
    number = draw_number(rng) if number is None else number
    depth = float(rng.random()) if depth is None else depth
    keyed = num_distractors > 0 if keyed is None else keyed
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}; it must lie between 0 and 1")
    if not 0 <= num_distractors < len(CITIES):
        raise ValueError(f"num_distractors is {num_distractors}; it must lie between 0 and {len(CITIES) - 1}")
    if num_distractors and not keyed:
        raise ValueError("keyed is False with distractors; the question could not say which number it wants")
    keys: list[str | None] = [None]
    if keyed:
        keys = [CITIES[which] for which in rng.choice(len(CITIES), 1 + num_distractors, replace=False)]
    numbers = [number]
    while len(numbers) <= num_distractors:
        other = draw_number(rng)
        numbers += [] if other in numbers else [other]
    depths = [depth, *rng.random(num_distractors)]
    needles = [
        (float(where), np.asarray(tokenizer.encode(needle_sentence(value, key)), np.int32))
        for where, value, key in zip(depths, numbers, keys, strict=True)
    ]
    if not present:
        del needles[0]
    asked = np.asarray(tokenizer.encode(_prompt(needle_question(keys[0]))), np.int32)
    answer = np.asarray([*tokenizer.encode(say(number)), tokenizer.eos_id], np.int32)
    fixed = 1 + sum(ids.size for _, ids in needles) + asked.size + answer.size
    if fixed > length:
        raise ValueError(f"length is {length}; needles, question and answer alone take {fixed} tokens")
    text, sentences, words = haystack.cut(rng, length - fixed)
    context, starts = insert_needles(text, needles, sentences, words)
    tokens = np.concatenate([np.asarray([tokenizer.bos_id], np.int32), context, asked])
    return PlacedNeedle(
        tokens=tokens,
        answer_tokens=answer,
        answer=spell(number),
        number=number,
        depth=depth,
        position=1 + starts[0] if present else None,
        key=keys[0],
        num_distractors=num_distractors,
    )


def insert_needles(
    text: NDArray[np.int32],
    needles: Sequence[tuple[float, NDArray[np.int32]]],
    sentences: NDArray[np.int64],
    words: NDArray[np.int64],
) -> tuple[NDArray[np.int32], list[int]]:
    """The text with each needle near its depth, and where each then starts, in the order of `needles`."""
    cuts: list[int] = []
    for depth, _ in needles:
        wanted = depth * text.size
        nearest = int(sentences[np.abs(sentences - wanted).argmin()])
        if abs(nearest - wanted) > text.size / 10:
            nearest = int(words[np.abs(words - wanted).argmin()])
        cuts.append(nearest)
    pieces: list[NDArray[np.int32]] = []
    starts = [0] * len(needles)
    done, size = 0, 0
    for which in sorted(range(len(needles)), key=lambda k: (cuts[k], needles[k][0])):
        starts[which] = cuts[which] + size
        pieces += [text[done : cuts[which]], needles[which][1]]
        done, size = cuts[which], size + needles[which][1].size
    return np.concatenate([*pieces, text[done:]]), starts


# Needles in video.


def needle_frame(number: int, size: int) -> NDArray[np.uint8]:
    """A number plate, uint8 [size, size, 3]: digits on red, on green and on blue, side by side, then a dark strip.

    The four columns are size / 4 wide and each digit keeps to the middle half of its column's height, so that with
    patches of size / 4 (or an even part of it) no patch sees two digits.
    """
    if size < 32 or size % 4:
        raise ValueError(f"size is {size}; a plate needs a multiple of 4, at least 32")
    cell = size // 4
    plate = Image.new("RGB", (size, size), _PLATE_EDGE)
    for slot, (digit, (ground, ink)) in enumerate(zip(spell(number), _PLATE_COLOURS.values(), strict=True)):
        plate.paste(ground, (slot * cell, 0, (slot + 1) * cell, size))
        mask = _digit_mask(int(digit), max(1, cell * 7 // 8), max(1, 2 * cell * 7 // 8))
        corner = (slot * cell + (cell - mask.width) // 2, cell + (2 * cell - mask.height) // 2)
        plate.paste(ink, corner, mask)
    return np.asarray(plate)


@functools.cache
def _digit_mask(digit: int, width: int, height: int) -> Image.Image:
    """The digit filling `height` and at most `width`, as coverage."""
    large = 256
    canvas = Image.new("L", (2 * large, 2 * large))
    font = ImageFont.load_default(size=large)
    ImageDraw.Draw(canvas).text((large // 2, large // 4), str(digit), fill=255, font=font, stroke_width=large // 24)
    glyph = canvas.crop(canvas.getbbox())
    wide = min(width, max(1, round(glyph.width * height / glyph.height)))
    return glyph.resize((wide, height), Image.Resampling.LANCZOS)


def place_video_needle(codes: ArrayLike, needle_codes: ArrayLike, depth: float) -> tuple[NDArray[np.int32], int]:
    """Codes [T, n] with the frame at `depth` (0 first, 1 last) replaced by the needle's [n], and that frame's index."""
    codes_Tn = np.array(codes, np.int32)
    needle_n = np.asarray(needle_codes, np.int32).reshape(-1)
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}; it must lie between 0 and 1")
    if codes_Tn.ndim != 2 or codes_Tn.shape[1] != needle_n.size:
        raise ValueError(
            f"codes have shape {codes_Tn.shape} and the needle {needle_n.size} codes; they must match [T, n]"
        )
    frame = round(depth * (codes_Tn.shape[0] - 1))
    codes_Tn[frame] = needle_n
    return codes_Tn, frame


def video_needle(
    codes: ArrayLike,
    needle_codes: ArrayLike,
    number: int,
    depth: float,
    tokenizer: TextTokenizer,
    vocabulary: Vocabulary,
    *,
    present: bool = True,
) -> PlacedNeedle:
    """The clip (codes [T, n]) with the plate's frame at `depth`, then the question; present=False leaves it alone."""
    placed, frame = place_video_needle(codes, needle_codes, depth)
    clip = placed if present else np.asarray(codes, np.int32)
    example = tokenize(_video_question(clip, PLATE_QUESTION, say(number)), tokenizer, vocabulary)
    asked = int(example.learn.argmax())
    opening = 1 + len(tokenizer.encode("<vision>"))
    return PlacedNeedle(
        tokens=example.tokens[:asked],
        answer_tokens=example.tokens[asked:],
        answer=spell(number),
        number=number,
        depth=depth,
        position=opening + frame * (clip.shape[1] + 1) if present else None,
        frame=frame if present else None,
    )


def frames_that_fit(length: int, codes_per_frame: int, tokenizer: TextTokenizer, vocabulary: Vocabulary) -> int:
    """How many frames a video needle of at most `length` tokens has; ValueError when not even one fits."""
    one = tokenize(_video_question(np.zeros((1, codes_per_frame), int), PLATE_QUESTION, say(0)), tokenizer, vocabulary)
    num_frames = (length - len(one)) // (codes_per_frame + 1) + 1
    if num_frames < 1:
        raise ValueError(f"length is {length}; one frame with question and answer takes {len(one)} tokens")
    return num_frames


def haystack_frames(rng: np.random.Generator, clips: Sequence[ArrayLike], num_frames: int) -> NDArray[np.int32]:
    """`num_frames` frames from random stretches of the clips (codes [T, n] each), joined when one is too short."""
    if not clips:
        raise ValueError("there are no clips to make a haystack of; give at least one")
    pieces: list[NDArray[np.int32]] = []
    missing = num_frames
    while missing > 0:
        clip = np.asarray(clips[int(rng.integers(len(clips)))], np.int32)
        start = int(rng.integers(max(1, clip.shape[0] - missing + 1)))
        pieces.append(clip[start : start + missing])
        missing -= pieces[-1].shape[0]
    return np.concatenate(pieces)


def _video_question(codes: NDArray[np.integer], asked: str, answer: str) -> Example:
    spans = (
        Span("video", codes=codes),
        Span("text", text=_prompt(asked)),
        Span("text", learn=True, text=answer),
    )
    return Example(spans)


# Captions and small worlds.

_CLIP_CAPTIONS = {
    "bikes": ("bicycles on a busy street", "a street with bicycles and cars", "people riding bicycles in the city"),
    "bigbuckbunny": ("a big white rabbit on green grass", "a cartoon rabbit stretching", "a rabbit yawning outdoors"),
    "carphone_pristine": ("a man talking in a car", "a man with a red tie in a car", "a man in a suit talking"),
    "carphone_distorted": (
        "a blurred man talking in a car",
        "a man in a car, badly blurred",
        "a blurred man in a suit",
    ),
}


def clip_captions(path: str | Path) -> tuple[str, ...]:
    """A few captions for a clip: of the demo's clips what they show, of any other what its file name says."""
    stem = Path(path).stem
    words = " ".join(re.findall(r"[A-Za-z]+|\d+", stem)).lower() or "something"
    return _CLIP_CAPTIONS.get(stem, (words, f"a video of {words}", f"a clip showing {words}"))


_COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230), "yellow": (235, 215, 50)}
_MOVES = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


def shape_clip(rng: np.random.Generator, num_frames: int, size: int) -> tuple[NDArray[np.uint8], str]:
    """A coloured square crossing a dark ground, uint8 [num_frames, size, size, 3], and what it does: its caption."""
    colour = str(rng.choice(list(_COLOURS)))
    direction = str(rng.choice(list(_MOVES)))
    side = max(2, size // 4)
    across = int(rng.integers(0, size - side + 1))
    travel = np.linspace(0, size - side, num_frames).round().astype(int)
    pixels = np.full((num_frames, size, size, 3), int(rng.integers(16, 48)), np.uint8)
    down, right = _MOVES[direction]
    along = travel if down + right > 0 else travel[::-1]
    for frame, place in enumerate(along):
        top, left = (int(place), across) if down else (across, int(place))
        pixels[frame, top : top + side, left : left + side] = _COLOURS[colour]
    return pixels, f"a {colour} square moves {direction}"


def sentences(rng: np.random.Generator, count: int) -> Iterator[str]:
    """Plain sentences from a small grammar, for tests that need text and no file."""
    people = ("the old man", "a child", "my sister", "the king", "a sailor", "the teacher")
    verbs = ("sees", "carries", "finds", "sells", "remembers", "paints")
    things = ("a boat", "the red house", "an apple", "three stones", "the long road", "a letter")
    places = ("by the river", "in the city", "under a tree", "at night", "before the rain", "on the hill")
    for _ in range(count):
        words = " ".join(str(rng.choice(choices)) for choices in (people, verbs, things, places))
        yield f"{words.capitalize()}."
