"""Data sets and the sampler: deterministic, complete, and readable at any step."""

import math
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.data.sampler import BatchSampler, collate, input_names
from worker.examples.text import ByteWindows, standard_library_corpus, unigram_entropy_bits


def test_the_default_text_is_the_standard_library_of_this_interpreter():
    corpus = standard_library_corpus().tobytes()
    source = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()
    assert source in corpus
    assert len(corpus) > 1_000_000


def test_windows_tile_the_text_and_targets_are_the_next_bytes(tmp_path):
    text = bytes(range(200)) + b"end"
    (tmp_path / "a.txt").write_bytes(text)
    data = ByteWindows(16, path=str(tmp_path / "a.txt"))
    assert len(data) == (len(text) - 1) // 16
    joined = torch.cat([data[i][0] for i in range(len(data))])
    following = torch.cat([data[i][1] for i in range(len(data))])
    assert bytes(joined.tolist()) == text[: len(joined)]
    assert bytes(following.tolist()) == text[1 : len(joined) + 1]


def test_a_folder_is_read_in_order_of_path_whatever_the_order_of_writing(tmp_path):
    for name in ("b.txt", "a.txt", "c/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert ByteWindows(1, path=str(tmp_path)).corpus.tobytes() == b"a.txtb.txtc/d.txt"


def test_a_text_too_short_for_a_window_is_refused_with_its_size(tmp_path):
    (tmp_path / "a").write_bytes(b"xyz")
    with pytest.raises(ValueError, match="3 bytes has no window of length 3"):
        ByteWindows(3, path=str(tmp_path / "a"))
    with pytest.raises(FileNotFoundError, match=r"data\.args\.path"):
        ByteWindows(3, path=str(tmp_path / "nothing"))


def test_unigram_entropy_equals_its_definition(tmp_path):
    text = b"abracadabra" * 3 + b"xyz"
    (tmp_path / "a").write_bytes(text)
    shares = [count / len(text) for count in Counter(text).values()]
    expected = -sum(share * math.log2(share) for share in shares)
    assert unigram_entropy_bits(ByteWindows(4, path=str(tmp_path / "a")).corpus) == pytest.approx(
        expected, rel=1e-12
    )
    assert 4 < unigram_entropy_bits(standard_library_corpus()) < 5.5


def test_noisy_digits_are_scikit_learns_images_with_repeatable_noise():
    from sklearn.datasets import load_digits

    from worker.examples.digits import NoisyDigits

    data, again, other = NoisyDigits(0.5), NoisyDigits(0.5), NoisyDigits(0.5, seed=1)
    images = torch.from_numpy(load_digits().images).float().unsqueeze(1)
    noisy, clean = data[7]
    assert torch.equal((clean + 1) * 8, images[7])
    assert torch.equal(noisy, again[7][0])
    assert not torch.equal(noisy, other[7][0])
    noise = torch.stack([data[i][0] - data[i][1] for i in range(len(data))])
    assert noise.std().item() == pytest.approx(0.5, rel=0.01)
    assert abs(noise.mean().item()) < 0.01


@given(
    samples=st.integers(1, 40),
    microbatches=st.integers(1, 4),
    size=st.integers(1, 4),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_epoch_deals_each_sample_once(samples, microbatches, size, seed):
    sampler = BatchSampler(samples, microbatches * size, microbatches, seed=seed)
    steps = -(-3 * samples // (microbatches * size))
    dealt = [i for step in range(1, steps + 1) for m in range(microbatches) for i in sampler.indices(step, m)]
    for epoch in range(3):
        assert sorted(dealt[epoch * samples : (epoch + 1) * samples]) == list(range(samples))


def test_a_step_can_be_asked_for_alone_so_that_a_resume_continues_exactly():
    first = BatchSampler(1000, 32, 4, seed=3)
    history = [[first.indices(step, m) for m in range(4)] for step in range(61)]
    resumed = BatchSampler(1000, 32, 4, seed=3)
    assert [[resumed.indices(step, m) for m in range(4)] for step in range(40, 61)] == history[40:]
    assert history[0] != [BatchSampler(1000, 32, 4, seed=4).indices(0, m) for m in range(4)]


def test_the_global_batch_does_not_depend_on_the_number_of_microbatches():
    one, four = BatchSampler(100, 8, 1), BatchSampler(100, 8, 4)
    assert one.indices(5, 0) == [i for m in range(4) for i in four.indices(5, m)]


def test_microbatches_that_do_not_divide_the_batch_are_refused():
    with pytest.raises(ValueError, match="global_batch 10 is not divisible by microbatches 4"):
        BatchSampler(100, 10, 4)


def test_collate_stacks_single_and_multiple_inputs():
    pair = (torch.ones(3), torch.tensor(2))
    inputs, target = collate([pair, pair])
    assert [x.shape for x in inputs] == [(2, 3)]
    assert target.tolist() == [2, 2]
    inputs, target = collate([((torch.ones(3), 1.5), 0), ((torch.zeros(3), 2.5), 1)])
    assert [x.tolist() for x in inputs] == [[[1.0] * 3, [0.0] * 3], [1.5, 2.5]]


def test_collate_names_what_is_not_a_pair_or_not_a_tensor():
    with pytest.raises(ValueError, match="not a pair"):
        collate([torch.ones(3)])
    with pytest.raises(ValueError, match="the target of a sample is no tensor"):
        collate([(torch.ones(3), "cat")])


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (
            [
                {"ids": torch.ones(3), "extra": None, "label": 1},
                {"ids": torch.ones(3), "extra": None, "label": 0},
            ],
            "the input extra of 2 of 2 samples is None: .* data.columns",
        ),
        ([(torch.ones(3), 1), (torch.ones(3), None)], "the target of 1 of 2 samples is None"),
    ],
)
def test_collate_names_what_is_none(samples: list, says: str):
    with pytest.raises(ValueError, match=says):
        collate(samples)


def test_collate_takes_dicts_as_inputs_by_name_whatever_their_order():
    first = {"ids": [1, 2, 3], "mask": torch.ones(3), "label": 1}
    second = {"label": 0, "mask": torch.zeros(3), "ids": [4, 5, 6]}
    assert input_names(first) == ("ids", "mask")
    inputs, target = collate([first, second])
    assert [x.tolist() for x in inputs] == [[[1, 2, 3], [4, 5, 6]], [[1.0] * 3, [0.0] * 3]]
    assert target.tolist() == [1, 0]


def test_collate_gives_the_target_to_a_model_that_computes_its_loss():
    sample = {"ids": torch.ones(3), "labels": torch.tensor(2)}
    assert input_names(sample, own_loss=True) == ("ids", "labels")
    inputs, target = collate([sample, sample], own_loss=True)
    assert [x.shape for x in inputs] == [(2, 3), (2,)] and target.shape == (2,)
    inputs, _ = collate([(torch.ones(3), torch.tensor(2))] * 2, own_loss=True)
    assert [x.shape for x in inputs] == [(2, 3), (2,)]


def test_collate_takes_a_dict_of_inputs_beside_the_target():
    sample = ({"b": torch.ones(3), "a": torch.zeros(2)}, torch.tensor(7))
    assert input_names(sample) == ("a", "b")
    inputs, target = collate([sample])
    assert [x.shape for x in inputs] == [(1, 2), (1, 3)] and target.tolist() == [7]


@pytest.mark.parametrize(
    ("samples", "own_loss", "says"),
    [
        ([{"ids": torch.ones(3)}], False, "wants one target: name it labels or"),
        ([{"ids": torch.ones(3), "label": 1, "target": 2}], False, "wants one target"),
        ([({"ids": torch.ones(3)}, 1)], True, "return one dict"),
        ([{"a": 1, "label": 1}, {"b": 1, "label": 1}], False, "inputs b, another a: return the same fields"),
        ([{"text": "cat", "label": 1}], False, "input text of a sample is no tensor"),
    ],
)
def test_collate_names_what_is_wrong_with_a_dict(samples, own_loss, says):
    with pytest.raises(ValueError, match=says):
        collate(samples, own_loss=own_loss)
