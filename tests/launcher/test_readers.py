"""Readers of files: what a sample is, any store, any size, any process; and errors that name the place."""

import json
import pickle
from multiprocessing import get_context
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from rung.launcher import storage_files
from rung.launcher.data import Csv, ImageFolder, Jsonl, Parquet, SavedDataset, Text, readers_csv, readers_text
from rung.launcher.storage_files import DataFile
from rung.strategies.errors import DataError, JobError, StorageError

PEOPLE = 'age,name,score\n31,"Ann, B.",0.5\n42,"two\nlines",\n\n7,"say ""hi""",2\n'


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def memory(name, data):
    url = f"memory://{name}"
    with fsspec.open(url, "wb") as file:
        file.write(data)
    return url


# -------------------------------------------------------------------- CSV


def test_csv_gives_rows_with_guessed_types_quotes_and_missing_values(tmp_path):
    rows = Csv(write(tmp_path, "people.csv", PEOPLE))
    assert list(rows) == [
        {"age": 31, "name": "Ann, B.", "score": 0.5},
        {"age": 42, "name": "two\nlines", "score": None},
        {"age": 7, "name": 'say "hi"', "score": 2.0},
    ]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
def test_csv_line_ends_and_a_missing_last_one(tmp_path, ending, last):
    text = "a,b" + ending + "1,2" + ending + "3,4" + (ending if last else "")
    assert [tuple(r.values()) for r in Csv(write(tmp_path, "x.csv", text))] == [(1, 2), (3, 4)]


def test_csv_with_features_and_label_gives_tensors(tmp_path):
    path = write(tmp_path, "x.csv", "a,b,kind\n1,2,cat\n3,,dog\n")
    rows = Csv(path, features=["b", "a"], label="kind", classes=["cat", "dog"])
    x, y = rows[0]
    assert x.tolist() == [2.0, 1.0]
    assert x.dtype == torch.float32
    assert y == 0
    x, y = rows[-1]
    assert x[0].isnan()
    assert y == 1


def test_csv_rows_of_several_files_follow_each_other(tmp_path):
    for n in range(3):
        write(tmp_path, f"part-{n}.csv", f"a\n{10 * n}\n{10 * n + 1}\n")
    for paths in (tmp_path, tmp_path / "part-*.csv", [tmp_path / f"part-{n}.csv" for n in range(3)]):
        assert [r["a"] for r in Csv(paths)] == [0, 1, 10, 11, 20, 21]


def test_csv_rows_across_the_pieces_in_which_the_index_is_made(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list('ab",\n x'), 9)) for _ in range(200)]
    lines = ["n,text"] + [f'{n},"{t.replace(chr(34), chr(34) * 2)}"' for n, t in enumerate(texts)]
    path = write(tmp_path, "x.csv", "\n".join(lines) + "\n")
    monkeypatch.setattr(readers_csv, "_SCAN_BYTES", 7)
    rows = Csv(path, types={"text": str})
    assert [r["n"] for r in rows] == list(range(200))
    missing = readers_csv._MISSING
    assert [r["text"] for r in rows] == [None if t.strip().lower() in missing else t for t in texts]


CSV_MISTAKES = [
    ("a,b\n1,2\n3,x\n", {"types": {"b": float}}, "x.csv:3, column 'b': 'x' is not a number"),
    ("a,b\n1,2\n3.5,4\n", {"types": {"a": int}}, "x.csv:3, column 'a': '3.5' is not a whole number"),
    ("a,b\n1,2\n3,4,5\n", {}, "x.csv:3: 3 fields, the header has 2: '3,4,5'"),
    ("a,b\n1,2\n3\n", {}, "x.csv:3: 1 fields, the header has 2: '3'"),
    (b"a,b\n1,2\n3,\xff\n", {}, "x.csv:3, column 'b': byte 0xff is not UTF-8"),
    (
        "a,b\n1,cat\n2,cow\n",
        {"features": ["a"], "label": "b", "classes": ["cat"]},
        "x.csv:3, column 'b': 'cow' is none",
    ),
    ("a,b\n1,2\n2,2.5\n", {"features": ["a"], "label": "b"}, "x.csv:3, column 'b': 2.5 is no class"),
    ('a,b\n1,"x\ny"\nz,4\n', {"types": {"a": int}}, "x.csv:4, column 'a': 'z' is not a whole number"),
]


@pytest.mark.parametrize(("text", "options", "message"), CSV_MISTAKES, ids=[m[2] for m in CSV_MISTAKES])
def test_a_csv_mistake_names_file_line_column_and_value(tmp_path, text, options, message):
    rows = Csv(write(tmp_path, "x.csv", text), **options)
    assert rows[0] is not None
    with pytest.raises(DataError, match="mend the file") as caught:
        rows[1]
    assert message in str(caught.value)
    assert caught.value.samples == (1,)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "is empty"),
        ("a,b\n", {}, "has a header and no rows"),
        ("a,a\n1,2\n", {}, "column 'a' occurs twice"),
        ("age,b\n1,2\n", {"features": ["aeg"]}, "has no column 'aeg'"),
        ('a,b\n1,"2\n3,4\n', {}, "x.csv:2: a quote that is opened here is never closed"),
    ],
)
def test_a_csv_file_that_cannot_be_used_at_all_says_why(tmp_path, text, options, message):
    with pytest.raises(DataError) as caught:
        Csv(write(tmp_path, "x.csv", text), **options)
    assert message in str(caught.value)


def test_a_label_without_features_and_files_with_other_columns_are_refused(tmp_path):
    a = write(tmp_path, "a.csv", "x,y\n1,2\n")
    b = write(tmp_path, "b.csv", "x,z\n1,2\n")
    with pytest.raises(JobError, match="needs features"):
        Csv(a, label="y")
    with pytest.raises(DataError, match=r"b\.csv:1: its columns are x, z"):
        Csv([a, b])


def test_a_missing_file_folder_or_pattern_is_named(tmp_path):
    for paths, message in (("nothing.csv", "nothing.csv"), ("*.csv", "no file here matches")):
        with pytest.raises((DataError, StorageError), match=message.replace("*", ".")):
            Csv(tmp_path / paths)
    with pytest.raises(DataError, match="no data files"):
        Csv([])


# -------------------------------------------------------------------- JSON lines


def test_jsonl_gives_objects_and_skips_empty_lines(tmp_path):
    path = write(tmp_path, "x.jsonl", '{"a": 1}\n\n{"a": [2, {"b": "ü"}]}')
    assert list(Jsonl(path)) == [{"a": 1}, {"a": [2, {"b": "ü"}]}]


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ('{"a": 1,}', {}, "x.jsonl:3: character 9: "),
        ("[1, 2]", {}, "x.jsonl:3: a row has to be an object in braces, this is a list"),
        ('{"b": 1}', {"required": ["a"]}, "x.jsonl:3, column 'a': missing"),
        ('{"a": "one"}', {"features": ["a"]}, "x.jsonl:3, column 'a': 'one' is not a number"),
        (b'{"a": "\xff"}', {}, "x.jsonl:3: byte 0xff at character 8 is not UTF-8"),
    ],
)
def test_a_jsonl_mistake_names_file_line_and_place(tmp_path, line, options, message):
    line = line if isinstance(line, bytes) else line.encode()
    rows = Jsonl(write(tmp_path, "x.jsonl", b'{"a": 0}\n\n' + line + b"\n"), **options)
    assert rows[0] is not None
    with pytest.raises(DataError) as caught:
        rows[1]
    assert message in str(caught.value)


# -------------------------------------------------------------------- Parquet and saved data sets


def test_parquet_rows_across_groups_and_files_with_a_small_cache(tmp_path):
    for n in range(2):
        table = pa.table({"x": np.arange(25) + 25 * n, "y": [f"t{i}" for i in range(25)]})
        pq.write_table(table, tmp_path / f"{n}.parquet", row_group_size=10)
    rows = Parquet(tmp_path, cache_bytes=1)
    order = np.random.default_rng(0).permutation(50)
    assert [rows[int(i)]["x"] for i in order] == order.tolist()
    assert rows[30]["y"] == "t5"
    x = Parquet(tmp_path, features=["x"])
    assert x[49].tolist() == [49.0]
    assert x.columns == ["x"]


def test_damaged_parquet_names_the_file(tmp_path):
    path = write(tmp_path, "x.parquet", b"PAR1 this is no such file PAR1")
    with pytest.raises(DataError, match=r"x\.parquet: cannot be read"):
        Parquet(path)
    pq.write_table(pa.table({"x": np.random.default_rng(0).random(1000)}), path, compression="gzip")
    data = bytearray(path.read_bytes())
    data[100:2000] = bytes(1900)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"x\.parquet, row group 0: cannot be read"):
        Parquet(path)[0]


def saved(folder, values, indices=None):
    folder.mkdir(parents=True)
    table = pa.table({"text": [f"t{v}" for v in values], "label": values})
    state = {"_data_files": [], "_fingerprint": "0"}
    for n, part in enumerate((table.slice(0, 4), table.slice(4))):
        name = f"data-{n:05}-of-00002.arrow"
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(part, max_chunksize=3)
        state["_data_files"].append({"filename": name})
    if indices is not None:
        chosen = pa.table({"indices": pa.array(indices, pa.uint64())})
        with pa.OSFile(str(folder / "indices.arrow"), "wb") as sink, pa.ipc.new_stream(sink, chosen.schema) as writer:
            writer.write_table(chosen)
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (folder / "state.json").write_text(json.dumps(state))


def test_a_data_set_saved_to_disk_is_read_in_parts_with_splits_and_chosen_rows(tmp_path):
    saved(tmp_path / "d" / "train", list(range(10)))
    saved(tmp_path / "d" / "test", list(range(10)), indices=[7, 2, 9])
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [r["label"] for r in SavedDataset(tmp_path / "d", "train")] == list(range(10))
    rows = SavedDataset(tmp_path / "d", "test")
    assert [r["text"] for r in rows] == ["t7", "t2", "t9"]
    assert len(rows) == 3
    with pytest.raises(DataError, match="no split 'valid'; its splits are train, test"):
        SavedDataset(tmp_path / "d", "valid")
    with pytest.raises(DataError, match="save_to_disk"):
        SavedDataset(tmp_path)


# -------------------------------------------------------------------- text


def test_text_windows_of_bytes_run_over_the_ends_of_files(tmp_path):
    write(tmp_path, "a.txt", "abcde")
    write(tmp_path, "b.txt", "fghij")
    windows = Text(tmp_path, context=3)
    assert len(windows) == 3
    assert [bytes(w.tolist()).decode() for w in windows] == ["abcd", "defg", "ghij"]
    assert windows[0].dtype == torch.int64


def numbered(text):
    return [int(word) for word in text.split()]


def test_text_with_a_tokenizer_is_computed_once_and_mapped(tmp_path, monkeypatch):
    path = write(tmp_path, "a.txt", "\n".join(map(str, range(100_000, 100_050))))
    monkeypatch.setattr(readers_text, "_PIECE_BYTES", 16)
    calls = []

    def encode(text):
        calls.append(text)
        return numbered(text)

    windows = Text(path, context=7, tokenizer=encode, cache=tmp_path / "cache")
    assert torch.cat([w[:-1] for w in windows]).tolist() == list(range(100_000, 100_049))
    assert len(calls) > 10
    calls.clear()
    assert len(Text(path, context=7, tokenizer=encode, cache=tmp_path / "cache")) == 7
    assert not calls
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_text_mistakes_are_named(tmp_path):
    path = write(tmp_path, "a.txt", b"1 2\n3 \xff\n")
    with pytest.raises(DataError, match=r"a\.txt:2: byte 0xff is not UTF-8"):
        Text(path, context=1, tokenizer=numbered, cache=tmp_path / "cache")
    with pytest.raises(DataError, match="less than one window"):
        Text(path, context=100)
    with pytest.raises(DataError, match="context is 0"):
        Text(path, context=0)


# -------------------------------------------------------------------- images


def test_image_folders_give_tensors_and_classes_in_order(tmp_path):
    for name, shade in (("dog/1.png", 255), ("cat/1.png", 0), ("cat/2.jpg", 128)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (6, 4), (shade, 0, 0)).save(tmp_path / name)
    images = ImageFolder(str(tmp_path))
    assert images.classes == ["cat", "dog"]
    assert [label for _, label in images] == [0, 0, 1]
    pixels, _ = images[2]
    assert pixels.shape == (3, 4, 6)
    assert pixels[0].eq(1).all()
    assert pixels[1].eq(0).all()
    assert ImageFolder(str(tmp_path), mode="L", size=(2, 3))[0][0].shape == (1, 2, 3)


def test_broken_images_and_empty_folders_are_named(tmp_path):
    write(tmp_path, "cat/1.png", b"this is text")
    write(tmp_path, "cat/2.png", b"")
    images = ImageFolder(str(tmp_path))
    for index, message in (
        (0, r"1\.png is no image that Pillow knows; it begins with b'this is "),
        (1, "2.png is empty"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            images[index]
        assert caught.value.samples == (index,)
    with pytest.raises(DataError, match="no images in folders"):
        ImageFolder(str(tmp_path / "nowhere"))


# -------------------------------------------------------------------- stores and processes


def every_kind(tmp_path):
    write(tmp_path, "x.csv", PEOPLE)
    write(tmp_path, "x.jsonl", '{"a": 1}\n{"a": 2}\n')
    write(tmp_path, "x.txt", "hello world")
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "x.parquet")
    saved(tmp_path / "saved", list(range(6)))
    (tmp_path / "images" / "a").mkdir(parents=True)
    Image.new("L", (2, 2), 9).save(tmp_path / "images" / "a" / "1.png")
    return {
        "csv": lambda top: Csv(f"{top}/x.csv"),
        "jsonl": lambda top: Jsonl(f"{top}/x.jsonl"),
        "text": lambda top: Text(f"{top}/x.txt", 4),
        "parquet": lambda top: Parquet(f"{top}/x.parquet"),
        "saved": lambda top: SavedDataset(f"{top}/saved"),
        "images": lambda top: ImageFolder(f"{top}/images", mode="L"),
    }


def plain(dataset):
    return [repr(sample) for sample in (dataset[i] for i in range(len(dataset)))]


def in_child(dataset, queue):
    queue.put(plain(dataset))


def test_every_reader_works_on_any_store_after_pickling_and_in_a_forked_process(tmp_path):
    makers = every_kind(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            memory(f"readers/{path.relative_to(tmp_path).as_posix()}", path.read_bytes())
    for name, make in makers.items():
        local = make(tmp_path)
        expected = plain(local)
        assert len(expected) > 0
        assert plain(make("memory://readers")) == expected, name
        assert plain(pickle.loads(pickle.dumps(local))) == expected, name
        queue = get_context("fork").Queue()
        child = get_context("fork").Process(target=in_child, args=(local, queue))
        child.start()
        assert queue.get(timeout=30) == expected, name
        child.join(10)
        with pytest.raises(IndexError):
            local[len(local)]


def test_a_remote_file_is_read_in_blocks_that_are_kept(tmp_path, monkeypatch):
    data = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8).tobytes()
    monkeypatch.setattr(storage_files, "_BLOCK_BYTES", 64)
    file = DataFile(memory("blocks/x.bin", data))
    rng = np.random.default_rng(1)
    for _ in range(200):
        start = int(rng.integers(0, 5000))
        stop = start + int(rng.integers(0, 900))
        assert file.read(start, stop) == data[start:stop]
    assert len(file._blocks) <= storage_files._BLOCKS
    with file.open() as stream:
        stream.seek(-10, 2)
        assert stream.read() == data[-10:]


def test_names_of_readers_are_those_of_the_package():
    import rung.launcher.data as package

    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError):
        package.Excel  # noqa: B018
    assert Path(package.__file__).name == "__init__.py"
