# SPDX-License-Identifier: Apache-2.0
"""Rows of packed documents: what is in them, training on them, and results of their documents."""

import pickle

import numpy as np
import pytest
import torch
from packed import corpus, log_normal, network, per_token_loss, unpacked_run, weights_of
from rank_pool import on_ranks
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.core.errors import ConfigurationError
from accelerate.utils import pack


class Documents:
    """Tokens, scores and a title for each length; notes what was read."""

    def __init__(self, lengths):
        self.lengths = lengths
        self.read = []

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, number):
        self.read.append(number)
        length = self.lengths[number]
        # The tokens tell their document and their place.
        tokens = [1000 * number + place for place in range(length)]
        return {
            "input_ids": tokens,
            "attention_mask": [1] * length,
            "score": torch.arange(length) / 2,
            "title": "x" * length,
        }


def documents_in(row):
    """The documents of a row, without its padding: lists of tokens."""
    sizes = [size for size in row["seq_lens"].tolist() if size]
    parts = zip(
        row["input_ids"].split(sizes),
        row["labels"].split(sizes),
        row["position_ids"].split(sizes),
        row["score"].split(sizes),
        strict=True,
    )
    documents = []
    for tokens, labels, positions, scores in parts:
        assert positions.tolist() == list(range(len(tokens)))
        if (tokens == 9).all():
            assert (labels == -100).all()
            assert (scores == 0).all()
            continue
        assert labels.tolist() == [-100, *tokens[1:].tolist()]
        assert scores.tolist() == (positions / 2).tolist()
        documents.append(tokens.tolist())
    return documents


def test_every_document_is_whole_and_in_one_row():
    lengths = log_normal(1500, 4, 1, 512)
    dataset = Documents(lengths)
    rows = pack(dataset, 512, lengths=lengths, labels=True, pad_token_id=9)
    assert set(dataset.read) == {0}
    assert len(rows) <= 1.01 * lengths.sum() / 512 + 1
    rows = pickle.loads(pickle.dumps(rows))
    found = {}
    paddings = []
    for number, row in enumerate(rows):
        assert row.keys() == {"input_ids", "labels", "position_ids", "seq_lens", "score"}
        assert len(row["input_ids"]) == len(row["labels"]) == row["seq_lens"].sum() == 512
        documents = documents_in(row)
        assert [tokens[0] // 1000 for tokens in documents] == rows.documents(number)
        found.update((tokens[0] // 1000, tokens) for tokens in documents)
        paddings.append(512 - sum(map(len, documents)))
    assert found == {number: dataset[number]["input_ids"] for number in range(len(lengths))}
    assert max(paddings) == paddings[-1]
    firsts = [rows.documents(number)[0] for number in range(len(rows) - 1)]
    assert firsts == sorted(firsts)
    # Counted, and read by workers, they are the same.
    counted = pack(Documents(lengths), 512, labels=True, pad_token_id=9)
    batches = list(DataLoader(counted, batch_size=len(rows), num_workers=1))
    for name, values in batches[0].items():
        assert torch.equal(values, torch.stack([row[name] for row in rows])), name


def test_options():
    tensors = [torch.arange(length) + 10 for length in (9, 3, 4)]
    rows = pack(tensors, 4, split_long=True)
    assert [rows.documents(number) for number in range(4)] == [[0], [0], [0, 1], [2]]
    assert [row["input_ids"].tolist() for row in rows] == [
        [10, 11, 12, 13],
        [14, 15, 16, 17],
        [18, 10, 11, 12],
        [10, 11, 12, 13],
    ]
    assert rows[2]["seq_lens"].tolist() == [1, 3, 0]
    assert "labels" not in rows[0]
    # The last row goes only where it has padding.
    assert len(pack(tensors, 4, split_long=True, drop_last=True)) == 4
    assert len(pack([*tensors, torch.arange(2)], 4, split_long=True, drop_last=True)) == 4
    # Labels that a document has stay, but for the first one; those that are shifted stay all.
    document = {
        "input_ids": np.array([1, 2, 3], dtype=np.uint16),
        "labels": [-100, 7, 8],
        "kind": 1,
    }
    assert pack([document], 4)[0]["labels"].tolist() == [-100, 7, 8, -100]
    document["labels"] = [6, 7, 8]
    row = pack([document], 4, mask_first_label=False)[0]
    assert row["labels"].tolist() == [6, 7, 8, -100]
    assert row["input_ids"].dtype == torch.int64
    assert pack([document], 4, fields=["input_ids"])[0].keys() == {
        "input_ids", "position_ids", "seq_lens",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("documents", "options", "facts"),
    [
        ([[1], [1, 2, 3]], {}, ["document 1", "3 tokens", "2", "split_long"]),
        ([[1], []], {}, ["document 1", "length 0"]),
        ([[1], [2]], {"lengths": [1]}, ["1 values", "2 documents"]),
        ([[1], [2]], {"lengths": [1.0, 1.0]}, ["float64"]),
        ([[1], [2]], {"lengths": [[1], [1]]}, ["[2, 1]"]),
        ([{"text": "a"}], {}, ["document 0", "input_ids", "text"]),
        ([{"input_ids": "a"}], {}, ["document 0", "input_ids", "str"]),
        ([[[1, 2]]], {}, ["document 0", "input_ids", "list"]),
        ([], {}, ["dataset", "list"]),
        (iter([[1]]), {}, ["dataset", "list_iterator"]),
        ([[1]], {"length": 2.0}, ["length", "2.0"]),
        ([[1]], {"length": 0}, ["length", "0"]),
    ],
)
def test_what_cannot_be_packed(documents, options, facts):
    with pytest.raises(ConfigurationError) as error:
        pack(documents, **{"length": 2, **options})
    for fact in facts:
        assert fact in str(error.value)


def test_a_document_that_has_changed():
    documents = [{"input_ids": [1, 2], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}]
    with pytest.raises(ConfigurationError, match=r"labels of document 1 has 1 .* 2 tokens"):
        pack(documents, 4)[0]
    with pytest.raises(ConfigurationError, match=r"input_ids of document 1 has 2 .* 3 tokens"):
        pack(documents, 5, lengths=[2, 3], fields=["input_ids"])[0]
    with pytest.raises(
        ConfigurationError, match="document 0 does not have score; it has input_ids, labels"
    ):
        pack(documents, 4, fields=["input_ids", "score"])[0]


@pytest.mark.parametrize("ids", [torch.rand(2), torch.ones(1, 2, dtype=torch.long)])
def test_tokens_that_are_none(ids):
    shape = str(list(ids.shape)).replace("[", r"\[")
    with pytest.raises(ConfigurationError, match=f"input_ids of document 0 .*{shape}"):
        pack([ids], 4)[0]


@on_ranks(1, 2)
@pytest.mark.parametrize("accumulated", [1, 3])
def test_training_on_rows_is_that_on_documents(accumulated, nproc):
    documents = corpus(130)
    rows = pack(documents, 96, labels=True)
    local = 2
    step = local * nproc * accumulated
    assert len(rows) % 4
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(7)).tolist()
    steps = []
    for start in range(0, len(rows), step):
        in_step = order[start : start + step]
        steps.append([number for row in in_step for number in rows.documents(row)])
    accelerator = Accelerator(cpu=True, exact=True, gradient_accumulation_steps=accumulated)
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        DataLoader(rows, batch_size=local, sampler=order),
    )
    for batch in loader:
        with accelerator.accumulate(model):
            losses = per_token_loss(model, batch["input_ids"], batch["labels"])
            items = (batch["labels"] != -100).sum()
            accelerator.backward(losses.sum() / items.clamp(min=1), num_items=items)
            optimizer.step()
            optimizer.zero_grad()
    found = weights_of(accelerator.unwrap_model(model))
    assert torch.allclose(found, unpacked_run(documents, steps), rtol=0, atol=1e-10)


@on_ranks(1, 2)
@pytest.mark.parametrize("exact", [False, True])
def test_results_of_documents_are_gathered_once(exact):
    documents = corpus(130)
    rows = pack(documents, 96, labels=True)
    accelerator = Accelerator(cpu=True, exact=exact)
    loader = accelerator.prepare(DataLoader(rows, batch_size=4))
    assert len(rows) % 4
    sums = []
    for batch in loader:
        # One tensor for each row, with one value for each of its documents.
        by_row = []
        for tokens, labels, sizes in zip(
            batch["input_ids"], batch["labels"], batch["seq_lens"].tolist(), strict=True
        ):
            parts = zip(tokens.split(sizes), labels.split(sizes), strict=True)
            is_document = [(part.sum(), bool((label[1:] != -100).any())) for part, label in parts]
            by_row.append(torch.stack([total for total, known in is_document if known]))
        sums += accelerator.gather_for_metrics(by_row, use_gather_object=True)
    expected = []
    for number in range(len(rows)):
        longer = [document for document in rows.documents(number) if len(documents[document]) > 1]
        expected += [int(documents[document].sum()) for document in longer]
    assert torch.cat(sums).tolist() == expected
