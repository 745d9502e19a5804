"""Datasets: which files, which documents, and every fault with its place."""

import errno
import gzip
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from titan.contracts import Dataset
from titan.data.tokens.bytepairs import read_ranks
from titan.data.tokens.files import find
from titan.data.tokens.shards import open_shard
from titan.errors import ConfigError, DataError, ResourceError
from titan.plugins.data.jsonl import Jsonl
from titan.plugins.data.parquet import Parquet
from titan.plugins.data.shards import Shards
from titan.plugins.data.stdlib import Stdlib
from titan.plugins.data.text import Text


def text(*paths: object, **options: Any) -> Text:
    return Text(Text.Config(path=tuple(map(str, paths)), **options))


def jsonl(*paths: object, **options: Any) -> Jsonl:
    return Jsonl(Jsonl.Config(path=tuple(map(str, paths)), **options))


def parquet(file: Path, **options: Any) -> Parquet:
    return Parquet(Parquet.Config(path=str(file), **options))


def all_texts(dataset: Dataset) -> list[str]:
    return [document.text for file in dataset.files() for document in dataset.documents(file)]


def test_stdlib_is_source_without_tests_and_packages() -> None:
    files = Stdlib(Stdlib.Config()).files()
    assert files == sorted(files) and len(files) > 300
    names = {file.name for file in files}
    assert {"argparse.py", "ast.py"} <= names
    root = next(file for file in files if file.name == "argparse.py").parent
    assert not any({"test", "tests", "site-packages"} & set(file.relative_to(root).parts) for file in files)
    assert 6e6 < sum(file.stat().st_size for file in files) < 40e6


def test_stdlib_is_divided_by_the_names_of_its_files() -> None:
    train, validation = (Stdlib(Stdlib.Config(split=split)).files() for split in ("train", "validation"))
    everything = Stdlib(Stdlib.Config()).files()
    assert sorted([*train, *validation]) == sorted(everything)
    assert 0.02 < len(validation) / len(everything) < 0.07
    root = next(file for file in everything if file.name == "argparse.py").parent
    # The same on every machine and Python.
    found = [root / name in validation for name in ("abc.py", "fractions.py", "pdb.py", "ast.py")]
    assert found == [True, True, True, False]


def test_stdlib_passes_over_what_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"# \xff\n")
    assert list(Stdlib(Stdlib.Config()).documents(tmp_path / "a.py")) == []


@pytest.mark.parametrize(("number", "raised"), [(errno.EACCES, DataError), (errno.ESTALE, ResourceError)])
def test_a_folder_that_cannot_be_read_is_not_left_out(
    number: int, raised: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("text")
    assert len(find([str(tmp_path)], ["*.txt"])) == 2
    whole = os.scandir

    def scandir(path: str) -> Any:
        if Path(path).name == "b":
            raise OSError(number, os.strerror(number), str(path))
        return whole(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(raised, match=rf"folder {tmp_path}/b cannot be read: {os.strerror(number)}"):
        find([str(tmp_path)], ["*.txt"])


def test_text_of_files_folders_and_globs(tmp_path: Path) -> None:
    for name in ("b/one.txt", "b/deep/two.md", "b/image.png", "c/3.rs", "a.log"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert all_texts(text(tmp_path / "a.log", tmp_path / "b")) == ["a.log", "b/deep/two.md", "b/one.txt"]
    assert all_texts(text(tmp_path / "**/*.rs", tmp_path / "b" / "*.txt")) == ["c/3.rs", "b/one.txt"]
    assert all_texts(text(tmp_path, glob="*.rs")) == ["c/3.rs"]
    assert all_texts(text(tmp_path / "a.log", tmp_path / "*.log")) == ["a.log"]
    assert all_texts(Text(Text.Config(path=str(tmp_path / "a.log")))) == ["a.log"]


def test_links_are_followed_and_no_file_is_read_twice(tmp_path: Path) -> None:
    corpus, store = tmp_path / "corpus", tmp_path / "store"
    for file in (corpus / "a/1.txt", store / "b/2.txt", corpus / ".hidden/3.txt", corpus / "a/._1.txt"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    links = {"b": store / "b", "a/circle": corpus, "a/another": corpus, "again": "a", "0.txt": "a/1.txt"}
    for name, target in links.items():
        (corpus / name).symlink_to(target)
    (store / "b" / "back").symlink_to(corpus / "a")
    paths = ("corpus", "corpus/**/*.txt", "corpus/**", "corp*", "corpus/*", "c*/**/**/[0-9].txt", "**/again/circle")
    for path in paths:
        assert all_texts(text(tmp_path / path)) == ["1.txt", "2.txt"], path
    assert all_texts(text(corpus / "**/b/*.txt")) == all_texts(text(store / "b/2.txt", corpus / "b/2.txt")) == ["2.txt"]
    assert all_texts(text(corpus / ".hidden")) == all_texts(text(corpus / "**/.hid*/*")) == ["3.txt"]
    assert "._1.txt" in all_texts(text(corpus, glob=".*.txt"))


def test_a_link_to_nothing_is_no_file_that_may_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TITAN_WARNED", "")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "store").symlink_to("/not/mounted")
    (tmp_path / "itself").symlink_to("itself")
    assert all_texts(text(tmp_path)) == all_texts(text(tmp_path)) == ["text"]
    warning = f"warning: folder {tmp_path}: 2 of its links lead nowhere, as {tmp_path}/"
    assert capsys.readouterr().err.rsplit("/", 1)[0] + "/" == warning
    (tmp_path / "b.txt").symlink_to("/not/there")
    for path in (tmp_path, tmp_path / "*.txt", tmp_path / "**", tmp_path / "b.txt"):
        with pytest.raises(DataError, match=r"/(b\.txt|store|itself) is a link to .*: no such file"):
            text(path).files()


def test_a_git_lfs_pointer_is_not_data(tmp_path: Path) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0a' * 32}\nsize 5000\n"
    readers: dict[str, Any] = {
        "a.txt": lambda file: all_texts(text(file)),
        "a.txt.gz": lambda file: all_texts(text(file)),
        "a.jsonl.zst": lambda file: all_texts(jsonl(file)),
        "a.bin": open_shard,
        "a.tiktoken": read_ranks,
        "a.parquet": lambda file: all_texts(parquet(file)),
    }
    for name, read in readers.items():
        (tmp_path / name).write_text(pointer)
        with pytest.raises(DataError, match=rf"{name} is a Git LFS pointer, not the file itself \(5,000 bytes\)"):
            read(tmp_path / name)
    (tmp_path / "a.txt").write_text(pointer + "is a pointer")
    assert all_texts(text(tmp_path / "a.txt")) == [pointer + "is a pointer"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_other_encodings_are_named(tmp_path: Path, encoding: str) -> None:
    for lines in (
        '{"text": "one"}',
        '{"text": "文字文字文字文字文字文字文字文字"}',
        '{"text": "größer"}\r\n{"text": "two"}\r\n',
    ):
        (tmp_path / "a.jsonl").write_bytes(lines.encode(encoding))
        for dataset, place in ((text, r"a\.jsonl"), (jsonl, r"a\.jsonl:1")):
            said = rf"{place}: is {encoding[:6].upper()}, not UTF-8; convert the file: iconv -f {encoding[:6].upper()}"
            with pytest.raises(DataError, match=said):
                all_texts(dataset(tmp_path / "a.jsonl"))
    kept = "NUL \0 and 字 in UTF-8"
    (tmp_path / "a.txt").write_text("\ufeff" + kept)
    assert all_texts(text(tmp_path / "a.txt")) == [kept]


def test_text_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("größer".encode()))
    assert all_texts(text(tmp_path)) == ["größer"]
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"largest" * 99)[:-9])
    with pytest.raises(DataError, match=r"a\.txt\.gz is cut short"):
        all_texts(text(tmp_path))
    (tmp_path / "a.txt.gz").write_bytes(b"plain")
    with pytest.raises(DataError, match=r"a\.txt\.gz cannot be read: Not a gzipped file"):
        all_texts(text(tmp_path))


def test_parquet(tmp_path: Path) -> None:
    pyarrow, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def dataset(name: str, **columns: object) -> Parquet:
        library.write_table(pyarrow.table(columns), tmp_path / name)
        return parquet(tmp_path / name)

    many = [f"größer {number}" for number in range(3000)]
    whole = dataset("a.parquet", text=many, other=list(range(3000)))
    assert all_texts(whole) == many
    *_, last = whole.documents(tmp_path / "a.parquet")
    assert last.place == f"{tmp_path}/a.parquet, row 3000"
    large = pyarrow.array(["x"], pyarrow.large_string())
    assert all_texts(dataset("large.parquet", text=large)) == ["x"]
    assert all_texts(dataset("c.parquet", text=pyarrow.array(["x", "y", "x"]).dictionary_encode())) == ["x", "y", "x"]
    wrong = {
        r"no column 'text'; set data.field to one of: 'words'": dataset("b.parquet", words=["x"]),
        "column 'text' has type int64, not string": dataset("c.parquet", text=[1]),
        "column 'text' has type list<.*>, not string": dataset("e.parquet", text=[["x"]]),
        r"d\.parquet, row 2: 'text' is null, not a string": dataset("d.parquet", text=["x", None]),
    }
    for said, found in wrong.items():
        with pytest.raises(DataError, match=said):
            all_texts(found)
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a\.parquet cannot be read after row 0: "):
        all_texts(whole)


def test_parquet_of_many_row_groups_that_is_damaged(tmp_path: Path) -> None:
    """The library passes over a page of another type; a checksum alone tells one of another content."""
    pyarrow, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    many, file = [f"document {number}" for number in range(40)], tmp_path / "a.parquet"
    found = parquet(file, field="words")
    how = {"row_group_size": 40, "use_dictionary": False, "compression": "none"}
    library.write_table(pyarrow.table({"words": many}), file, **{**how, "row_group_size": 7})
    assert all_texts(found) == many
    library.write_table(pyarrow.table({"words": many}), file, **how)
    content = bytearray(file.read_bytes())
    content[5] ^= 2
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet is damaged: it gives 0 of its 40 rows"):
        all_texts(found)
    library.write_table(pyarrow.table({"words": many}), file, **how, write_page_checksum=True)
    file.write_bytes(file.read_bytes().replace(b"document 17", b"Jocument 17"))
    with pytest.raises(DataError, match=r"a\.parquet cannot be read after row \d+: .*CRC"):
        all_texts(found)


def test_parquet_whose_columns_cannot_be_told_apart(tmp_path: Path) -> None:
    pyarrow, library = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    library.write_table(pyarrow.Table.from_arrays([["x"], ["y"]], names=["text", "text"]), file)
    with pytest.raises(DataError, match="2 columns are named 'text'"):
        all_texts(parquet(file))
    library.write_table(pyarrow.table({"a": [{"b": 1}], "a.b": ["y"]}), file)
    assert all_texts(parquet(file, field="a.b")) == ["y"]


def test_zst_is_unpacked(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    packed = zstandard.compress(b'{"text": "one"}\n') + zstandard.compress(b'{"text": "two"}\n')
    (tmp_path / "a.jsonl.zst").write_bytes(packed)
    assert all_texts(jsonl(tmp_path)) == ["one", "two"]
    (tmp_path / "a.jsonl.zst").write_bytes(b"plain")
    with pytest.raises(DataError, match=r"a\.jsonl\.zst cannot be unpacked"):
        all_texts(jsonl(tmp_path))


def test_a_zst_with_the_longest_window_is_unpacked(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    header = b"\x28\xb5\x2f\xfd" + bytes([0, (31 - 10) << 3])  # no size, a window of 2 GiB
    (tmp_path / "a.txt.zst").write_bytes(header + (4 << 3 | 1).to_bytes(3, "little") + b"text")  # a last, raw block
    assert zstandard.get_frame_parameters((tmp_path / "a.txt.zst").read_bytes()).window_size == 1 << 31
    assert all_texts(text(tmp_path)) == ["text"]


def test_a_zst_that_is_cut_within_a_frame_is_refused(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    content = "".join(f"{number * 7919 % 10007} " for number in range(20000)).encode()
    frames = [zstandard.compress(content), zstandard.compress(b""), zstandard.compress(content[:5000])]
    skippable = b"\x50\x2a\x4d\x18" + len(b"notes").to_bytes(4, "little") + b"notes"
    whole = skippable + b"".join(frames)
    path = tmp_path / "a.txt.zst"
    path.write_bytes(whole)
    assert all_texts(text(path)) == [(content + content[:5000]).decode()]
    path.write_bytes(whole[: -len(frames[2])])
    assert all_texts(text(path)) == [content.decode()], "a cut between frames cannot be seen"
    first, last = len(skippable) + len(frames[0]), len(whole)
    for cut in (3, len(skippable) - 2, len(skippable) + 2, first // 2, first - 3, last - len(frames[2]) + 1, last - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.txt\.zst is cut short"):
            all_texts(text(path))
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(b'{"text": "one"}\n' * 9)[:-1])
    with pytest.raises(DataError, match=r"b\.jsonl\.zst is cut short"):
        all_texts(jsonl(tmp_path))


def test_without_their_packages_a_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zst").write_bytes(b"x")
    for package, dataset, said in (
        ("pyarrow.parquet", parquet, r"needs the pyarrow package: .* -m pip install -e .*\[parquet\]"),
        ("zstandard", text, r"a\.zst: reading \.zst needs .*: .* -m pip install -e .*\[zst\]"),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(DataError, match=said):
            all_texts(dataset(tmp_path / "a.zst"))


@pytest.mark.parametrize(
    ("content", "separator", "documents"),
    [
        ("  one\n\n<|e|>\n  two <|e|> three<|e|>\n\n<|e|>", "<|e|>", ["  one\n\n", "  two ", " three"]),
        ("  one\n<|e|>\n  two\n", "\n<|e|>\n", ["  one", "  two\n"]),
        ("<|e|>\none\n<|e|>\n<|e|>\ntwo\n<|e|>", "\n<|e|>\n", ["one", "two"]),
        ("<|e|>\n one\n<|e|>\ntwo <|e|> too\n", "\n<|e|>", [" one", "two <|e|> too\n"]),
        ("one\r\n  1\r\n<|e|>\r\ntwo\r\n", "\n<|e|>\n", ["one\r\n  1", "two\r\n"]),
        ("one\n<|e|>\r\ntwo", "\r\n<|e|>\r\n", ["one", "two"]),
        (" a\n b\n\n\n c\n", "\n\n", [" a\n b", "\n c\n"]),
        (" a\r\n\n \n b\n", "\n", [" a", " b"]),
        ("a.b|c(", ".", ["a", "b|c("]),
    ],
)
def test_a_separator_cuts_and_changes_nothing_else(
    tmp_path: Path, content: str, separator: str, documents: list[str]
) -> None:
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert all_texts(text(tmp_path, separator=separator)) == documents
    assert all_texts(text(tmp_path)) == [content]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (lambda folder: text(folder / "nowhere.txt"), r"nowhere\.txt: no such file or folder"),
        (lambda folder: text("~nobody-here/a.txt"), "'~nobody-here/a.txt': there is no user 'nobody-here'"),
        (lambda folder: jsonl(folder / "*.nothing"), r"\*\.nothing: no such file"),
        (lambda folder: jsonl(folder), r"folder .* holds no file that matches \*\.jsonl, \*\.jsonl\.gz"),
        (lambda folder: Shards(Shards.Config(path=str(folder))), r"holds no file that matches \*\.bin"),
        (lambda folder: text(), r"a dataset needs a path"),
        (lambda folder: text(folder / "empty.gz"), r"empty\.gz is empty"),
        (lambda folder: jsonl(folder / "empty.gz"), r"empty\.gz is empty"),
        (lambda folder: text(folder / "nul.txt"), r"nul\.txt: ends in 4 NUL bytes, as after a crash"),
        (lambda folder: text(folder / "latin.txt"), r"latin\.txt: not UTF-8 at byte 3"),
    ],
)
def test_faults_name_the_file(tmp_path: Path, dataset: Any, words: str) -> None:
    (tmp_path / "empty.gz").write_bytes(b"")
    (tmp_path / "nul.txt").write_bytes(b"hello\0\0\0\0")
    (tmp_path / "latin.txt").write_bytes(b"Gr.\xf6\xdfe")
    with pytest.raises((DataError, ConfigError), match=words):
        all_texts(dataset(tmp_path))


def test_jsonl_reads_the_field_of_every_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1}\n\n{"body": "x", "text": "t\\u00f6\\n"}')
    dataset = jsonl(tmp_path)
    assert all_texts(dataset) == ["one", "tö\n"]
    assert [d.place for d in dataset.documents(tmp_path / "a.jsonl")] == [f"{tmp_path}/a.jsonl:{n}" for n in (1, 3)]
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"body": "packed"}'))
    assert all_texts(jsonl(tmp_path / "b.jsonl.gz", field="body")) == ["packed"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "cut', r"a\.jsonl:2: not JSON: Unterminated string"),
        (b'{"body": "x", "id": 3}', r"a\.jsonl:2: no field 'text'; set data.field to one of: 'body', 'id'"),
        (b'{"meta": {"body": "x"}, "id": 3}', r"a\.jsonl:2: no field 'text'; set .* one of: 'meta\.body', 'id'"),
        (b'{"text": 12}', r"a\.jsonl:2: field 'text' is 12, not a string"),
        (b'{"text": %s}' % (b"7" * 5000), r"a\.jsonl:2: field 'text' is Infinity, not a string"),
        (b'{"text": %s0%s}' % (b"[" * 5000, b"]" * 5000), r"a\.jsonl:2: field 'text' is \[\[\[.*, not a string"),
        (b'{"text": ' + b"[" * 5000, r"a\.jsonl:2: not JSON: "),
        (b"\0" * 1500, r"a\.jsonl:2: not JSON: .*; it has 1,500 NUL bytes, .*: write the file again or delete them"),
        (b'{"text": "x"}\r{"text": "y"}\r', r"a\.jsonl:2: not JSON: .*; lines end in CR, .*: tr '\\r' '\\n' < FILE"),
        (
            b'[{"text": "x"},',
            r"a\.jsonl:2: not JSON: .*; one object per line is read, no JSON array; .*: jq -c '\.\[\]'",
        ),
        (b"{", r"a\.jsonl:2: not JSON: .*; an object must be on one line; .*: jq -c \. FILE"),
        (b'{"text": null}', r"a\.jsonl:2: field 'text' is null, not a string"),
        (b'["text"]', r"a\.jsonl:2: must be a JSON object, not a list"),
        (b'{"text": "\xff"}', r"a\.jsonl:2: not UTF-8 at byte 10 of the line"),
    ],
)
def test_jsonl_faults_name_file_and_line(tmp_path: Path, line: bytes, words: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b'\n{"text": "later"}\n')
    with pytest.raises(DataError, match=words):
        all_texts(jsonl(tmp_path))


def test_jsonl_reads_whatever_other_fields_hold(tmp_path: Path) -> None:
    """A thread has a small stack: nothing may recurse as deep as a line is nested."""
    deep = b'{"a": [' * 50_000 + b'"]}\\""' + b"]}" * 50_000
    lines = [
        b'{"text": "integer", "id": -1%s, "e": 1e999}' % (b"7" * 5000),
        b'{"text": "deep", "b": "[", "a": %s, "c": {"d": [1]}}' % deep,
        b'\xef\xbb\xbf{"text": "mark", "a": NaN, "text": "marked"}\r',
        b'{"text": "\\ud800"}',
        b"\xef\xbb\xbf",
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(all_texts, jsonl(tmp_path)).result() == ["integer", "deep", "marked", "\ud800"]


def test_jsonl_reads_a_field_of_an_object_in_a_line(tmp_path: Path) -> None:
    lines = '{"meta": {"text": {"en": "within"}}}\n{"meta.text.en": "at the top", "meta": {"text": {"en": "within"}}}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    assert all_texts(jsonl(tmp_path, field="meta.text.en")) == ["within", "at the top"]
    with pytest.raises(DataError, match=r"a\.jsonl:1: no field 'meta\.text\.de'"):
        all_texts(jsonl(tmp_path, field="meta.text.de"))
