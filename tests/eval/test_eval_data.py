import hashlib

import pytest
from transformers import AutoTokenizer

from checkpoints import save_tiny_checkpoint
from kvplus_eval import data
from kvplus_eval.data import EvalText, cut_windows, load_text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint")))


def words(count):
    return EvalText("words", " ".join(f"w{number % 63}" for number in range(count)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.txt`: no such file"):
        load_text(str(tmp_path / "gone.txt"))


@pytest.mark.parametrize("content", ["", " \n\t\n"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match="is empty"):
        load_text(str(path))


def test_a_file_that_isnt_text_is_refused(tmp_path):
    path = tmp_path / "binary.txt"
    path.write_bytes(b"abc\xff\xfe")
    with pytest.raises(ValueError, match="isn't UTF-8 text.*at byte 3"):
        load_text(str(path))


def test_the_hash_is_the_files_own_where_line_ends_are_newlines(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_bytes("naïve\ntext\n".encode())
    assert load_text(str(path)).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_line_ends_dont_change_the_text(tmp_path):
    for name, end in (("unix.txt", b"\n"), ("dos.txt", b"\r\n")):
        (tmp_path / name).write_bytes(b"one" + end + b"two" + end)
    assert load_text(str(tmp_path / "unix.txt")).sha256 == load_text(str(tmp_path / "dos.txt")).sha256


def test_json_lines_give_their_text_fields(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two", "id": 2}\n')
    assert load_text(str(path)).text == "one\n\ntwo"


@pytest.mark.parametrize("line", ['{"body": "x"}', "[1]", "{broken"])
def test_a_bad_json_line_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "one"}\n' + line)
    with pytest.raises(ValueError, match="line 2"):
        load_text(str(path))


@pytest.mark.parametrize(("status", "words"), [("absent", "no such repository"), ("denied", "refuses it")])
def test_a_data_set_that_cant_be_had_is_named_with_the_reason(monkeypatch, status, words):
    monkeypatch.setattr(data, "hub_status", lambda *args: status)
    with pytest.raises(FileNotFoundError, match=words):
        load_text("some/dataset")


def test_without_a_hub_the_default_is_pythons_own_text(monkeypatch):
    monkeypatch.setattr(data, "hub_status", lambda *args: "unreachable")
    found = load_text(None)
    assert found.name == "pydoc-topics"
    assert len(found.text) > 100_000
    assert load_text("pydoc-topics").sha256 == found.sha256


def test_windows_follow_each_other_without_gap_or_overlap(tokenizer):
    windows = cut_windows(words(60), tokenizer, windows=3, window_tokens=20)
    assert [window.tolist() for window in windows] == [list(range(s + 1, s + 21)) for s in (0, 20, 40)]


def test_a_text_shorter_than_one_window_is_refused_with_what_would_fit(tokenizer):
    with pytest.raises(ValueError, match=r"has 19 tokens, shorter than one window of 20.*--window-tokens 19"):
        cut_windows(words(19), tokenizer, windows=1, window_tokens=20)


def test_too_few_windows_are_refused_with_how_many_there_are(tokenizer):
    with pytest.raises(ValueError, match=r"has 2 windows of 20 tokens, 3 were asked for"):
        cut_windows(words(59), tokenizer, windows=3, window_tokens=20)


def test_each_window_starts_with_the_token_that_the_tokenizer_puts_first(tokenizer):
    class WithBos:
        bos_token_id = 63

        def __call__(self, text, add_special_tokens=True, **options):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            return {"input_ids": [63, *ids] if add_special_tokens else ids}

    windows = cut_windows(words(40), WithBos(), windows=2, window_tokens=20)
    assert [window[0].item() for window in windows] == [63, 63]
    assert [window[1].item() for window in windows] == [1, 20]
    assert {len(window) for window in windows} == {20}


def test_the_digest_of_the_file_is_what_sha256sum_prints(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"one\r\ntwo\r\n")
    text = load_text(str(path))
    assert text.file_sha256 == hashlib.sha256(b"one\r\ntwo\r\n").hexdigest()
    assert text.sha256 == hashlib.sha256(b"one\ntwo\n").hexdigest()
    assert text.file_sha256 in text.describe()
    assert text.sha256 in text.describe()
    assert text.facts()["file_sha256"] == text.file_sha256


def test_one_digest_is_told_where_file_and_text_are_the_same(tmp_path):
    path = tmp_path / "unix.txt"
    path.write_bytes(b"one\ntwo\n")
    assert load_text(str(path)).describe().count(hashlib.sha256(b"one\ntwo\n").hexdigest()) == 1


class Streamed:
    """Stands for a data set that is read document by document."""

    column_names = ("text", "url")

    def __init__(self):
        self.read = 0

    def __iter__(self):
        for number in range(1000):
            self.read += 1
            yield {"text": f"document {number} " * 10}


@pytest.mark.parametrize("choice", ["c4", "stream:some/dataset:en:validation"])
def test_a_large_data_set_is_read_only_as_far_as_needed(monkeypatch, choice):
    datasets = pytest.importorskip("datasets")
    rows, asked = Streamed(), {}
    monkeypatch.setattr(data, "hub_status", lambda *args: "answers")
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: asked.update(options, names=names) or rows)
    text = load_text(choice, least_characters=1000)
    assert (asked["streaming"], asked["split"], asked["names"][1]) == (True, "validation", "en")
    assert 1000 <= len(text.text) < 1300
    assert rows.read < 12
    assert "first 10 documents" in text.name
    assert load_text(choice, least_characters=1000).sha256 == text.sha256


def test_a_small_data_set_is_read_whole(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(data, "hub_status", lambda *args: "answers")

    class Rows(dict):
        column_names = ("text",)

    monkeypatch.setattr(datasets, "load_dataset", lambda *names, streaming, **options: Rows(text=["a", "b"]))
    assert load_text("wikitext-2-raw", least_characters=1).text == "a\n\nb"


def test_line_ends_of_unicode_inside_a_json_string_end_no_line(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"text": "one\u2028still\x85one"}\n \n{"text": "two"}\n', encoding="utf-8")
    assert load_text(str(path)).text == "one\u2028still\x85one\n\ntwo"


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("wikitext-2", ("Salesforce/wikitext", "wikitext-2-raw-v1")),
        ("wikitext-103", ("Salesforce/wikitext", "wikitext-103-raw-v1")),
        ("pg19", ("emozilla/pg19", "default")),
        ("c4", ("allenai/c4", "en")),
    ],
)
def test_data_sets_have_short_names(monkeypatch, choice, names):
    datasets = pytest.importorskip("datasets")
    asked = []

    class Rows(Streamed):
        def __getitem__(self, column):
            return [row[column] for row in self]

    monkeypatch.setattr(data, "hub_status", lambda *args: "answers")
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: asked.append(names) or Rows())
    assert "document 0" in load_text(choice, least_characters=10).text
    assert asked == [names]
