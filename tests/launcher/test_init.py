import sys
from pathlib import Path

import pytest
import torch

from rung.launcher.init import init
from rung.launcher.job import load
from rung.launcher.schedule import schedule_factor
from rung.launcher.task import load_task, make_optimizer
from rung.strategies.errors import JobError


def test_what_init_writes_trains_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "new" / "folder"
    assert init(folder) == [folder / "job.yaml", folder / "task.py"]
    job = load(folder / "job.yaml")
    assert job.steps is not None
    task = load_task(job)
    torch.manual_seed(0)
    model, data = task.model(), task.dataset("train")
    assert data is not None
    assert len(data) > 100_000
    assert task.dataset("valid") is not None
    assert task.dataset("test") is None
    optimizer = make_optimizer(job.optimizer, task.parameters(model))
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(60):
        optimizer.param_groups[0]["lr"] = job.optimizer.lr * schedule_factor(job.schedule, step, 60)
        indices = torch.randint(len(data), (job.batch,), generator=generator).tolist()
        batch = task.collate([task.fetch(data, i) for i in indices])
        assert task.weight(batch) == job.batch
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.5, abs=0.3)  # log 256
    assert sum(losses[-10:]) / 10 < 3.7
    assert set(task.metrics(model, batch)) == {"accuracy"}


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("mine")
    with pytest.raises(JobError, match=r"task\.py is there already; nothing was written"):
        init(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["task.py"]
    assert (tmp_path / "task.py").read_text() == "mine"
    (tmp_path / "job.yaml").symlink_to(tmp_path / "nowhere")
    with pytest.raises(JobError, match=r"job\.yaml and .*task\.py are there already"):
        init(tmp_path)


def test_init_says_why_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"cannot be written to: (Not a directory|File exists)"):
        init(tmp_path / "file")
    with pytest.raises(JobError, match="cannot be written to"):
        init(tmp_path / "file" / "below")


def test_the_template_explains_every_line_and_holds_only_what_load_knows(tmp_path: Path) -> None:
    path, _ = init(tmp_path)
    lines = path.read_text().splitlines()
    assert len(lines) < 30
    assert all("#" in line for line in lines if line and not line.startswith("validation"))
