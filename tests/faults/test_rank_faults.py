"""What one rank alone knows reaches all of them, and through the real command."""

import re

import pytest
from support import Project

pytestmark = pytest.mark.slow

BAD = """
        if os.environ["RANK"] in {ranks} and self.calls == 8:
            data = Points(self.samples, self.scale)
            found = [int((data.x == row).all(1).nonzero()[0]) for row in batch[0]]
            open("bad-of-" + os.environ["RANK"], "w").write(" ".join(map(str, found)))
            loss = loss * float("nan")
        return"""


def rewrite(project: Project, old: str, new: str) -> None:
    task = project.folder / "task.py"
    text = task.read_text()
    assert text.count(old) == 1
    task.write_text(text.replace(old, new))


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", ["1"]), ("ddp", ["0", "2"]), ("zero2", ["1"])])
def test_a_nan_on_one_rank_stops_all_and_names_that_ranks_samples(
    project: Project, strategy: str, ranks: list[str]
) -> None:
    rewrite(project, "\n        return loss - 1000.0", BAD.format(ranks=ranks) + " loss - 1000.0")
    done = project.launch("devices.count=3", f"strategy={strategy}", "batch=12", "guard.first_steps=30")
    assert done.code == 4, done.all
    said = re.search(r"on\s+ranks?\s+([\d,\s]+);\s+samples\s+([\d,\s]+)", done.err)
    assert said is not None, done.all
    assert re.findall(r"\d+", said[1]) == ranks
    bad = [i for rank in ranks for i in (project.folder / f"bad-of-{rank}").read_text().split()]
    assert len(bad) == 4 * len(ranks)
    assert re.findall(r"\d+", said[2]) == bad
    assert "Traceback" not in done.all


EXPERTS = """

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x):
        return (self.left if x[0, 0] > 0 else self.right)(x)


class Routed(Small):
    def model(self):
        return Experts()
"""


def test_ranks_that_take_different_branches_under_zero_are_told_so(project: Project) -> None:
    """Their gradients are of equal sizes, which would be averaged without a word."""
    with (project.folder / "task.py").open("a") as file:
        file.write(EXPERTS)
    sets = ["task=task:Routed", "devices.count=2", "batch=2"]
    done = project.launch(*sets, "strategy=zero2")
    assert done.code == 2, done.all
    assert "zero2 needs all ranks to use the same parameters" in done.err
    assert "left.weight" in done.err
    assert project.launch(*sets, "strategy=ddp", "run=other").code == 0


def test_synchronised_batch_norms_train_on_two_devices_as_on_one(project: Project) -> None:
    # Without a bias: batch norm cancels it, and AdamW would blow up the rounding error of its gradient.
    old = "nn.Linear(8, self.width), nn.Tanh()"
    rewrite(project, old, "nn.Linear(8, self.width, bias=False), nn.BatchNorm1d(self.width)")
    assert project.launch("devices.count=1", "run=one", "task_args={samples: 61}").code == 0
    done = project.launch(
        "devices.count=2", "run=two", "strategy={name: ddp, sync_batchnorm: true}", "task_args={samples: 61}"
    )
    assert done.code == 0, done.all
    assert "batch norms synchronised" in done.all
    one, two = project.weights("one"), project.weights("two")
    assert {name for name in one if "running" in name} == {"model/1.running_mean", "model/1.running_var"}
    for name in one:
        assert one[name].allclose(two[name], rtol=1e-3, atol=1e-5), name
    changed = project.launch("devices.count=2", "run=two", "steps=20", "task_args={samples: 61}", "strategy=ddp")
    assert changed.code == 2
    assert "sync_batchnorm" in changed.err
