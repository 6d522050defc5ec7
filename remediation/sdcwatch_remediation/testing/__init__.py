"""Fakes for tests of the service and of what is built on it: a provider, node agents on loopback, a clock, events."""

from sdcwatch_remediation.testing.agents import FakeAgents
from sdcwatch_remediation.testing.events import alert, delivery, event_line
from sdcwatch_remediation.testing.provider import FakeProvider, fleet
from sdcwatch_remediation.testing.rig import Clock, Rig, make_rig

__all__ = ["Clock", "FakeAgents", "FakeProvider", "Rig", "alert", "delivery", "event_line", "fleet", "make_rig"]
