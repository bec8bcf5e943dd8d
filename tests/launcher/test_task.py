import math
import os
import pickle
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rung.launcher.job import Job, Optimizer, Schedule
from rung.launcher.job_types import OPTIMIZERS
from rung.launcher.optimizers import torch_optimizers
from rung.launcher.schedule import schedule_factor
from rung.launcher.task import TaskAdapter, load_task, make_optimizer, user_code
from rung.strategies.errors import JobError, TaskError
from rung.strategies.tracebacks import user_traceback

TASK = """
import torch

class Helper:
    pass

class MyTask:
    def __init__(self, width: int = 3, *, depth=1):
        self.width = width

    def model(self):
        return torch.nn.Linear(self.width, 1)

    def dataset(self, split):
        return {"train": [torch.ones(self.width)] * 5}[split]

    def loss(self, model, batch):
        return model(batch).mean()

not_a_class = MyTask()

class Lacking:
    def model(self): ...
    def data_set(self, split): ...
"""


@pytest.fixture(autouse=True)
def _path_and_folder_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    return None


def job_for(folder: Path, task: str = "task:MyTask", **args: Any) -> Job:
    values = {"task": task, "run": "r", "batch": 2, "task_args": args}
    return Job.from_dict(values, source=folder / "job.yaml")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def adapter(**methods: Any) -> TaskAdapter:
    """A task of three methods, with some replaced or added."""

    class Small:
        def model(self) -> torch.nn.Module:
            return torch.nn.Linear(2, 1)

        def dataset(self, split: str) -> Any:
            return [1, 2] if split == "train" else None

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return torch.zeros(())

    task = Small()
    for name, method in methods.items():
        setattr(task, name, method)
    return TaskAdapter(task)


# ------------------------------------------------------------------------------------------------- finding the task


def test_found_beside_the_job_file_then_in_the_working_directory(tmp_path: Path) -> None:
    write(tmp_path / "a" / "task.py", TASK)
    assert load_task(job_for(tmp_path / "a", width=4)).model().in_features == 4
    assert sys.path[0] == str(tmp_path / "a")
    write(tmp_path / "cwd" / "here.py", TASK.replace("width: int = 3", "width: int = 7"))
    assert load_task(job_for(tmp_path / "a", "here:MyTask")).model().in_features == 7
    write(tmp_path / "a" / "here.py", TASK.replace("width: int = 3", "width: int = 8"))
    assert load_task(job_for(tmp_path / "b", "here:MyTask")).model().in_features == 7


def test_found_in_a_package_beside_the_job_or_around_it(tmp_path: Path) -> None:
    write(tmp_path / "pkg1" / "task.py", TASK)
    assert load_task(job_for(tmp_path, "pkg1.task:MyTask")).model().in_features == 3
    write(tmp_path / "pkg2" / "inner" / "task.py", TASK)
    assert load_task(job_for(tmp_path / "pkg2", "pkg2.inner.task:MyTask")).model().in_features == 3
    assert load_task(job_for(tmp_path / "pkg2" / "inner", "pkg2.inner.task:MyTask")).model().in_features == 3


def test_two_jobs_in_one_process_each_get_their_own_module_and_its_helpers(tmp_path: Path) -> None:
    for name, width in (("one", 11), ("two", 12), ("one", 11)):
        write(tmp_path / name / "sizes.py", f"WIDTH = {width}\n")
        write(tmp_path / name / "task.py", "from sizes import WIDTH\n" + TASK.replace("= 3", "= WIDTH"))
        assert load_task(job_for(tmp_path / name)).model().in_features == width


def test_what_is_not_there_is_named_with_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "task.py", TASK)
    for task, words in (
        ("tsk:MyTask", ["job.yaml: task: there is no module tsk; did you mean task?", f"in {tmp_path} and "]),
        ("task.deeper:MyTask", ["task"]),
        ("nothing_like_it.at_all:MyTask", ["there is no module nothing_like_it.at_all", "nothing_like_it/at_all.py"]),
        ("task:MyTsk", ["task.py has no MyTsk; did you mean MyTask?", "it defines Helper, MyTask"]),
        ("task:not_a_class", ["task:not_a_class is a MyTask, not a class"]),
        ("task:Lacking", ["task:Lacking lacks dataset; did you mean data_set?; loss"]),
        ("task:Helper", ["lacks model; dataset; loss"]),
    ):  # fmt: skip
        with pytest.raises((JobError, TaskError)) as caught:
            load_task(job_for(tmp_path, task))
        for word in words:
            assert word in str(caught.value)


def test_a_module_that_python_has_loaded_already_is_refused_not_mixed_up(tmp_path: Path) -> None:
    write(tmp_path / "json.py", TASK)
    with pytest.raises(
        JobError, match=r"(?s)json has the same name as a module that is loaded already .*give yours another"
    ):
        load_task(job_for(tmp_path, "json:MyTask"))


def test_wrong_task_args_name_the_argument_and_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "task.py", TASK + "\nclass Needy(MyTask):\n    def __init__(self, path, **more): ...\n")
    with pytest.raises(JobError) as caught:
        load_task(job_for(tmp_path, widht=4, x=1))
    assert "job.yaml: task_args.widht: not an argument of MyTask; did you mean width?" in str(caught.value)
    assert "task_args.x: not an argument of MyTask\n" in str(caught.value)
    assert "its signature is MyTask(width: int = 3, *, depth=1)" in str(caught.value)
    with pytest.raises(JobError, match=r"task_args\.path: missing; Needy needs it"):
        load_task(job_for(tmp_path, "task:Needy", anything=1))


# ---------------------------------------------------------------------------------------- errors in the user's code


def test_an_error_while_importing_shows_the_users_lines_only(tmp_path: Path) -> None:
    write(tmp_path / "task.py", "import helper\n")
    write(tmp_path / "helper.py", "x = 1\nimport no_such_package\n")
    with pytest.raises(TaskError) as caught:
        load_task(job_for(tmp_path))
    assert caught.value.message == (
        "ModuleNotFoundError: No module named 'no_such_package' in helper.py:2, in importing task"
    )
    text = caught.value.traceback_text
    assert f'File "{tmp_path / "task.py"}", line 1' in text
    assert text.count("File ") == 2
    assert "rung" not in text.replace(str(tmp_path), "")


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    write(tmp_path / "task.py", "x = 1\nclass MyTask\n")
    with pytest.raises(TaskError) as caught:
        load_task(job_for(tmp_path))
    assert caught.value.message == "SyntaxError: expected ':' in task.py:2, in importing task"
    assert "class MyTask" in caught.value.traceback_text
    assert caught.value.traceback_text.count("File ") == 1


def test_each_method_that_raises_is_named_and_survives_pickling(tmp_path: Path) -> None:
    write(
        tmp_path / "task.py",
        """
        class MyTask:
            def __init__(self, fail=False):
                if fail: 1 / 0
            def _f(self, *_): raise KeyError("x")
            model = dataset = loss = weight = collate = parameters = label = metrics = size = _f
        """,
    )
    task = load_task(job_for(tmp_path))
    calls = {
        "model": task.model, "dataset('train')": lambda: task.dataset("train"), "loss": lambda: task.loss(0, 0),
        "weight": lambda: task.weight(0), "collate": lambda: task.collate([]), "parameters": lambda: task.parameters(0),
        "label": lambda: task.label(0), "metrics": lambda: task.metrics(0, 0), "size": lambda: task.size(0),
        "dataset('valid')": lambda: task.dataset("valid"), "sample 3": lambda: task.fetch({}, 3),
    }  # fmt: skip
    for what, call in calls.items():
        with pytest.raises(TaskError) as caught:
            call()
        error = pickle.loads(pickle.dumps(caught.value))
        place = "KeyError: 3" if what == "sample 3" else "KeyError: 'x' in task.py:5"
        assert error.message == f"{place}, in {what}"
        assert error.traceback_text == caught.value.traceback_text
        assert "launcher" not in error.traceback_text
    with pytest.raises(TaskError, match=r"ZeroDivisionError: division by zero in task\.py:4, in MyTask\.__init__"):
        load_task(job_for(tmp_path, fail=True))


def test_causes_groups_and_frames_of_rung_in_between(tmp_path: Path) -> None:
    source = write(
        tmp_path / "user.py",
        """
        def inner():
            raise KeyError("deep")
        def chained(*_):
            try:
                inner()
            except KeyError as error:
                raise ValueError("outer") from error
        def through(adapter):
            adapter.collate([1])
        def loops():
            return loops()
        class Odd(Exception):
            def __str__(self): raise RuntimeError
        def odd():
            raise Odd
        def leave():
            raise SystemExit(3)
        """,
    )
    names: dict[str, Any] = {"__name__": "user"}
    exec(compile(source.read_text(), str(source), "exec"), names)

    def caught(call: Any) -> TaskError:
        with pytest.raises(TaskError) as info, user_code("there"):
            call()
        return info.value

    with pytest.raises(TaskError) as info:
        adapter(loss=names["chained"]).loss(0, 0)
    error = info.value
    assert error.message == "ValueError: outer in user.py:8, in loss"
    assert "KeyError: 'deep'" in error.traceback_text
    assert "direct cause" in error.traceback_text
    assert error.traceback_text.count("File ") == error.traceback_text.count(f'File "{source}"') == 3
    bare = adapter()
    bare._collate = lambda samples: names["inner"]()  # what comes out of the adapter is complete already
    assert caught(lambda: names["through"](bare)).message == "KeyError: 'deep' in user.py:3, in collate"
    assert len(caught(names["loops"]).traceback_text.splitlines()) < 30
    assert "Odd: <exception str() failed>" in caught(names["odd"]).message
    assert caught(names["leave"]).message == "the task called exit(3) in user.py:18, in there"
    if sys.version_info >= (3, 11):
        try:
            names["inner"]()
        except KeyError as first:
            group = ExceptionGroup("several", [first])  # noqa: F821
        assert "KeyError: 'deep'" in user_traceback(group)


def test_what_is_not_the_users_mistake_passes_unchanged() -> None:
    for error in (
        KeyboardInterrupt(),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.distributed.DistBackendError("NCCL error"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
        JobError("ours"),
    ):
        with pytest.raises(type(error)) as caught, user_code("loss"):
            raise error
        assert caught.value is error

        def loss(*_: Any, error: BaseException = error) -> torch.Tensor:
            raise error

        with pytest.raises(type(error)) as caught:
            adapter(loss=loss).loss(0, 0)
        assert caught.value is error


def test_the_hot_path_costs_under_two_microseconds() -> None:
    task = adapter()
    value = torch.zeros(())
    plain = lambda model, batch: value  # noqa: E731
    task._loss = plain

    def seconds(call: Any) -> float:
        best = math.inf
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(5_000):
                call(None, None)
            best = min(best, time.perf_counter() - start)
        return best / 5_000

    assert seconds(task.loss) - seconds(plain) < 2e-6


# --------------------------------------------------------------------------------------------- defaults and checks


def test_defaults_of_the_optional_methods() -> None:
    task = adapter()
    flags = (task.has_weight, task.has_label, task.has_metrics, task.has_collate, task.has_parameters, task.has_size)
    assert not any(flags)
    assert task.dataset("valid") is None
    assert task.metrics(None, None) == {}
    batch = task.collate([{"x": torch.ones(3), "y": 1}, {"x": torch.zeros(3), "y": 2}])
    assert batch["x"].shape == (2, 3)
    assert task.weight(batch) == 2.0
    model = task.model()
    assert [len(group["params"]) for group in task.parameters(model)] == [2]
    model.bias.requires_grad_(False)
    assert [len(group["params"]) for group in task.parameters(model)] == [1]
    model.weight.requires_grad_(False)
    with pytest.raises(TaskError, match="no parameter to train"):
        task.parameters(model)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.ones(4, 2), 4.0),
        ([torch.zeros(()), {"deep": (torch.ones(3),)}], 3.0),
        (["a", "b", "c", "d", "e"], 5.0),
        ({"ids": torch.ones(6, 1), "names": ["a"]}, 6.0),
    ],
)
def test_the_default_weight_counts_samples(batch: Any, count: float) -> None:
    assert adapter().weight(batch) == count


def test_optional_methods_are_used() -> None:
    task = adapter(
        weight=lambda batch: torch.tensor(7),
        label=lambda sample: torch.tensor(2),
        metrics=lambda model, batch: {"a": torch.ones(())},
        collate=tuple,
        size=len,
        parameters=lambda model: [{"params": model.weight, "lr": 3.0}, {"params": [("bias", model.bias)]}],
    )
    assert (task.weight(0), task.label(0), task.collate([1, 2]), task.size("abc")) == (7.0, 2, (1, 2), 3)
    model = task.model()
    first, second = task.parameters(model)
    assert first["lr"] == 3.0
    assert first["params"][0] is model.weight
    assert second["params"][0] is model.bias


@pytest.mark.parametrize(
    ("methods", "call", "words"),
    [
        ({"model": lambda: 3}, lambda t: t.model(), "model() returned 3, not a torch.nn.Module"),
        ({"dataset": lambda s: None}, lambda t: t.dataset("train"), "returned None, which lacks a length"),
        ({"dataset": lambda s: iter([1])}, lambda t: t.dataset("valid"), "lacks a length or cannot be indexed"),
        ({"dataset": lambda s: []}, lambda t: t.dataset("train"), "dataset('train') is empty"),
        ({"loss": lambda m, b: 3.0}, lambda t: t.loss(0, 0), "loss() returned 3.0, not a tensor"),
        ({"loss": lambda m, b: torch.ones(4)}, lambda t: t.loss(0, 0), "a tensor of shape (4,), not a scalar"),
        ({"weight": lambda b: math.nan}, lambda t: t.weight(0), "weight() returned nan"),
        ({"weight": lambda b: -1}, lambda t: t.weight(0), "weight() returned -1.0"),
        ({"metrics": lambda m, b: 3}, lambda t: t.metrics(0, 0), "metrics() returned 3"),
        ({"parameters": lambda m: [3]}, lambda t: t.parameters(t.model()), "parameters() gave 3"),
        ({}, lambda t: t.weight(3), "no tensor in the batch 3"),
        ({}, lambda t: t.use_class_weights(torch.ones(2)), "class_weights=None"),
    ],
)  # fmt: skip
def test_what_a_method_may_not_give_is_said(methods: dict[str, Any], call: Any, words: str) -> None:
    with pytest.raises(TaskError) as caught:
        call(adapter(**methods))
    assert words in str(caught.value)


def test_an_attribute_in_place_of_a_method_is_said() -> None:
    with pytest.raises(JobError, match=r"Small\.weight is 3, but rung calls weight\(\)"):
        adapter(weight=3)


def test_class_weights_reach_a_loss_that_takes_them() -> None:
    task = adapter(loss=lambda model, batch, class_weights=None: class_weights.sum())
    assert task.takes_class_weights
    task.use_class_weights(torch.tensor([1.0, 2.0]))
    assert task.loss(None, None) == 3.0


def test_a_key_error_means_no_split_only_where_it_names_the_split() -> None:
    def wrong(split: str) -> Any:
        return {"train": [1]}["path"]

    with pytest.raises(TaskError, match="KeyError: 'path'"):
        adapter(dataset=wrong).dataset("valid")
    assert adapter(dataset=lambda split: {"train": [1]}[split]).dataset("valid") is None


# --------------------------------------------------------------------------------- names of ours beside the job file


@pytest.mark.slow
def test_a_users_launcher_strategies_and_cluster_do_no_harm(tmp_path: Path) -> None:
    for name in (
        "launcher.py",
        "strategies/__init__.py",
        "cluster/__init__.py",
        "rung_helpers.py",
        "errors.py",
        "plan.py",
    ):
        write(tmp_path / name, f"MINE = {name!r}\n")
    write(
        tmp_path / "task.py",
        "import launcher, strategies, cluster, errors\n"
        "assert launcher.MINE and strategies.MINE and cluster.MINE and errors.MINE\n" + TASK,
    )
    write(tmp_path / "job.yaml", "task: task:MyTask\nrun: r\nbatch: 2\n")
    code = """
        from rung.launcher.job import load
        from rung.launcher.task import load_task
        task = load_task(load("job.yaml"))
        import rung.launcher.planner, rung.strategies.single, rung.cluster.hardware, rung.launcher, rung.cluster
        assert not hasattr(rung.launcher, "MINE") and not hasattr(rung.cluster, "MINE")
        print(task.loss(task.model(), task.collate([task.fetch(task.dataset("train"), 0)])).dim())
        """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert result.stdout.strip() == "0", result.stderr


# ------------------------------------------------------------------------------------------ optimizers and schedule


def test_every_optimizer_that_the_job_file_knows_is_one_of_torchs_and_the_other_way_round() -> None:
    here = set(torch_optimizers())
    assert here - set(OPTIMIZERS) == set()
    assert set(OPTIMIZERS) - here <= {"muon"}  # torch 2.9 and later


def test_every_optimizer_steps_with_the_jobs_defaults() -> None:
    for name in torch_optimizers():
        model = torch.nn.Linear(3, 2, bias=False)
        optimizer = make_optimizer(Optimizer(name=name), [{"params": list(model.parameters())}])
        if name != "sparseadam":  # wants sparse gradients
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 1e-4


def test_updates_are_fused_where_torch_can_and_the_job_asks_for_nothing_else() -> None:
    def made(parameter: torch.nn.Parameter, name: str = "adamw", **args: object) -> torch.optim.Optimizer:
        return make_optimizer(Optimizer(name=name, lr=1e-2, args=args), [{"params": [parameter]}])

    def one(**kind: object) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.linspace(-1, 1, 40, **kind).view(5, 8))  # type: ignore[call-overload]

    for name in ("adam", "AdamW", "sgd"):
        assert made(one(), name).defaults["fused"] is True
        fused, plain = one(dtype=torch.float64), one(dtype=torch.float64)
        for parameter, optimizer in ((fused, made(fused, name)), (plain, made(plain, name, fused=False))):
            for step in range(5):
                parameter.grad = parameter.detach().sin() + step
                optimizer.step()
        torch.testing.assert_close(fused, plain, rtol=1e-13, atol=1e-13)
    assert made(one(), foreach=True).defaults["fused"] is None
    assert made(one(dtype=torch.complex64)).defaults["fused"] is None
    assert made(torch.nn.Parameter(one().detach().t())).defaults["fused"] is None


def test_optimizer_arguments(tmp_path: Path) -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": 0.5}]
    made = make_optimizer(Optimizer(name="SGD", lr=0.5, args={"momentum": 0.9}), groups)
    assert isinstance(made, torch.optim.SGD)
    assert (made.defaults["lr"], made.defaults["momentum"], made.param_groups[0]["weight_decay"]) == (0.5, 0.9, 0.5)
    assert tuple(make_optimizer(Optimizer(args={"betas": [0.8, 0.9]}), groups).defaults["betas"]) == (0.8, 0.9)
    for optimizer, words in (
        (Optimizer(name="sgd", args={"momentun": 1}), "momentun: not an argument of sgd; did you mean momentum?"),
        (Optimizer(args={"lr": 1}), "optimizer.args.lr: write it as optimizer.lr"),
        (Optimizer(args={"betas": [1.5, 0.9]}), "Invalid beta parameter at index 0: 1.5"),
        (Optimizer(args={"betas": "x"}), "does not take this"),
        (Optimizer(name="sparseadam", weight_decay=0.2), "sparseadam takes no weight_decay, but the job says 0.2"),
        (Optimizer.model_construct(name="adamv"), "has no adamv; did you mean adam"),
    ):  # fmt: skip
        with pytest.raises(JobError) as caught:
            make_optimizer(optimizer, groups)
        assert words in str(caught.value)


def test_an_optimizer_of_the_users(tmp_path: Path) -> None:
    write(
        tmp_path / "mine.py",
        """
        import torch
        def half(groups, lr, momentum=0.1):
            return torch.optim.SGD(groups, lr=lr / 2, momentum=momentum)
        def nothing(groups, lr): return 3
        def fails(groups, **kw): raise KeyError("mine")
        constant = 3
        """,
    )
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]}]
    made = make_optimizer(Optimizer(name="mine:half", lr=1.0, args={"momentum": 0.3}), groups, tmp_path)
    assert (made.defaults["lr"], made.defaults["momentum"]) == (0.5, 0.3)
    with pytest.raises(JobError, match=r"mine:half takes no weight_decay, but the job says 0\.5"):
        make_optimizer(Optimizer(name="mine:half", weight_decay=0.5), groups, tmp_path)
    with pytest.raises(JobError, match="mine:nothing made a int"):
        make_optimizer(Optimizer(name="mine:nothing"), groups, tmp_path)
    with pytest.raises(JobError, match="mine:constant is a int, not a class or function"):
        make_optimizer(Optimizer(name="mine:constant"), groups, tmp_path)
    with pytest.raises(JobError, match="has no hafl; did you mean half"):
        make_optimizer(Optimizer(name="mine:hafl"), groups, tmp_path)
    with pytest.raises(TaskError, match=r"KeyError: 'mine' in mine\.py:6, in optimizer mine:fails"):
        make_optimizer(Optimizer(name="mine:fails"), groups, tmp_path)


def test_the_schedule_at_its_ends_and_corners() -> None:
    linear = Schedule(warmup=0.1, final=0.2)
    assert schedule_factor(linear, 0, 100) == pytest.approx(1 / 11)
    assert schedule_factor(linear, 9, 100) == pytest.approx(10 / 11)
    assert schedule_factor(linear, 10, 100) == 1.0
    assert schedule_factor(linear, 55, 100) == pytest.approx(0.6)
    assert schedule_factor(linear, 100, 100) == schedule_factor(linear, 1000, 100) == 0.2
    cosine = Schedule(name="cosine", warmup=0.0)
    assert schedule_factor(cosine, 0, 10) == 1.0
    assert schedule_factor(cosine, 5, 10) == pytest.approx(0.5)
    assert schedule_factor(cosine, 10, 10) == 0.0
    constant = Schedule(name="constant", warmup=0.5)
    assert [schedule_factor(constant, s, 4) for s in range(5)] == [1 / 3, 2 / 3, 1.0, 1.0, 1.0]
    assert schedule_factor(Schedule(), 0, 1) == 1.0
    whole = Schedule(warmup=1.0)
    assert [schedule_factor(whole, s, 3) for s in range(4)] == [0.25, 0.5, 0.75, 0.0]


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize(("warmup", "total", "final"), [(0.0, 7, 0.0), (0.3, 20, 0.1), (0.03, 100, 0.0)])
def test_the_schedule_is_what_torchs_own_schedulers_give(name: Any, warmup: float, total: int, final: float) -> None:
    from torch.optim import lr_scheduler as lrs

    schedule = Schedule(name=name, warmup=warmup, final=final)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    rise = round(warmup * total)
    down: Any
    if name == "linear":
        down = lrs.LinearLR(optimizer, start_factor=1.0, end_factor=max(final, 1e-12), total_iters=total - rise)
    else:
        down = lrs.CosineAnnealingLR(optimizer, T_max=total - rise, eta_min=final)
    if rise:
        up = lrs.LinearLR(optimizer, start_factor=1 / (rise + 1), end_factor=1.0, total_iters=rise)
        scheduler: Any = lrs.SequentialLR(optimizer, [up, down], milestones=[rise])
    else:
        scheduler = down
    for step in range(total + 1):
        assert schedule_factor(schedule, step, total) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        scheduler.step()
