"""Token files: windows as numpy slices them, nothing copied, and files that cannot be right told by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.data.tokens import IGNORE_INDEX, TokenFiles


@pytest.fixture
def tokens(tmp_path):
    """Two files, raw and .npy, of 50 and 23 tokens."""
    first, second = np.arange(50, dtype=np.uint16), np.arange(1000, 1023, dtype=np.uint32)
    first.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", second)
    return tmp_path, [first.astype(np.int64), second.astype(np.int64)]


@pytest.mark.parametrize(("length", "stride"), [(8, None), (8, 3), (1, 1), (22, 5), (49, 49)])
def test_windows_are_slices_of_each_file_and_targets_the_next_tokens(tokens, length, stride):
    folder, arrays = tokens
    expected = [
        one[begin : begin + length + 1]
        for one in arrays
        for begin in range(0, len(one) - length, stride or length)
    ]
    data = TokenFiles(str(folder), length, stride=stride)
    assert len(data) == len(expected)
    for (inputs, targets), window in zip((data[i] for i in range(len(data))), expected, strict=True):
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.tolist() == window[:-1].tolist() and targets.tolist() == window[1:].tolist()
    with pytest.raises(IndexError, match=f"window {len(data)} of {len(data)}"):
        data[len(data)]


def test_labels_of_a_model_that_shifts_them_itself_are_the_tokens(tokens):
    folder, arrays = tokens
    data = TokenFiles([str(folder / "b.npy")], 23, targets="same")
    assert len(data) == 1 and data[0].keys() == {"input_ids", "labels"}
    assert data[0]["input_ids"].tolist() == data[0]["labels"].tolist() == arrays[1].tolist()


@pytest.mark.parametrize("targets", ["next", "same"])
def test_no_target_counts_behind_the_end_of_a_document(tmp_path, targets):
    np.array([5, 0, 7, 8, 0, 9, 1], dtype=np.uint16).tofile(tmp_path / "a.bin")
    sample = TokenFiles(str(tmp_path / "a.bin"), 6, targets=targets, document_end=0)[0]
    inputs, labels = sample if targets == "next" else sample.values()
    assert inputs.tolist() == [5, 0, 7, 8, 0, 9]
    expected = (
        [0, IGNORE_INDEX, 8, 0, IGNORE_INDEX, 1]
        if targets == "next"
        else [5, 0, IGNORE_INDEX, 8, 0, IGNORE_INDEX]
    )
    assert labels.tolist() == expected


def test_a_file_is_mapped_and_not_read(tmp_path):
    """A sparse file of 4 GiB is made and looked at in no time, and a sample holds memory of its own."""
    with open(tmp_path / "large.bin", "wb") as file:
        file.truncate(4 << 30)
    data = TokenFiles(str(tmp_path / "large.bin"), 1024)
    inputs, targets = data[len(data) - 1]
    assert inputs.sum() == 0 and len(data) == ((2 << 30) - 1) // 1024
    inputs += 1
    assert data[len(data) - 1][0].sum() == 0 and targets.sum() == 0


@pytest.mark.parametrize(
    ("written", "arguments", "says"),
    [
        (b"abc", {}, r"a\.bin of 3 bytes is no row of uint16 tokens, which have 2 bytes each: set dtype"),
        (b"", {}, r"a\.bin of 0 bytes is no row"),
        (
            b"ab" * 8,
            {},
            r"no file has the 9 tokens of a window of length 8: .*a\.bin \(8 tokens\); set length",
        ),
        (b"ab" * 8, {"dtype": "float32"}, "dtype 'float32' is none of tokens: use one of uint8"),
        (b"ab" * 8, {"length": 0}, "length is 0"),
        (b"ab" * 8, {"stride": 0}, "stride is 0"),
        (b"ab" * 8, {"targets": "all"}, "targets is 'all': write next or same"),
    ],
)
def test_what_cannot_be_right_is_told_with_file_size_and_type(tmp_path, written, arguments, says):
    (tmp_path / "a.bin").write_bytes(written)
    with pytest.raises(ValueError, match=says):
        TokenFiles(str(tmp_path / "a.bin"), **{"length": 8, **arguments})


def test_a_npy_file_of_another_shape_and_one_that_is_none_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((4, 4), dtype=np.uint16))
    with pytest.raises(ValueError, match=r"a\.npy of \d+ bytes has the shape \[4, 4\] of uint16"):
        TokenFiles(str(tmp_path), 8)
    (tmp_path / "a.npy").write_bytes(b"no header")
    with pytest.raises(ValueError, match=r"of 9 bytes is no \.npy file"):
        TokenFiles(str(tmp_path), 8)


def test_no_files_are_told_with_the_place(tmp_path):
    with pytest.raises(FileNotFoundError, match="no token files in"):
        TokenFiles(str(tmp_path), 8)
    with pytest.raises(FileNotFoundError, match=r"no token file .*gone\.bin"):
        TokenFiles([str(tmp_path / "gone.bin")], 8)


def test_a_token_outside_the_vocabulary_is_told_with_its_file(tmp_path):
    np.array([1, 2, 900, 3, 4], dtype=np.uint16).tofile(tmp_path / "a.bin")
    data = TokenFiles(str(tmp_path / "a.bin"), 4, vocabulary=512)
    with pytest.raises(
        ValueError, match=r"a\.bin has the token 900 .* the vocabulary 512: is its type uint16"
    ):
        data[0]
