"""True peaks on CPU and CUDA."""

from ebbflow.measurement.peak import measure
from ebbflow.measurement.resident import resident_bytes

__all__ = ["measure", "resident_bytes"]
