"""The ladder for a job on the machines that are there, and again when these have changed."""

import os

from rung.cluster.binding import describe, slices
from rung.cluster.catalog import Inventory
from rung.cluster.hardware import Hardware
from rung.launcher.attempt import Context
from rung.launcher.calibrations import factors_for
from rung.launcher.fallback import Recovery
from rung.launcher.job import Job
from rung.launcher.machines import inventory_of, usable_cores
from rung.launcher.planner import Ladder, plan_ladder, with_each, with_threads
from rung.launcher.profiling import find_profile, worth_it
from rung.launcher.report import show_plan
from rung.launcher.speeds import find_speed
from rung.launcher.watch.progress import View
from rung.launcher.workers import freest
from rung.strategies.plan import Plan


def make_ladder(job: Job, hardware: Hardware | Inventory, view: View, *, always: bool = False) -> Ladder:
    """Profiles the task where that can change the choice (or `always`), and plans. OMP_NUM_THREADS, if set, is the most
    threads of a worker, as everywhere else."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    ladder = _ladder(job, hardware, view, always)
    if isinstance(hardware, Hardware):
        ladder = with_binding(ladder, hardware)
    return with_threads(ladder, int(wanted)) if wanted.isdigit() else ladder


def with_binding(ladder: Ladder, hardware: Hardware) -> Ladder:
    """The ladder with a word, in each plan, about the NUMA nodes that its workers will stay on, if they will."""
    if len(hardware.host.numa_nodes) < 2:
        return ladder
    words: dict[tuple[str, int], str] = {}

    def told(plan: Plan) -> Plan:
        key = (plan.device, plan.devices)
        if key not in words:
            gpus = freest(hardware.of("cuda"), plan.devices) if plan.device == "cuda" else ()
            words[key] = describe(slices(plan.devices, hardware.host, gpus))
        return plan.with_(reasons={**plan.reasons, "binding": words[key]}) if words[key] else plan

    return with_each(ladder, told)


def _ladder(job: Job, hardware: Hardware | Inventory, view: View, always: bool) -> Ladder:
    simple = plan_ladder(job, hardware)
    if not always and not worth_it(job, simple.best.device):
        return simple
    profile, trouble = find_profile(job, simple.best.precision)
    if profile is None:
        view.say(f"note       {trouble}", style="yellow")
        return simple
    machines = hardware
    if simple.best.device == "cpu" and isinstance(hardware, Hardware):
        machines = inventory_of(hardware, find_speed(usable_cores(hardware)))
    return plan_ladder(job, machines, profile, factors=factors_for(profile.digest))


def replan(context: Context, recovery: Recovery) -> None:
    """Looks at a cluster's machines anew, and plans for them if they are more or fewer than before."""
    if not context.fleet.elastic:
        return
    machines = context.fleet.machines()
    ladder = make_ladder(context.fleet.planned(context.job), machines, context.view)
    if ladder.best.devices != recovery.plan.devices:
        recovery.replan(ladder)
        show_plan(context.view, ladder)
