"""A device without a device: the virtual Jetson of edgeopt's own tests, for yours."""

from edgeopt.testing.faults import Faults
from edgeopt.testing.virtual import Unavailable, VirtualDevice, virtual_device

__all__ = ["Faults", "Unavailable", "VirtualDevice", "virtual_device"]
