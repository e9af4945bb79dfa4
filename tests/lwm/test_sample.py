"""Generation against the plain model: every id must be what `model.logits` of the whole sequence says."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.vocabulary import Vocabulary
from lwm import drawing, model, sharding
from lwm.config import MeshConfig, ModelConfig, load_config
from lwm.sample import Sampler

VOCABULARY = Vocabulary(40, 10, 16)
# Large initial weights, so that the likeliest ids differ from one another clearly and depend on the whole prompt.
CONFIG = ModelConfig(
    text_vocab_size=40,
    vision_vocab_size=16,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    init_std=0.3,
)


@pytest.fixture(scope="module")
def params() -> Any:
    return model.init(CONFIG, jax.random.key(0))


def prompts(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, CONFIG.vocab_size, length).astype(np.int32) for length in lengths]


_LENGTH = 112
_logits = jax.jit(lambda params, tokens: model.logits(CONFIG, params, tokens))


def next_logits(params: Any, sequences: list[list[int]]) -> np.ndarray:
    """float32 [N, V]: the plain model's logits after each sequence, in one call (causality hides the padding)."""
    tokens = np.zeros((len(sequences), _LENGTH), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
    logits = np.asarray(_logits(params, jnp.asarray(tokens)))
    return logits[np.arange(len(sequences)), [len(sequence) - 1 for sequence in sequences]]


# new ids of a row so far -> the ids that may follow
Allowed = Callable[[list[int]], Sequence[int]]


def greedy(
    params: Any, rows: list[np.ndarray], steps: int, allowed: Allowed = lambda new: range(CONFIG.vocab_size)
) -> list[list[int]]:
    """The likeliest allowed ids, one at a time, each from the whole sequence before it; never a near tie."""
    news: list[list[int]] = [[] for _ in rows]
    for _ in range(steps):
        logits = next_logits(params, [[*row.tolist(), *new] for row, new in zip(rows, news, strict=True)])
        for new, scores in zip(news, logits, strict=True):
            ids = list(allowed(new))
            order = sorted(ids, key=lambda i: -scores[i])
            assert len(ids) == 1 or scores[order[0]] - scores[order[1]] > 1e-4, "a near tie; choose another seed"
            new.append(order[0])
    return news


def make(params: Any, mesh: dict[str, int] | None = None, **options: Any) -> Sampler:
    where = None if mesh is None else sharding.make_mesh(MeshConfig(**mesh))
    return Sampler(CONFIG, params, mesh=where, vocabulary=VOCABULARY, **{"max_length": 200, **options})


MESHES: dict[str, dict[str, Any]] = {
    "one device": {},
    "striped": {"mesh": {"fsdp": 2, "sp": 4}, "layout": "striped"},
    "zigzag, sharded weights": {
        "mesh": {"fsdp": 2, "tp": 2, "sp": 2},
        "layout": "zigzag",
        "query_block": 16,
        "replicate_weights": False,
    },
}


@pytest.mark.parametrize("name", MESHES)
def test_cache_equals_teacher_forcing(params: Any, name: str) -> None:
    """Rows of different lengths in one batch; new ids lie in the shards of several devices."""
    rows = prompts(57, 3, 90, 64, 1)
    sampler = make(params, **MESHES[name])
    expected = greedy(params, rows, 20)
    assert sampler.generate(rows, max_new_tokens=20, modality="any") == expected
    # The same programs serve other lengths, fewer rows and fewer ids.
    assert sampler.generate(rows[3:1:-1], max_new_tokens=9, modality="any") == [row[:9] for row in expected[3:1:-1]]
    assert len(sampler.programs) == 1
    assert (sampler.usage.prompt_tokens, sampler.usage.new_tokens) == (215 + 154, 5 * 20 + 2 * 9)


@pytest.mark.parametrize("name", ["one device", "zigzag, sharded weights"])
def test_prompts_read_in_chunks(params: Any, name: str) -> None:
    """Chunks that end inside one row and after another, answers that begin in different chunks, and a stream."""
    rows = prompts(57, 3, 90, 64, 1)
    sampler = make(params, **MESHES[name], prefill_chunk=40)
    expected = greedy(params, rows, 9)
    assert sampler.generate(rows, max_new_tokens=9, modality="any") == expected
    assert sampler.usage.prompt_tokens == 215
    (shape,) = sampler.programs
    assert sampler.programs[shape].prefill is None


def test_what_was_read_is_not_read_again(params: Any) -> None:
    """Questions about one haystack, a conversation that goes on, and a prompt that has nothing to do with either."""
    sampler = make(params, mesh={"fsdp": 2, "sp": 4}, layout="striped", prefill_chunk=48)
    hay, first, second, other = prompts(90, 6, 4, 50, seed=3)
    streamed: list[int] = []

    def ask(prompt: np.ndarray, read: int) -> list[int]:
        before = (sampler.usage.prompt_tokens, sampler.usage.reused_tokens)
        streamed.clear()
        (ids,) = sampler.generate(
            [prompt],
            max_new_tokens=6,
            modality="any",
            reuse=True,
            on_tokens=lambda index, new: streamed.extend(new),
        )
        assert ids == streamed == greedy(params, [prompt], 6)[0]
        assert sampler.usage.prompt_tokens - before[0] == read
        assert sampler.usage.reused_tokens - before[1] == len(prompt) - read
        return ids

    answer = ask(np.concatenate([hay, first]), 96)
    # All but the last new id are in the cache.
    ask(np.concatenate([hay, first, np.asarray(answer, np.int32)]), 1)
    ask(np.concatenate([hay, second]), 4)
    ask(np.concatenate([hay, second]), 1)
    ask(other, 50)
    with pytest.raises(ValueError, match="reuse is set for 9 prompts"):
        sampler.generate([other] * 9, max_new_tokens=6, reuse=True)


@pytest.fixture(scope="module")
def small(params: Any) -> Sampler:
    """One device, a context of 70 tokens, at most four rows: all tests below fit its programs."""
    sampler = make(params, max_length=70, max_batch=4)
    sampler.generate(prompts(9, 9, 9, 9), max_new_tokens=16)
    return sampler


TEXT = range(VOCABULARY.text_size)
CODES = range(VOCABULARY.text_size, VOCABULARY.eof)


def test_text_only_stop_and_context(params: Any, small: Sampler) -> None:
    rows = prompts(30, 61, 12, seed=1)
    expected = greedy(params, rows, 16, lambda new: TEXT)
    # The second prompt leaves room for nine ids.
    assert small.generate(rows, max_new_tokens=16) == [expected[0], expected[1][:9], expected[2]]
    parts: list[list[int]] = [[], [], []]
    small.generate(rows, max_new_tokens=16, on_tokens=lambda index, new: parts[index].extend(new))
    assert parts == [expected[0], expected[1][:9], expected[2]]
    assert 0 < small.usage.first_token_seconds < small.usage.prefill_seconds + small.usage.decode_seconds
    stop = expected[0][5]
    cut = [row[: row.index(stop)] if stop in row else row for row in (expected[0], expected[1][:9], expected[2])]
    assert small.generate(rows, max_new_tokens=16, stop_id=stop) == cut
    assert small.generate(rows[:1], max_new_tokens=16, stop_id=expected[0][0]) == [[]]
    assert small.generate([], max_new_tokens=16) == []
    # More prompts than max_batch: one batch after the other.
    assert small.generate(rows * 2, max_new_tokens=3) == [row[:3] for row in expected * 2]
    assert len(small.programs) == 1


def frames(new: list[int], codes_per_frame: int, num_frames: int | None) -> Sequence[int]:
    """What may follow inside media: counted from the ids themselves."""
    if VOCABULARY.eov in new:
        return TEXT
    if len(new) % (codes_per_frame + 1) < codes_per_frame:
        return CODES
    if num_frames is None:
        return (VOCABULARY.eof, VOCABULARY.eov)
    return (VOCABULARY.eov if len(new) == num_frames * (codes_per_frame + 1) - 1 else VOCABULARY.eof,)


def test_inside_media(params: Any, small: Sampler) -> None:
    rows = prompts(20, 7, 33, seed=2)
    expected = greedy(params, rows, 12, lambda new: frames(new, 3, 2))
    given: dict[str, Any] = {"modality": "vision", "codes_per_frame": 3}
    assert small.generate(rows, max_new_tokens=12, num_frames=2, **given) == expected
    for ids in small.generate(rows, max_new_tokens=12, num_frames=2, stop_id=VOCABULARY.eov, **given):
        codes = VOCABULARY.split_frames([*ids, VOCABULARY.eov])
        assert codes.shape == (2, 3)
    expected = greedy(params, rows, 16, lambda new: frames(new, 3, None))
    assert small.generate(rows, max_new_tokens=16, **given) == expected
    # Without a size the model ends frames itself, but never an empty one, and unused ids stay unused.
    for ids in small.generate(rows, max_new_tokens=16, modality="vision"):
        inside = ids[: ids.index(VOCABULARY.eov) + 1] if VOCABULARY.eov in ids else ids
        assert all(CODES.start <= i <= VOCABULARY.eov for i in inside)
        assert inside[0] in CODES
        assert all(i in CODES for i, before in zip(inside[1:], inside, strict=False) if before == VOCABULARY.eof)


def test_text_with_media(params: Any, small: Sampler) -> None:
    rows = prompts(20, 7, 33, seed=3)
    # An id that the model writes soon anyway plays <vision>.
    marker = greedy(params, rows, 4, lambda new: TEXT)[0][2]

    def may(new: list[int]) -> Sequence[int]:
        while marker in new:
            inside = new[new.index(marker) + 1 :]
            if VOCABULARY.eov not in inside:
                return frames(inside, 2, 2)
            new = inside[inside.index(VOCABULARY.eov) + 1 :]
        return TEXT

    expected = greedy(params, rows, 16, may)
    assert any(VOCABULARY.eov in row for row in expected)
    options: dict[str, Any] = {"modality": "mixed", "vision_start": marker, "codes_per_frame": 2, "num_frames": 2}
    assert small.generate(rows, max_new_tokens=16, **options) == expected
    assert len(small.programs) == 1


def test_seeds(small: Sampler) -> None:
    rows = prompts(20, 7, 33, 8, seed=4)
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0}
    drawn = small.generate(rows, seed=1, **options)
    assert drawn == small.generate(rows, seed=1, **options)
    assert drawn != small.generate(rows, seed=2, **options)
    # A prompt's draws depend on its index, not on its neighbours.
    assert small.generate(rows[:2], seed=1, **options) == drawn[:2]
    same = small.generate([rows[0]] * 2, seed=1, **options)
    assert same[0] != same[1]
    assert small.generate(rows, top_k=1, **options) == small.generate(rows, max_new_tokens=12)
    assert small.generate(rows, top_p=1e-6, **options) == small.generate(rows, max_new_tokens=12)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "kept"),
    [
        (1.0, None, None, [0, 1, 2, 3, 4]),
        (0.5, None, None, [0, 1, 2, 3, 4]),
        (2.0, 2, None, [0, 1]),
        # Shares 0.5, 0.25, 0.125, 0.1, 0.025: three reach 0.8, and of the top three the first two reach 0.85.
        (1.0, None, 0.8, [0, 1, 2]),
        (1.0, 3, 0.85, [0, 1]),
    ],
)
def test_draws_follow_the_distribution(
    temperature: float, top_k: int | None, top_p: float | None, kept: list[int]
) -> None:
    shares = np.array([0.5, 0.25, 0.125, 0.1, 0.025])
    count = 20000
    order = np.array([3, 0, 4, 1, 2])
    logits = np.full(6, -np.inf)
    logits[order] = np.log(shares)
    settings = drawing.make_settings(temperature, top_k, top_p, None)
    keys = jax.random.split(jax.random.key(0), count)
    ids = drawing.draw(jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1)), keys, jnp.asarray(3), settings)
    expected = np.zeros(6)
    expected[order[kept]] = shares[kept] ** (1 / temperature)
    expected /= expected.sum()
    found = np.bincount(np.asarray(ids), minlength=6) / count
    # Five standard deviations of a share.
    assert np.all(np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / count))


def test_guidance(params: Any, small: Sampler) -> None:
    prompt, other = prompts(24, 5, seed=5)

    def guided(scale: float, steps: int) -> list[int]:
        new: list[int] = []
        for _ in range(steps):
            given, free = next_logits(params, [[*prompt.tolist(), *new], [*other.tolist(), *new]]).astype(np.float64)
            scores = free + scale * (given - free)
            new.append(max(frames(new, 3, 3), key=lambda i: scores[i]))
        return new

    options: dict[str, Any] = {"num_frames": 3, "codes_per_frame": 3, "temperature": 0.0}
    for scale in (0.0, 1.0, 4.0):
        codes = small.generate_video(prompt, guidance=scale, unconditional=other, **options)
        assert VOCABULARY.vision_tokens(codes).tolist() == guided(scale, 12)
    plain = small.generate_video(prompt, **options)
    assert np.array_equal(plain, small.generate_video(prompt, guidance=1.0, **options))
    assert plain.shape == (3, 3)


def test_refusals(params: Any, small: Sampler) -> None:
    def says(text: str, call: Callable[[], object]) -> None:
        with pytest.raises(ValueError) as error:
            call()
        assert text in str(error.value)

    (fits, long) = prompts(69, 75)
    assert len(small.generate([fits], max_new_tokens=5)[0]) == 1
    says(
        "prompt 1 has 75 tokens, but the model's context is 70", lambda: small.generate([fits, long], max_new_tokens=5)
    )
    says("shorten it by 6", lambda: small.generate([long], max_new_tokens=5))
    says("at least one integer id", lambda: small.generate([fits[:0]], max_new_tokens=5))
    says("has ids from", lambda: small.generate([fits + 40], max_new_tokens=5))
    says("max_new_tokens is 0", lambda: small.generate([fits], max_new_tokens=0))
    says("modality is 'speech'", lambda: small.generate([fits], max_new_tokens=5, modality="speech"))
    says("vision_start is not given", lambda: small.generate([fits], max_new_tokens=5, modality="mixed"))
    says("codes_per_frame is 0", lambda: small.generate([fits], max_new_tokens=5, codes_per_frame=0))
    says("without unconditional", lambda: small.generate([fits], max_new_tokens=5, guidance=2.0))
    for name, value in (("temperature", -1.0), ("top_k", 0), ("top_p", 0.0), ("guidance", -1.0)):
        says(f"{name} is {value}", partial(small.generate, [fits], max_new_tokens=5, **{name: value}))
    says("20 frames of 3 codes take 80", lambda: small.generate_video(fits[:8], num_frames=20, codes_per_frame=3))
    says("max_batch is 0", lambda: make(params, max_batch=0))
    says("text_vocab_size is 40", lambda: Sampler(CONFIG, params, vocabulary=Vocabulary(41), max_length=8))


def test_a_stage_says_how_to_run(params: Any) -> None:
    stage = load_config("tiny", ["stages.s1024.attention.key_block=32", "stages.s1024.compute_dtype=float32"]).stage(
        "s1024"
    )
    sampler = Sampler.for_stage(
        CONFIG, params, stage, sharding.make_mesh(stage.mesh), vocabulary=VOCABULARY, max_batch=3
    )
    plan = sampler.compute.plan
    assert plan is not None
    assert (plan.layout, plan.strategy, plan.key_block, plan.num_shards) == ("zigzag", "ring", 32, 2)
    assert (sampler.max_length, sampler.max_batch) == (1024, 3)
    assert sampler.config.rope_theta == 4e4
    query = sampler.params["layers"]["query"]
    assert (query.sharding.spec[2], query.dtype) == ("tp", jnp.float32)
    assert not query.is_fully_replicated
    assert sampler.params["layers"]["mlp_norm"].is_fully_replicated
