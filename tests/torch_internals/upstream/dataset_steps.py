"""Shards of a stream have other rows than the stream after a step that groups rows, and nothing public says so."""

import datasets


def rows(shards):
    for shard in shards:
        yield from ({"id": 5 * shard + row} for row in range(5))


def total(batch):
    return {"id": [sum(batch["id"])]}


stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]})
grouped = stream.map(total, batched=True, batch_size=3)
shards = [grouped.shard(num_shards=2, index=index) for index in range(2)]
whole = [row["id"] for row in grouped]
if sorted(row["id"] for shard in shards for row in shard) != sorted(whole):
    raise SystemExit(
        "the shards of a grouped stream have other rows, and `map` is the same step with and without"
    )
