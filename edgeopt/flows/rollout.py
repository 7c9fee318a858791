"""Rollout: an artifact goes to the devices of a fleet, wave by wave; a wave that fails is taken back.

A wave fails where more than `max_failures` of its devices fail: then no further device is begun, and the devices of
the wave that took the artifact go back to what each of them ran before. Devices that cannot be reached are tried
again, and count as failures only where that is asked for; a wave in which no device runs the artifact proves nothing,
so that the rollout ends there too. Every event is on the disk before the next one (see rollout_journal).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from edgeopt.errors import RolloutError, UsageError
from edgeopt.flows import rollout_journal as journals
from edgeopt.flows.rollout_crew import Crew, Pace, Watch
from edgeopt.flows.rollout_device import Outcome, Task, check_one, deploy_one, report_path, take_back
from edgeopt.flows.rollout_engines import Engines
from edgeopt.flows.rollout_plan import WAVES, Plan, Undo, assign, waves_of
from edgeopt.flows.validate import How
from edgeopt.ports.connection import Connection
from edgeopt.runtime.artifact import Artifact
from edgeopt.spec.fleet import Device

NOT_REACHED = ("offline", "busy")
_TO_DO = ("waiting", "begun", "stopped", *NOT_REACHED)


@dataclass(frozen=True)
class Options:
    """What a plan is made of besides artifacts and devices; see `edgeopt rollout --help`."""

    canary: int = 1
    waves: str = WAVES
    max_failures: int = 0
    undo: Undo = "wave"
    count_offline: bool = False
    soak_s: float = 0.0
    keep: int = 3


@dataclass(frozen=True)
class Rolled:
    """How a rollout ended: 'done', 'incomplete' (some devices failed or were not reached), 'halted' (a wave failed
    and was taken back), 'unproven' (no device of a wave runs it) or 'interrupted', with the reason."""

    plan: Plan
    folder: Path
    result: str
    reason: str
    outcomes: dict[str, Outcome]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The result as JSON data."""
        wave_of = {name: at for at, wave in enumerate(self.plan.waves) for name in wave}
        devices = []
        for device in self.plan.devices:
            report = report_path(self.folder, device.name)
            devices.append({
                "name": device.name, "host": device.host, "wave": wave_of[device.name], "digest": device.digest,
                **self.outcomes[device.name].as_dict(), "report": str(report) if report.exists() else None,
            })  # fmt: skip
        return {
            "id": self.plan.id, "name": self.plan.name, "result": self.result, "reason": self.reason,
            "folder": str(self.folder), "waves": [list(wave) for wave in self.plan.waves], "devices": devices,
            "seconds": round(self.seconds, 3),
        }  # fmt: skip

    def check(self) -> None:
        """RolloutError unless every device runs the artifact."""
        if self.result in ("done", "interrupted"):
            return
        todo = {
            "halted": "see the devices' reports, mend what failed, and begin a new rollout",
            "incomplete": "go on with 'edgeopt rollout ARTIFACT --resume' once they are reachable; what failed is taken"
            " up by a new rollout",
            "unproven": "go on with 'edgeopt rollout ARTIFACT --resume' once they are reachable",
        }[self.result]
        raise RolloutError(f"the rollout {self.plan.id} is {self.result}: {self.reason}", where=str(self.folder),
                           todo=todo)  # fmt: skip


@dataclass(frozen=True)
class Tools:
    """What a rollout works with: how a host is reached, how it validates, its pace, and who watches."""

    reach: Callable[[str], Connection]
    how: How = field(default_factory=How)
    pace: Pace = field(default_factory=Pace)
    watch: Watch = field(default_factory=Watch)


def make_plan(given: Sequence[Artifact], devices: Sequence[Device], options: Options | None = None) -> Plan:
    """The plan of a rollout of the artifacts `given`, and of those that the fleet names. Touches no device."""
    options = options or Options()
    folder = journals.folder_beside(given[0].folder)
    named = {path: Artifact.open(path) for path in sorted({d.artifact for d in devices if d.artifact})}
    planned = assign(devices, given, named)
    held = {a.digest: str(a.folder.resolve()) for a in (*given, *named.values())}
    name = given[0].manifest.name
    return Plan(
        id=journals.new_id(folder, name), name=name, devices=planned,
        artifacts={d.digest: held[d.digest] for d in planned},
        waves=waves_of(planned, canary=options.canary, waves=options.waves), max_failures=options.max_failures,
        undo=options.undo, count_offline=options.count_offline, soak_s=options.soak_s, keep=options.keep,
    )  # fmt: skip


def rollout(plan: Plan, folder: Path, tools: Tools) -> Rolled:
    """Carry out `plan`; its record is made in `folder`, see `rollout_journal.folder_beside`.

    LockedError where another rollout of artifacts of this name goes on. What happens to a device is part of the
    answer; SIGINT, SIGTERM and SIGHUP end the rollout in peace: no device is begun, those at work are ended.
    """
    artifacts = _opened(plan)
    with journals.only_one(folder, plan.name):
        journal = journals.begin(folder / plan.id, plan)
        return _Run(plan, folder / plan.id, journal, artifacts, tools, []).go()


def resume(folder: Path, name: str, asked: str, tools: Tools) -> Rolled:
    """Go on with the rollout `asked` ('': the newest) of artifacts called `name` where it stopped.

    What runs the artifact is left alone, what failed stays failed, what was not reached is tried again. UsageError
    for one that was halted: its wave has been taken back.
    """
    with journals.only_one(folder, name):
        plan, events, journal = journals.take_up(journals.find(folder, name, asked))
        if any(event["event"] == "end" and event.get("result") == "halted" for event in events):
            journal.close()
            raise UsageError(
                f"the rollout {plan.id} was halted and taken back", where=str(folder / plan.id),
                todo="begin a new rollout: devices that run the artifact already are left as they are",
            )  # fmt: skip
        return _Run(plan, folder / plan.id, journal, _opened(plan), tools, events).go()


def _opened(plan: Plan) -> dict[str, Artifact]:
    opened = {}
    for digest, path in plan.artifacts.items():
        opened[digest] = Artifact.open(path)
        if opened[digest].digest != digest:
            raise UsageError(
                f"the artifact is not the one that the rollout {plan.id} began with ({digest[:12]})", where=path,
                todo="begin a new rollout, or bring the old artifact back",
            )  # fmt: skip
    return opened


class _Run:
    """A rollout at work. `events` are those of its earlier life."""

    def __init__(
        self, plan: Plan, folder: Path, journal: journals.Journal, artifacts: dict[str, Artifact], tools: Tools,
        events: list[dict[str, Any]],
    ):  # fmt: skip
        self._plan, self._folder, self._journal, self._tools, self._events = plan, folder, journal, tools, events
        self._known = journals.replay(plan, events)
        self._outcomes = {name: _restored(known) for name, known in self._known.items()}
        self._crew = Crew(tools.pace, tools.watch, self._settle)
        self._task = Task(
            id=plan.id, folder=folder, artifacts=artifacts, reach=tools.reach, begun=self._begun,
            stopped=self._crew.stopped, how=tools.how, keep=plan.keep,
            engines=Engines(folder / "engines") if len(plan.devices) > 1 else None,
        )  # fmt: skip

    def go(self) -> Rolled:
        try:
            with self._crew:
                result, reason = self._waves()
                if self._crew.stopped():
                    result, reason = "interrupted", "it can be taken up again"
                else:
                    self._journal.write("end", result=result, reason=reason)
        finally:
            self._journal.close()
        return Rolled(self._plan, self._folder, result, reason, self._outcomes, self._crew.seconds)

    def _waves(self) -> tuple[str, str]:
        halted = next((event for event in self._events if event["event"] == "halted"), None)
        if halted is not None:
            return self._take_back(halted["undo"], halted["reason"])
        passed = {event.get("wave") for event in self._events if event["event"] == "wave"}
        for at, wave in enumerate(self._plan.waves):
            if at in passed:
                continue
            said = f"wave {at + 1} of {len(self._plan.waves)}"
            self._tools.watch.say(f"{said}: {len(wave)} device{'s' if len(wave) > 1 else ''}")
            why_not = self._wave(wave, soak=at + 1 < len(self._plan.waves))
            if self._crew.stopped():
                return "", ""
            if why_not:
                return self._halt(wave, f"{said}: {why_not}")
            if not any(self._outcomes[name].state == "active" for name in wave):
                return "unproven", f"{said}: no device of it runs the artifact"
            self._journal.write("wave", wave=at)
        return self._late()

    def _wave(self, names: Sequence[str], *, soak: bool) -> str:
        """Deploy to those of `names` that are not settled; why the wave failed, or ''."""
        todo = [name for name in names if self._outcomes[name].state in _TO_DO]
        self._crew.each(todo, self._deploy, enough=lambda: self._failed(names) != "")
        if soak and self._plan.soak_s and not self._failed(names):
            self._tools.watch.say(f"soaking for {self._plan.soak_s:g} s")
            if self._crew.wait(self._plan.soak_s):
                return ""
            active = [name for name in names if self._outcomes[name].state == "active"]
            self._crew.each(active, self._check, enough=lambda: self._failed(names) != "")
        return self._failed(names)

    def _late(self) -> tuple[str, str]:
        """Once more what could not be reached when its wave was due; then the end."""
        late = tuple(name for name, outcome in self._outcomes.items() if outcome.state in _TO_DO)
        if late:
            self._tools.watch.say(f"once more, {len(late)} not reached: {_some(late)}")
            self._crew.each(late, self._deploy, enough=lambda: self._failed(late, ("failed",)) != "", tries=1)
            why_not = self._failed(late, ("failed",))
            if self._crew.stopped():
                return "", ""
            if why_not:
                return self._halt(late, f"late devices: {why_not}")
        failed = [name for name, outcome in self._outcomes.items() if outcome.state == "failed"]
        missed = [name for name, outcome in self._outcomes.items() if outcome.state in NOT_REACHED]
        words = [f"failed: {_some(failed)}"] if failed else []
        words += [f"not reached: {_some(missed)}"] if missed else []
        return ("incomplete", "; ".join(words)) if words else ("done", "every device runs the artifact")

    def _failed(self, names: Iterable[str], counted: tuple[str, ...] = ()) -> str:
        """Why `names` have failed as a wave, or ''; `counted` are the states that count, else what the plan says."""
        counted = counted or (("failed", *NOT_REACHED) if self._plan.count_offline else ("failed",))
        failed = [name for name in names if self._outcomes[name].state in counted]
        if len(failed) <= self._plan.max_failures:
            return ""
        return f"{len(failed)} failed, {self._plan.max_failures} may: {_some(failed)}"

    def _halt(self, wave: Iterable[str], reason: str) -> tuple[str, str]:
        reach = {"wave": tuple(wave), "rollout": tuple(self._outcomes), "none": ()}[self._plan.undo]
        undo = [name for name in reach if self._may_run_it(name)]
        self._journal.write("halted", reason=reason, undo=undo)
        self._tools.watch.say(f"halted: {reason}")
        return self._take_back(undo, reason)

    def _may_run_it(self, name: str) -> bool:
        """Whether the device took the artifact in this rollout, or fell silent while it did."""
        outcome = self._outcomes[name]
        return not outcome.kept and outcome.state in ("active", *NOT_REACHED) and self._before(name) is not None

    def _before(self, name: str) -> dict[str, Any] | None:
        return self._outcomes[name].before or self._known[name].before

    def _take_back(self, undo: list[str], reason: str) -> tuple[str, str]:
        todo = [name for name in undo if self._outcomes[name].state not in ("rolled back", "left")]
        if todo:
            self._tools.watch.say(f"taking {len(todo)} back to what they ran before: {_some(todo)}")
        self._crew.each(todo, self._undo)
        stuck = [name for name in undo if self._outcomes[name].state == "not rolled back"]
        return "halted", reason + (f"; not taken back: {_some(stuck)}" if stuck else "")

    def _deploy(self, name: str) -> Outcome:
        known = self._known[name]
        # begun once, and where that ended is not known
        interrupted = known.before if known.state in ("begun", "stopped", *NOT_REACHED) else None
        return deploy_one(self._task, self._plan.device(name), self._tell(name), interrupted)

    def _check(self, name: str) -> Outcome:
        kept = self._outcomes[name]
        found = check_one(self._task, self._plan.device(name), self._tell(name), kept.before)
        return kept if found.state == "active" else found

    def _undo(self, name: str) -> Outcome:
        return take_back(self._task, self._plan.device(name), self._before(name) or {}, self._tell(name))

    def _tell(self, name: str) -> Callable[[str, str], None]:
        return lambda state, detail: self._tools.watch.device(name, state, detail)

    def _begun(self, name: str, before: dict[str, Any]) -> None:
        self._journal.write("device", device=name, state="begun", before=before)
        self._known[name].state, self._known[name].before = "begun", before

    def _settle(self, name: str, outcome: Outcome) -> None:
        self._outcomes[name] = outcome
        self._journal.write("device", device=name, **outcome.as_dict())
        self._tools.watch.device(name, outcome.state, outcome.what)


def _restored(known: journals.Known) -> Outcome:
    """The outcome as the journal has it; of what was begun and not ended 'begun'."""
    if known.state == "begun" or known.last is None:
        return Outcome(known.state, before=known.before)
    held = {f.name: known.last[f.name] for f in fields(Outcome) if f.name in known.last}
    return Outcome(**{**held, "before": held.get("before") or known.before})


def _some(names: Sequence[str]) -> str:
    """Names in words, ten of them at the most."""
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
