"""A loopback HyperPod: SageMaker JSON 1.1 for unmodified boto3, a virtual clock and a menu of faults."""
