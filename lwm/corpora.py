"""Building the corpora that a configuration names: its tokenizers and vocabulary, one source, one directory."""

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from data.book import CHUNK_TOKENS
from data.build import PART_TOKENS, Item, Job, build_corpus
from data.cluster_build import MakeItems, build_on_cluster
from data.corpus import Corpus
from data.examples import check_fit
from data.prepare import Encoder, Limits, Preparer, Worker, prepared
from data.sources import Source, open_source
from data.text import TextTokenizer
from data.vocabulary import Vocabulary
from lwm.config import ConfigError, RunConfig
from lwm.vision_tokenizer import VisionTokenizer


def vocabulary_of(config: RunConfig) -> Vocabulary:
    """The id space of a run: text ids, then the vision codes if it has a vision tokenizer."""
    if config.vqgan is None:
        return Vocabulary(config.model.text_vocab_size)
    return Vocabulary(config.model.text_vocab_size, config.vqgan.num_embeddings, config.model.vision_vocab_size)


def corpus_directory(config: RunConfig, name: str) -> Path:
    """Where corpus `name` is, or will be; ValueError lists those the configuration has."""
    for corpus in config.corpora:
        if corpus.name == name:
            return Path(corpus.directory)
    known = ", ".join(corpus.name for corpus in config.corpora)
    raise ConfigError(f"{config.name} has no corpus {name!r}; its corpora are {known}")


def text_tokenizer_of(config: RunConfig) -> TextTokenizer:
    """The text tokenizer that `tokenizers.text` names; ValueError when it is not set or cannot be read."""
    if config.tokenizers.text is None:
        raise ConfigError(f"{config.name}: tokenizers.text is not set; train one with `lwm tokenizer train-text`")
    return TextTokenizer.load(config.tokenizers.text)


def vision_tokenizer_of(config: RunConfig) -> VisionTokenizer:
    """The vision tokenizer in `tokenizers.vision`; ValueError when it is not set, not there, or not of `vqgan`."""
    directory = config.tokenizers.vision
    if config.vqgan is None or directory is None:
        missing = "vqgan" if config.vqgan is None else "tokenizers.vision"
        raise ConfigError(f"{config.name}: {missing} is not set, so there is no vision tokenizer for images and videos")
    tokenizer = VisionTokenizer.load(directory)
    if tokenizer.config != config.vqgan:
        raise ConfigError(
            f"{config.name}: the vision tokenizer in {directory} is not of the configuration's vqgan; train it again, "
            "or set vqgan to what it was trained with"
        )
    return tokenizer


@dataclass(frozen=True)
class BuildOptions:
    """How a source becomes examples, and by how many processes (0: this one); `max_bad`: share of bad ones allowed."""

    limits: Limits = Limits()
    chunk_tokens: int = CHUNK_TOKENS
    processes: int = 0
    max_bad: float = 0.1
    overwrite: bool = False


def build_from_source(
    config: RunConfig,
    name: str,
    source: Source,
    options: BuildOptions = BuildOptions(),
    *,
    vision: VisionTokenizer | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> Corpus:
    """Tokenize a source (`data.sources`) into the directory that the configuration gives corpus `name`.

    Goes on where an earlier build of the same source ended. `vision` is needed where the source has images or videos.
    `progress` is called with the number of records done, and frames and tokens per second.

    Raises:
        ValueError: a bad manifest, tokenizer or directory, or too many bad files; one sentence.
        OSError: the source cannot be read.
    """
    directory = corpus_directory(config, name)
    job, worker = plan_build(config, name, source, options, vision)
    encoder = Encoder(job.vocabulary, None if vision is None else vision.encode)
    begin = time.monotonic()

    def report(record: int) -> None:
        if progress is not None:
            seconds = max(time.monotonic() - begin, 1e-9)
            frames = f"{encoder.frames / seconds:.1f} frames/s, " if encoder.frames else ""
            progress(record + 1, f"{frames}{encoder.tokens / seconds:.0f} tokens/s")

    def items(first: int) -> Iterator[tuple[int, Item]]:
        return encoder(prepared(source.records(first), first, worker, options.processes), report)

    return build_corpus(
        directory,
        name,
        items,
        vocabulary=job.vocabulary,
        input_fingerprint=job.input_fingerprint,
        tokenizers=job.tokenizers,
        part_tokens=job.part_tokens,
        overwrite=options.overwrite,
        max_skipped_share=options.max_bad,
    )


@dataclass(frozen=True)
class OpenItems:
    """What a worker of a cluster makes of a source's records; everything is opened where it is called."""

    config: RunConfig
    name: str
    source: Path
    templates: tuple[str, ...]
    columns: tuple[tuple[str, str], ...]
    options: BuildOptions

    def __call__(self) -> MakeItems:
        source = open_source(self.source, templates=self.templates, columns=dict(self.columns))
        vision = vision_tokenizer_of(self.config) if source.has_media else None
        job, worker = plan_build(self.config, self.name, source, self.options, vision)
        encoder = Encoder(job.vocabulary, None if vision is None else vision.encode)

        def items(records: range) -> Iterator[tuple[int, Item]]:
            mine = itertools.islice(source.records(records.start), len(records))
            return encoder(prepared(mine, records.start, worker, self.options.processes))

        return items


def build_by_beam(opened: OpenItems, source: Source, shards: int, flags: Sequence[str]) -> Corpus:
    """`build_from_source` as a Beam pipeline of so many shards; `flags` are Beam's (`data.cluster_build`)."""
    config, options = opened.config, opened.options
    vision = vision_tokenizer_of(config) if source.has_media else None
    job, _ = plan_build(config, opened.name, source, options, vision)
    return build_on_cluster(
        corpus_directory(config, opened.name),
        job,
        opened,
        num_records=source.total,
        num_shards=shards,
        options=flags,
        overwrite=options.overwrite,
        max_skipped_share=options.max_bad,
    )


def plan_build(
    config: RunConfig, name: str, source: Source, options: BuildOptions, vision: VisionTokenizer | None
) -> tuple[Job, Worker]:
    """What decides the corpus, and what prepares its records."""
    tokenizer, vocabulary = text_tokenizer_of(config), vocabulary_of(config)
    check_fit(tokenizer, vocabulary)
    frame_size = None if config.vqgan is None else config.vqgan.resolution
    facts = [
        source.fingerprint, tokenizer.fingerprint, "" if vision is None else vision.fingerprint, asdict(vocabulary),
        frame_size, asdict(options.limits), options.chunk_tokens,
    ]  # fmt: skip
    tokenizers = {"text": tokenizer.fingerprint} | ({} if vision is None else {"vision": vision.fingerprint})
    job = Job(
        name,
        vocabulary,
        hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
        tokenizers,
        # Frames take long to make: a build that ends early should lose few of them.
        part_tokens=PART_TOKENS // 8 if source.has_media else PART_TOKENS,
    )
    codes = 0 if vision is None else vision.codes_per_frame
    return job, Worker(Preparer(tokenizer, options.limits, frame_size, codes), options.chunk_tokens)
