"""What the user's code prints in the workers is shown as it comes, each line with its rank, and costs no more when it
is a flood."""

import os
import pty
import subprocess
import time
from pathlib import Path

import pytest
from support import environment

from rung.cluster.failures import LAST_WORDS
from rung.launcher.watch import output
from rung.launcher.watch.output import Output
from rung.launcher.watch.progress import View

NOISY = """

class Noisy(Small):
    def loss(self, model, batch):
        rank = os.environ["RANK"]
        if self.calls == 2:
            print(f"hello from {rank}")
            os.system("echo a child of " + rank)
            time.sleep(3)  # a busy launcher is to see this before the flood
        if rank == "1" and self.calls >= 3:
            print("\\n".join(f"flood {n}" for n in range(20_000)))
        if rank == "1" and self.calls == 30:
            print("its last words")
            raise ValueError("broken on purpose")
        return super().loss(model, batch)
"""


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "LOOK_S", 0.0)


def test_lines_carry_their_rank_and_wait_for_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch)
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    logs[0].write_text("of an earlier attempt\n")
    shown: list[str] = []
    seen = Output(logs, shown.append)
    with logs[0].open("a") as zero, logs[1].open("a") as one:
        print("a", file=zero, flush=True)
        print("\r 10%\r 20%\r100%\r\n\x1b[31mred\x1b[0m\x07", file=one, flush=True)
        one.write("half a ")
        one.flush()
        seen.look()
        print("line", file=one, flush=True)
        one.write("no end")
        one.flush()
        seen.look()
    seen.look(last=True)
    seen.look(last=True)
    assert "\n".join(shown).splitlines() == [
        "[rank 0] a", "[rank 1] 100%", "[rank 1] red", "[rank 1] half a line", "[rank 1] no end",
    ]  # fmt: skip


def test_one_worker_needs_no_prefix_and_what_ended_it_is_left_to_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once(monkeypatch)
    shown: list[str] = []
    seen = Output([tmp_path / "0.log"], shown.append)
    seen.look()
    (tmp_path / "0.log").write_text(f"mine\n\n{LAST_WORDS}\nTraceback (most recent call last):\n")
    seen.look(last=True)
    assert shown == ["mine"]


def test_of_a_flood_a_share_is_read_and_the_rest_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once(monkeypatch)
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    shown: list[str] = []
    seen = Output(logs, shown.append)
    with logs[0].open("a") as zero, logs[1].open("a") as one:
        began = time.process_time()
        for turn in range(20):
            one.write("x" * 99 + "\n")
            one.write(("y" * 99 + "\n") * 50_000)  # 5 MB
            one.flush()
            print("quiet", turn, file=zero, flush=True)
            seen.look()
        seen.look(last=True)
    lines = "\n".join(shown).splitlines()
    assert [line for line in lines if line.startswith("[rank 0]")] == [f"[rank 0] quiet {n}" for n in range(20)]
    floods = [line for line in lines if line.startswith(("[rank 1] y", "[rank 1] x"))]
    assert output.BURST // 2 <= len(floods) < output.BURST
    assert {len(line) for line in floods} == {99 + len("[rank 1] ")}  # none begins in its middle
    assert sum("MiB more than is shown" in line for line in lines) >= 1
    assert time.process_time() - began < 2.0  # writing the 100 MB included


def test_a_view_that_rung_itself_reads_leaves_it_out(tmp_path: Path) -> None:
    for options, words in (({}, "mine\nours\n"), ({"force_plain": True}, "ours\n"), ({"silent": True}, "")):
        with (tmp_path / "seen").open("w+") as stream, View(stream=stream, **options) as view:  # type: ignore[arg-type]
            view.echo("mine")
            view.say("ours")
            stream.seek(0)
            assert stream.read() == words


@pytest.mark.slow
def test_prints_of_two_workers_stand_above_the_progress_line(project) -> None:
    with (project.folder / "task.py").open("a") as file:
        file.write(NOISY)
    ours, theirs = pty.openpty()
    sets = ["task=task:Noisy", "strategy=ddp", "devices.count=2", "steps=60", "fallback=off", "checkpoint.every=none"]
    command = project.command(*sets)
    with subprocess.Popen(
        command, cwd=project.folder, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        env=environment(project.folder, {"TERM": "xterm", "COLUMNS": "120"}), start_new_session=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        text = b""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            text += data
    os.close(ours)
    seen = text.decode(errors="replace").replace("\r", "")
    assert process.returncode == 2
    for line in ("[rank 0] hello from 0", "[rank 0] a child of 0", "[rank 1] hello from 1", "[rank 1] a child of 1"):
        assert seen.count(line + "\n") == 1, seen[-3000:]
    assert "[rank 1] flood " in seen
    assert "more than is shown" in seen
    assert seen.count("flood") < 1500  # of 540,000
    assert seen.count("ValueError: broken on purpose") <= 2
    assert "rung-" not in seen.partition("Traceback")[2]
    assert LAST_WORDS not in seen
    assert "its last words" in project.logs()
