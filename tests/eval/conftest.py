"""A small text world and a small video world to hide needles in."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from data.build import build_corpus
from data.examples import TokenizedExample
from data.synthetic import CITIES, Haystack, needle_question, needle_sentence, sentences, shape_clip
from data.text import train_tokenizer
from data.vocabulary import Vocabulary
from eval.haystack import VideoHaystack
from eval.needle_video import encode_plates
from lwm.config import RunConfig

NUM_CODES = 4096


@pytest.fixture(scope="session")
def texts():
    return list(sentences(np.random.default_rng(0), 600))


@pytest.fixture(scope="session")
def tokenizer(texts, tmp_path_factory):
    needles = [
        text for city in CITIES for text in (needle_sentence(5, city), f"USER: {needle_question(city)} ASSISTANT:")
    ]
    return train_tokenizer([*texts, *needles], tmp_path_factory.mktemp("text") / "t.model", size=400)


@pytest.fixture(scope="session")
def text_haystack(texts, tokenizer):
    return Haystack([" ".join(texts)], tokenizer)


@pytest.fixture(scope="session")
def vocabulary(tokenizer):
    return Vocabulary(tokenizer.size, num_codes=NUM_CODES, vision_size=NUM_CODES + 2)


def encode_frames(pixels):
    """Stands for a vision tokenizer: each of 2 x 2 quarters of a frame becomes a hash of its pixels; [T, 2, 2]."""
    quarters = pixels.reshape(len(pixels), 2, pixels.shape[1] // 2, 2, pixels.shape[2] // 2, 3).swapaxes(2, 3)
    codes = [
        int(hashlib.sha256(q.tobytes()).hexdigest(), 16) % NUM_CODES for q in quarters.reshape(-1, *quarters.shape[3:])
    ]
    return np.array(codes).reshape(len(pixels), 2, 2)


@pytest.fixture(scope="session")
def clips():
    """Pixels of three clips, uint8 [T, 32, 32, 3]."""
    return [
        shape_clip(np.random.default_rng(seed), num_frames, 32)[0] for seed, num_frames in ((1, 30), (2, 7), (3, 50))
    ]


@pytest.fixture(scope="session")
def video_haystack(clips):
    return VideoHaystack(tuple(encode_frames(clip).reshape(len(clip), -1) for clip in clips))


@pytest.fixture(scope="session")
def plates():
    return encode_plates(encode_frames, 32)


@pytest.fixture
def needles_config(tmp_path: Path, texts: list[str]) -> RunConfig:
    """A run of one short stage of text that ends with needles."""
    model_file = tmp_path / "text.model"
    tokenizer = train_tokenizer(texts, model_file, size=360)

    def example(number: int) -> TokenizedExample:
        tokens = np.asarray(tokenizer.encode(texts[number]), np.int32)
        return TokenizedExample(tokens, np.arange(tokens.size) > 0, str(number), "test")

    build_corpus(
        tmp_path / "corpus",
        "text",
        map(example, range(64)),
        vocabulary=Vocabulary(tokenizer.size),
        input_fingerprint="test",
    )
    stage = {
        "name": "only",
        "seq_len": 128,
        "batch_rows": 8,
        "steps": 2,
        "rope_theta": 1e4,
        "optimizer": {"peak_lr": 1e-3, "warmup_steps": 0},
        "mixture": ({"corpus": "text", "share": 1.0},),
        "needles": {"lengths": (96,), "depths": (0.5,), "rounds": 1},
    }
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 4}
    return RunConfig.model_validate(
        {
            "name": "needles",
            "output_dir": str(tmp_path / "run"),
            "model": {"text_vocab_size": tokenizer.size, **sizes},
            "tokenizers": {"text": str(model_file)},
            "corpora": ({"name": "text", "directory": str(tmp_path / "corpus")},),
            "stages": (stage,),
            "telemetry": {"wandb": "off"},
        }
    )
