import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from rung.launcher.data.fetch import Randomness
from rung.launcher.data.loader import Loader, Step, auto_workers, eval_batches
from rung.launcher.data.order import Order
from rung.launcher.data.rng import seed_everything
from rung.launcher.task import TaskAdapter
from rung.strategies.errors import DataError, TaskError, WorkersFailed
from rung.strategies.plan import Plan, cut


class Augmented:
    """Sample i is (i, noise from each of the three global generators)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        import random

        noise = torch.tensor([random.random(), np.random.random()])
        return {"index": torch.tensor(index), "noise": torch.cat([noise, torch.randn(3)])}


class Plain:
    """Sample i is the number i; counts what is fetched."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        return torch.tensor(index)


class Bulk(Plain):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(i) for i in indices]


class Faulty(Plain):
    """Does what `fault` says at sample 13."""

    def __init__(self, size: int, fault: str) -> None:
        super().__init__(size)
        self.fault = fault

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            match self.fault:
                case "raise":
                    self.decode(index)
                case "memory":
                    raise MemoryError("no room")
                case "cuda":
                    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
                case "exit":
                    os._exit(3)
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "lambda":
                    return lambda: None
        return torch.tensor(index)

    def decode(self, index: int) -> None:
        raise ValueError(f"bad header in record {index}")


def plan(global_batch: int, micro_batch: int, devices: int = 1, shares: tuple[int, ...] = ()) -> Plan:
    return Plan(
        strategy="single" if devices == 1 else "ddp",
        device="cpu",
        devices=devices,
        global_batch=global_batch,
        micro_batch=micro_batch,
        shares=shares,
    )


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def loaders(dataset: Any, how: Plan, order: Order, **more: Any) -> list[Loader]:
    return [Loader(dataset, default_collate, order, how, rank, **more) for rank in range(how.devices)]


def samples_of(loaders: list[Loader]) -> list[tuple[int, int, int, bytes]]:
    """What is trained on, in the order of the global batches: (epoch, position of the batch, index, bits)."""
    found = []
    for steps in zip(*loaders, strict=True):
        assert len({(step.epoch, step.position, step.count, step.slots) for step in steps}) == 1
        here = []
        for step in steps:
            micro = list(step.micro)
            assert len(micro) == step.slots
            for one in micro:
                assert one.batch["index"].tolist() == one.indices.tolist()
                if not one.filler:
                    here += [
                        (step.epoch, step.position, index, noise.numpy().tobytes())
                        for index, noise in zip(one.indices.tolist(), one.batch["noise"], strict=True)
                    ]
        assert [index for _, _, index, _ in here] == steps[0].indices.tolist()
        found += here
    return found


def numbers(step: Step) -> list[list[int]]:
    return [one.batch.tolist() for one in step.micro]


REFERENCE_ORDER = Order(41, seed=5)


def reference() -> list[tuple[int, int, int, bytes]]:
    return samples_of(loaders(Augmented(41), plan(16, 16), REFERENCE_ORDER, epochs=2))


@pytest.mark.parametrize("how", [plan(16, 3), plan(16, 8, 2), plan(16, 1, 3), plan(16, 4, 4), plan(16, 5, 2, (13, 3))])
def test_samples_and_their_augmentation_do_not_depend_on_how_the_batch_is_cut(how: Plan) -> None:
    found = samples_of(loaders(Augmented(41), how, REFERENCE_ORDER, epochs=2))
    assert found == reference()
    assert len({bits for *_, bits in found}) == 2 * 41  # every sample has noise of its own in every epoch


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_loader_workers_change_no_bit(workers: int) -> None:
    for how in (plan(16, 16), plan(16, 3, 2)):
        made = loaders(Augmented(41), how, REFERENCE_ORDER, epochs=2, workers=workers)
        try:
            assert samples_of(made) == reference()
        finally:
            for loader in made:
                loader.close()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_resume_goes_on_with_the_same_bits(steps: int) -> None:
    how = plan(16, 4)
    place = (0, 0)
    for step in itertools.islice(Loader(Augmented(41), default_collate, REFERENCE_ORDER, how, 0), steps):
        place = step.resume
    rest = loaders(Augmented(41), how, REFERENCE_ORDER, epoch=place[0], position=place[1], epochs=2)
    assert samples_of(rest) == reference()[place[0] * 41 + place[1] :]


def test_the_last_smaller_batch_of_an_epoch_is_used() -> None:
    found = list(itertools.islice(Loader(Plain(10), default_collate, Order(10, 1), plan(4, 4), 0), 4))
    assert [(step.epoch, step.position, step.count, step.resume) for step in found] == [
        (0, 0, 4, (0, 4)), (0, 4, 4, (0, 8)), (0, 8, 2, (1, 0)), (1, 0, 4, (1, 4)),
    ]  # fmt: skip


def test_a_seek_costs_the_same_anywhere_in_a_trillion_samples() -> None:
    order = Order(10**12, 3)
    start = time.perf_counter()
    loader = Loader(Plain(10**12), default_collate, order, plan(8, 8), 0, epoch=10**9, position=10**12 - 4)
    first, second = numbers(next(loader)), numbers(next(loader))
    assert time.perf_counter() - start < 1
    assert first == [order.indices(10**9, 10**12 - 4, 4).tolist()]
    assert second == [order.indices(10**9 + 1, 0, 8).tolist()]


def test_a_rank_without_samples_gets_a_filler_and_no_sample_counts_twice() -> None:
    how = plan(8, 1, 4)
    made = [list(Loader(Plain(10), default_collate, Order(10, 1), how, rank, epochs=1)) for rank in range(4)]
    last = [list(steps[-1].micro) for steps in made]
    assert [[one.filler for one in micro] for micro in last] == [[False], [False], [True], [True]]
    assert all(len(one.batch) == len(one.indices) == 1 for micro in last for one in micro)
    assert all(one.indices[0] in steps[-1].indices for steps, micro in zip(made, last, strict=True) for one in micro)
    for rank, micro in enumerate(last):
        assert len(micro) == cut(2, how).slots
        start, stop = cut(2, how).slices[rank][0]
        assert micro[0].filler == (start == stop)


def test_micro_batches_are_fetched_only_when_their_turn_comes() -> None:
    data = Plain(12)
    loader = Loader(data, default_collate, Order(12, 1), plan(12, 4), 0, random=Randomness())
    step = next(loader)
    assert data.fetched == []
    micro = iter(step.micro)
    next(micro)
    assert data.fetched == step.indices[:4].tolist()
    assert [one.indices.tolist() for one in micro] == [step.indices[4:8].tolist(), step.indices[8:].tolist()]
    data.fetched.clear()
    whole = next(loader).materialise()
    assert data.fetched == whole.indices.tolist()
    assert numbers(whole) == numbers(whole)


def test_fetching_in_the_process_leaves_the_models_generators_alone() -> None:
    seed_everything(1, 1, 1)
    expected = torch.rand(3), np.random.random()
    seed_everything(1, 1, 1)
    loader = Loader(Augmented(41), default_collate, REFERENCE_ORDER, plan(16, 4), 0)
    assert loader.random == Randomness(samples=True, collate=False)
    found = [torch.rand(1)]
    found.extend(torch.rand(1) for _ in next(loader).micro)
    assert torch.equal(torch.cat(found)[:3], expected[0])
    assert np.random.random() == expected[1]


def masked(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).float() * torch.rand(len(samples))


@pytest.mark.slow
def test_a_collate_that_draws_is_seeded_too() -> None:
    def run(workers: int, position: int) -> list[bytes]:
        order = Order(32, 4)
        with Loader(Plain(32), masked, order, plan(8, 4), 0, position=position, epochs=1, workers=workers) as loader:
            assert loader.random == Randomness(samples=False, collate=True)
            return [one.batch.numpy().tobytes() for step in loader for one in step.micro]

    seed_everything(0, 0, 0)
    whole = run(0, 0)
    torch.rand(5)
    assert run(0, 8) == whole[2:]
    assert run(2, 0) == whole


def test_many_samples_are_fetched_at_once_where_the_data_set_can() -> None:
    data = Bulk(12)
    assert numbers(next(Loader(data, default_collate, Order(12, 1), plan(8, 8), 0, random=Randomness())))
    assert data.fetched == []


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sample_that_raises_is_named_with_the_users_traceback_only(workers: int) -> None:
    order = Order(20, shuffle=False)
    with Loader(Faulty(20, "raise"), default_collate, order, plan(4, 4), 0, workers=workers) as loader:
        for _ in range(3):
            list(next(loader).micro)
        with pytest.raises(
            TaskError, match=r"ValueError: bad header in record 13 in test_loader.py:\d+, in sample 13 of"
        ) as caught:
            list(next(loader).micro)
    text = caught.value.traceback_text
    assert "in decode" in text
    assert "in __getitem__" in text
    assert text.count("File ") == 2
    assert "launcher/data" not in text


def test_a_broken_sample_is_found_behind_a_bulk_fetch() -> None:
    class Lot(Faulty):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return [self[i] for i in indices]

    loader = Loader(Lot(20, "raise"), default_collate, Order(20, shuffle=False), plan(20, 20), 0)
    with pytest.raises(TaskError, match=r"ValueError: bad header.*, in sample 13 of the data set"):
        list(next(loader).micro)


def test_a_bulk_fetch_that_fails_alone_or_miscounts_is_told() -> None:
    class Short(Plain):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices[1:]

    class Broken(Plain):
        def __getitems__(self, indices: list[int]) -> list[int]:
            raise OSError("no such file")

    for data, says in (
        (Short(9), "3 samples for 4"),
        (Broken(9), "OSError: no such file .*, in __getitems__ of the data set, for samples 0, 1, 2, 3"),
    ):
        loader = Loader(data, default_collate, Order(9, shuffle=False), plan(4, 4), 0)
        with pytest.raises(TaskError, match=says):
            list(next(loader).micro)


def test_a_collate_that_raises_names_its_samples() -> None:
    class Task:
        def loss(self, model: Any, batch: Any) -> None: ...

        def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([torch.zeros(int(i)) for i in samples])

    collates: list[Any] = [Task().collate, TaskAdapter(Task()).collate]
    for collate in collates:
        loader = Loader(Plain(20), collate, Order(20, shuffle=False), plan(4, 4), 0, random=Randomness())
        with pytest.raises(TaskError, match=r"RuntimeError: .*, in collate of samples 0, 1, 2, 3") as caught:
            next(iter(next(loader).micro))
        assert "stack expects each tensor" in caught.value.traceback_text
        assert "test_loader.py" in caught.value.traceback_text


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("fault", "kind"), [("memory", MemoryError), ("cuda", RuntimeError)])
def test_memory_that_runs_out_is_not_taken_for_a_mistake(fault: str, kind: type[Exception], workers: int) -> None:
    order = Order(20, shuffle=False)
    loader = Loader(Faulty(20, fault), default_collate, order, plan(20, 20), 0, workers=workers)
    with loader, pytest.raises(kind, match=r"no room|CUDA out of memory"):
        list(next(loader).micro)


def test_what_is_no_map_style_data_set_or_no_place_in_it_is_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    class Counted(Endless):
        def __len__(self) -> int:
            return 10

    order = Order(10)
    for data in (Endless(), Counted(), iter(range(10))):
        with pytest.raises(TaskError, match=f"a {type(data).__name__}, .*no __len__ and __getitem__"):
            Loader(data, default_collate, order, plan(4, 4), 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="10 samples, the data set has 9"):
        Loader(Plain(9), default_collate, order, plan(4, 4), 0)
    with pytest.raises(ValueError, match="rank 2"):
        Loader(Plain(10), default_collate, order, plan(4, 2, 2), 2)
    with pytest.raises(DataError, match="position 11"):
        next(Loader(Plain(10), default_collate, order, plan(4, 4), 0, position=11))


def test_the_loader_adds_little_to_a_step() -> None:
    loader = Loader(Bulk(10**6), as_list, Order(10**6, 1), plan(8, 8), 0)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(100):
            list(next(loader).micro)
        best = min(best, (time.perf_counter() - start) / 100)
    assert best < 100e-6  # about 20 where nothing else runs


@pytest.mark.parametrize(("size", "how"), [(10, plan(64, 4)), (10, plan(8, 2, 3)), (7, plan(8, 2, 3, (5, 2, 1)))])
def test_evaluation_sees_each_sample_once_and_all_ranks_run_in_step(size: int, how: Plan) -> None:
    data = TensorDataset(torch.arange(size))
    ranks = [list(eval_batches(data, default_collate, how, rank)) for rank in range(how.devices)]
    assert len({len(micro) for micro in ranks}) == 1
    assert all(len(one.indices) <= how.micro_batch for micro in ranks for one in micro)
    seen = [i for micro in ranks for one in micro if not one.filler for i in one.batch[0].tolist()]
    assert sorted(seen) == list(range(size))


@pytest.mark.parametrize(
    ("cpus", "ranks", "fetch_s", "step_s", "workers", "why"),
    [
        (64, 8, 0.0005, 0.1, 0, "a worker would cost more"),
        (64, 1, 0.002, 1.0, 0, "a hundredth"),
        (2, 2, 0.1, 0.1, 0, "leave none"),
        (1, 1, 0.1, None, 0, "leave none"),
        (16, 1, 0.1, 0.1, 2, "100 ms"),
        (16, 1, 0.004, 0.1, 1, "4 ms"),
        (16, 2, 1.0, 0.1, 7, "13 would keep up"),
        (256, 1, 5.0, 0.01, 16, "would keep up"),
        (16, 1, 0.1, None, 4, "free for each trainer"),
    ],
)
def test_the_number_of_loader_workers_has_a_reason(
    cpus: int, ranks: int, fetch_s: float, step_s: float | None, workers: int, why: str
) -> None:
    count, reason = auto_workers(cpus, ranks, fetch_s, step_s)
    assert count == workers
    assert why in reason


def settings_of(samples: list[Any]) -> dict[str, Any]:
    return {"threads": torch.get_num_threads(), "samples": torch.stack(samples)}


@pytest.mark.slow
def test_loader_workers_outlive_the_signals_that_stop_a_trainer() -> None:
    with Loader(Plain(10**6), settings_of, Order(10**6, 1), plan(4, 4), 0, workers=2) as loader:
        for pid in loader.worker_pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        for _ in range(20):
            [one] = next(loader).micro
            assert one.batch["samples"].tolist() == one.indices.tolist()
            assert one.batch["threads"] == 1
        assert all(psutil.Process(pid).is_running() for pid in loader.worker_pids)
        pids = loader.worker_pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_starting_workers_takes_nothing_from_the_process() -> None:
    def handler(*_: object) -> None: ...

    before = signal.signal(signal.SIGCHLD, handler)
    try:
        seed_everything(2, 2, 2)
        expected = torch.rand(2)
        seed_everything(2, 2, 2)
        with Loader(Plain(100), default_collate, Order(100, 1), plan(4, 4), 0, workers=1) as loader:
            list(next(loader).micro)
            assert torch.equal(torch.rand(2), expected)
            assert signal.getsignal(signal.SIGCHLD) is handler
            assert not signal.pthread_sigmask(signal.SIG_BLOCK, set()) & {signal.SIGINT, signal.SIGTERM}
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [("kill", -9, r"killed by SIGKILL \(exit code -9\).*memory"), ("exit", 3, "exit code 3")],
)
def test_a_loader_worker_that_ends_gives_one_clear_error(fault: str, status: int, says: str) -> None:
    order = Order(20, shuffle=False)
    with Loader(Faulty(20, fault), default_collate, order, plan(4, 4), 0, workers=2) as loader:
        start = time.monotonic()
        with pytest.raises(WorkersFailed, match=says) as caught:
            [numbers(step) for step in loader]
        assert time.monotonic() - start < 10
        assert caught.value.exit_status == status
        pids = loader.worker_pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_a_batch_that_cannot_be_sent_is_an_error_and_not_a_wait() -> None:
    order = Order(20, subset=np.array([13] * 20), shuffle=False)
    loader = Loader(Faulty(20, "lambda"), as_list, order, plan(4, 4), 0, workers=1)
    with loader, pytest.raises(TaskError, match="cannot be sent"):
        list(next(loader).micro)


@pytest.mark.slow
def test_micro_batches_left_over_are_not_taken_for_the_next_step() -> None:
    with Loader(Plain(64), default_collate, Order(64, 1), plan(16, 4), 0, workers=2) as loader:
        next(iter(next(loader).micro))
        next(loader)
        for step in itertools.islice(loader, 3):
            assert [i for part in numbers(step) for i in part] == step.indices.tolist()


@pytest.mark.gpu
@pytest.mark.slow
def test_batches_for_a_gpu_come_in_pinned_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; there is none")
    how = plan(8, 4).with_(device="cuda")
    with Loader(Plain(32), default_collate, Order(32, 1), how, 0, epochs=1, workers=1) as loader:
        micro = [one for step in loader for one in step.micro]
    assert len(micro) == 8
    assert all(one.batch.is_pinned() and one.batch.tolist() == one.indices.tolist() for one in micro)


TRAINER = """
    import sys, time
    import numpy
    from rung.launcher.data.fetch import Randomness
    from rung.launcher.data.loader import Loader
    from rung.launcher.data.order import Order
    from rung.strategies.plan import Plan

    class Slow:
        def __len__(self):
            return 100
        def __getitem__(self, index):
            time.sleep(0 if index < 4 else 300)
            return index

    plan = Plan(strategy="single", device="cpu", devices=1, global_batch=4, micro_batch=4)
    order = Order(100, shuffle=False)
    loader = Loader(Slow(), list, order, plan, 0, workers=2, random=Randomness())
    list(next(loader).micro)
    print(*loader.worker_pids, flush=True)
"""


def trainer(then: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A process with two loader workers, of which at least one is in a fetch of five minutes."""
    code = textwrap.dedent(TRAINER) + then
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]


@pytest.mark.slow
def test_loader_workers_end_when_their_trainer_is_killed() -> None:
    process, workers = trainer("time.sleep(300)")
    assert len(workers) == 2
    process.kill()
    process.wait(10)
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert alive == []


@pytest.mark.slow
@pytest.mark.parametrize("then", ["", "raise SystemExit(0)", "loader.close()", "del loader"])
def test_a_trainer_ends_soon_although_a_worker_is_stuck_in_a_fetch(then: str) -> None:
    start = time.monotonic()
    process, workers = trainer(then)
    assert process.wait(20) == 0
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []
    assert time.monotonic() - start < 25


@pytest.mark.slow
def test_workers_serve_a_trainer_that_is_itself_a_child(tmp_path: Path) -> None:
    body = textwrap.indent(textwrap.dedent(TRAINER), "    ")
    code = f"import multiprocessing\ndef main():\n{body}\nif __name__ == '__main__':\n"
    code += "    child = multiprocessing.get_context('fork').Process(target=main)\n"
    code += "    child.start()\n    child.join(30)\n    print('exit', child.exitcode)\n    child.kill()\n"
    file = tmp_path / "trainer.py"
    file.write_text(code)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "exit 0", done.stderr
