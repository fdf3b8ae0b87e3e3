"""True peaks on CPU and CUDA."""

from ebbflow.measure.peak import measure
from ebbflow.measure.resident import resident_bytes

__all__ = ["measure", "resident_bytes"]
