# SPDX-License-Identifier: Apache-2.0
"""Batches with equally many tokens: their sizes, what each shard reads, and runs that continue on other ranks."""

import numpy as np
import pytest
import torch
from loaders import Ids
from packed import corpus, log_normal, network, per_token_loss, unpacked_run, weights_of
from states import reset_states
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.core.errors import ConfigurationError
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import TokenBatchSampler


def batches_of(sampler, epoch=0):
    sampler.set_epoch(epoch)
    return list(sampler)


def imbalance(sizes, ranks):
    """The largest batch of each step to the mean of the step, for the worst step."""
    steps = len(sizes) // ranks
    by_step = np.array(sizes[: steps * ranks]).reshape(steps, ranks)
    return (by_step.max(1) / by_step.mean(1)).max() - 1


@pytest.mark.parametrize(
    ("lengths", "budget"),
    [
        (log_normal(6000, 6, 1, 8192), 8192),
        (log_normal(8000, 6, 1.5, 16384), 16384),
        (log_normal(5000, 6, 0.5, 8192), 8192),
        # Few documents in a batch.
        (log_normal(3000, 7, 0.5, 4096), 4096),
        (log_normal(3000, 7, 1, 4096), 4096),
    ],
    ids=["usual", "wide", "narrow", "few, narrow", "few"],
)
def test_batches_of_a_step_are_balanced(lengths, budget):
    sampler = TokenBatchSampler(lengths, budget)
    assert len(sampler) <= 1.12 * lengths.sum() / budget
    shuffled = []
    for epoch in range(3):
        batches = batches_of(sampler, epoch)
        shuffled.append(batches)
        assert len(batches) == len(sampler)
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        sizes = [int(lengths[batch].sum()) for batch in batches]
        assert max(sizes) <= budget
        for ranks in (1, 2, 4, 8, 16, 64):
            assert imbalance(sizes, ranks) < 0.05, (epoch, ranks)
    # Another order, and other companions.
    assert shuffled[0] == batches_of(TokenBatchSampler(lengths.tolist(), budget))
    assert shuffled[0] != batches_of(TokenBatchSampler(lengths, budget, seed=1))
    company = [{index: set(batch) for batch in batches for index in batch} for batches in shuffled]
    same = [len(company[0][index] & company[1][index]) - 1 for index in range(len(lengths))]
    others = [len(company[0][index]) - 1 for index in range(len(lengths))]
    assert sum(same) < 0.1 * sum(others)


def test_the_number_of_batches():
    lengths = log_normal(3000, 6, 1, 8192)
    fewest = -(-int(lengths.sum()) // 8192)
    sampler = TokenBatchSampler(lengths, 8192)
    assert fewest <= len(sampler) <= 1.04 * fewest
    assert len(sampler) % 8 == 0
    for multiple in (1, 7, 24, 96):
        sampler = TokenBatchSampler(torch.from_numpy(lengths), 8192, multiple_of=multiple)
        assert len(list(sampler)) == len(sampler)
        assert len(sampler) % multiple == 0
        assert len(sampler) < 1.04 * fewest + multiple
    # One document in each batch.
    sampler = TokenBatchSampler([60] * 7, 100)
    assert sorted(sampler) == [[index] for index in range(7)]


def test_epochs():
    sampler = TokenBatchSampler(log_normal(500, 6, 1, 8192), 8192)
    epochs = [batches_of(sampler, epoch) for epoch in range(3)]
    sampler.set_epoch(0)
    # Without set_epoch they follow one another, in a torch loader and in a prepared one.
    loader = DataLoader(Ids(500), batch_sampler=sampler)
    assert [[batch["id"].tolist() for batch in loader] for _ in range(3)] == epochs
    sampler = TokenBatchSampler(sampler.lengths, 8192)
    loader = prepare_data_loader(DataLoader(Ids(500), batch_sampler=sampler), None, 1, 0)
    assert [[batch["id"].tolist() for batch in loader] for _ in range(3)] == epochs
    loader.set_epoch(1)
    assert [batch["id"].tolist() for batch in loader] == epochs[1]
    fixed = TokenBatchSampler(sampler.lengths, 8192, shuffle=False)
    assert list(fixed) == list(fixed)


@pytest.mark.parametrize(
    ("lengths", "options", "facts"),
    [
        ([5, 0, 3], {}, ["document 1", "length 0"]),
        ([5, 200, 3], {}, ["document 1", "200 tokens", "100"]),
        ([5.0, 3.0], {}, ["float64"]),
        (["a", "b"], {}, ["lengths"]),
        ([], {}, ["[0]"]),
        ([5, 4, 3], {"multiple_of": 4}, ["3 documents", "4 batches"]),
    ],
)
def test_bad_input(lengths, options, facts):
    with pytest.raises(ConfigurationError) as error:
        TokenBatchSampler(lengths, 100, **options)
    for fact in ["TokenBatchSampler", *facts]:
        assert fact in str(error.value)


LENGTHS = log_normal(700, 4, 1, 512)


def shard(shards, index, **options):
    sampler = TokenBatchSampler(LENGTHS, 512)
    loader = DataLoader(Ids(len(LENGTHS)), batch_sampler=sampler)
    return prepare_data_loader(loader, num_processes=shards, process_index=index, **options)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shards", [2, 3, 4, 16, 64])
def test_shards_read_every_document_once(shards, exact):
    count = len(TokenBatchSampler(LENGTHS, 512))
    steps = -(-count // shards)
    read = []
    for index in range(shards):
        loader = shard(shards, index, exact=exact)
        assert len(loader) == steps
        batches = []
        for batch in loader:
            ids = batch["id"].tolist()
            batches.append(ids[: loader.batch_counts[index]])
        assert len(batches) == steps
        read.append(batches)
    assert sorted(ids for batches in read for batch in batches for ids in batch) == list(
        range(len(LENGTHS))
    )


def test_an_epoch_continues_on_other_shards():
    expected = batches_of(TokenBatchSampler(LENGTHS, 512), epoch=1)
    found = []
    state = None
    for shards, stop in ((2, 9), (1, 5), (4, 3), (2, None)):
        loaders = [shard(shards, index) for index in range(shards)]
        for loader in loaders:
            if state is None:
                loader.set_epoch(1)
            else:
                loader.load_state_dict(state)
        passes = [iter(loader) for loader in loaders]
        for step, batches in enumerate(zip(*passes, strict=True), 1):
            found += [batch["id"].tolist() for batch in batches]
            if step == stop:
                break
        state = loaders[0].state_dict()
        assert state["order"] == {"seed": 0} if stop else "order" not in state
    assert found[: len(expected)] == expected
    assert len(found) - len(expected) < 2


def join(documents):
    """Documents one after the other, without padding."""
    labels = torch.cat(documents)
    ends = torch.tensor([0, *map(len, documents)]).cumsum(0)
    labels[ends[:-1]] = -100
    return {"tokens": torch.cat(documents)[None], "labels": labels[None], "bounds": ends}


def train(folder, stop, resume, window=4):
    """Two epochs, from a checkpoint or until one. Returns the weights and the lengths of the documents read."""
    reset_states()
    documents = corpus(120)
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = window // accelerator.num_processes
    sampler = TokenBatchSampler([len(document) for document in documents], 128, multiple_of=window)
    loader = DataLoader(documents, batch_sampler=sampler, collate_fn=join)
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), loader
    )
    first = 0
    if resume:
        accelerator.load_state(folder)
        first = loader.iteration
    sums = []
    for epoch in range(first, 2):
        for step, batch in enumerate(loader, 1):
            with accelerator.accumulate(model):
                losses = per_token_loss(model, batch["tokens"], batch["labels"])
                items = (batch["labels"] != -100).sum()
                accelerator.backward(losses.sum() / items, num_items=items)
                optimizer.step()
                optimizer.zero_grad()
            sizes = batch["bounds"].diff().tolist()
            per_document = torch.stack([part.sum() for part in batch["tokens"][0].split(sizes)])
            sums += accelerator.gather_for_metrics(per_document).tolist()
            if (epoch, step) == stop:
                accelerator.save_state(folder)
                return weights_of(accelerator.unwrap_model(model)), sums
    return weights_of(accelerator.unwrap_model(model)), sums


def test_training_continues_on_other_ranks(ranks, tmp_path):
    documents = corpus(120)
    sampler = TokenBatchSampler([len(document) for document in documents], 128, multiple_of=4)
    batches = [*batches_of(sampler, 0), *batches_of(sampler, 1)]
    steps = []
    for start in range(0, len(batches), 4):
        steps.append([number for batch in batches[start : start + 4] for number in batch])
    expected = unpacked_run(documents, steps)
    first = ranks(2).run(train, tmp_path, (0, 6), False)
    second = ranks(1).run(train, tmp_path, (1, 8), True)
    third = ranks(2).run(train, tmp_path, None, True)
    for weights, _ in third:
        assert torch.allclose(weights, expected, rtol=0, atol=1e-10)
    # Every rank has gathered the results of all documents, in the order of the batches.
    found = first[0][1] + second[0][1] + third[0][1]
    assert found == [int(documents[number].sum()) for batch in batches for number in batch]
