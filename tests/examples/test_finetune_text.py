# SPDX-License-Identifier: Apache-2.0
"""The text example: its data, a run on a CSV with a model made here, and what it says of wrong input."""

import json

import pytest
from packages import package
from ranks import run_ranks

transformers = package("transformers")

WORDS = ["good", "great", "lovely", "bad", "awful", "poor", "a", "the", "film", "book", "was", "is"]


@pytest.fixture
def text(example):
    return example("finetune_text")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny BERT with a word-level tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    vocabulary = {
        word: index for index, word in enumerate((folder / "vocab.txt").read_text().split("\n"))
    }
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def reviews(tmp_path):
    path = tmp_path / "reviews.csv"
    lines = ["said,kind"]
    for thing in ("the film", "a film", "the book", "a book"):
        for verb in ("was", "is"):
            lines += [f'"{thing} {verb} {word}",praise' for word in WORDS[:3]] * 2
            lines += [f'"{thing} {verb} {word}",blame' for word in WORDS[3:6]]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.thorough
def test_docstrings_are_real_many_and_even(text):
    pairs = text.docstrings(each=50)
    counts = {topic: sum(label == topic for _, label in pairs) for topic in text.TOPICS}
    assert len({sentence for sentence, _ in pairs}) == len(pairs)
    assert all(30 <= count <= 50 for count in counts.values()), counts
    assert pairs == text.docstrings(each=50)


def test_the_split_keeps_the_share_of_each_label(text):
    pairs = [(str(i), "many" if i % 4 else "few") for i in range(80)]
    train, test = text.split(pairs, 0.25, seed=1)
    assert sorted(train + test) == sorted(pairs)
    assert [sum(label == name for _, label in test) for name in ("few", "many")] == [5, 15]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot read --csv"),
        ("body,kind\nx,y\n", "has no column 'said', only: body, kind"),
        ("", "has no column 'said', only: none"),
        (b"said,kind\n\xff\xfe\x00,y\n", "cannot read --csv"),
    ],
)
def test_a_file_that_cannot_be_used_is_told(text, tmp_path, content, told):
    path = tmp_path / "file.csv"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=told):
        text.from_csv(path, "said", "kind")


def test_labels_that_cannot_be_learned_are_told(text):
    with pytest.raises(SystemExit, match="at least two labels, found 1"):
        text.split([("a", "x"), ("b", "x")], 0.5, 0)
    with pytest.raises(SystemExit, match=r"label 'y' .*one text"):
        text.split([("a", "x"), ("b", "x"), ("c", "y")], 0.5, 0)


def test_a_folder_that_is_no_model_is_told(text, tmp_path):
    with pytest.raises(SystemExit, match=r"contains no config\.json"):
        text.model_source(str(tmp_path))


def test_an_id_of_the_hub_is_passed_on_and_an_unknown_one_is_told(text, monkeypatch):
    assert text.model_source("someone/some-model") == "someone/some-model"

    def absent(source, local_files_only):
        assert not local_files_only
        raise OSError("no such model")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", absent)
    with pytest.raises(SystemExit, match="no such model"):
        text.load("someone/some-model")


@pytest.mark.timeout(300)
def test_a_run_on_a_csv_beats_the_commonest_label(
    script, model, reviews, tmp_path, logs_no_mistake
):
    options = ["--csv", reviews, "--model", model, "--cpu"]
    options += ["--text_column", "said", "--label_column", "kind", "--output_dir", tmp_path / "out"]
    options += ["--epochs", 6, "--batch_size", 4, "--lr", 0.01]
    (done,) = run_ranks(script("finetune_text"), 1, *options, timeout=280)
    logs_no_mistake([done])
    assert "57 for training, 15 for testing, 2 labels" in done.stdout
    assert "66.7%" in done.stdout  # always "praise"
    assert "100.0%, +33.3 points over it" in done.stdout
    assert json.loads((tmp_path / "out" / "labels.json").read_text()) == ["blame", "praise"]
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
