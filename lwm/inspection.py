"""Looking at a corpus: counts, how its examples fill rows, and examples decoded back to text and pictures."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.corpus import Corpus
from data.examples import untokenize
from data.mixture import Mixture
from data.packing import Packing
from data.text import TextTokenizer
from lwm import media
from lwm.config import RunConfig
from lwm.corpora import text_tokenizer_of, vision_tokenizer_of
from lwm.vision_tokenizer import VisionTokenizer

_MOST_ROWS = 4096
_MOST_FRAMES = 16
_MOST_CHARACTERS = 600


class Tokenizers(NamedTuple):
    """What a corpus was made with, as far as it is there."""

    text: TextTokenizer
    vision: VisionTokenizer | None


def describe(corpus: Corpus) -> Iterator[str]:
    """Counts and lengths, a line each."""
    lengths = np.asarray(corpus.lengths)
    counts = corpus.counts
    yield f"{corpus.name}: {len(corpus)} examples, {lengths.sum()} tokens to predict, fingerprint {corpus.fingerprint}"
    p10, median, p90 = np.percentile(lengths, [10, 50, 90]).astype(int)
    yield f"lengths: shortest {lengths.min()}, 10% {p10}, median {median}, 90% {p90}, longest {lengths.max()}"
    text, vision = np.asarray(corpus.learned).sum(0).tolist()
    yield (
        f"tokens: {counts['tokens']}, of which vision {counts['vision_tokens'] / counts['tokens']:.1%}; learned "
        f"{counts['learned'] / counts['tokens']:.1%} ({text} text, {vision} vision)"
    )
    yield f"tokenizers: {', '.join(f'{name} {value[:12]}' for name, value in corpus.tokenizers.items()) or 'not said'}"
    for kind, what in (("skipped", f"left out: {counts['skipped']}"), ("damaged", "made from damaged files")):
        listed = corpus.manifest.get(kind, [])
        if listed:
            yield f"{what}; the first:"
        for entry in listed[:3]:
            yield f"  {entry['id']}: {entry['reason']}"


def packing(corpus: Corpus, config: RunConfig) -> Iterator[str]:
    """For each length of row in the configuration's stages, how full rows of this corpus alone would be."""
    lengths = np.asarray(corpus.lengths)
    for seq_len in dict.fromkeys(stage.seq_len for stage in config.stages):
        stages = [stage.name for stage in config.stages if stage.seq_len == seq_len]
        masked, padded = _fill(corpus, seq_len, "masked"), _fill(corpus, seq_len, "pad")
        longer = int((lengths > seq_len).sum())
        yield (
            f"rows of {seq_len} (stage {', '.join(stages)}): masked {masked:.2%} full, one example a row "
            f"{padded:.2%}; {longer} examples are longer and are cut"
        )


def _fill(corpus: Corpus, seq_len: int, packing: Packing) -> float:
    name = corpus.name
    lengths, identity = {name: np.asarray(corpus.lengths)}, {name: corpus.fingerprint}
    plan = Mixture(lengths, identity, {name: 1.0}, seq_len=seq_len, seed=0, packing=packing)
    count = min(_MOST_ROWS, plan.rows_per_window * 8)
    return float(plan.rows(0, count).length.sum() / (count * seq_len))


def tokenizers_for(corpus: Corpus, config: RunConfig) -> Tokenizers:
    """The configuration's tokenizers; ValueError where the corpus was made with others."""
    text = text_tokenizer_of(config)
    made_with_vision = corpus.counts["vision_tokens"] > 0
    vision = vision_tokenizer_of(config) if made_with_vision else None
    found = {"text": text.fingerprint} | ({} if vision is None else {"vision": vision.fingerprint})
    for name, fingerprint in found.items():
        expected = corpus.tokenizers.get(name)
        if expected not in (None, fingerprint):
            raise ValueError(
                f"the corpus at {corpus.directory} was made with the {name} tokenizer {expected[:12]}, and "
                f"{config.name} has {fingerprint[:12]}; give the configuration it was built with"
            )
    return Tokenizers(text, vision)


def show(corpus: Corpus, count: int, tokenizers: Tokenizers | None, out: Path | None) -> Iterator[str]:
    """The first `count` examples, a few lines each; pictures of their clips in `out`."""
    for index in range(min(count, len(corpus))):
        example = corpus[index]
        head = f"example {index}: {len(example)} tokens, {int(example.learn.sum())} learned"
        if tokenizers is None:
            shown = " ".join(map(str, example.tokens[:16]))
            yield f"{head}: {shown}{' ...' if len(example) > 16 else ''}"
            continue
        yield f"{head} ({example.id}, from {example.source})"
        clips = 0
        for piece in untokenize(example.tokens, tokenizers.text, corpus.vocabulary):
            if isinstance(piece, str):
                yield f"  text: {piece[:_MOST_CHARACTERS]}{' ...' if len(piece) > _MOST_CHARACTERS else ''}"
                continue
            place = ""
            if out is not None and tokenizers.vision is not None and len(piece):
                chosen = np.linspace(0, len(piece) - 1, min(len(piece), _MOST_FRAMES)).round().astype(int)
                path = media.write(out / f"example_{index}_{clips}.png", tokenizers.vision.decode(piece[chosen]))
                place = f", drawn in {path}"
            yield f"  {len(piece)} frames of {piece.shape[1]} codes{place}"
            clips += 1


def draw_lengths(corpus: Corpus, out: Path) -> Path:
    """A histogram of the examples' lengths, by number and by tokens, on a logarithmic scale."""
    from matplotlib.figure import Figure

    lengths = np.asarray(corpus.lengths)
    low, high = max(1, int(lengths.min())), int(lengths.max()) + 1
    edges = np.unique(np.geomspace(low, max(high, low + 1), 41).round().astype(int))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    heights, _ = np.histogram(lengths, edges)
    tokens, _ = np.histogram(lengths, edges, weights=lengths)
    axes.stairs(heights / heights.sum(), edges, fill=True, color="tab:blue", alpha=0.6, label="share of the examples")
    axes.stairs(tokens / tokens.sum(), edges, color="tab:orange", linewidth=2, label="share of the tokens")
    axes.set_xscale("log", base=2)
    ticks = np.unique(np.geomspace(edges[0], edges[-1], 7).round().astype(int))
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks.tolist()], minor=False)
    axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    axes.set_xlabel("length of an example (tokens to predict)")
    axes.set_ylabel("share")
    axes.set_title(f"{corpus.name}: {len(corpus)} examples, {lengths.sum():,} tokens to predict")
    axes.legend()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "lengths.png"
    figure.savefig(path, dpi=120)
    return path
