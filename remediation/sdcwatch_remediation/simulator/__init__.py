"""A loopback HyperPod: SageMaker JSON 1.1 for unmodified boto3, a virtual clock and a menu of faults."""

from sdcwatch_remediation.simulator.config import GroupConfig, NodeConfig, SimulatorConfig, SimulatorConfigError
from sdcwatch_remediation.simulator.simulator import Call, Simulator

__all__ = ["Call", "GroupConfig", "NodeConfig", "Simulator", "SimulatorConfig", "SimulatorConfigError"]
