"""Fine-tuning works with any module and image tensors.

Several processes fine-tune the network that one would, up to rounding; over gloo, on the loopback interface.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from timm.layers import BatchNormAct2d

from labeler.errors import InvalidSetting, TryAgain
from workers.students.finetune import FineTuning, fine_tune
from workers.students.ranks import ALONE, joined_ranks, run_in_ranks


def small_backbone() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
        )


def bars(rng: np.random.Generator, count: int = 120) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Images with a bright bar at one of three heights."""
    truth = rng.integers(0, 3, count)
    images = rng.normal(0, 0.3, (count, 1, 12, 12)).astype(np.float32)
    images[np.arange(count), 0, 4 * truth + 1] += 2
    return torch.from_numpy(images), truth


def soft(truth: NDArray[np.int64]) -> NDArray[np.float64]:
    return 0.7 * np.eye(3)[truth] + 0.1


QUICK = FineTuning(epochs=8, batch_size=32, learning_rate=0.03, warmup_epochs=1)


def test_a_network_learns_soft_labels(rng: np.random.Generator) -> None:
    images, truth = bars(rng)
    losses: list[float] = []
    student = fine_tune(
        small_backbone(), images, soft(truth), settings=QUICK, on_epoch=lambda _epoch, loss: losses.append(loss)
    )
    fresh, fresh_truth = bars(rng)
    assert (student.predict(fresh) == fresh_truth).mean() > 0.9
    assert len(losses) == 9
    assert losses[-1] < losses[0]


def test_same_seed_same_network(rng: np.random.Generator) -> None:
    images, truth = bars(rng, 40)
    first, again = (
        fine_tune(small_backbone(), images, soft(truth), settings=FineTuning(epochs=1), seed=3).predict_proba(images)
        for _ in range(2)
    )
    np.testing.assert_array_equal(first, again)


def test_saved_weights_come_back(rng: np.random.Generator, tmp_path: Path) -> None:
    images, truth = bars(rng, 40)
    student = fine_tune(small_backbone(), images, soft(truth), settings=FineTuning(epochs=1))
    student.save(tmp_path / "network.safetensors")
    found = load_file(tmp_path / "network.safetensors")
    assert found.keys() == student.network.state_dict().keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in student.network.state_dict().items())


def test_a_frozen_backbone_stays_as_it_is(rng: np.random.Generator) -> None:
    images, truth = bars(rng, 40)
    backbone = small_backbone()
    for parameter in backbone.parameters():
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in backbone.parameters()]
    fine_tune(backbone, images, soft(truth), settings=FineTuning(epochs=1))
    assert all(torch.equal(old, new) for old, new in zip(before, backbone.parameters(), strict=True))


def test_a_network_is_tuned_on_bytes_of_which_no_more_than_a_batch_becomes_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them did, on the device: 602 GB for a million photos."""
    from feature_store.backbones import network
    from feature_store.backbones.network import PreparedImages

    counts: list[int] = []
    convert = network.to_unit_range
    monkeypatch.setattr(network, "to_unit_range", lambda pixels: (counts.append(len(pixels)), convert(pixels))[1])
    pixels = np.random.default_rng(2).integers(0, 256, (50, 8, 8, 3), dtype=np.uint8)
    prepared = PreparedImages(pixels, torch.full((1, 3, 1, 1), 0.5), torch.full((1, 3, 1, 1), 0.25))
    whole = (convert(torch.from_numpy(pixels)) - 0.5) / 0.25
    soft = np.eye(2)[np.arange(50) % 2]
    settings = FineTuning(epochs=2, batch_size=16, warmup_epochs=1)
    made = []
    for images in (prepared, whole):
        torch.manual_seed(0)
        body = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        tuned = fine_tune(body, images, soft, settings=settings, seed=3)
        made.append(tuned.predict_proba(images, batch_size=20))
    assert np.array_equal(made[0], made[1])
    assert max(counts) == 20


SETTINGS = FineTuning(epochs=3, batch_size=16, learning_rate=0.01, warmup_epochs=1)
COUNT = 35
"""Two whole batches and one of three, which two processes cannot share evenly."""


def backbone() -> torch.nn.Module:
    """A normalization of torch's and one of timm's, which carries its activation.

    Nothing stands before a normalization that has no gradient but rounding, as a bias: AdamW makes steps of that.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1, bias=False),
            BatchNormAct2d(8),
            torch.nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(4),
            torch.nn.Flatten(),
        )


def problem() -> tuple[torch.Tensor, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    rng = np.random.default_rng(4)
    truth = rng.integers(0, 3, COUNT)
    images = rng.normal(0, 0.3, (COUNT, 1, 32, 32)).astype(np.float32)
    images[np.arange(COUNT), 0, 10 * truth + 1] += 2
    return torch.from_numpy(images), 0.7 * np.eye(3)[truth] + 0.1


def tune(out: Path) -> None:
    """Train as each process does."""
    images, labels = problem()
    losses: list[float] = []
    with joined_ranks() as ranks:
        student = fine_tune(
            backbone(), images, labels, settings=SETTINGS, seed=5, ranks=ranks,
            on_epoch=lambda _, loss: losses.append(loss),
        )  # fmt: skip
        if ranks.is_first:
            state = dict(student.network.state_dict()) | {"losses": torch.tensor(losses, dtype=torch.float64)}
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, out)


def in_two_processes(script: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """`run_in_ranks`, of a script of ours instead of a command."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(sys, "executable", _wrapper(script))
    return run_in_ranks((), 2)


def _wrapper(script: Path) -> str:
    """An interpreter that runs a script, whatever module it is asked for."""
    wrapper = script.with_suffix(".sh")
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')
    wrapper.chmod(0o700)
    return str(wrapper)


def in_forks(count: int, out: Path) -> list[int | None]:
    """Tune in this number of processes, with the variables that torchrun sets; return how each ended.

    Forks, which have loaded torch and timm already: what `run_in_ranks` starts is looked at by the other tests.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    forks = [context.Process(target=_tune_as, args=(rank, count, port, out)) for rank in range(count)]
    for one in forks:
        one.start()
    for one in forks:
        one.join()
    return [one.exitcode for one in forks]


def _tune_as(rank: int, count: int, port: int, out: Path) -> None:
    told = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    tune(out)


def test_two_processes_tune_the_network_that_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight and statistic of the normalizations; gradients, normalization and uneven batches go into them."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert in_forks(1, tmp_path / "one.safetensors") == [0]
    assert in_forks(2, tmp_path / "two.safetensors") == [0, 0]
    one, two = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    assert list(one) == list(two)
    for name, tensor in one.items():
        apart, scale = (tensor.double() - two[name].double()).abs().max(), tensor.double().abs().max()
        # Rounding in single precision; a step is a thousandth or a hundredth.
        assert float(apart) < 1e-6 + 1e-5 * float(scale), name


def test_what_one_process_refuses_ends_them_all_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "refuse.py"
    script.write_text(
        "import os, sys, time\nif os.environ['RANK'] == '0': time.sleep(600)\n"
        "sys.stderr.write('no such thing\\n')\nsys.exit(2)\n"
    )
    assert in_two_processes(script, monkeypatch) == 2
    assert capfd.readouterr().err == "no such thing\n"


def test_a_killed_process_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "die.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(TryAgain, match=r"one of 2 processes was killed \(signal 9\) and nothing was saved"):
        in_two_processes(script, monkeypatch)


def test_a_process_that_was_started_alone_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined_ranks() as ranks:
        assert ranks is ALONE


def test_processes_without_a_gpu_each_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidSetting, match="4 processes were asked for, and 2 are here"), joined_ranks():
        pass
