import itertools
import json
import re
import time
from types import SimpleNamespace

import pytest

from rung.cluster.catalog import DEVICES, device_like, parse_hardware, parse_link
from rung.cluster.hardware import probe
from rung.launcher.machines import inventory_of
from rung.launcher.plan_view import HEADER, account_rows, as_json, rows
from rung.launcher.planner import corrected, plan_ladder
from rung.strategies.errors import DoesNotFit, JobError
from rung.strategies.memory import GIB, MIB, Factors
from rung.strategies.profile import Activity, Line, ParameterGroup, Profile


def make_profile(count, *, per_sample, precision="bf16", flops=None):
    groups = [
        ParameterGroup(name=f"b.{i}", count=count // 40, bytes=count // 10, dtype="float32", trainable=True)
        for i in range(40)
    ]

    def activity(share, work):
        return Activity(
            first=(Line(4 * count, 0.1 * per_sample), Line(0, share * per_sample)),
            again=(Line(0, share * per_sample),),
            flops=Line(0, (flops or 6.0 * count * 2048) * work),
            moved=Line(0, 10 * per_sample * work),
            operations=int(4000 * work),
        )

    return Profile(
        task="t", digest="d", method="given", precision=precision, optimizer="AdamW", groups=tuple(groups),
        buffer_bytes=0, optimizer_bytes=8 * count, step_bytes=0, input_bytes=Line(0, 16384),
        plain=activity(1.0, 1.0), checkpointed=activity(0.15, 4 / 3), largest_parameter=count // 100,
    )  # fmt: skip


def make_job(batch=64, *, count="auto", memory="auto", precision="auto", kind="auto", balance="auto", **pins):
    wanted = {"name": "auto", **pins}
    devices = SimpleNamespace(count=count, memory=memory, type=kind, balance=balance)
    return SimpleNamespace(batch=batch, strategy=wanted, precision=precision, devices=devices)


def machines(devices="8 x H100-80G", nodes=1, **more):
    host = {"memory": "2TB", "cores": 96, "disk": "8TB"}
    return parse_hardware({"nodes": nodes, "devices": devices, "network": "400Gb/s", "host": host, **more})


def cpu_machine(memory_gib=16, cores=2):
    from rung.cluster.catalog import LINKS, Inventory, Node
    from rung.launcher.machines import cpu_device
    from rung.strategies.memory import HostFacts

    host = HostFacts(total_bytes=memory_gib * GIB, free_bytes=memory_gib * GIB, cores=cores, disk_bytes=100 * GIB)
    node = Node(devices=(cpu_device(host),), host=host, link=LINKS["memory"])
    return Inventory(nodes=(node,), network=LINKS["memory"])


SMALL = make_profile(10**8, per_sample=200e6)
LARGE = make_profile(7 * 10**9, per_sample=2e9)
HUGE = make_profile(20 * 10**9, per_sample=1e9)
PREDICTED = ("predicted_device_peak_bytes", "predicted_host_peak_bytes", "predicted_step_s", "reasons")
TINY_FP32 = make_profile(10**7, per_sample=10e6, precision="fp32", flops=1e10)


def test_ddp_comes_first_where_memory_is_ample():
    ladder = plan_ladder(make_job(), machines(link="nvlink4"), SMALL)
    assert (ladder.best.strategy, ladder.best.devices) == ("ddp", 8)
    assert ladder.best.reasons["strategy"].startswith("fastest that fits")


def test_zero_comes_when_ddp_does_not_fit_and_the_reason_says_by_how_much():
    ladder = plan_ladder(make_job(), machines(link="nvlink4"), LARGE)
    assert ladder.best.zero_stage > 0
    refused = [entry for entry in ladder.rejected if entry.plan.strategy == "ddp"]
    assert all("needs" in entry.reason and "of 79.6 GiB" in entry.reason for entry in refused)
    assert all(entry.short_bytes > 0 for entry in refused)


def test_synchronised_batch_norms_are_part_of_every_plan_of_the_job():
    for wanted in (False, True):
        plans = plan_ladder(make_job(sync_batchnorm=wanted), machines(), SMALL).plans
        assert {plan.sync_batchnorm for plan in plans} == {wanted}
        assert any("synchronised" in plan.describe() for plan in plans) == wanted


def test_rungs_are_in_order_of_time_within_a_strategy_and_all_fit():
    ladder = plan_ladder(make_job(), machines(link="nvlink4"), LARGE)
    for rung in ladder.rungs:
        assert rung.account is not None
        assert rung.account.device_bytes_with_headroom <= DEVICES["h100-80g"].free_bytes
    times = [rung.plan.predicted_step_s for rung in ladder.rungs if rung.plan.strategy == "zero3"]
    assert all(b >= a * 0.98 for a, b in itertools.pairwise(times))


def test_a_slow_link_makes_zero3_slower():
    fast = plan_ladder(make_job(), machines(link="nvlink4"), LARGE)
    slow = plan_ladder(make_job(), machines(link="pcie3"), LARGE)

    def best(ladder, strategy):
        return min(p.predicted_step_s for p in ladder.plans if p.strategy == strategy and p.offload_optimizer == "none")

    assert best(slow, "zero3") > best(fast, "zero3")


@pytest.mark.parametrize("count", [10**8, 3 * 10**9, 7 * 10**9, 30 * 10**9])
def test_a_slow_network_keeps_training_within_one_node_or_off_zero3(count):
    """Weights do not cross it in every pass: all of it in one node, or a strategy that gathers none."""
    profile = make_profile(count, per_sample=1e9)

    def best(network):
        return plan_ladder(make_job(256), machines(nodes=4, link="nvlink4", network=network), profile).best

    assert best("3200Gb/s").devices == 32
    slow, slowest = best("25Gb/s"), best("1Gb/s")
    assert slow.devices <= 8 or slow.zero_stage < 3 or slow.node_ranks == 8, slow.describe()
    assert slowest.devices <= 8, slowest.describe()


def test_over_a_slow_network_zero3_holds_the_weights_a_second_time_in_each_node_where_they_fit():
    def ladder(nodes=4, network="100Gb/s", **more):
        return plan_ladder(make_job(256, **more), machines(nodes=nodes, link="nvlink4", network=network), HUGE)

    best = ladder().best
    assert (best.strategy, best.devices, best.node_ranks) == ("zero3", 32, 8)
    assert "a second time" in best.describe()
    plain, twice = (ladder(within_nodes=wanted).best for wanted in (False, True))
    assert (plain.node_ranks, twice.node_ranks) == (0, 8)
    assert twice.predicted_step_s < plain.predicted_step_s
    alike = next(
        rung.plan for rung in ladder(within_nodes=False).rungs
        if rung.plan == twice.with_(node_ranks=0, **{k: getattr(rung.plan, k) for k in PREDICTED})
    )  # fmt: skip
    more = twice.predicted_device_peak_bytes - alike.predicted_device_peak_bytes
    assert more == pytest.approx(2 * HUGE.parameter_count / 8, rel=0.1), "bf16, an eighth of it on each device"
    assert all(plan.node_ranks == 0 for plan in ladder(nodes=1).plans)
    assert ladder(network="3200Gb/s").best.node_ranks == 0, "as fast without: the simpler one"


@pytest.mark.parametrize(
    ("kinds", "balance", "expected"),
    [
        (("8 x H100-80G", "1 x V100-16G"), "auto", 8),  # its part would be smaller than what sharing costs
        (("4 x H100-80G", "4 x A100-80G"), "auto", 8),
        (("4 x H100-80G", "4 x A100-80G"), False, 4),  # equal shares: eight would compute as eight A100
        (("2 x H100-80G", "1 x T4-16G"), "auto", 2),
    ],
)
def test_a_slow_device_is_left_out_unless_shares_that_follow_speed_make_it_useful(kinds, balance, expected):
    inventory = machines(list(kinds), link="nvlink4")
    best = plan_ladder(make_job(256, balance=balance), inventory, SMALL).best
    assert best.devices == expected
    assert ("slower" in best.reasons["devices"]) == (expected < inventory.device_count)


def test_under_zero3_nothing_is_measured_so_a_slow_device_is_left_out():
    inventory = machines(["4 x H100-80G", "4 x A100-80G"], link="nvlink4")
    assert plan_ladder(make_job(256, name="zero3"), inventory, LARGE).best.devices == 4


def test_one_device_gets_zero_only_with_offload():
    ladder = plan_ladder(make_job(8), machines("1 x RTX4090-24G"), make_profile(3 * 10**9, per_sample=1e9))
    assert all(p.offload_optimizer != "none" for p in ladder.plans if p.zero_stage)
    assert ladder.best.offload_optimizer == "host"
    assert any("nothing to divide" in entry.reason for entry in ladder.rejected)


def test_a_cpu_takes_one_process_and_never_offloads_to_the_host():
    ladder = plan_ladder(make_job(32), cpu_machine(), TINY_FP32)
    assert (ladder.best.strategy, ladder.best.devices, ladder.best.threads) == ("single", 1, 2)
    assert not any("host" in (p.offload_optimizer, p.offload_parameters) for p in ladder.plans)
    assert any("gains nothing" in entry.reason for entry in ladder.rejected)


def test_a_cap_on_a_cpu_leads_to_smaller_micro_batches_then_to_more_processes():
    tight = plan_ladder(make_job(32, memory=300 * MIB), cpu_machine(), TINY_FP32)
    assert tight.best.micro_batch < 32
    assert tight.best.memory_cap_bytes == 300 * MIB
    profile = make_profile(10**8, per_sample=10e6, precision="fp32", flops=1e11)
    forced = plan_ladder(make_job(32, memory=int(1.4 * GIB)), cpu_machine(cores=4), profile)
    assert forced.best.devices > 1
    assert forced.best.zero_stage > 0


def test_pins_are_honoured():
    job = make_job(name="zero2", micro_batch=2, checkpointing=True, offload_optimizer="host", devices=4)
    for plan in plan_ladder(job, machines(), SMALL).plans:
        assert plan.strategy == "zero2"
        assert (plan.micro_batch, plan.devices, plan.offload_optimizer) == (2, 4, "host")
        assert plan.activation_checkpointing
        assert plan.reasons["strategy"] == "set in the job"
    assert {p.devices for p in plan_ladder(make_job(count=(2, 4)), machines(), SMALL).plans} == {2, 4}
    assert plan_ladder(make_job(kind="cpu"), inventory_of(probe())).best.device == "cpu"


def test_ddp_on_one_device_is_single_and_comes_last():
    ladder = plan_ladder(make_job(name="ddp", count=(1, 2)), cpu_machine(), TINY_FP32)
    kinds = [(plan.strategy, plan.devices) for plan in ladder.plans]
    assert set(kinds) == {("ddp", 2), ("single", 1)}
    assert kinds.index(("single", 1)) > len(kinds) - 1 - kinds[::-1].index(("ddp", 2))
    alone = plan_ladder(make_job(name="ddp", count=1), cpu_machine(), TINY_FP32).best
    assert (alone.strategy, alone.reasons["strategy"]) == ("single", "what ddp is on one device")


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (make_job(count=9), "9 asked for, 8 there"),
        (make_job(4, count=8), "cannot share a batch of 4"),
        (make_job(name="single", devices=2), "single runs on one device"),
        (make_job(name="ddp", offload_optimizer="host"), "ddp cannot offload"),
        (make_job(name="zero2", offload_parameters="host"), "zero2 keeps whole parameters"),
        (make_job(name="zero9"), "'zero9' is not one of"),
    ],
)
def test_pins_that_cannot_be_are_refused(job, says):
    with pytest.raises(JobError, match=says):
        plan_ladder(job, machines(), SMALL)


def test_when_nothing_fits_the_way_out_is_named():
    with pytest.raises(DoesNotFit) as caught:
        plan_ladder(make_job(16), machines("1 x T4-16G", host={"memory": "8GB", "cores": 4}), LARGE)
    assert caught.value.exit_code == 3
    assert "The nearest is" in caught.value.message
    assert "devices like these with zero3" in caught.value.hint
    assert "LoRA" in caught.value.hint
    with pytest.raises(DoesNotFit) as caught:
        plan_ladder(make_job(16, memory=50 * MIB), cpu_machine(), TINY_FP32)
    assert "raise devices.memory to" in caught.value.hint


def test_without_a_profile_the_simplest_comes_first():
    ladder = plan_ladder(make_job(32), cpu_machine())
    assert (ladder.best.strategy, ladder.best.micro_batch) == ("single", 32)
    assert "memory was not checked" in ladder.notes[0]
    assert plan_ladder(make_job(64), machines()).best.strategy == "ddp"


def test_an_out_of_memory_corrects_the_rest_of_the_ladder():
    ladder = plan_ladder(make_job(), machines("8 x A100-40G"), SMALL)
    plan = ladder.best
    seen = int(plan.predicted_device_peak_bytes * 1.5)
    after = corrected(ladder, plan, seen)
    assert plan.describe() not in [p.describe() for p in after.plans]
    assert all(p.predicted_device_peak_bytes < seen for p in after.plans)
    assert len(after.rungs) + len(after.rejected) == len(ladder.rungs) + len(ladder.rejected)
    assert any("ran out of memory" in entry.reason for entry in after.rejected)


def test_unequal_devices_are_judged_by_the_smallest():
    ladder = plan_ladder(make_job(count=8), machines(["4 x A100-80G", "4 x V100-16G"]), SMALL)
    assert all(rung.account.device_peak_bytes < 15.8 * GIB for rung in ladder.rungs)
    assert plan_ladder(make_job(), machines(["4 x A100-80G", "4 x V100-16G"])).best.precision == "fp16"


def test_eight_thousand_devices_are_planned_in_seconds():
    began = time.process_time()
    ladder = plan_ladder(make_job(16384), machines(nodes=1000, link="nvlink4"), LARGE)
    assert time.process_time() - began < 5
    assert ladder.best.devices > 1000


def test_calibration_scales_predictions():
    plain = plan_ladder(make_job(), machines(), SMALL)
    slow = plan_ladder(make_job(), machines(), SMALL, factors=Factors(time=2.0, device_bytes=GIB, runs=3))
    assert slow.best.predicted_device_peak_bytes == plain.best.predicted_device_peak_bytes + GIB
    assert any("3 measured runs" in note for note in slow.notes)


def test_the_table_marks_the_choice_and_says_why_others_are_not():
    ladder = plan_ladder(make_job(), machines(link="nvlink4"), LARGE)
    table = rows(ladder)
    assert all(len(row) == len(HEADER) for row in table)
    assert [row[0] for row in table].count("->") == 1
    assert table[0][0] == "->"
    assert any("needs" in row[-1] for row in table)
    assert account_rows(ladder.rungs[0])
    json.dumps(as_json(ladder))


def test_a_description_stands_for_machines_that_are_not_here():
    inventory = parse_hardware({"nodes": 4, "devices": "8 x h100-80g", "link": "nvlink4", "network": "400Gb/s"})
    assert inventory.device_count == 32
    assert inventory.network.bytes_per_s == pytest.approx(0.85 * 50e9)
    assert device_like("NVIDIA A100-SXM4-80GB", 80 * 10**9) is DEVICES["a100-80g"]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"devices": "8 x H900"}, "'8 x H900' is not a known device"),
        ({"devices": "H100-80G", "nodes": 0}, "nodes: 0 is not a whole number"),
        ({"devices": "H100-80G", "link": "string"}, "'string' is not a link"),
        ({"devices": "H100-80G", "host": {"memory": "much"}}, "host.memory: 'much' is not a size"),
        ({"devices": "H100-80G", "colour": "red"}, "unknown colour"),
        ({}, "devices: None is not a known device"),
        ({"groups": 3}, "a list of mappings"),
    ],
)
def test_a_wrong_description_is_refused(values, says):
    with pytest.raises(JobError, match=says):
        parse_hardware(values)


def test_rates_are_bits_with_a_small_b_and_bytes_with_a_large_one():
    assert parse_link("400Gb/s", "x").bytes_per_s * 8 == pytest.approx(parse_link("400GB/s", "x").bytes_per_s)


def test_this_machine_can_be_planned():
    inventory = inventory_of(probe())
    assert inventory.device_count >= 1
    assert plan_ladder(make_job(8), inventory).best.global_batch == 8


@pytest.mark.parametrize("billions", [5, 10, 20])
def test_so_many_devices_as_are_proposed_are_enough(billions):
    profile, host = make_profile(billions * 10**9, per_sample=1e9), {"memory": "64GB", "cores": 16}
    with pytest.raises(DoesNotFit) as caught:
        plan_ladder(make_job(), machines("1 x RTX4090-24G", host=host), profile)
    count = int(re.search(r"use (\d+) devices", caught.value.hint)[1])
    assert "micro-batch" not in caught.value.hint  # it could be any already
    assert plan_ladder(make_job(), machines("1 x RTX4090-24G", nodes=count, host=host), profile).rungs
