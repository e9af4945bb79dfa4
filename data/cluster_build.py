"""Building a corpus on a cluster, as an Apache Beam pipeline: DirectRunner here, Dataflow, Flink or Spark there.

The records of a source are cut into shards. Every worker writes whole parts of the corpus (`data.build.write_shard`)
beside its final place, which must be a file system that all of them reach; frames are encoded in batches on whatever
accelerator the worker has. A shard that is done twice, or again after its worker died, makes the same part. At the end
this process reads the parts back and puts the corpus in place, as it would have written it alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from data.build import Item, Job, begin_shards, build_corpus, write_shard
from data.corpus import Corpus

# The items of a run of records; and what makes that in a worker: picklable, called once there, it may load a model.
MakeItems = Callable[[range], Iterable[tuple[int, Item]]]
OpenItems = Callable[[], MakeItems]

_opened: dict[tuple[str, str], MakeItems] = {}


def build_on_cluster(
    directory: str | os.PathLike[str],
    job: Job,
    open_items: OpenItems,
    *,
    num_records: int,
    num_shards: int,
    options: Sequence[str] = (),
    overwrite: bool = False,
    max_skipped_share: float = 0.1,
) -> Corpus:
    """The corpus of `job` in `directory`, made in `num_shards` shards by a Beam runner.

    options: Beam's own flags, such as `--runner=DataflowRunner --project=... --temp_location=...`; by default the
    pipeline runs in this process. The rest is as in `data.build.build_corpus`.

    ValueError where Beam is not installed, or as there.
    """
    if num_shards < 1:
        raise ValueError(f"num_shards is {num_shards}; it must be at least 1")
    beam = _beam()
    from apache_beam.options.pipeline_options import PipelineOptions

    shards = shard_ranges(num_records, num_shards)
    finished = begin_shards(directory, job, shards, overwrite)
    if finished is not None:
        return finished
    with beam.Pipeline(options=PipelineOptions(list(options), save_main_session=False)) as pipeline:
        _ = (
            pipeline
            | "Shards" >> beam.Create(list(enumerate(shards)))
            # Without it a runner may fuse all shards into one worker.
            | "Spread" >> beam.Reshuffle()
            | "Write" >> beam.Map(_write, str(directory), job, open_items)
        )
    return build_corpus(
        directory,
        job.name,
        _nothing_left,
        vocabulary=job.vocabulary,
        input_fingerprint=job.input_fingerprint,
        tokenizers=job.tokenizers,
        part_tokens=job.part_tokens,
        overwrite=overwrite,
        max_skipped_share=max_skipped_share,
    )


def shard_ranges(num_records: int, num_shards: int) -> list[range]:
    """Records 0 .. num_records - 1 in at most `num_shards` runs of nearly equal length."""
    count = max(1, min(num_records, num_shards))
    bounds = [number * num_records // count for number in range(count + 1)]
    return [range(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]


def _write(shard: tuple[int, range], directory: str, job: Job, open_items: OpenItems) -> int:
    part, records = shard
    # A worker writes many shards and opens its source, tokenizers and model once.
    key = (directory, job.input_fingerprint)
    if key not in _opened:
        _opened[key] = open_items()
    return write_shard(directory, job, part, records, _opened[key])


def _nothing_left(first: int) -> Iterator[tuple[int, Item]]:
    """All parts are whole: what a builder alone would make after them."""
    return iter(())


def _beam() -> Any:
    try:
        import apache_beam
    except ImportError:
        raise ValueError(
            "building on a cluster needs Apache Beam, which is not installed; install it with: pip install "
            "'lwm[beam]', without the constraints file, whose protobuf and pyarrow are newer than Beam allows"
        ) from None
    return apache_beam
