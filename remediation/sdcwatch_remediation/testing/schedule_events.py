"""What can happen in a schedule: faults, doorbells, forgeries, decisions, other people's acts, faults of the provider.

What it does: each is a method, chosen with the schedule's own random numbers; `go_on` lets the service get on with its
work under kills, `rest` takes away what stands in the way and lets everything come to its end.
What it never does: look into the service to decide what happens next.
Its place: between `schedules`, which chooses what happens, and `schedule_world`, in which it does.
"""

from __future__ import annotations

from contextlib import suppress

from sdcwatch_remediation.errors import Conflict
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.service import Service
from sdcwatch_remediation.simulator.faults import MENU
from sdcwatch_remediation.testing.events import alert, delivery, event_line
from sdcwatch_remediation.testing.schedule_world import JOB, REPLACE, World
from sdcwatch_remediation.testing.slurm_memory import FAULTS

REST_ROUNDS = 80
REST_SECONDS = 600.0
"""Rounds after a schedule and virtual seconds between them: longer than every deadline but `frozen`'s."""


class Happenings(World):
    """A world in which things happen."""

    def fault(
        self, *, suspects: int = 1, persistence: str = "", job: str = JOB, lie: bool = False, again: str = ""
    ) -> None:
        """Let an event happen, or one agent claim one; its alerts may or may not be delivered yet.

        Args:
            suspects: how many instances it names.
            persistence: `persistent` or `transient`; empty: either.
            job: the training job.
            lie: one agent alone tells of it, and it is not true.
            again: the instance that it names; empty: any.
        """
        members = self.members()
        if len(members) < 3:
            return
        self.step += 1
        named = sorted(self.random.sample(range(len(members)), suspects))
        if again:
            named = [number for number, member in enumerate(members) if member.instance_id == again] or named
        persistence = persistence or self.random.choice(("persistent", "persistent", "transient"))
        line = event_line(members, named, time=self.clock(), step=self.step, persistence=persistence, training_job=job)
        tellers = [self.random.choice(members)] if lie else members
        for member in tellers:
            self.agents[member.address].events.append(line)
        if not lie:
            for member in members:
                self.agents[member.address].latch = line["event"]["id"]
            if suspects == 1:
                kinds = self.blamed.setdefault(members[named[0]].instance_id, [])
                kinds += [persistence, *self._test(members[named[0]], line["event"]["id"])]
        if suspects == 1 and self.random.random() < 0.1:
            self._others_mark(members[named[0]])
        self.note("agent lies" if lie else "fault" if suspects == 1 else "event names two")
        for rank in named:
            body = delivery(alert(members[rank], rank, training_job=job))
            self.bodies.append(body)
            if self.random.random() < 0.8:
                self.deliver(body)

    def _test(self, suspect: Member, latch_id: str) -> list[str]:
        """Let a suspect's own agent serve its known-answer test, or be of a version that has none yet."""
        result = self.random.choice(("", "", "pass", "fail", "unknown", "stale"))
        if not result:
            return []
        stale, result = result == "stale", "fail" if result == "stale" else result
        device = {"device": "cpu", "name": "", "uuid": "", "serial": "", "outcome": result}
        test = {"latch_id": latch_id, "node": suspect.node_name, "instance": suspect.instance_id, "result": result}
        agent, when = self.agents[suspect.address], self.clock() + 1.0
        if stale:
            # Of an earlier halt, and told all the same: it says nothing about this one.
            test["latch_id"], when, agent.any_latch = "sdc-" + "0" * 16, self.clock() - 900.0, True
        agent.tests = [*(agent.tests or []), {**test, "detail": "", "time": when, "devices": [device]}]
        self.note(f"known-answer test: {'stale' if stale else result}")
        return ["failed test"] if result == "fail" and not stale else []

    def forge(self) -> None:
        """Ring for an instance about which nothing happened."""
        members = self.members()
        if members:
            self.note("forged alert")
            rank = self.random.randrange(len(members))
            self.deliver(delivery(alert(members[rank], rank)))

    def again(self) -> None:
        """Deliver an older alert once more, as it was or resolved, alone or to both processes at once."""
        if not self.bodies:
            return
        body = self.random.choice(self.bodies)
        choice = self.random.random()
        if choice < 0.3:
            body = body.replace(b'"status": "firing"', b'"status": "resolved"')
        self.note("alert resolved" if choice < 0.3 else "alert again" if choice < 0.7 else "alert twice at once")
        self.deliver(body)
        if choice >= 0.7:
            self.deliver(body)

    def decide(self, *, yes: float = 0.7) -> None:
        """Let a person decide about every open case; `yes` is how often they approve what waits."""
        choice, stale = self.random.random(), self.random.random() < 0.1
        rest = (choice - yes) / (1 - yes) if yes < 1 else 0.0

        def work(service: Service) -> None:
            for case in service.store.cases(open_only=True):
                if choice < yes:
                    if case.state == "awaiting_approval":
                        digest = "0" * 64 if stale else case.request_sha256
                        service.ledger.approve(case, by="ann", request_sha256=digest)
                elif rest < 0.15:
                    service.ledger.reject(case, by="ann", reason="no")
                elif rest < 0.3:
                    service.ledger.cancel(case, by="ann", reason="no")
                elif rest < 0.6:
                    service.ledger.hold(case, by="ann", reason="looking")
                else:
                    service.ledger.unhold(case, by="ann")

        names = ("reject", "cancel", "hold", "unhold")
        self.note("approve" if choice < yes else names[(rest >= 0.15) + (rest >= 0.3) + (rest >= 0.6)])
        self.begin("decide", work)

    def say_no(self) -> None:
        """Let a person end every open case for which nothing irrevocable was asked."""
        word = self.random.choice(("reject", "cancel"))

        def work(service: Service) -> None:
            for case in service.store.cases(open_only=True):
                with suppress(Conflict):
                    getattr(service.ledger, word)(case, by="ann", reason="no")

        self.note(word)
        self.begin("decide", work)

    def unhold(self) -> None:
        """End every hold and every stop."""

        def work(service: Service) -> None:
            for case in service.store.cases(open_only=True):
                if case.held_by:
                    service.ledger.unhold(case, by="ann")
            if service.ledger.paused():
                service.ledger.resume(by="ann")

        self.switch.unlink(missing_ok=True)
        self.begin("unhold", work)

    def stop(self) -> None:
        """Pause or resume, set or remove the kill switch."""
        what = self.random.choice((0, 0, 0, 1, 2, 3, 4, 5))
        self.note(("pause", "resume", "resume", "kill switch on", "kill switch off", "kill switch off")[what])
        if what == 0:
            self.begin("pause", lambda service: service.ledger.pause(by="ann", reason="drill"))
        elif what in (1, 2):
            self.begin("resume", lambda service: service.ledger.resume(by="ann"))
        elif what == 3:
            self.switch.touch()
        else:
            self.switch.unlink(missing_ok=True)

    def provider_fault(self) -> None:
        """Order one fault of the menu, of the provider or of Slurm."""
        if self.slurm is not None and self.random.random() < 0.6:
            self.slurm.faults.append(self.random.choice(FAULTS))
            return
        if self.kubernetes is not None and self.random.random() < 0.6:
            self.kubernetes.order(self.result.road)
            self.kubernetes.graceful = self.random.random() < 0.5
            return
        kind = self.random.choice([kind for kind in MENU if kind != "paging_changes"])
        operation = self.random.choice((None, REPLACE, REPLACE, REPLACE))
        if kind in ("no_capacity", "bad_replacement"):
            operation = None
        self.simulator.order(kind, operation=operation, seconds=self.random.choice((1.0, 60.0)))
        if operation is None:
            self.note(f"{kind} ordered")

    def others_act(self) -> None:
        """Let somebody else replace an instance, change its status, drain a node, or undo that."""
        members = self.members()
        if self.slurm is not None and members and self.random.random() < 0.3:
            self.note("others drain")
            self.slurm.drain_by_others(self.random.choice(members).node_name)
        elif self.kubernetes is not None and members and self.random.random() < 0.6:
            blamed = [member for member in members if member.instance_id in self.blamed]
            self._others_mark(self.random.choice(blamed or members))
        elif members and self.random.random() < 0.4:
            self.note("others replace")
            self.simulator.others_replace(self.random.choice(members).instance_id)
        elif members:
            status = self.random.choice(("SystemUpdating", "Failure"))
            self.note(f"instance {status}")
            self.simulator.set_status(self.random.choice(members).instance_id, status)
        self.others_done()

    def _others_mark(self, member: Member) -> None:
        """Let somebody else cordon a node of Kubernetes, or set its condition."""
        if self.kubernetes is not None:
            suspects = self.random.random() < 0.5
            self.note("others suspect" if suspects else "others cordon")
            act = self.kubernetes.suspect_by_others if suspects else self.kubernetes.cordon_by_others
            act(member.instance_id)

    def others_done(self, share: float = 0.5) -> None:
        """Let what others had under way end, for a share of the instances."""
        for node in self.simulator.state()["nodes"]:
            if node["status"] in ("SystemUpdating", "Failure") and self.random.random() < share:
                self.simulator.set_status(node["instance_id"], "Running")
        if self.slurm is not None and self.random.random() < share:
            self.slurm.others_resume()
        if self.kubernetes is not None and self.random.random() < share:
            self.kubernetes.others_undo()

    def owner(self) -> None:
        """Let the owner of the nodes replace one that it was told of."""
        if self.result.road == "handover" and self.kubernetes is not None and self.kubernetes.owner_acts():
            self.note("others: the owner replaces")

    def go_on(self, rounds: int) -> None:
        """Let the service get on with its work, killed again and again on the way and started anew."""
        for _ in range(rounds):
            self.advance(self.random.choice((5.0, 11.0, 16.0)))
            self.kill()
            if self.result.mode == "approve" and self.random.random() < 0.3:
                self.decide(yes=1.0)
            if self.random.random() < 0.2:
                self.owner()
            if self.random.random() < 0.5:
                self.rounds()
            else:
                self.round()
            self.drain()
            for process in self.processes:
                if not process.up:
                    process.open()

    def rest(self) -> None:
        """Take away whatever stands in the way, and let everything come to its end."""
        self.simulator.clear_faults()
        if self.slurm is not None:
            self.slurm.faults.clear()
        if self.kubernetes is not None:
            self.kubernetes.faults.clear()
        for process in self.processes:
            process.life.ends_at = None
        self.drain()
        for process in self.processes:
            if not process.up:
                process.open()
        self.others_done(share=1.0)
        self.unhold()
        self.drain()
        answered = self.result.mode == "approve" and self.random.random() < 0.7
        owner_acts, no = self.random.random() < 0.7, self.random.random() < 0.3
        for number in range(REST_ROUNDS):
            self.advance(REST_SECONDS)
            self.round()
            self.drain()
            if answered and number < 3:
                self.decide(yes=1.0)
                self.drain()
            if no and number == 1:
                self.say_no()
                self.drain()
            if owner_acts:
                self.owner()
            if not self.working():
                return
