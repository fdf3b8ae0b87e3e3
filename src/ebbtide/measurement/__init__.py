"""True peaks on CPU and CUDA."""

from ebbtide.measurement.peak import measure
from ebbtide.measurement.resident import resident_bytes

__all__ = ["measure", "resident_bytes"]
