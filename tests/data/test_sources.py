"""Each source on a small folder, with everything in it that real folders have."""

from __future__ import annotations

import json
import os
import sys

import pytest

from fxpar.data import Corpus, open_corpus
from fxpar.data.files import list_files
from fxpar.data.report import BAD_JSON, EMPTY, NOT_TEXT, UNDECODABLE, UNREADABLE
from fxpar.data.text_files import definitions
from fxpar.errors import (
    CorpusChangedError,
    CorpusFormatError,
    CorpusKindError,
    CorpusOptionError,
    CorpusPathError,
    EmptyCorpusError,
    MissingDataPackageError,
    MissingPackageError,
)


def content(corpus: Corpus) -> dict[str, str]:
    return {corpus.name(i): corpus.text(i) for i in range(len(corpus))}


def write(root, files: dict[str, str | bytes]):
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return root


# ---------------------------------------------------------------------------------------------------------------- text
def test_text_folder_reads_what_it_can_and_counts_the_rest(tmp_path):
    write(
        tmp_path,
        {
            "b.py": "b = 1\n",
            "a.txt": b"\xef\xbb\xbfwith a mark\r\n",
            "deep/er/c.py": "c = 'ü'\n",
            "deep/empty.py": "",
            "blank.txt": " \n\t",
            "latin.txt": b"caf\xe9",
            "utf16.txt": "wide".encode("utf-16-le"),
            ".git/config": "hidden",
            "deep/__pycache__/x.py": "compiled",
        },
    )
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    os.symlink(tmp_path, tmp_path / "deep" / "circle")
    corpus = open_corpus(tmp_path)
    assert content(corpus) == {"a.txt": "with a mark\r\n", "b.py": "b = 1\n", "deep/er/c.py": "c = 'ü'\n"}
    report = corpus.report
    assert (report.kind, report.files, report.documents) == ("text", 7, 3)
    assert report.text_bytes == sum(len(text.encode()) for text in content(corpus).values())
    assert report.count(EMPTY) == report.count(UNDECODABLE) == report.count(UNREADABLE) == 2
    assert "latin.txt at byte 3" in str(report)
    assert "dangling.txt, pipe.txt" in str(report)
    assert "blank.txt, deep/empty.py" in str(report)


def test_order_and_fingerprint_do_not_depend_on_the_file_system(tmp_path, monkeypatch):
    files = {f"{folder}{name}": name for folder in ("", "x/", "x/y/", "x-y/") for name in ("b", "a", "B", "ä")}
    first = open_corpus(write(tmp_path / "one", files))
    walk = os.walk

    def backwards(root):
        for folder, folders, names in walk(root):
            folders.reverse()
            yield folder, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    second = open_corpus(write(tmp_path / "two", dict(reversed(files.items()))))
    assert list(content(first)) == list(content(second)) == sorted(files)
    assert first.fingerprint == second.fingerprint


def test_fingerprint_sees_names_texts_and_borders(tmp_path):
    variants = [{"a": "12", "b": "3"}, {"a": "1", "b": "23"}, {"a": "12", "c": "3"}, {"a": "12"}]
    corpora = [open_corpus(write(tmp_path / str(i), files)) for i, files in enumerate(variants)]
    assert len({corpus.fingerprint for corpus in corpora}) == len(variants)


@pytest.mark.parametrize(
    ("globs", "names"),
    [
        ("*.py", ["a.py", "x/b.py", "x/y/c.py"]),
        ("x/*.py", ["x/b.py"]),
        ("x/**/*.py", ["x/b.py", "x/y/c.py"]),
        ("**/*.py", ["a.py", "x/b.py", "x/y/c.py"]),
        ("./x/**", ["x/b.py", "x/d.txt", "x/long.txt", "x/y/c.py"]),
        (["?.txt", "[ab].py"], ["a.py", "x/b.py", "x/d.txt"]),
        ("[!a].py", ["x/b.py", "x/y/c.py"]),
    ],
)
def test_globs(tmp_path, globs, names):
    write(tmp_path, dict.fromkeys(("a.py", "x/b.py", "x/y/c.py", "x/d.txt", "x/long.txt"), "text"))
    assert list(content(open_corpus(tmp_path, glob=globs))) == names


@pytest.mark.parametrize("glob", ["[", "[]", "[z-a]", "a[", "(", "\\", "[\\]"])
def test_strange_globs_fit_nothing_and_do_not_break(tmp_path, glob):
    write(tmp_path, {"q.py": "text"})
    assert list_files(tmp_path, [glob]).names == ()


def test_one_file_is_a_corpus(tmp_path):
    write(tmp_path, {"a.txt": "alone", "b.txt": "other"})
    assert content(open_corpus(tmp_path / "a.txt")) == {"a.txt": "alone"}


def test_file_names_that_are_not_utf8(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "w") as file:
        file.write("text")
    assert list(content(open_corpus(tmp_path)).values()) == ["text"]


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_text("other")])
def test_a_document_that_changes_is_an_error(tmp_path, change):
    corpus = open_corpus(write(tmp_path, {"a.txt": "first", "b.txt": "second"}))
    change(tmp_path / "b.txt")
    assert corpus.text(0) == "first"
    with pytest.raises(CorpusChangedError, match=r"'b\.txt' changed or went away"):
        corpus.text(1)
    with pytest.raises(IndexError):
        corpus.text(2)


def test_the_kind_is_that_of_the_files_which_the_glob_leaves(tmp_path):
    write(tmp_path, {"README.md": "read", "a.jsonl": '{"text": "one"}\n', "b/c.jsonl": '{"text": "two"}\n'})
    assert content(open_corpus(tmp_path, glob="*.jsonl")) == {"a.jsonl:1": "one", "b/c.jsonl:1": "two"}
    assert "README.md" in content(open_corpus(tmp_path))
    with pytest.raises(EmptyCorpusError, match=r"none of its 3 files \(2 \.jsonl, 1 \.md\) matches \*\.txt; change"):
        open_corpus(tmp_path, glob="*.txt")


def test_nothing_left_says_why(tmp_path):
    write(tmp_path, {"empty.txt": "", "latin.txt": b"\xe9"})
    with pytest.raises(
        EmptyCorpusError, match=r"1 empty \(empty\.txt\); skipped 1 undecodable \(latin\.txt at byte 0\)"
    ):
        open_corpus(tmp_path)
    with pytest.raises(EmptyCorpusError, match=r"none of its 2 files \(2 \.txt\) matches \*\.py; change the glob"):
        open_corpus(tmp_path, glob="*.py")
    (tmp_path / "sub").mkdir()
    with pytest.raises(EmptyCorpusError, match="it holds no file"):
        open_corpus(tmp_path / "sub")


def test_examples_are_few_and_the_count_is_complete(tmp_path):
    write(tmp_path, {**{f"{i}.txt": "" for i in range(9)}, "z": "text"})
    (kind,) = open_corpus(tmp_path).report.skipped
    assert (kind.count, len(kind.examples)) == (9, 5)
    assert str(kind).endswith("4.txt, ...)")


# --------------------------------------------------------------------------------------------------------------- jsonl
LINES = [
    '{"text": "first", "id": 1}',
    "",
    "{broken",
    '{"id": 2}',
    '{"text": 3}',
    '["text"]',
    '{"text": ""}',
    '{"text": "half \\ud800"}',
    b'{"text": "\xe9"}',
    '{"text": ' + "[" * 100_000,
    '{"text": "größte"}',
]


def test_jsonl_counts_wrong_lines_with_their_numbers(tmp_path):
    data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in LINES)
    write(tmp_path, {"a.jsonl": data, "sub/b.jsonl": b'\xef\xbb\xbf{"text": "marked"}\n', "none.jsonl": b""})
    corpus = open_corpus(tmp_path)
    assert corpus.report.kind == "jsonl"
    assert content(corpus) == {"a.jsonl:1": "first", "a.jsonl:11": "größte", "sub/b.jsonl:1": "marked"}
    skipped = {kind.reason: kind.examples for kind in corpus.report.skipped}
    assert skipped == {
        EMPTY: ("a.jsonl:2", "a.jsonl:7", "none.jsonl"),
        BAD_JSON: ("a.jsonl:3", "a.jsonl:6", "a.jsonl:10"),
        "without the field 'text'": ("a.jsonl:4",),
        NOT_TEXT: ("a.jsonl:5",),
        UNDECODABLE: ("a.jsonl:8", "a.jsonl:9"),
    }


def test_jsonl_field(tmp_path):
    write(tmp_path, {"a.jsonl": '{"body": "x", "title": "y"}\n{"body": "z"}'})
    assert list(content(open_corpus(tmp_path / "a.jsonl", field="body")).values()) == ["x", "z"]
    with pytest.raises(EmptyCorpusError, match=r"no field 'text'; its lines have body, title: name one as `field`"):
        open_corpus(tmp_path / "a.jsonl")


def test_jsonl_line_that_moved_is_an_error(tmp_path):
    corpus = open_corpus(write(tmp_path, {"a.jsonl": '{"text": "one"}\n{"text": "two"}'}))
    (tmp_path / "a.jsonl").write_text('{"text": "longer than one"}\n{"text": "two"}')
    for index in range(2):
        with pytest.raises(CorpusChangedError):
            corpus.text(index)


def test_jsonl_that_cannot_be_read(tmp_path):
    write(tmp_path, {"a.jsonl": '{"text": "one"}'})
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling.jsonl")
    assert open_corpus(tmp_path).report.count(UNREADABLE) == 2


# ------------------------------------------------------------------------------------------------------------- parquet
def write_parquet(path, columns, **options):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), path, **options)


def test_parquet_reads_row_groups_in_any_order(tmp_path):
    texts = [f"row {i}" for i in range(10)]
    write_parquet(tmp_path / "a.parquet", {"text": [*texts[:4], None, *texts[4:], " "]}, row_group_size=3)
    write_parquet(tmp_path / "sub" / "b.parquet", {"text": ["last"], "n": [1]})
    write_parquet(tmp_path / "c.parquet", {"words": ["x"]})
    write_parquet(tmp_path / "d.parquet", {"text": [1, 2]})
    write(tmp_path, {"e.parquet": "no parquet"})
    os.mkfifo(tmp_path / "pipe.parquet")
    corpus = open_corpus(tmp_path)
    assert corpus.report.kind == "parquet"
    names = [f"a.parquet:{row}" for row in (0, 1, 2, 3, 5, 6, 7, 8, 9, 10)]
    assert content(corpus) == {**dict(zip(names, texts, strict=True)), "sub/b.parquet:0": "last"}
    assert [corpus.text(i) for i in (10, 9, 0, 5)] == ["last", "row 9", "row 0", "row 5"]
    skipped = {kind.reason: kind.examples for kind in corpus.report.skipped}
    assert skipped == {
        EMPTY: ("a.parquet:4", "a.parquet:11"),
        "without the field 'text'": ("c.parquet",),
        NOT_TEXT: ("d.parquet:0", "d.parquet:1"),
        UNREADABLE: ("e.parquet", "pipe.parquet"),
    }


def test_parquet_with_bad_bytes(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    offsets, data = arrow.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])), arrow.py_buffer(b"ok\xe9")
    column = arrow.StringArray.from_buffers(2, offsets, data)
    write_parquet(tmp_path / "a.parquet", {"text": column})
    corpus = open_corpus(tmp_path)
    assert content(corpus) == {"a.parquet:0": "ok"}
    assert corpus.report.count(UNDECODABLE) == 1


def test_parquet_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", {"body": ["x"], "n": [1]})
    assert content(open_corpus(tmp_path / "a.parquet", column="body")) == {"a.parquet:0": "x"}
    with pytest.raises(EmptyCorpusError, match=r"no column 'text'; its files have body, n: name one as `column`"):
        open_corpus(tmp_path / "a.parquet")


# ------------------------------------------------------------------------------------------------------------- dataset
def test_dataset_on_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": ["a", "", None, "b"], "n": [1, 2, 3, 4]})
    rows.save_to_disk(str(tmp_path / "one"))
    corpus = open_corpus(tmp_path / "one")
    assert corpus.report.kind == "dataset"
    assert corpus.report.files == 1
    assert content(corpus) == {"0": "a", "3": "b"}
    assert corpus.report.count(EMPTY) == 2
    with pytest.raises(CorpusFormatError, match="no column 'body'; it has text, n"):
        open_corpus(tmp_path / "one", column="body")
    with pytest.raises(CorpusFormatError, match="has no splits"):
        open_corpus(tmp_path / "one", split="train")
    parts = datasets.DatasetDict({"train": rows, "test": rows.select([3])})
    parts.save_to_disk(str(tmp_path / "two"))
    assert content(open_corpus(tmp_path / "two", split="test")) == {"0": "b"}
    with pytest.raises(CorpusFormatError, match=r"splits test, train: name one as `split`"):
        open_corpus(tmp_path / "two")
    with pytest.raises(CorpusFormatError, match="no split 'tst'"):
        open_corpus(tmp_path / "two", split="tst")


def test_folder_that_is_no_dataset(tmp_path):
    pytest.importorskip("datasets")
    write(tmp_path, {"dataset_info.json": "{}"})
    with pytest.raises(CorpusFormatError, match="load_from_disk"):
        open_corpus(tmp_path)


# -------------------------------------------------------------------------------------------------------------- stdlib
def test_stdlib_is_the_running_library():
    corpus = open_corpus("python-stdlib", glob="json/*.py")
    with open(json.__file__, encoding="utf-8", newline="") as file:
        assert content(corpus)["json/__init__.py"] == file.read()
    assert corpus.report.source == corpus.report.kind == "python-stdlib"


def test_stdlib_leaves_out_packages_and_tests():
    plain = content(open_corpus("python-stdlib", glob=["unittest/**/*.py", "site-packages/**/*.py"]))
    assert plain
    assert not any("site-packages" in name or "/test" in name.replace("unittest", "") for name in plain)


# -------------------------------------------------------------------------------------------------------------- errors
def test_unknown_things_name_the_nearest(tmp_path):
    write(tmp_path, {"a.txt": "text"})
    with pytest.raises(CorpusPathError, match="did you mean 'python-stdlib'"):
        open_corpus("python-stdlb")
    with pytest.raises(CorpusPathError, match="no such file or folder"):
        open_corpus("x" * 10_000)
    with pytest.raises(CorpusPathError, match="no such file or folder"):
        open_corpus(tmp_path / "none", kind="text")
    with pytest.raises(CorpusKindError, match="did you mean 'jsonl'"):
        open_corpus(tmp_path, kind="json")
    with pytest.raises(CorpusOptionError, match=r"option 'globs': there is no such option; did you mean 'glob'"):
        open_corpus(tmp_path, globs="*.py")
    with pytest.raises(CorpusOptionError, match="3 is neither a pattern"):
        open_corpus(tmp_path, glob=3)
    with pytest.raises(CorpusOptionError, match="'yes' is not a bool"):
        open_corpus("python-stdlib", tests="yes")


@pytest.mark.parametrize(("kind", "package"), [("parquet", "pyarrow.parquet"), ("dataset", "datasets")])
def test_missing_package_names_the_extra(tmp_path, monkeypatch, kind, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDataPackageError, match=r'pip install "fxpar\[data\]"') as caught:
        open_corpus(tmp_path, kind=kind)
    assert isinstance(caught.value, MissingPackageError)


def test_stdlib_by_definition_loses_nothing():
    whole = open_corpus("python-stdlib", glob="json/*.py")
    parts = open_corpus("python-stdlib", glob="json/*.py", unit="definition")
    assert len(parts) > 2 * len(whole)
    by_file: dict[str, str] = {}
    for index in range(len(parts)):
        file = parts.name(index).partition(":")[0]
        by_file[file] = by_file.get(file, "") + parts.text(index)
    for index in range(len(whole)):
        assert by_file[whole.name(index)].split() == whole.text(index).split()
    starts = {parts.text(index).split()[0] for index in range(len(parts))}
    assert {"def", "class"} <= starts
    with pytest.raises(CorpusOptionError, match="'lines' is none of file, definition"):
        open_corpus("python-stdlib", unit="lines")


def test_decorators_stay_with_their_definition():
    text = 'import a\n\n@cache\n@other(\n    1,\n)\ndef f():\n    @inner\n    def g(): pass\n\nclass C: pass\nx = "@"\n'
    assert [text[start:stop].split("\n")[0] for start, stop in definitions(text)] == [
        "import a",
        "@cache",
        "class C: pass",
    ]
