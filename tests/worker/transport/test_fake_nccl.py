"""The fake of cupy.cuda.nccl agrees with cupy's own, wherever that can be imported (its wheel needs no GPU)."""

from __future__ import annotations

import inspect
import re
import types
import warnings

import pytest

from tests.worker.transport.fake_nccl import FakeCommunicator, FakeNccl
from worker.transport import nccl as transport


def real_nccl():
    """cupy.cuda.nccl, or a skip that says what is missing. The wheels of cupy and of NCCL are enough."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cupy warns where there is no driver
        nccl = pytest.importorskip("cupy.cuda.nccl", exc_type=ImportError, reason="cupy is not installed")
    if not nccl.available:
        pytest.skip("cupy finds no NCCL library: install nvidia-nccl-cu12 and nvidia-cuda-runtime-cu12")
    return nccl


def parameters(function) -> list[str]:
    """Names of parameters, without self: from the first line of Cython's docstring, or by inspection."""
    if signature := re.match(r"[\w.]+\((.*)\)", inspect.getdoc(function) or ""):
        names = [part.split("=")[0].split()[-1] for part in signature[1].split(",") if part.strip()]
    else:
        names = list(inspect.signature(function).parameters)
    return [name for name in names if name != "self"]


def disagreements(real, fake) -> list[str]:
    """What of `fake` is not as in `real`, one line each."""
    found = []
    pairs = [(name, real, fake) for name in ("get_version", "get_unique_id", "groupStart", "groupEnd")]
    mine = fake.NcclCommunicator
    methods = [name for name in dir(mine) if not name.startswith("_") and callable(getattr(mine, name))]
    pairs += [(name, real.NcclCommunicator, mine) for name in methods if name != "nccl"]
    for name, theirs, ours in pairs:
        if not hasattr(theirs, name):
            found.append(f"{name} does not exist")
        elif (wanted := parameters(getattr(theirs, name))) != (given := parameters(getattr(ours, name))):
            found.append(f"{name} takes {wanted}, the fake {given}")
    wanted, given = parameters(real.NcclCommunicator), parameters(mine)
    if wanted != given:
        found.append(f"NcclCommunicator takes {wanted}, the fake {given}")
    identity, made = real.get_unique_id(), fake.get_unique_id()
    if (type(identity), len(identity)) != (type(made), len(made)):
        found.append(f"get_unique_id gives {type(identity).__name__}, the fake {type(made).__name__}")
    return found


def refusal(nccl, *arguments) -> tuple[type, str] | None:
    try:
        nccl.NcclCommunicator(*arguments)
    except Exception as error:
        return type(error), str(error)
    return None


def test_the_fake_has_cupys_methods_parameters_and_identities():
    assert disagreements(real_nccl(), FakeNccl()) == []


def test_communicators_of_one_process_are_never_taken_for_each_other():
    """Identities that came again after 256 let a communicator meet another's messages, and wait for a minute."""
    fake = FakeNccl()
    assert len({fake.get_unique_id() for _ in range(2000)}) == 2000


def test_the_fake_refuses_an_identity_as_cupy_does():
    real, fake = real_nccl(), FakeNccl()
    for identity in ((1,) * 128, b"too short"):
        assert refusal(fake, 2, identity, 0) == refusal(real, 2, identity, 0) is not None


def test_numbers_of_types_and_operations_are_cupys():
    real = real_nccl()
    assert (transport._BYTES, transport._SUM) == (real.NCCL_UINT8, real.NCCL_SUM)
    for dtype, number in transport._SUMMED_TYPES.items():
        assert getattr(real, f"NCCL_{str(dtype).removeprefix('torch.').upper()}") == number, dtype


def test_cupy_has_no_name_for_a_status_as_the_transport_expects():
    real = real_nccl()
    assert "remote process exited" in str(real.NcclError(6))
    with pytest.raises(KeyError, match="7"):
        real.NcclError(7)


def test_a_fake_that_disagrees_is_told_line_by_line():
    class Communicator:
        def __init__(self, ndev, commId, rank, config=None):
            pass

        def send(self, sendbuf, count, peer, datatype, stream):
            pass

        recv = FakeCommunicator.recv
        abort = FakeCommunicator.abort
        destroy = FakeCommunicator.destroy
        check_async_error = FakeCommunicator.check_async_error

    other = types.SimpleNamespace(
        NcclCommunicator=Communicator,
        get_version=lambda: 1,
        get_unique_id=lambda: (0,) * 128,
        groupStart=lambda: None,
        groupEnd=lambda communicators: None,
    )
    assert disagreements(other, FakeNccl()) == [
        "groupEnd takes ['communicators'], the fake []",
        "allGather does not exist",
        "allReduce does not exist",
        "reduceScatter does not exist",
        "send takes ['sendbuf', 'count', 'peer', 'datatype', 'stream'], "
        "the fake ['sendbuf', 'count', 'datatype', 'peer', 'stream']",
        "get_unique_id gives tuple, the fake bytes",
    ]


def test_cupy_takes_more_bytes_than_an_int_counts():
    """A tensor of 2^31 elements and more is one message: none of cupy's calls has a narrower count."""
    real = real_nccl()
    nobody = real.NcclCommunicator.__new__(real.NcclCommunicator)
    calls = [
        lambda: nobody.send(0, 2**40, 1, 0, 0),
        lambda: nobody.recv(0, 2**40, 1, 0, 0),
        lambda: nobody.allReduce(0, 0, 2**40, 7, 0, 0),
        lambda: nobody.reduceScatter(0, 0, 2**40, 7, 0, 0),
        lambda: nobody.allGather(0, 0, 2**40, 1, 0),
    ]
    for call in calls:
        with pytest.raises(
            real.NcclError, match="INVALID_ARGUMENT"
        ):  # there is no communicator: not an overflow
            call()
    nobody.abort()  # of one that is none, and again: nothing
    nobody.destroy()
