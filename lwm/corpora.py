"""Building the corpora that a configuration names: its tokenizers and vocabulary, one manifest, one directory."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from data.build import Corpus, build_corpus
from data.examples import EncodeFrames, tokenize_all
from data.manifest import read_manifest
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


def has_media(manifest: Path) -> bool:
    """Whether a manifest names images or videos."""
    return any(span.kind != "text" for example in read_manifest(manifest) for span in example.spans)


def build_from_manifest(
    config: RunConfig,
    name: str,
    manifest: Path,
    *,
    encode_frames: EncodeFrames | None = None,
    encoder_fingerprint: str = "",
    fps: float = 1.0,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Corpus:
    """Tokenize a JSONL manifest (`data.manifest`) into the directory that the configuration gives corpus `name`.

    Args:
        encode_frames: uint8 [T, H, W, 3] -> codes; needed where the manifest names images or videos.
        encoder_fingerprint: identifies its weights, so that a corpus of other codes is not taken for this one.
        fps: frames per second of videos that do not say.
        overwrite: replace a corpus made from other input.
        progress: called with the number of examples so far.

    Raises:
        ValueError: a bad manifest, tokenizer or directory; one sentence.
        OSError: the manifest cannot be read.
    """
    directory = corpus_directory(config, name)
    tokenizer = text_tokenizer_of(config)
    vocabulary = vocabulary_of(config)
    frame_size = None if config.vqgan is None else config.vqgan.resolution
    with manifest.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    parts = [content, tokenizer.fingerprint, encoder_fingerprint, asdict(vocabulary), frame_size, fps]
    examples = read_manifest(manifest)
    return build_corpus(
        directory,
        name,
        tokenize_all(examples, tokenizer, vocabulary, encode_frames, frame_size=frame_size, fps=fps),
        vocabulary=vocabulary,
        input_fingerprint=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),
        tokenizers={"text": tokenizer.fingerprint} | ({"vision": encoder_fingerprint} if encoder_fingerprint else {}),
        overwrite=overwrite,
        progress=progress,
    )
